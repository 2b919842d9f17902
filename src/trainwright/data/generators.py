"""Random generators that loaders, samplers and data sets hold: found, read and put back."""

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
"""Attributes of a data set whose own attributes are looked at too."""
_END = object()
_NONE = frozenset({type(None), bool, int, float, str, tuple, list, dict, Tensor, type(lambda: None)})
"""Types of attributes that are looked at most often, and are no generators."""


class Generators:
    """The generators that loaders and samplers hold, as they stood at the start of the epoch in hand.

    Resumed inside the saved epoch, the order is drawn again from its start; resumed at a later epoch, the
    generators go on from where they stood when the state was saved. A sampler with `state_dict` and
    `load_state_dict` is asked for its state in the same way.
    """

    def __init__(self, owners: dict[str, Any]) -> None:
        self._found: dict[str, Any] = {}
        for name, owner in owners.items():
            for key, value in getattr(owner, "__dict__", {}).items():
                if is_generator(value) and not any(value is held_by(one) for one in self._found.values()):
                    self._found[f"{name}.{key}"] = value if isinstance(value, torch.Generator) else Other(value)
        distinct = {id(owner): (name, owner) for name, owner in owners.items() if name != "loader"}
        self._stateful = {name: owner for name, owner in distinct.values() if knows_its_state(owner)}
        self._epoch = -1
        self._start = self._states()
        self._loaded: dict[str, Any] | None = None

    @property
    def epoch(self) -> int:
        """The epoch in hand, or the loaded one that is not begun yet."""
        return self._epoch if self._loaded is None else int(self._loaded["epoch"])

    @property
    def found(self) -> list[Any]:
        """The generators themselves, each with `get_state`, `set_state` and `manual_seed`."""
        return list(self._found.values())

    @property
    def stateful(self) -> bool:
        """Whether a sampler has told its own state."""
        return bool(self._stateful)

    def begin(self, epoch: int) -> None:
        """Note the start of `epoch`, after going back to a loaded state where there is one."""
        if self._loaded is not None:
            self._put(self._loaded["start" if self._loaded["epoch"] == epoch else "now"])
            self._loaded = None
        self._epoch, self._start = epoch, self._states()

    def settle(self) -> None:
        """Go to the end of a loaded state at once: no epoch follows, and others draw from the same objects."""
        if self._loaded is None:
            return
        now = self._loaded["now"]
        self._put(now)
        for name, sampler in self._stateful.items():
            if stands_in_the_middle(sampler):
                sampler.load_state_dict(deepcopy(now[name]))
        self._put(now, samplers=False)
        self._epoch, self._start, self._loaded = self._loaded["epoch"], self._loaded["start"], None

    def state_dict(self) -> dict[str, Any]:
        """The epoch in hand (-1 before the first), the states at its start, and the states now."""
        return self._loaded or {"epoch": self._epoch, "start": dict(self._start), "now": self._states()}

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        """Take over a saved state; it takes effect when the next epoch begins."""
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
        """Its state as plain data."""
        if isinstance(self.generator, np.random.Generator):
            return deepcopy(dict(self.generator.bit_generator.state))
        return self.generator.getstate() if isinstance(self.generator, random.Random) else self.generator.get_state()

    def set_state(self, state: Any) -> None:
        """Put back what `get_state` gave."""
        if isinstance(self.generator, np.random.Generator):
            self.generator.bit_generator.state = state
        elif isinstance(self.generator, random.Random):
            self.generator.setstate(state)
        else:
            self.generator.set_state(state)

    def manual_seed(self, number: int) -> None:
        """Start it from one number."""
        if isinstance(self.generator, np.random.Generator):
            bits = self.generator.bit_generator
            bits.state = type(bits)(number).state
        else:
            self.generator.seed(number)


def knows_its_state(data: Any) -> bool:
    """Whether `data` have both `state_dict` and `load_state_dict`; a class itself has not."""
    known = callable(getattr(data, "state_dict", None)) and callable(getattr(data, "load_state_dict", None))
    return known and not isinstance(data, type)


def stands_in_the_middle(data: Any) -> bool:
    """Whether data whose state was loaded go on with a pass; if not, the end of their last pass is now behind them."""
    with rng_preserved():
        return next(iter(data), _END) is not _END


def hidden_in(data: Any) -> str:
    """Where a data set, what it is a subset of or its transform holds a generator, such as "dataset.rng", or ""."""
    return next(_hidden(data, "dataset", 4), "")


def held_by(generator: Any) -> Any:
    """The generator itself, where it was dressed as one of torch's."""
    return generator.generator if isinstance(generator, Other) else generator


def _hidden(owner: Any, name: str, depth: int) -> Iterator[str]:
    attributes = getattr(owner, "__dict__", None)
    if not isinstance(attributes, dict) or isinstance(owner, type) or knows_its_state(owner):
        return
    for key, value in attributes.items():
        if is_generator(value):
            yield f"{name}.{key}"
        elif key in _INSIDE and depth:
            inside = value if isinstance(value, list | tuple) else [value]
            for one in inside:
                yield from _hidden(one, f"{name}.{key}", depth - 1)


def is_generator(value: Any) -> bool:
    """Whether it is a generator with a state of its own: not the process's, nor the operating system's."""
    if type(value) in _NONE:
        return False
    if isinstance(value, torch.Generator):
        return value is not torch.default_generator
    if isinstance(value, random.Random):
        return value is not getattr(random, "_inst", None) and not isinstance(value, random.SystemRandom)
    kind: Any = type(value)
    if not _is_of_numpys(kind):
        return False  # and NumPy's generators, slow to import, are left alone
    kinds = (np.random.Generator, np.random.RandomState)
    return isinstance(value, kinds) and value is not getattr(np.random.mtrand, "_rand", None)


@lru_cache(maxsize=256)
def _is_of_numpys(kind: type) -> bool:
    """Whether a class is one of NumPy's random module, or built on one."""
    return any(one.__module__.startswith("numpy.random") for one in kind.__mro__)
