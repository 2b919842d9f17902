"""What the cells of the law Resume train on: rows that draw, in every kind of order, read by workers or not."""

from __future__ import annotations

import os
import random
import time
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler, default_collate, get_worker_info

from laws.models import SHAPES, tensors
from laws.resume_cells import Cell
from trainwright import batches

ROWS, SIZE, BATCHES = 27, 4, 7
"""7 batches per epoch: 7 updates with `accumulate=1`, windows of 3, 3 and 1 with 3."""


class Noisy(Dataset):
    """Rows that draw from torch, Python and NumPy when they are read."""

    def __init__(self, kind: str) -> None:
        self.x, self.y = tensors(kind, ROWS)

    def __len__(self):
        return ROWS

    def __getitem__(self, row):
        noise = torch.randn(SHAPES["mlp" if self.x.ndim == 2 else "cnn"])
        return self.x[row] * (1 + 0.1 * random.random()) + 0.1 * noise + 0.1 * float(np.random.rand()), self.y[row]


class Dealt:
    """Batches of an order that depends on a generator and on the epoch that it is set to."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(9)
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return BATCHES

    def __iter__(self):
        rows = torch.randperm(ROWS, generator=self.generator).roll(self.epoch).tolist()
        yield from (rows[start : start + SIZE] for start in range(0, ROWS, SIZE))


def data(cell: Cell, watch: Any) -> Any:
    """What the cell trains on."""
    rows, collate = Noisy(cell["model"]), Collate(watch)
    if cell["data"] == "batches":
        return batches(rows, SIZE, shuffle=True, seed=1, collate=collate)
    workers = {
        "num_workers": int(cell["workers"][0]),
        "persistent_workers": cell["workers"].endswith("persistent"),
        "collate_fn": collate,
    }
    if cell["data"] == "batch_sampler":
        return DataLoader(rows, batch_sampler=Dealt(), **workers)
    order = {
        "shuffle": {"shuffle": True},
        "generator": {"shuffle": True, "generator": torch.Generator().manual_seed(7)},
        "sampler": {"sampler": WeightedRandomSampler(torch.arange(1.0, ROWS + 1), ROWS)},
    }
    return DataLoader(rows, SIZE, **order[cell["data"]], **workers)


class Collate:
    """torch's own, which sends the signal that is to come while its batch is waited for."""

    def __init__(self, watch: Any) -> None:
        interrupt = watch.interrupt
        self.target = interrupt.batch if interrupt and interrupt.kind == "signal while waiting" else -1
        self.before = 0 if interrupt is None else interrupt.batch - interrupt.micro
        self.signal = None if interrupt is None else interrupt.signal
        self.seen, self.process = watch.seen, os.getpid()
        self.epoch, self.given = -1, 0

    def __call__(self, rows):
        if self.target >= 0:
            self.count()
        return default_collate(rows)

    def count(self):
        """Find out which batch this is, and send the signal once the windows before its own have been trained on."""
        if self.seen.value // BATCHES != self.epoch:
            self.epoch, self.given = self.seen.value // BATCHES, 0
        worker = get_worker_info()
        number = self.given if worker is None else self.given * worker.num_workers + worker.id
        self.given += 1
        if self.epoch * BATCHES + number != self.target:
            return
        self.target = -1
        while self.seen.value < self.before:
            time.sleep(0.001)
        if worker is not None:
            time.sleep(0.03)  # the update that is under way ends, and the loop waits
        os.kill(self.process, self.signal)
