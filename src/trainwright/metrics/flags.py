"""Right guesses, as a sum over rows that is counted as whole numbers, and only when somebody asks for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainwright.core.records import SumLoss


class Hits(SumLoss):
    """Guesses that are right, over the rows whose target is none to be ignored; both are made when asked for."""

    __slots__ = ("guess", "ignored", "on_host", "target")

    def __init__(self, guess: Tensor, target: Tensor, *, ignored: int) -> None:
        self.guess, self.target, self.ignored = guess, target, ignored
        self.on_host = guess.is_cpu and target.is_cpu
        """Whether the host can count them without waiting."""

    @property
    def total(self) -> Tensor:  # type: ignore[override]
        """Which rows are right."""
        return self.guess == self.target

    @property
    def count(self) -> Tensor:  # type: ignore[override]
        """Which rows count."""
        return self.target != self.ignored

    def counted(self) -> tuple[int, int]:
        """How many rows are right and how many count, of rows on the CPU: half of the time by NumPy."""
        target = self.target.numpy()
        right, counted = self.guess.numpy() == target, target != self.ignored
        return int(np.count_nonzero(right)), int(np.count_nonzero(counted))


TOGETHER = 64
"""Batches whose flags are counted in one go on an accelerator: a few kernels for all of them instead of for each."""


class Flags:
    """A yes or no per row of many batches, and which rows count; those of an accelerator wait there."""

    def __init__(self) -> None:
        self.hits: list[Tensor] = []
        self.counted: list[Tensor] = []

    def take(self, given: SumLoss) -> tuple[int, int]:
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


def are_flags(given: SumLoss) -> bool:
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
