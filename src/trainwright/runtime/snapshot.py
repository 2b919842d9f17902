"""A copy of plain data and tensors that shares nothing with what it was made of."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from torch import Tensor

from trainwright.base.errors import SettingError, message


def snapshot(tree: Any, *at: Any, into: Any = None) -> Any:
    """Copy dicts, lists and tuples with their tensors (detached); anything else as `deepcopy` does.

    `at`: the keys that lead to it. `into`: an earlier copy that nobody needs any more; tensors of the same form are
    copied into its storage. SettingError for what has no copy, such as a lock, with these keys.
    """
    if isinstance(tree, Tensor):
        return into.copy_(tree.detach()) if _is_alike(tree, into) else tree.detach().clone()
    spare: Any
    if type(tree) is dict:
        spare = into if type(into) is dict else {}
        return {key: snapshot(value, *at, key, into=spare.get(key)) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        alike = type(into) in (list, tuple) and len(into) == len(tree)
        return type(tree)(
            snapshot(value, *at, index, into=into[index] if alike else None) for index, value in enumerate(tree)
        )
    try:
        return deepcopy(tree)
    except TypeError as error:
        kind, where = type(tree).__name__, "".join(f"[{key!r}]" for key in at)
        what = f"self.state{where} is a {kind}, which cannot be copied; an evaluation works on a copy"
        fix = f"keep it in an attribute of the Trainer: self.my_{kind.lower()} = ..."
        raise SettingError(message(what, want="plain data and tensors", fix=fix)) from error


def _is_alike(one: Tensor, other: Any) -> bool:
    """Whether `one` can be copied into `other` without anything being allocated."""
    if not (type(one) is type(other) is Tensor) or other.is_inference():
        return False
    return (one.shape, one.dtype, one.device, one.layout) == (other.shape, other.dtype, other.device, other.layout)
