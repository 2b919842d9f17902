"""A copy of plain data and tensors that shares nothing with what it was made of."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from torch import Tensor

from trainwright.base.errors import SettingError, message


def snapshot(tree: Any, *at: Any) -> Any:
    """Copy dicts, lists and tuples with their tensors (detached); anything else as `deepcopy` does.

    `at`: the keys that lead to it. SettingError for what has no copy, such as a lock, with these keys.
    """
    if isinstance(tree, Tensor):
        return tree.detach().clone()
    if type(tree) is dict:
        return {key: snapshot(value, *at, key) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(snapshot(value, *at, index) for index, value in enumerate(tree))
    try:
        return deepcopy(tree)
    except TypeError as error:
        kind, where = type(tree).__name__, "".join(f"[{key!r}]" for key in at)
        what = f"self.state{where} is a {kind}, which cannot be copied; an evaluation works on a copy"
        fix = f"keep it in an attribute of the Trainer: self.my_{kind.lower()} = ..."
        raise SettingError(message(what, want="plain data and tensors", fix=fix)) from error
