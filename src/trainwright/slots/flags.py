"""A yes or no per row: counted as whole numbers, on the CPU at once, else many batches together."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainwright.base.records import Sum
from trainwright.slots.hits import Hits

TOGETHER = 64
"""Batches whose flags are counted in one go on an accelerator: a few kernels for all of them instead of for each."""


class Flags:
    """A yes or no per row of many batches, and which rows count; those of an accelerator wait there."""

    def __init__(self) -> None:
        self.hits: list[Tensor] = []
        self.counted: list[Tensor] = []

    def take(self, given: Sum) -> tuple[int, int]:
        """Take in what `are_flags` has let pass; return what of its sum and count the host knows at once."""
        hits, counted, known = given.total, given.count, 0
        on_host = lies_on_host(hits)
        if not isinstance(counted, Tensor):
            assert isinstance(counted, int)
            known = counted
        elif on_host:
            known = int(np.count_nonzero(counted.numpy()))
        else:
            self.counted.append(counted)
        if on_host:
            return int(np.count_nonzero(hits.numpy())), known
        self.hits.append(hits)
        return 0, known

    @property
    def are_many(self) -> bool:
        """Whether it is time to count those that wait."""
        return len(self.hits) >= TOGETHER

    def close(self) -> tuple[Tensor | None, Tensor | None]:
        """Hand over the sum and the count of those that wait; None where none do."""
        hits, counted = (torch.cat(each).count_nonzero() if each else None for each in (self.hits, self.counted))
        self.hits, self.counted = [], []
        return hits, counted


def are_flags(given: Sum) -> bool:
    """Whether a sum is a yes or no per row, with which rows count or how many."""
    if type(given) is Hits:
        return True
    hits, counted = given.total, given.count
    if type(hits) is not Tensor or hits.dtype is not torch.bool or hits.dim() != 1:
        return False
    if type(counted) is int:
        return counted > 0
    return type(counted) is Tensor and counted.dtype is torch.bool and counted.shape == hits.shape


def lies_on_host(tensor: Any) -> bool:
    """Whether the host can read a tensor without waiting."""
    there: bool = tensor.is_cpu
    return there
