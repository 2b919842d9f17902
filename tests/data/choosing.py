"""A data set that is worth workers, and its batches with and without them: shared by the tests of chosen workers."""

from __future__ import annotations

import multiprocessing
import random
import time
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from trainwright.data.batches import Batches, batches
from trainwright.data.bits import same_bits

ROWS, SIZE, EPOCHS = 60, 4, 3


class Augmented(Dataset):
    """Rows that draw from every generator, are told the epoch where asked, and take a while."""

    def __init__(self, shift: float = 0.0, wait: float = 5e-4) -> None:
        self.shift, self.wait = shift, wait
        self.names = [f"{index}" for index in range(ROWS)]
        self.weights = np.ones(3)
        self.scale = torch.ones(3)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        time.sleep(self.wait)
        drawn = torch.rand(3) * self.scale + self.shift
        return int(self.names[index]), drawn, random.random(), np.random.rand(3) * self.weights


class Epochs(Augmented):
    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return *super().__getitem__(index), self.epoch


def source(data: Any, workers: Any = "auto", **settings: Any) -> Batches:
    return batches(data, SIZE, seed=3, workers=workers, **({"shuffle": True} | settings))


def passes(given: Batches, between: Any = None, *, first: int = 0, skip: int = 0) -> list[Any]:
    """Every batch; `between` is called with the number of those that were given."""
    table = []
    given.keeps_workers = True
    for epoch in range(first, EPOCHS):
        for batch in given.epoch(epoch, skip if epoch == first else 0):
            table.append([one.clone() for one in batch])
            batch[1].zero_()  # a step may write into its batch
            if between is not None:
                between(len(table))
    given.end_workers()
    return table


def chose(given: Batches) -> Any:
    return given._chosen.workers


def check_same(make: Any, between: Any = lambda data: None, **settings: Any) -> Batches:
    """Batches with workers that were chosen, against those that one process fetches."""
    alone, ours = make(), make()
    expected = passes(source(alone, 0, **settings), between(alone))
    before = torch.get_rng_state()
    given = source(ours, **settings)
    table = passes(given, between(ours))
    assert same_bits(table, expected)
    assert torch.equal(torch.get_rng_state(), before)
    return given


_others: set[int | None] = set()


def ignore_those_that_run() -> None:
    """Leave out of `pids` what runs now: what earlier tests have left, or what many of them share."""
    _others.update(process.pid for process in multiprocessing.active_children())


def pids() -> set[int | None]:
    """The processes that this one has started since `ignore_those_that_run`."""
    return {process.pid for process in multiprocessing.active_children()} - _others
