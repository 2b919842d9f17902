"""Random generators that loaders, samplers and data sets hold: their states are saved and restored."""

from __future__ import annotations

import random
from collections.abc import Iterator
from copy import copy, deepcopy
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainwright.core.errors import DataError
from trainwright.core.rng import rng_preserved

_INSIDE = ("dataset", "datasets", "transform", "transforms", "target_transform")
"""Attributes of a data set whose own attributes are searched too."""
_END = object()
_NONE = frozenset({type(None), bool, int, float, str, tuple, list, dict, Tensor, type(lambda: None)})
"""The most frequent types of attributes, none of them a generator."""


class Generators:
    """The generators that loaders and samplers hold, with their states at the start of the current epoch.

    A resume inside the saved epoch draws the order again from the states at its start; a resume at a later epoch
    starts from the states at the save. So does the state of a sampler with `state_dict` and `load_state_dict`.
    """

    def __init__(self, owners: dict[str, Any]) -> None:
        self._found: dict[str, Any] = {}
        for name, owner in owners.items():
            for key, value in getattr(owner, "__dict__", {}).items():
                if is_generator(value) and not any(value is unwrapped(one) for one in self._found.values()):
                    self._found[f"{name}.{key}"] = value if isinstance(value, torch.Generator) else Other(value)
        distinct = {id(owner): (name, owner) for name, owner in owners.items() if name != "loader"}
        self._stateful = {name: owner for name, owner in distinct.values() if is_stateful(owner)}
        self._epoch = -1
        self._start = self._states()
        self._loaded: dict[str, Any] | None = None

    @property
    def epoch(self) -> int:
        """The current epoch, or the loaded one that is not begun yet."""
        return self._epoch if self._loaded is None else int(self._loaded["epoch"])

    @property
    def found(self) -> list[Any]:
        """The generators, each with `get_state`, `set_state` and `manual_seed`."""
        return list(self._found.values())

    @property
    def stateful(self) -> bool:
        """Whether a sampler has a state of its own."""
        return bool(self._stateful)

    def begin(self, epoch: int) -> None:
        """Record the states at the start of `epoch`, after restoring a loaded state."""
        if self._loaded is not None:
            self._put(self._loaded["start" if self._loaded["epoch"] == epoch else "now"])
            self._loaded = None
        self._epoch, self._start = epoch, self._states()

    def seek_loaded(self) -> None:
        """Restore the states at the save at once: no epoch follows, and others draw from the same objects."""
        if self._loaded is None:
            return
        now = self._loaded["now"]
        self._put(now)
        for name, sampler in self._stateful.items():
            if is_inside_pass(sampler):
                sampler.load_state_dict(deepcopy(now[name]))
        self._put(now, samplers=False)
        self._epoch, self._start, self._loaded = self._loaded["epoch"], self._loaded["start"], None

    def state_dict(self) -> dict[str, Any]:
        """Return the current epoch (-1 before the first), the states at its start, and the present states."""
        return self._loaded or {"epoch": self._epoch, "start": dict(self._start), "now": self._states()}

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        """Load a saved state; it takes effect when the next epoch begins."""
        have, want = {*self._found, *self._stateful}, set(tree["start"])
        if have != want:
            raise DataError(
                "the saved state belongs to another loader: its random generators differ",
                have=", ".join(sorted(have)) or "no generator",
                want=", ".join(sorted(want)) or "no generator",
                fix="build loader and sampler as when the state was saved, or fit(..., resume_data=False)",
            )
        self._loaded = {"epoch": int(tree["epoch"]), "start": tree["start"], "now": tree["now"]}

    def beside(self) -> Generators:
        """Return a copy for a pass beside training: it draws from the present states, in whatever epoch."""
        other = copy(self)
        if self._loaded is not None:
            other._loaded = {**self._loaded, "start": self._loaded["now"]}
        return other

    def _put(self, states: dict[str, Any], *, samplers: bool = True) -> None:
        for name, generator in self._found.items():
            generator.set_state(states[name])
        for name, sampler in self._stateful.items() if samplers else ():
            sampler.load_state_dict(deepcopy(states[name]))

    def _states(self) -> dict[str, Any]:
        states = {name: generator.get_state() for name, generator in self._found.items()}
        return states | {name: deepcopy(sampler.state_dict()) for name, sampler in self._stateful.items()}


class Other:
    """A generator of Python's or NumPy's, with the methods of torch's."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def get_state(self) -> Any:
        """Return the state as plain data."""
        if isinstance(self.generator, np.random.Generator):
            return deepcopy(dict(self.generator.bit_generator.state))
        return self.generator.getstate() if isinstance(self.generator, random.Random) else self.generator.get_state()

    def set_state(self, state: Any) -> None:
        """Restore a state."""
        if isinstance(self.generator, np.random.Generator):
            self.generator.bit_generator.state = state
        elif isinstance(self.generator, random.Random):
            self.generator.setstate(state)
        else:
            self.generator.set_state(state)

    def manual_seed(self, number: int) -> None:
        """Seed the generator."""
        if isinstance(self.generator, np.random.Generator):
            bits = self.generator.bit_generator
            bits.state = type(bits)(number).state
        else:
            self.generator.seed(number)


def is_stateful(data: Any) -> bool:
    """Return whether an object has `state_dict` and `load_state_dict`; a class is no such object."""
    known = callable(getattr(data, "state_dict", None)) and callable(getattr(data, "load_state_dict", None))
    return known and not isinstance(data, type)


def is_inside_pass(data: Any) -> bool:
    """Return whether data are inside a pass after a load; if not, the end of their last pass has now been read."""
    with rng_preserved():
        return next(iter(data), _END) is not _END


def hidden_in(data: Any) -> str:
    """Return where a data set, its base or its transform holds a generator, such as "dataset.rng"; or ""."""
    return next(_hidden(data, "dataset", 4), "")


def unwrapped(generator: Any) -> Any:
    """Return the generator inside an `Other`."""
    return generator.generator if isinstance(generator, Other) else generator


def _hidden(owner: Any, name: str, depth: int) -> Iterator[str]:
    attributes = getattr(owner, "__dict__", None)
    if not isinstance(attributes, dict) or isinstance(owner, type) or is_stateful(owner):
        return
    for key, value in attributes.items():
        if is_generator(value):
            yield f"{name}.{key}"
        elif key in _INSIDE and depth:
            inside = value if isinstance(value, list | tuple) else [value]
            for one in inside:
                yield from _hidden(one, f"{name}.{key}", depth - 1)


def is_generator(value: Any) -> bool:
    """Return whether it is a generator with a state of its own: not the process's, nor the operating system's."""
    if type(value) in _NONE:
        return False
    if isinstance(value, torch.Generator):
        return value is not torch.default_generator
    if isinstance(value, random.Random):
        return value is not getattr(random, "_inst", None) and not isinstance(value, random.SystemRandom)
    kind: Any = type(value)
    if not _is_from_numpy(kind):
        return False  # before NumPy's generators, slow to import, are touched
    kinds = (np.random.Generator, np.random.RandomState)
    return isinstance(value, kinds) and value is not getattr(np.random.mtrand, "_rand", None)


@lru_cache(maxsize=256)
def _is_from_numpy(kind: type) -> bool:
    """Return whether a class is one of NumPy's random module, or built on one."""
    return any(one.__module__.startswith("numpy.random") for one in kind.__mro__)
