"""A copy of plain data and tensors that shares nothing with what it was made of."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from torch import Tensor


def snapshot(tree: Any) -> Any:
    """Copy dicts, lists and tuples with their tensors (detached); anything else as `deepcopy` does."""
    if isinstance(tree, Tensor):
        return tree.detach().clone()
    if type(tree) is dict:
        return {key: snapshot(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(snapshot(value) for value in tree)
    return deepcopy(tree)
