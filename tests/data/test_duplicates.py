"""Batches of worker processes are compared bit for bit."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trainwright.data.dataloader.workers import same_bits


@dataclass
class Pair:
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
    Pair(torch.ones(1), None),
    Pair(torch.ones(1), 1.0),
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
