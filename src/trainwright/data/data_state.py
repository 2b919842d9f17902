"""The state of loaders, samplers and data sets: their random generators and their `state_dict`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from copy import copy, deepcopy
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Sampler

from trainwright.core.errors import DataError
from trainwright.core.rng import rng_preserved

_NESTED = ("dataset", "datasets", "transform", "transforms", "target_transform", "samplers")
"""Attributes of a data set or sampler whose attributes are searched too."""
_END = object()
_NEVER_GENERATORS = frozenset({type(None), bool, int, float, str, tuple, list, dict, Tensor, type(lambda: None)})
"""Frequent types of attributes that are no generators."""


class Generators:
    """The generators of loaders and samplers, with their states at the start of the current epoch.

    A resume inside the saved epoch repeats the draw of its order from the states at its start; a resume at a later
    epoch starts from the states at the save. The same holds for samplers with `state_dict` and `load_state_dict`.
    """

    def __init__(self, owners: dict[str, Any]) -> None:
        self.owners = owners
        """The loader and the samplers, by name."""
        self._found: dict[str, Any] = {}
        for name, owner in owners.items():
            for key, value in getattr(owner, "__dict__", {}).items():
                if is_generator(value) and not any(value is unwrapped(one) for one in self._found.values()):
                    self._found[f"{name}.{key}"] = adapted(value)
        distinct = {id(owner): (name, owner) for name, owner in owners.items() if name != "loader"}
        self._stateful = {name: owner for name, owner in distinct.values() if is_stateful(owner)}
        self._epoch = -1
        self._start = self._states()
        self._sought: dict[str, Any] | None = None
        """The position to restore at the start of the next epoch."""

    @property
    def epoch(self) -> int:
        """The current epoch, or that of a position that is still to be restored."""
        return self._epoch if self._sought is None else int(self._sought["epoch"])

    @property
    def found(self) -> list[Any]:
        """The generators, each with `get_state`, `set_state` and `manual_seed`."""
        return list(self._found.values())

    @property
    def stateful(self) -> bool:
        """Whether a sampler has a `state_dict`."""
        return bool(self._stateful)

    @property
    def known(self) -> set[int]:
        """The ids of the owners and of their generators."""
        return {id(one) for one in (*self.owners.values(), *map(unwrapped, self._found.values()))}

    def begin(self, epoch: int) -> None:
        """Restore a position from `seek`, if any, and record the states at the start of `epoch`."""
        sought, self._sought = self._sought, None
        if sought is not None and sought["epoch"] == epoch:
            self._set_generators(sought["start"])
            self._load_samplers(sought["start"])
        elif sought is not None:  # `seek` has set the generators, which were broadcast from rank 0 since
            self._load_samplers(sought["now"])
        self._epoch, self._start = epoch, self._states()

    def position(self) -> dict[str, Any]:
        """Return the current epoch (-1 before the first), the states at its start, and the current states."""
        return self._sought or {"epoch": self._epoch, "start": dict(self._start), "now": self._states()}

    def seek(self, position: dict[str, Any], *, ended: bool) -> None:
        """Set the generators to their states at the save; samplers are set at the start of the next epoch.

        `ended`: set the samplers now too, since no epoch follows, but another `fit` may use them.
        """
        have, want = {*self._found, *self._stateful}, set(position["start"])
        if have != want:
            raise DataError(
                "the saved state belongs to another loader: its random generators differ",
                have=", ".join(sorted(have)) or "no generator",
                want=", ".join(sorted(want)) or "no generator",
                fix="build loader and sampler as when the state was saved, or fit(..., resume_data=False)",
            )
        epoch, start, now = int(position["epoch"]), position["start"], position["now"]
        self._sought = {"epoch": epoch, "start": start, "now": now}
        self._set_generators(now)
        if ended:
            self._epoch, self._start, self._sought = epoch, start, None
            self._load_samplers(now)
            self._load_samplers(now, only=is_inside_pass)
            self._set_generators(now)

    def independent_copy(self) -> Generators:
        """Return a copy for a pass besides training, which draws from the current states in any epoch."""
        other = copy(self)
        if self._sought is not None:
            other._sought = {**self._sought, "start": self._sought["now"]}
        return other

    def _set_generators(self, states: dict[str, Any]) -> None:
        for name, generator in self._found.items():
            generator.set_state(states[name])

    def _load_samplers(self, states: dict[str, Any], *, only: Callable[[Any], bool] | None = None) -> None:
        for name, sampler in self._stateful.items():
            if only is None or only(sampler):
                sampler.load_state_dict(deepcopy(states[name]))

    def _states(self) -> dict[str, Any]:
        states = {name: generator.get_state() for name, generator in self._found.items()}
        return states | {name: deepcopy(sampler.state_dict()) for name, sampler in self._stateful.items()}


class GeneratorAdapter:
    """Gives a generator of Python or NumPy the methods of a `torch.Generator`."""

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
    """Return whether an object (not a class) has `state_dict` and `load_state_dict`."""
    has_both = callable(getattr(data, "state_dict", None)) and callable(getattr(data, "load_state_dict", None))
    return has_both and not isinstance(data, type)


def is_inside_pass(data: Any) -> bool:
    """Return whether data are inside a pass after a load. Starts an iterator, which consumes the end of a pass."""
    with rng_preserved():
        return next(iter(data), _END) is not _END


def unsaved_generators(data: Any, collate: Any, samplers: Generators) -> Iterator[str]:
    """Yield a line on each generator that no checkpoint holds, such as "dataset.rng", with a fix.

    Searches the data set, nested data sets and transforms, the collate function, and nested samplers.
    """
    collator = getattr(collate, "__self__", collate)
    for name, owner in {"dataset": data, "collate_fn": collator, **samplers.owners}.items():
        if owner is not collator and is_stateful(owner):
            continue
        for place in islice(_hidden(owner, name, known={id(data), *samplers.known}), 1):
            own = "" if owner is collator else f", or give {type(owner).__name__} state_dict and load_state_dict"
            yield f"{place} is a generator that no checkpoint holds; draw from the global ones{own}"


def adapted(generator: Any) -> Any:
    """Return a generator with the methods of a `torch.Generator`."""
    return generator if isinstance(generator, torch.Generator) else GeneratorAdapter(generator)


def unwrapped(generator: Any) -> Any:
    """Return the generator inside a `GeneratorAdapter`."""
    return generator.generator if isinstance(generator, GeneratorAdapter) else generator


def _hidden(owner: Any, name: str, *, known: set[int], depth: int = 4) -> Iterator[str]:
    """Yield the paths of generators in an object and its nested parts, except objects whose ids are `known`."""
    attributes = getattr(owner, "__dict__", None)
    if not isinstance(attributes, dict) or isinstance(owner, type):
        return
    for key, value in attributes.items():
        if id(value) in known:
            continue
        if is_generator(value):
            yield f"{name}.{key}"
        elif depth and (key in _NESTED or isinstance(value, Sampler)):
            for one in value if isinstance(value, list | tuple) else [value]:
                yield from _hidden(one, f"{name}.{key}", known=known, depth=depth - 1)


def is_generator(value: Any) -> bool:
    """Return whether a value is a generator with a separate state, not a global or operating-system one."""
    if type(value) in _NEVER_GENERATORS:
        return False
    if isinstance(value, torch.Generator):
        return value is not torch.default_generator
    if isinstance(value, random.Random):
        return value is not getattr(random, "_inst", None) and not isinstance(value, random.SystemRandom)
    kind: Any = type(value)
    if not _is_from_numpy(kind):
        return False  # checked first, since `numpy.random` is slow to import
    kinds = (np.random.Generator, np.random.RandomState)
    return isinstance(value, kinds) and value is not getattr(np.random.mtrand, "_rand", None)


@lru_cache(maxsize=256)
def _is_from_numpy(kind: type) -> bool:
    """Return whether a class is, or derives from, one of `numpy.random`."""
    return any(one.__module__.startswith("numpy.random") for one in kind.__mro__)


class StatefulData:
    """A loader or data set with `state_dict` and `load_state_dict`, with its state after the committed batches."""

    def __init__(self, data: Any, *, rows_by_index: bool = False) -> None:
        self.data = data
        """The object with the state."""
        self.rows_by_index = rows_by_index
        """Whether rows are fetched by index, so that the state includes no position."""
        self._given = 0
        self._begun = False
        self._committed: dict[str, Any] | None = None

    def count(self, iterator: Iterator[Any], given: int) -> Iterator[Any]:
        """Yield the batches of a pass and count them, starting at `given`."""
        self._begun, self._given, self._committed = True, given, None
        return self._count(iterator)

    def commit(self) -> None:
        """Capture the state, after all batches yielded so far were trained."""
        if self._begun:
            self._committed = self._now()

    def position(self) -> dict[str, Any] | None:
        """Return the committed state with its number of batches; None before the first pass."""
        if not self._begun:
            return None
        return self._now() if self._committed is None else self._committed

    def seek(self, position: dict[str, Any] | None, *, given: int | None) -> None:
        """Restore the state; DataError unless it is that after `given` batches (None: any number)."""
        if position is None:
            return
        if given not in (None, position["given"]):
            raise no_state_error(position["given"], given)
        self.data.load_state_dict(deepcopy(position["state"]))
        self._begun, self._given, self._committed = True, position["given"], position

    def _count(self, iterator: Iterator[Any]) -> Iterator[Any]:
        for batch in iterator:
            self._given += 1
            yield batch

    def _now(self) -> dict[str, Any]:
        return {"given": self._given, "state": deepcopy(self.data.state_dict())}


def stateful_data(data: Any) -> StatefulData | None:
    """Return the `StatefulData` of `data`, or of a loader's data set; None if neither has a state."""
    if is_stateful(data):
        return StatefulData(data)
    # With workers, their copies of the data set have the states, which come with the batches.
    if not isinstance(data, DataLoader) or data.num_workers or not is_stateful(data.dataset):
        return None
    return StatefulData(data.dataset, rows_by_index=not isinstance(data.dataset, IterableDataset))


def no_state_error(saved: int, given: int | None) -> DataError:
    """Return the error for a resume at a batch without a saved state."""
    return DataError(
        f"the data cannot continue after {given} batches of the epoch",
        have=f"after {saved} batches",
        fix="resume from another checkpoint of the run, or fit(..., resume_data=False)",
    )
