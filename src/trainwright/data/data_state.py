"""The state of loaders, samplers and data sets: their random generators, and their own `state_dict`."""

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
"""Attributes of a data set or a sampler whose own attributes are searched too."""
_END = object()
_NEVER_GENERATORS = frozenset({type(None), bool, int, float, str, tuple, list, dict, Tensor, type(lambda: None)})
"""The most frequent types of attributes, none of them a generator."""


class Generators:
    """The generators that loaders and samplers hold, with their states at the start of the current epoch.

    A resume inside the saved epoch draws the order again from the states at its start; a resume at a later epoch
    starts from the states at the save. So does the state of a sampler with `state_dict` and `load_state_dict`.
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
        """The position that the next epoch begins at."""

    @property
    def epoch(self) -> int:
        """The current epoch, or that of the position sought, if it has not begun yet."""
        return self._epoch if self._sought is None else int(self._sought["epoch"])

    @property
    def found(self) -> list[Any]:
        """The generators, each with `get_state`, `set_state` and `manual_seed`."""
        return list(self._found.values())

    @property
    def stateful(self) -> bool:
        """Whether a sampler has a state of its own."""
        return bool(self._stateful)

    @property
    def known(self) -> set[int]:
        """The ids of the owners and of their generators."""
        return {id(one) for one in (*self.owners.values(), *map(unwrapped, self._found.values()))}

    def begin(self, epoch: int) -> None:
        """Record the states at the start of `epoch`, after restoring those of a position sought."""
        sought, self._sought = self._sought, None
        if sought is not None and sought["epoch"] == epoch:
            self._set_generators(sought["start"])
            self._load_samplers(sought["start"])
        elif sought is not None:  # the generators are set already, and have been broadcast from rank 0 since
            self._load_samplers(sought["now"])
        self._epoch, self._start = epoch, self._states()

    def position(self) -> dict[str, Any]:
        """Return the current epoch (-1 before the first), the states at its start, and the present states."""
        return self._sought or {"epoch": self._epoch, "start": dict(self._start), "now": self._states()}

    def seek(self, position: dict[str, Any], *, ended: bool) -> None:
        """Set the generators to their states at the save at once, and samplers when the next epoch begins.

        `ended`: samplers too are set at once, because other sources read them.
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
        """Return a copy for a pass apart from training: it draws from the present states in any epoch."""
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
    """A generator of Python or NumPy, with the methods of a `torch.Generator`."""

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
    has_both = callable(getattr(data, "state_dict", None)) and callable(getattr(data, "load_state_dict", None))
    return has_both and not isinstance(data, type)


def is_inside_pass(data: Any) -> bool:
    """Return whether data are inside a pass after a load; if not, the end of their last pass has now been read."""
    with rng_preserved():
        return next(iter(data), _END) is not _END


def unsaved_generators(data: Any, collate: Any, samplers: Generators) -> Iterator[str]:
    """Yield a line on each generator that no checkpoint holds, such as "dataset.rng", with a fix.

    Searched are the data set, its base and its transform, the collate function, and samplers inside of samplers.
    """
    collator = getattr(collate, "__self__", collate)
    for name, owner in {"dataset": data, "collate_fn": collator, **samplers.owners}.items():
        if owner is not collator and is_stateful(owner):
            continue
        for place in islice(_hidden(owner, name, known={id(data), *samplers.known}), 1):
            own = "" if owner is collator else f", or give {type(owner).__name__} state_dict and load_state_dict"
            yield f"{place} is a generator that no checkpoint holds; draw from the global ones{own}"


def adapted(generator: Any) -> Any:
    """Return a generator that has the methods of a `torch.Generator`."""
    return generator if isinstance(generator, torch.Generator) else GeneratorAdapter(generator)


def unwrapped(generator: Any) -> Any:
    """Return the generator inside a `GeneratorAdapter`."""
    return generator.generator if isinstance(generator, GeneratorAdapter) else generator


def _hidden(owner: Any, name: str, *, known: set[int], depth: int = 4) -> Iterator[str]:
    """Yield the places of generators in an object and its nested parts, without objects whose ids are `known`."""
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
    """Return whether it is a generator with a state of its own: not the process's, nor the operating system's."""
    if type(value) in _NEVER_GENERATORS:
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


class StatefulData:
    """A loader or data set with `state_dict` and `load_state_dict`, and its state after the committed batches."""

    def __init__(self, data: Any, *, rows_by_index: bool = False) -> None:
        self.data = data
        """The object with the state."""
        self.rows_by_index = rows_by_index
        """Whether the state holds no position, because rows are fetched by index."""
        self._given = 0
        self._begun = False
        self._committed: dict[str, Any] | None = None

    def count(self, iterator: Iterator[Any], given: int) -> Iterator[Any]:
        """Yield the batches of a pass and count them, from `given` on."""
        self._begun, self._given, self._committed = True, given, None
        return self._count(iterator)

    def commit(self) -> None:
        """Capture the state: all batches yielded so far are trained on."""
        if self._begun:
            self._committed = self._now()

    def position(self) -> dict[str, Any] | None:
        """Return the committed state with its number of batches; None before the first pass."""
        if not self._begun:
            return None
        return self._now() if self._committed is None else self._committed

    def seek(self, position: dict[str, Any] | None, *, given: int | None) -> None:
        """Restore the state after `given` batches of its epoch; None: at any position."""
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
    """Return the state of `data`, or of a loader's data set; None where neither has one."""
    if is_stateful(data):
        return StatefulData(data)
    # Workers have copies of the data set, whose states come with their batches.
    if not isinstance(data, DataLoader) or data.num_workers or not is_stateful(data.dataset):
        return None
    return StatefulData(data.dataset, rows_by_index=not isinstance(data.dataset, IterableDataset))


def no_state_error(saved: int, given: int | None) -> DataError:
    """Return the error of a resume at a batch without a saved state."""
    return DataError(
        f"the data cannot continue after {given} batches of the epoch",
        have=f"after {saved} batches",
        fix="resume from another checkpoint of the run, or fit(..., resume_data=False)",
    )
