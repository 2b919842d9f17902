"""The random state of the process as plain data: Python, NumPy, torch, and each accelerator in use."""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from _random import Random as _Twister
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from trainwright.core.checks import check_form

_MT19937 = 624 * 4 + 4
"""Bytes of the state of NumPy's Mersenne twister: its key and its position."""
_HEAD = object.__basicsize__
_WORDS = struct.Struct("=i624I")
"""How CPython holds the state of its Mersenne twister, behind the head of the object: its position and its key."""


def random_state() -> dict[str, Any]:
    """Every global random state, as a tree of plain data and tensors; nobody changes what is in it."""
    state = host_random_state()
    if torch.cuda.is_initialized() and torch.cuda.is_available():  # to ask for the first takes no time
        state["cuda"] = torch.cuda.get_rng_state_all()
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def have_moved(state: dict[str, Any]) -> bool:
    """Whether any global random state is another one than `random_state` gave."""
    return not _same(random_state(), state)


def host_random_state() -> dict[str, Any]:
    """The global random states of Python, NumPy and torch on the CPU, in the same form."""
    return {"python": _python.state(), "numpy": _numpy.state(), "torch": torch.default_generator.get_state()}


def set_random_state(state: dict[str, Any]) -> None:
    """Put back a state that `random_state` gave."""
    _python.set_state(state["python"])
    _numpy.set_state(state["numpy"])
    torch.default_generator.set_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        for index, one in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(one, index)
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])


def is_random_state(value: object) -> bool:
    """Whether a value is what `random_state` gives, so that `set_random_state` takes it; nothing is set."""
    state: Any = value
    try:
        random.Random().setstate(state["python"])
        np.random.RandomState(type(np.random.mtrand._rand._bit_generator)()).set_state(state["numpy"])
        torch.Generator().set_state(state["torch"])
        return all(isinstance(one, torch.Tensor) and one.dtype is torch.uint8 for one in state.get("cuda", ()))
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError):
        return False


def seed(number: int, generators: Iterable[torch.Generator] = ()) -> None:
    """Start every global random state, and that of `generators`, from one number."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)
    for generator in generators:
        generator.manual_seed(number)


def unmoved(generators: Iterable[torch.Generator] = ()) -> AbstractContextManager[None]:
    """Leave every global random state, and that of `generators`, as it was found, whatever is drawn inside."""
    return _Unmoved(generators)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return bool(np.array_equal(one, other)) if isinstance(one, np.ndarray) else one == other


class _Unmoved:
    """Puts the states back; a class, since every evaluation enters it."""

    __slots__ = ("_generators", "_own", "_state")

    def __init__(self, generators: Iterable[torch.Generator]) -> None:
        self._generators = generators

    def __enter__(self) -> None:
        self._state = random_state()
        self._own = [(generator, generator.get_state()) for generator in self._generators] if self._generators else ()

    def __exit__(self, *error: object) -> None:
        set_random_state(self._state)
        for generator, before in self._own:
            generator.set_state(before)


class _Python:
    """Python's global state, asked for again only where it has moved: its 625 numbers are as many objects, 20 KB.

    To look is to compare the generator's own memory with what it was, where that is known to hold the state.
    """

    def __init__(self) -> None:
        self._seen: bytes | None = None
        self._state: Any = None

    def state(self) -> Any:
        """What `random.getstate()` gives."""
        generator = getattr(random.getstate, "__self__", None)
        seen = self._looked_at(generator)
        if seen is None or seen != self._seen or self._state[2] != getattr(generator, "gauss_next", None):
            self._state = random.getstate()
            words = self._state[1]
            known = seen is not None and seen == _WORDS.pack(words[-1], *words[:-1])
            self._seen = seen if known else None
        return self._state

    def set_state(self, state: Any) -> None:
        """Put a state back, where somebody has drawn."""
        if self.state() is not state:
            random.setstate(state)

    def _looked_at(self, generator: Any) -> bytes | None:
        """The memory behind the head of a generator of CPython's own: position and key; None of any other."""
        if type(generator) is not random.Random or sys.implementation.name != "cpython":
            return None
        if _Twister.__basicsize__ < _HEAD + _WORDS.size:
            return None
        return ctypes.string_at(id(generator) + _HEAD, _WORDS.size)


class _NumPy:
    """NumPy's global state, asked for again only where it has moved: to ask takes 41 us, to look takes 1 us."""

    def __init__(self) -> None:
        self._seen: tuple[int, bytes] | None = None
        self._state: Any = None

    def state(self) -> Any:
        """What `np.random.get_state()` gives."""
        generator: Any = np.random.mtrand._rand._bit_generator
        if type(generator) is not np.random.MT19937:
            return np.random.get_state()
        address = generator.ctypes.state_address
        # A cached normal deviate lies elsewhere: it can come only with a move, and go without one.
        if self._state is None or self._state[3] or self._seen != (address, ctypes.string_at(address, _MT19937)):
            self._state = np.random.get_state()
            self._seen = (address, ctypes.string_at(address, _MT19937))
        return self._state

    def set_state(self, state: Any) -> None:
        """Put a state back: it takes 40 us, and mostly nobody has drawn from it."""
        if self.state() is not state:
            np.random.set_state(state)
            self._seen = None  # a cached deviate may have come back without a move


_python = _Python()
_numpy = _NumPy()


class RandomPart:
    """Part `random` of a checkpoint: the states at the start of the current epoch, and at the boundary of the save."""

    def __init__(self) -> None:
        self.epoch_start: dict[str, Any] = {}
        """Empty until the iterator of the current epoch is about to be made: a run may stop before."""
        self.loaded: dict[str, Any] | None = None
        """The loaded state of the boundary, until it is restored."""
        self.is_at_boundary = False
        """Whether the process draws from there already, though the iterator of the epoch is still to be made."""
        self.before_window: dict[str, Any] | None = None
        """The state before the current window was fetched, where a run can end inside one."""
        self.ended_in_window = False
        """Whether that is the state of the boundary: the run has ended inside a window."""

    def state_dict(self) -> dict[str, Any]:
        """Return both states."""
        chosen = self.before_window if self.ended_in_window else None if self.is_at_boundary else self.loaded
        return {"epoch_start": self.epoch_start, "now": random_state() if chosen is None else chosen}

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        """Take over both states; the iterator of the epoch is made between restoring the one and the other."""
        check_form(tree, epoch_start=lambda state: state == {} or is_random_state(state), now=is_random_state)
        self.epoch_start, self.loaded = tree["epoch_start"], tree["now"]

    def seek_boundary(self) -> None:
        """Continue the draws after the boundary, for work that is due before the epoch continues."""
        if self.loaded is not None:
            set_random_state(self.loaded)
            self.is_at_boundary = True

    def restore(self) -> None:
        """Continue the draws after the boundary for good: between two epochs, or where nothing is left of one."""
        if self.loaded is not None:
            set_random_state(self.loaded)
            self.epoch_start, self.loaded = {}, None
