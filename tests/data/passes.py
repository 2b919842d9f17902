"""Trains on a source as a run does, cut at one batch, and goes on from there: shared by the tests of resuming."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from sources import Noisy, committed, generator, text
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SubsetRandomSampler, get_worker_info

from trainwright.core.rng import random_state, set_random_state

EPOCHS = 3
END = object()


class Augmented(Noisy):
    """Rows that draw from every generator of the worker, and tell which worker it was and what it was seeded with."""

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        info = get_worker_info()
        worker = (-1, -1) if info is None else (info.id, info.seed % 1000)
        return *super().__getitem__(index), random.gauss(0, 1), np.random.randn(), *worker


class Shuffled(Sampler[int]):
    """Draws its order from a generator of Python's or NumPy's own."""

    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[int]:
        order = list(range(20))
        self.rng.shuffle(order)
        return iter(order)


class Globally(Shuffled):
    """Draws its order from Python's own generator when it is first asked."""

    def __init__(self) -> None:
        super().__init__(None)

    def __iter__(self) -> Iterator[int]:
        order = list(range(20))
        random.shuffle(order)
        yield from order


class Mixed(Globally):
    """Keeps its generator's state to itself and gives it when asked."""

    def __init__(self) -> None:
        self._own = [random.Random(5)]

    def __iter__(self) -> Iterator[int]:
        yield from self._own[0].sample(range(20), 20)

    def state_dict(self) -> dict[str, Any]:
        return {"own": self._own[0].getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._own[0].setstate(state["own"])


def starts_noisily(worker: int) -> None:
    """A worker's start that draws, too."""
    torch.rand(worker + 1)


class Passing(DataLoader):
    """A loader whose batches go through an `__iter__` of its own."""

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield [*batch, "passed"]


ORDERS: dict[str, Callable[[], dict[str, Any]]] = {
    "in order": lambda: {"batch_size": 4},
    "shuffle": lambda: {"batch_size": 4, "shuffle": True},
    "generator": lambda: {"batch_size": 4, "shuffle": True, "generator": generator()},
    "sampler": lambda: {"batch_size": 4, "sampler": SubsetRandomSampler(range(1, 20), generator())},
    "batch sampler": lambda: {"batch_sampler": BatchSampler(RandomSampler(range(20), generator=generator()), 4, True)},
    "python": lambda: {"batch_size": 4, "sampler": Shuffled(random.Random(3))},
    "numpy": lambda: {"batch_size": 4, "sampler": Shuffled(np.random.default_rng(3))},
    "legacy": lambda: {"batch_size": 4, "sampler": Shuffled(np.random.RandomState(3))},
    "globally": lambda: {"batch_size": 4, "sampler": Globally()},
    "stateful": lambda: {"batch_size": 4, "sampler": Mixed()},
    "one by one": lambda: {"batch_size": None, "shuffle": True},
}
WORKERS: dict[str, dict[str, Any]] = {
    "0": {},
    "2": {"num_workers": 2, "worker_init_fn": starts_noisily},
    "2 persistent": {"num_workers": 2, "persistent_workers": True, "timeout": 30},
}


def loader(order: str, workers: str, kind: Any = DataLoader) -> DataLoader[Any]:
    return kind(Augmented(), **ORDERS[order](), **WORKERS[workers])


def trains() -> None:
    """What a step draws."""
    torch.rand(2), random.random(), np.random.rand()


def trained(source: Any, cuts: list[tuple[int, int]], window: int = 1) -> tuple[list[list[str]], dict[Any, Any]]:
    """Every batch of every epoch, and what is saved at each of the cuts: (epoch, batches trained on)."""
    table: list[list[str]] = []
    saved = {}
    for epoch in range(EPOCHS):
        start = random_state()
        if (epoch, 0) in cuts:
            saved[epoch, 0] = {"data": committed(source), "start": start, "now": start}
        iterator = source.epoch(epoch)
        table.append([])
        while True:
            if len(table[-1]) % window == 0:
                source.commit()
            batch = next(iterator, END)
            if batch is END:
                break
            table[-1].append(text(batch))
            trains()
            at = (epoch, len(table[-1]))
            if at in cuts:
                data = committed(source) if len(table[-1]) % window == 0 else source.position()
                saved[at] = {"data": data, "start": start, "now": random_state()}
    return table, saved


def resumed(source: Any, saved: dict[str, Any], epoch: int, batch: int) -> list[list[str]]:
    """The rest of that epoch, and the next ones."""
    said = source.seek(saved["data"])
    assert said is None
    table: list[list[str]] = []
    set_random_state(saved["now"])
    for number in range(epoch, EPOCHS):
        skip = batch if number == epoch else 0
        if skip:
            set_random_state(saved["start"])
        iterator = source.epoch(number, skip=skip)
        if skip:
            set_random_state(saved["now"])
        table.append([])
        for one in iterator:
            table[-1].append(text(one))
            trains()
            source.commit()
    return table


def rest(table: list[list[str]], epoch: int, batch: int) -> list[list[str]]:
    """What a resume there is to give."""
    return [table[epoch][batch:], *table[epoch + 1 :]]


def alike(given: list[list[str]], expected: list[list[str]]) -> bool:
    """Whether all batches are equal; pytest would take minutes to show how they differ."""
    return given == expected
