"""Reads what objects hold, so that it can be compared later: numbers by value, all else by what is in it, or as itself.

What a step reads beside its batch lies in attributes, in settings and counters that these hold, in variables that
functions close over, and in those of the module that they were written in. All of it is followed for code of the user's
own, as deep as settings commonly lie; of installed packages an object is itself alone.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections import deque
from collections.abc import Iterator
from functools import partial
from io import IOBase
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

DEPTH = 4
"""How many steps an attribute is followed."""
ITEMS = 64
"""How many items of a container are looked at, beside their number."""
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device})
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
"""What every module holds for torch; parameters, buffers and modules are read from it apart."""
_NAMESPACES = frozenset({"types", "argparse"})
"""Where the standard library keeps classes of plain settings."""
_OWN = WeakKeyDictionary[type, bool]()
"""Which classes were found to be the user's own."""
_BESIDE_STEPS = frozenset({"begin_epoch", "end_epoch", "after_update", "validation_step", "predict_step"})
"""Methods of a trainer that no update runs."""


class Itself:
    """An object that is equal to itself alone; as long as it is compared, none takes its place in memory."""

    __slots__ = ("_one",)

    def __init__(self, one: Any) -> None:
        self._one = one

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and other._one is self._one

    def __hash__(self) -> int:
        return id(self._one)


class Unknown:
    """What may have moved, for all that can be told: it is equal to nothing."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return False


class Reader:
    """Reads once: what was met before is not followed again."""

    def __init__(self, device: torch.device, beside: Any = None) -> None:
        """`device`: of the run, whose own memory may hold other numbers at each replay. `beside`: not followed."""
        self._device = device
        self.tensors: list[Tensor] = []
        """All on the device of the run that were met."""
        self._met = {id(beside)}

    def held_by(self, one: Any) -> Iterator[tuple[str, Any]]:
        """The attributes of an object, or of a dict of them, each with what it can be compared by."""
        if type(one) is dict:
            yield from ((str(name), self.read(value, DEPTH)) for name, value in one.items())
            return
        yield "", Itself(one)
        if isinstance(one, type):
            yield from self.of_class(one)
            return
        if isinstance(one, FunctionType | MethodType | partial):
            yield "()", self._object(one, DEPTH)
            return
        self._met.add(id(one))
        if isinstance(one, nn.Module):
            tensors = {**one._parameters, **one._buffers}
            yield from ((name, self.read(value, 1)) for name, value in tensors.items())
        for name, value in _held(one).items():
            if not (isinstance(one, nn.Module) and name in _OF_MODULES):
                yield name, value if type(value) in _PLAIN else self.read(value, DEPTH)
        yield from self.of_class(type(one))

    def of_class(self, kind: type) -> Iterator[tuple[str, Any]]:
        """What the user's own among a class and its bases hold, and what their methods read of the module's."""
        if id(kind) in self._met:
            return
        for each in kind.__mro__:
            if id(each) in self._met:
                continue
            self._met.add(id(each))
            if not _is_own_class(each):
                continue
            for name, value in list(vars(each).items()):
                if type(value) in _PLAIN and not name.startswith("__"):
                    yield f"{each.__name__}.{name}", value
                elif isinstance(value, FunctionType) and name not in _BESIDE_STEPS:
                    yield f"{each.__name__}.{name}", self._function(value, DEPTH)

    def read(self, value: Any, depth: int) -> Any:
        """What a value can be compared by."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if isinstance(value, Tensor):
            return self._tensor(value)
        if depth == 0 or id(value) in self._met or isinstance(value, type | ModuleType):
            return Itself(value)
        if isinstance(value, list | tuple | dict | set | frozenset | deque):
            return self._container(value, depth - 1)
        return self._object(value, depth - 1)

    def _tensor(self, tensor: Tensor) -> Any:
        """Where it lies; one of the host is baked in by value, which its version tells."""
        if tensor.layout is not torch.strided or tensor.is_meta:
            return Itself(tensor)
        if tensor.device.type == self._device.type:
            self.tensors.append(tensor)
        version = tensor._version if tensor.device.type != self._device.type and not tensor.is_inference() else 0
        return Itself(tensor), tensor.data_ptr(), tensor.shape, tensor.requires_grad, version

    def _container(self, value: Any, depth: int) -> Any:
        """How many items it has, and the first of them."""
        if isinstance(value, set | frozenset):
            plain = len(value) <= ITEMS and all(type(item) in _PLAIN for item in value)
            return frozenset(value) if plain else len(value)
        self._met.add(id(value))
        items = value.items() if isinstance(value, dict) else value
        try:
            first = [item for item, _ in zip(items, range(ITEMS), strict=False)]
        except RuntimeError:  # another thread writes to it
            return Itself(value), len(value)
        if isinstance(value, dict):
            return len(value), [(self.read(key, depth), self.read(item, depth)) for key, item in first]
        return len(value), [self.read(item, depth) for item in first]

    def _object(self, value: Any, depth: int) -> Any:
        if isinstance(value, FunctionType):
            return self._function(value, depth)
        if isinstance(value, MethodType):
            return self.read(value.__func__, depth), self.read(value.__self__, depth)
        if isinstance(value, partial):
            return [self.read(part, depth) for part in (value.func, value.args, value.keywords)]
        if isinstance(value, nn.Module):
            return [fact for module in value.modules() for fact in self.held_by(module)]
        if not _is_own_class(type(value)):
            moves = isinstance(value, Iterator) and not isinstance(value, IOBase)
            return Unknown() if moves else (Itself(value), _inside(value))
        self._met.add(id(value))
        held = [(name, self.read(item, depth)) for name, item in _held(value).items()]
        return Itself(value), held, list(self.of_class(type(value)))

    def _function(self, function: FunctionType, depth: int) -> Any:
        """What it closes over, its defaults, and the variables of its module that it names."""
        if id(function) in self._met or not _is_own(function):
            return Itself(function)
        self._met.add(id(function))
        cells = []
        for cell in function.__closure__ or ():
            try:
                cells.append(self.read(cell.cell_contents, depth))
            except ValueError:  # nothing is in it yet
                cells.append(None)
        known = function.__globals__
        named = [(name, self.read(known[name], depth)) for name in _names(function.__code__) if name in known]
        return Itself(function), cells, self.read(function.__defaults__, depth), named


