"""Right guesses, as a sum over rows that is counted as whole numbers, and only when somebody asks for it."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from trainwright.base.records import Sum


class Hits(Sum):
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
