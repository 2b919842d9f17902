"""The running statistics of normalisation layers: kept before each update, put back where it is left out."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.runtime import late
from trainwright.runtime.modules import running_statistics


class Statistics:
    """What forward passes in train mode move besides the weights, as it was before the update in hand."""

    def __init__(self, model: nn.Module, *, keeps: bool, updates: int = 1) -> None:
        """`updates`: before how many of the last ones they are known."""
        self._own = running_statistics(model) if keeps else []
        kinds: dict[Any, list[Tensor]] = defaultdict(list)  # a kernel copies those of one kind together
        for statistic in self._own:
            kinds[statistic.device, statistic.dtype].append(statistic)
        self.alike = list(kinds.values())
        """The statistics of each device and type."""
        self._kept = [[[one.clone() for one in kind] for kind in self.alike] for _ in range(updates)]
        self.kept = 0
        """How often they were kept."""

    def keep(self) -> None:
        """Keep them as they are before an update."""
        self.kept += 1
        for kept, statistics in zip(self._kept[self.kept % len(self._kept)], self.alike, strict=True):
            torch._foreach_copy_(kept, statistics)

    def put_back(self, *, ago: int = 0) -> None:
        """Make them what they were before the update in hand, or before the one so many updates ago."""
        for kept, statistics in zip(self._kept[(self.kept - ago) % len(self._kept)], self.alike, strict=True):
            torch._foreach_copy_(statistics, kept)

    def mend(self) -> None:
        """Put back statistics that are not finite: where a scaler skips they advance, but these would stay so.

        A step up an overflowed gradient makes them, as SAM takes one.
        """
        if self.alike and not all(late.read([torch.isfinite(one).all() for one in self._own])):
            self.put_back()
