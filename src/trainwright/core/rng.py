"""The random state of the process as plain data: Python, NumPy, torch, and each accelerator in use."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from trainwright.core.checks import check_form

_MT19937 = 624 * 4 + 4
"""Size in bytes of the state of NumPy's Mersenne Twister: key and position."""


def random_state() -> dict[str, Any]:
    """Return all global random states as a tree of plain data and tensors, which must not be modified."""
    state = host_random_state()
    if torch.cuda.is_initialized() or _HAS_MPS:
        state |= _accelerator_state()
    return state


def _accelerator_state() -> dict[str, Any]:
    state: dict[str, Any] = {}
    if torch.cuda.is_initialized() and torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if _HAS_MPS:
        state["mps"] = torch.mps.get_rng_state()
    return state


def have_moved(state: dict[str, Any]) -> bool:
    """Return whether any global random state differs from what `random_state` returned."""
    return not _same(random_state(), state)


def host_random_state() -> dict[str, Any]:
    """Return the global CPU random states of Python, NumPy and torch, in the form of `random_state`."""
    return {"python": random.getstate(), "numpy": _numpy.state(), "torch": torch.default_generator.get_state()}


def set_random_state(state: dict[str, Any]) -> None:
    """Set all global random states to what `random_state` returned."""
    random.setstate(state["python"])
    _numpy.set_state(state["numpy"])
    torch.default_generator.set_state(state["torch"])
    if len(state) > 3:
        _set_accelerator_state(state)


def _set_accelerator_state(state: dict[str, Any]) -> None:
    if "cuda" in state and torch.cuda.is_available():
        for index, saved in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(saved, index)
    if "mps" in state and _HAS_MPS:
        torch.mps.set_rng_state(state["mps"])


def is_random_state(value: object) -> bool:
    """Return whether `set_random_state` accepts a value, without a change of any state."""
    state: Any = value
    try:
        random.Random().setstate(state["python"])
        np.random.RandomState(type(np.random.mtrand._rand._bit_generator)()).set_state(state["numpy"])
        torch.Generator().set_state(state["torch"])
        return all(isinstance(saved, torch.Tensor) and saved.dtype is torch.uint8 for saved in state.get("cuda", ()))
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError):
        return False


def seed(number: int, generators: Iterable[torch.Generator] = ()) -> None:
    """Seed all global random states and `generators` with one number."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)
    for generator in generators:
        generator.manual_seed(number)


def _same(state: Any, other: Any) -> bool:
    if isinstance(state, dict) and isinstance(other, dict):
        return state.keys() == other.keys() and all(_same(state[key], other[key]) for key in state)
    if isinstance(state, list | tuple) and isinstance(other, list | tuple):
        return len(state) == len(other) and all(map(_same, state, other))
    if isinstance(state, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(state, other)
    return bool(np.array_equal(state, other)) if isinstance(state, np.ndarray) else state == other


class rng_preserved:  # a class, since each evaluation enters it: cheaper than a generator
    """Context manager that restores all global random states and those of `generators` at its end."""

    __slots__ = ("_generators", "_own", "_state")

    def __init__(self, generators: Iterable[torch.Generator] = ()) -> None:
        self._generators = generators

    def __enter__(self) -> None:
        self._state = random_state()
        self._own = [(generator, generator.get_state()) for generator in self._generators]

    def __exit__(self, *error: object) -> None:
        set_random_state(self._state)
        for generator, before in self._own:
            generator.set_state(before)


class PausedRng:
    """Random states of a pass with pauses: `resume` restores those of the last `pause`, including `generators`."""

    def __init__(self, generators: Iterable[torch.Generator] = ()) -> None:
        self._generators = list(generators)
        self._states: tuple[dict[str, Any], list[torch.Tensor]] | None = None

    def pause(self) -> None:
        """Record the current states."""
        self._states = random_state(), [generator.get_state() for generator in self._generators]

    def resume(self) -> None:
        """Restore the recorded states. No-op before the first pause."""
        if self._states is None:
            return
        state, own = self._states
        set_random_state(state)
        for generator, before in zip(self._generators, own, strict=True):
            generator.set_state(before)


class _NumPy:
    """NumPy's global generator. Its state is read and set only after a change, since either takes about 40 us.

    `numpy.random` is slow to import and is therefore imported on first use.
    """

    _seen: bytes | None = None
    _state: Any = None

    def state(self) -> Any:
        """Return the state."""
        memory = self._memory()
        if memory is None or memory != self._seen:
            self._state, self._seen = np.random.get_state(), memory
        return self._state

    def set_state(self, state: Any) -> None:
        """Set a state, if numbers were drawn since."""
        if self.state() is not state:
            np.random.set_state(state)
            self._seen = None  # the memory does not include the cached second normal deviate

    def _memory(self) -> bytes | None:
        """Return the memory that changes with each draw; None if it is unknown."""
        generator: Any = np.random.mtrand._rand._bit_generator
        # A cached second normal deviate is outside of this memory, and is consumed without a change of it.
        if type(generator) is not np.random.MT19937 or (self._state is not None and self._state[3]):
            return None
        return ctypes.string_at(generator.ctypes.state_address, _MT19937)


_HAS_MPS = torch.backends.mps.is_available()
_numpy = _NumPy()


@dataclass(slots=True)
class RngCheckpoint:
    """Part `random` of a checkpoint: the random states at the start of the current epoch and at the save.

    A resume draws the order of the epoch from the first state, then continues from the second:

        loaded -> (restore_before_opening, for a validation or probe that is due) -> epoch opened
        loaded -> restore, if the epoch is complete
    """

    epoch_start_state: dict[str, Any] = field(default_factory=dict)
    """Empty until the iterator of the current epoch is made; a run may stop before that."""
    resume_state: dict[str, Any] | None = None
    """The loaded state of the save, until the epoch is opened or `restore` is called."""
    restored_before_opening: bool = False
    """Whether `resume_state` was already set, before the epoch is opened."""

    def state_after_opening(self) -> dict[str, Any] | None:
        """Return the state to set once the epoch is opened; None if the epoch is not resumed."""
        return random_state() if self.restored_before_opening else self.resume_state

    def state_dict(self) -> dict[str, Any]:
        """Return both states."""
        return {"epoch_start": self.epoch_start_state, "now": self.state_after_opening() or random_state()}

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        """Load both states. The states of the process change only in the methods below."""
        check_form(tree, epoch_start=lambda state: state == {} or is_random_state(state), now=is_random_state)
        self.epoch_start_state, self.resume_state = tree["epoch_start"], tree["now"]

    def restore_before_opening(self) -> None:
        """Set the state of the save, for a validation or probe that is due before the epoch is opened."""
        if self.resume_state is not None:
            set_random_state(self.resume_state)
            self.restored_before_opening = True

    def restore(self) -> None:
        """Set the state of the save, for a resume between two epochs or after the last batch of one."""
        if self.resume_state is not None:
            set_random_state(self.resume_state)
            self.epoch_start_state, self.resume_state = {}, None
