"""Whether a data set is still what it was: worker processes have copies, to which nobody tells a change."""

from __future__ import annotations

import pickle
from enum import Enum
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainwright.core.torch_private import version_of
from trainwright.data.generators import is_generator

_FIXED = (bool, int, float, complex, str, bytes, type(None), range, PurePath, Enum, torch.dtype, torch.Size, np.dtype)
"""Types of values that nobody can change in place."""
_CODE = (type, FunctionType, MethodType, BuiltinFunctionType, ModuleType)
_MOST_ITEMS = 100_000
"""Items of a list that are compared one by one, 10 ns each."""
_MOST_BYTES = 1 << 20
_MOST_VALUES = 1000
_FEW = 64
_LOOKED_AT = (*_FIXED, *_CODE, Tensor, np.ndarray)


class Fingerprint:
    """A data set as it was seen: its attributes, and those of what it holds, such as transforms.

    `sure` says whether whatever may change was looked at; large arrays and objects without attributes were not.
    """

    def __init__(self, data: Any) -> None:
        self._data = data
        self._found = [(value, _noted(value)) for value in _values(data)]
        self.goes_on = any(is_generator(value) or hasattr(value, "__next__") for value, _ in self._found)
        """Whether it holds a random generator, an iterator or a file, which stands elsewhere after each row."""
        self.sure = len(self._found) < _MOST_VALUES and all(map(_is_known, self._found))

    def is_same(self, *, closely: bool) -> bool:
        """Whether every attribute holds what it held; `closely`: whether that holds what it held, too."""
        now = _values(self._data)
        return len(now) == len(self._found) and all(
            _is_same(value, found, closely=closely) for value, found in zip(now, self._found, strict=True)
        )


def why_not_sent(data: Any) -> str:
    """Why a data set cannot go to another process, or shares with this one what both would move; "" where it can."""
    try:
        _Weightless(_Nowhere(), protocol=5, buffer_callback=lambda _: None).dump(data)
    except Exception as error:  # pickling runs code of any class
        return f"cannot be sent to a process: {type(error).__name__}: {error}"[:200]
    return ""


class _Nowhere:
    """A file that keeps nothing."""

    def write(self, part: Any) -> int:
        """Take in nothing."""
        return len(part)


class _Weightless(pickle.Pickler):
    """Pickles all but the numbers in tensors and arrays; raises TypeError for a tensor on another device."""

    def reducer_override(self, value: Any) -> Any:
        """Leave out what is only numbers."""
        if isinstance(value, Tensor):
            if value.device.type != "cpu":
                raise TypeError(f"a tensor on {value.device}")
            return int, ()
        if isinstance(value, np.ndarray) and value.dtype != object:
            return int, ()
        return NotImplemented


class _Items(NamedTuple):
    """What a list, tuple, dict or set held; None where its items may change in place."""

    number: int
    items: list[Any] | None


class _Unknown:
    """Stands for what was not looked at."""


_UNKNOWN = _Unknown()


def _values(owner: Any) -> list[Any]:
    """The values of all attributes, in order, those of objects inside too."""
    found: list[Any] = []
    owners, seen = [owner], {id(owner)}
    while owners and len(found) < _MOST_VALUES:
        for value in getattr(owners.pop(0), "__dict__", {}).values():
            found.append(value)
            inside = value if isinstance(value, list | tuple) and len(value) <= _FEW else (value,)
            new = [one for one in inside if not isinstance(one, _LOOKED_AT) and id(one) not in seen]
            owners += new
            seen.update(map(id, new))
    return found


def _noted(value: Any) -> Any:
    """What a value is compared by, besides its identity."""
    if isinstance(value, (*_FIXED, *_CODE)):
        return None
    if isinstance(value, Tensor):
        return version_of(value) if not value.is_inference() else _UNKNOWN
    if isinstance(value, np.ndarray):
        return value.tobytes() if value.nbytes <= _MOST_BYTES and value.dtype != object else _UNKNOWN
    if isinstance(value, list | tuple | dict | set):
        return _noted_items(value)
    return None if getattr(value, "__dict__", None) is not None and not hasattr(value, "__next__") else _UNKNOWN


def _noted_items(value: Any) -> _Items:
    items = list(value.items()) if isinstance(value, dict) else list(value)
    if len(items) > _MOST_ITEMS:
        return _Items(len(items), None)
    held = len(items) <= _FEW and all(hasattr(item, "__dict__") for item in items)  # looked into on their own
    return _Items(len(items), items if held or all(map(_is_fixed, items)) else None)


def _is_fixed(item: Any) -> bool:
    if isinstance(item, tuple):
        return all(map(_is_fixed, item))
    return isinstance(item, (*_FIXED, *_CODE, np.generic))


def _is_known(found: tuple[Any, Any]) -> bool:
    noted = found[1]
    return noted is not _UNKNOWN and not (isinstance(noted, _Items) and noted.items is None)


def _is_same(now: Any, found: tuple[Any, Any], *, closely: bool) -> bool:
    before, noted = found
    if isinstance(now, _FIXED):
        return type(now) is type(before) and (now is before or bool(now == before))
    if now is not before:
        return False
    if isinstance(noted, _Items):
        unequal = closely and noted.items is not None and _noted_items(now).items != noted.items
        return len(now) == noted.number and not unequal
    if isinstance(now, Tensor) or (closely and isinstance(noted, bytes)):
        return bool(_noted(now) == noted)
    return True
