"""A stream that every worker of a loader reads whole is told once, and nothing else is taken for one."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from trainwright import Trainer
from trainwright.data import shard
from trainwright.data.dataloader.workers import warn_of_duplicates

ROWS = [(torch.randn(3, generator=torch.Generator().manual_seed(i)), torch.tensor([float(i)])) for i in range(24)]
SAYS = "all 2 workers give the same batches: each reads all of Naive, and every row comes 2 times"


class Naive(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(ROWS)


class Dealt(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        index, total = shard()
        return itertools.islice(ROWS, index, None, total)


def fit(data: Any) -> int:
    model = nn.Linear(3, 1)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), nn.MSELoss(), console=False)
    return trainer.fit(data, epochs=2).updates


def test_a_stream_that_each_worker_reads_whole_is_told_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert fit(DataLoader(Naive(), batch_size=4, num_workers=2)) == 24
    assert [str(one.message)[: len(SAYS)] for one in caught] == [SAYS]


@pytest.mark.parametrize("loader", [{"num_workers": 2}, {"num_workers": 1}, {}])
def test_a_stream_that_is_sharded_is_not_told(loader: dict[str, int]) -> None:
    assert fit(DataLoader(Dealt(), batch_size=4, **loader)) == 12


def test_a_stream_that_one_worker_reads_is_not_told() -> None:
    assert fit(DataLoader(Naive(), batch_size=4, num_workers=1)) == 12


@pytest.mark.parametrize(
    ("numbers", "told"),
    [
        ([1, 1, 2, 2, 3, 3], True),
        ([1, 1, 1, 1, 1, 1], False),  # data that repeat a batch
        ([1, 1, 2, 3, 4, 5], False),
        ([1, 2, 3, 3, 4, 4], False),
        ([1, 1, 2], False),  # too short to tell
        ([], False),
    ],
)
def test_only_two_rounds_that_differ_are_doubled_and_every_batch_is_given(numbers: list[int], told: bool) -> None:
    given = [{"x": torch.tensor([number]), "name": "a"} for number in numbers]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert list(warn_of_duplicates(iter(given), workers=2, name="Naive")) == given
    assert len(caught) == told
