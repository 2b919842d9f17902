"""A stream that every dataloader worker reads completely is warned of once, and nothing else is taken for one."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from trainwright import Trainer
from trainwright.data import shard
from trainwright.data.dataloader.workers import same_bits, warn_of_duplicates

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


def test_a_stream_that_each_worker_reads_completely_is_warned_of_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert fit(DataLoader(Naive(), batch_size=4, num_workers=2)) == 24
    ours = [str(one.message) for one in caught if "fork()" not in str(one.message)]  # Python's own from 3.12 on
    assert [text[: len(SAYS)] for text in ours] == [SAYS]


@pytest.mark.parametrize("loader", [{"num_workers": 2}, {"num_workers": 1}, {}])
def test_a_sharded_stream_is_not_warned_of(loader: dict[str, int]) -> None:
    assert fit(DataLoader(Dealt(), batch_size=4, **loader)) == 12


def test_a_stream_that_one_worker_reads_is_not_warned_of() -> None:
    assert fit(DataLoader(Naive(), batch_size=4, num_workers=1)) == 12


@pytest.mark.parametrize(
    ("numbers", "reported"),
    [
        ([1, 1, 2, 2, 3, 3], True),
        ([1, 1, 1, 1, 1, 1], False),  # data that repeat a batch
        ([1, 1, 2, 3, 4, 5], False),
        ([1, 2, 3, 3, 4, 4], False),
        ([1, 1, 2], False),  # too short to tell
        ([], False),
    ],
)
def test_only_two_rounds_that_differ_are_doubled_and_every_batch_is_given(numbers: list[int], reported: bool) -> None:
    given = [{"x": torch.tensor([number]), "name": "a"} for number in numbers]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert list(warn_of_duplicates(iter(given), workers=2, name="Naive")) == given
    assert len(caught) == reported


@dataclass
class Both:
    x: Any
    y: Any


BATCHES = [
    torch.tensor([1.0, float("nan")]),
    torch.tensor([1.0, -0.0]),
    torch.tensor([1.0, 0.0]),
    torch.tensor([1, 0]),
    torch.zeros(2, 3),
    torch.zeros(3, 2).t(),
    torch.tensor([True]),
    torch.tensor([1j]),
    np.array([1.0]),
    np.float32(1),
    {"a": torch.ones(1)},
    {"b": torch.ones(1)},
    [torch.ones(1), "a"],
    [torch.ones(1), "b"],
    (torch.ones(1), "a", 1),
    Both(torch.ones(1), None),
    Both(torch.ones(1), 1.0),
    1,
    True,
    float("nan"),
]


def test_batches_are_the_same_only_where_every_bit_is() -> None:
    for number, one in enumerate(BATCHES):
        for other, two in enumerate(copy.deepcopy(BATCHES)):
            assert same_bits(one, two) == (number == other), (one, two)
    assert not same_bits(object(), object())
    assert not same_bits([object()], [object()])
    assert not same_bits(torch.ones(2).to_sparse(), torch.ones(2).to_sparse())
