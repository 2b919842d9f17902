"""Tuples, lists and mappings of a batch once more, with other items: named tuples and classes of one's own stay."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any


def sequence_like(like: Any, items: Iterable[Any]) -> Any:
    """A tuple, named tuple or list like this one, of these items."""
    kind: Any = type(like)
    return kind(*items) if hasattr(like, "_fields") else kind(items)


def mapping_like(like: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping like this one, with these items; a dict where it cannot be written to."""
    if type(like) is dict:
        return items
    try:
        made: Any = copy.copy(like)  # a class of its own may be built with other arguments
        for key, value in items.items():
            made[key] = value
    except TypeError:  # a read-only mapping
        return items
    return made
