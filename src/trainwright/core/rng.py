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
"""Size in bytes of the state of NumPy's Mersenne twister: key and position."""
_HEAD = object.__basicsize__
_WORDS = struct.Struct("=i624I")
"""Memory layout of CPython's Mersenne twister after the object header: position and key."""


def random_state() -> dict[str, Any]:
    """Return every global random state, as a tree of plain data and tensors that must not be modified."""
    state = host_random_state()
    if torch.cuda.is_initialized() and torch.cuda.is_available():  # the first check takes no time
        state["cuda"] = torch.cuda.get_rng_state_all()
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def have_moved(state: dict[str, Any]) -> bool:
    """Return whether any global random state differs from what `random_state` returned."""
    return not _same(random_state(), state)


def host_random_state() -> dict[str, Any]:
    """Return the global random states of Python, NumPy and torch on the CPU, in the same form."""
    return {"python": _python.state(), "numpy": _numpy.state(), "torch": torch.default_generator.get_state()}


def set_random_state(state: dict[str, Any]) -> None:
    """Set all global random states to what `random_state` returned."""
    _python.set_state(state["python"])
    _numpy.set_state(state["numpy"])
    torch.default_generator.set_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        for index, one in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(one, index)
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])


def is_random_state(value: object) -> bool:
    """Return whether `set_random_state` accepts a value; nothing is set."""
    state: Any = value
    try:
        random.Random().setstate(state["python"])
        np.random.RandomState(type(np.random.mtrand._rand._bit_generator)()).set_state(state["numpy"])
        torch.Generator().set_state(state["torch"])
        return all(isinstance(one, torch.Tensor) and one.dtype is torch.uint8 for one in state.get("cuda", ()))
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError):
        return False


def seed(number: int, generators: Iterable[torch.Generator] = ()) -> None:
    """Seed every global random state, and `generators`, with one number."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)
    for generator in generators:
        generator.manual_seed(number)


def unmoved(generators: Iterable[torch.Generator] = ()) -> AbstractContextManager[None]:
    """Restore every global random state, and those of `generators`, at the end of the block."""
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
    """Restores the states; a class, since every evaluation enters it."""

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
    """Python's global state, converted again only if it has changed: its 625 numbers are as many objects, 20 KB.

    The check compares the generator's memory with that of the last call, where the memory layout is known.
    """

    def __init__(self) -> None:
        self._seen: bytes | None = None
        self._state: Any = None

    def state(self) -> Any:
        """Return what `random.getstate()` returns."""
        generator = getattr(random.getstate, "__self__", None)
        seen = self._memory_of(generator)
        if seen is None or seen != self._seen or self._state[2] != getattr(generator, "gauss_next", None):
            self._state = random.getstate()
            words = self._state[1]
            known = seen is not None and seen == _WORDS.pack(words[-1], *words[:-1])
            self._seen = seen if known else None
        return self._state

    def set_state(self, state: Any) -> None:
        """Set a state, if a number was drawn since."""
        if self.state() is not state:
            random.setstate(state)

    def _memory_of(self, generator: Any) -> bytes | None:
        """Return the memory of a CPython generator, position and key; None for any other generator."""
        if type(generator) is not random.Random or sys.implementation.name != "cpython":
            return None
        if _Twister.__basicsize__ < _HEAD + _WORDS.size:
            return None
        return ctypes.string_at(id(generator) + _HEAD, _WORDS.size)


class _NumPy:
    """NumPy's global state, converted again only if it has changed: that takes 41 us, the check 1 us."""

    def __init__(self) -> None:
        self._seen: tuple[int, bytes] | None = None
        self._state: Any = None

    def state(self) -> Any:
        """Return what `np.random.get_state()` returns."""
        generator: Any = np.random.mtrand._rand._bit_generator
        if type(generator) is not np.random.MT19937:
            return np.random.get_state()
        address = generator.ctypes.state_address
        # A cached normal deviate is stored elsewhere: it appears only with a change, and may vanish without one.
        if self._state is None or self._state[3] or self._seen != (address, ctypes.string_at(address, _MT19937)):
            self._state = np.random.get_state()
            self._seen = (address, ctypes.string_at(address, _MT19937))
        return self._state

    def set_state(self, state: Any) -> None:
        """Set a state, if a number was drawn since: setting takes 40 us."""
        if self.state() is not state:
            np.random.set_state(state)
            self._seen = None  # a cached deviate may be set without a change of the memory


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