def _held(one: Any) -> dict[str, Any]:
    """The attributes of an object itself, those in slots too."""
    if not _is_own_class(type(one)):
        return getattr(one, "__dict__", {})
    held = dict(getattr(one, "__dict__", {}))
    for kind in type(one).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(one, name) and name not in ("__dict__", "__weakref__"):
                held[name] = getattr(one, name)
    return held


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:  # functions inside
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_own_class(kind: type) -> bool:
    own = _OWN.get(kind)
    if own is None:
        own = _OWN[kind] = _is_own(kind)
    return own


def _is_own(one: Any) -> bool:
    """Whether a class or a function was written by the user, and is of no installed package."""
    name = getattr(one, "__module__", None) or ""
    top = name.partition(".")[0]
    if top in ("torch", "trainwright", "builtins", "numpy") or (
        top in sys.stdlib_module_names and top not in _NAMESPACES
    ):
        return False
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return "site-packages" not in file and "dist-packages" not in file


def _inside(one: Any) -> Any:
    """What is in a generator of the host, or in a small array; None for other things."""
    if isinstance(one, random.Random):
        return one.getstate()
    if isinstance(one, np.random.Generator):
        return pickle.dumps(one.bit_generator.state)
    if isinstance(one, np.random.RandomState):
        return pickle.dumps(one.get_state())
    if isinstance(one, torch.Generator) and one.device.type == "cpu":
        return one.get_state().numpy().tobytes()
    if isinstance(one, np.ndarray | np.generic) and one.size <= ITEMS:
        return one.tobytes()
    return None
