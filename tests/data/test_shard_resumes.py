"""A resume on as many processes goes on with what each of them had of its own; on another number with the rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from passes import Augmented
from sharded_sources import opened
from sources import committed
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from trainwright.core.rng import random_state
from trainwright.data.opening import batches
from trainwright.data.source import require_resume
from trainwright.distributed.mesh import Shard


def test_on_another_number_of_processes_the_rows_are_the_same_and_a_line_says_what_is_not() -> None:
    def make() -> Any:
        return DataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=1)

    source = opened(make, Shard(0, 2))
    require_resume(source)
    start = random_state()
    iterator = source.epoch(0)
    next(iterator)
    saved, rows = committed(source), [one.batch[0].tolist() for one in iterator]
    assert saved["workers"]["seed"] is not None
    again = opened(make, Shard(0, 1))
    assert "the random draws of workers are not" in again.seek(saved, other_size=True)
    assert again.position()["workers"]["seed"] is None
    torch.set_rng_state(start["torch"])
    assert [one.batch[0].tolist()[:2] for one in again.epoch(0, 1)] == rows


def test_a_line_says_it_for_a_function_of_the_epoch_too() -> None:
    source = opened(lambda: lambda epoch: DataLoader(Augmented(), batch_size=4, num_workers=1), Shard(0, 2))
    assert "the random draws of workers are not" in source.seek(committed(source), other_size=True)


class Counting(Dataset):
    """Tells how often it was asked, and keeps it."""

    def __init__(self) -> None:
        self.asked = 0

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        self.asked += 1
        return index, self.asked

    def state_dict(self) -> Any:
        return {"asked": self.asked}

    def load_state_dict(self, tree: Any) -> None:
        self.asked = tree["asked"]


@pytest.mark.parametrize("of", ["batches", "loader"])
def test_a_data_set_that_tells_its_state_is_asked_on_each_process(of: str) -> None:
    def make() -> Any:
        return batches(Counting(), 6) if of == "batches" else DataLoader(Counting(), batch_size=6)

    positions = []
    for rank in range(2):
        source = opened(make, Shard(rank, 2, least=4))  # six rows: all of them the first one's
        require_resume(source)
        iterator = source.epoch(0)
        source.commit()
        next(iterator) if rank == 0 else list(iterator)
        positions.append(committed(source))
    assert [one["state"]["state"] for one in positions] == [{"asked": 6}, {"asked": 12}]
    again = opened(make, Shard(1, 2, least=4))
    again.seek(positions[1])
    assert next(again.epoch(1)).batch[1].tolist() == [13, 14, 15, 16, 17, 18]


def test_samplers_hear_the_epoch_on_every_process() -> None:
    data = list(range(20))
    for rank in range(2):
        sampler = DistributedSampler(data, 1, 0, seed=5)
        source = opened(lambda sampler=sampler: DataLoader(data, batch_size=10, sampler=sampler), Shard(rank, 2))
        for epoch in (0, 3):
            rows = [row for one in source.epoch(epoch) for row in one.batch.tolist()]
            reference = DistributedSampler(data, 1, 0, seed=5)
            reference.set_epoch(epoch)
            order = list(reference)
            assert rows == [order[start + 5 * rank + at] for start in (0, 10) for at in range(5)]
