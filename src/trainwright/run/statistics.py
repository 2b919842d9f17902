"""The running statistics of normalisation layers: kept before each update, put back where it is left out."""

from __future__ import annotations

import torch
from torch import nn

from trainwright.runtime import late
from trainwright.runtime.modules import running_statistics


class Statistics:
    """What forward passes in train mode move besides the weights, as it was before the update in hand."""

    def __init__(self, model: nn.Module, *, keeps: bool) -> None:
        self._own = running_statistics(model) if keeps else []
        kept = [statistic.clone() for statistic in self._own]
        pairs = list(zip(kept, self._own, strict=True))
        kinds = {(one.device, one.dtype) for one in kept}  # a kernel copies those of one kind together
        self.alike = [
            tuple(zip(*[pair for pair in pairs if (pair[0].device, pair[0].dtype) == kind], strict=True))
            for kind in kinds
        ]
        """(copies, statistics) of each device and type."""

    def put_back(self) -> None:
        """Make them what they were before the update in hand."""
        for kept, statistics in self.alike:
            torch._foreach_copy_(statistics, kept)

    def mend(self) -> None:
        """Put back statistics that are not finite: where a scaler skips they advance, but these would stay so.

        A step up an overflowed gradient makes them, as SAM takes one.
        """
        if self.alike and not all(late.read([torch.isfinite(one).all() for one in self._own])):
            self.put_back()
