"""Numbers cross the ranks here, in one function: sums, counts and metrics of all ranks are added up on rank 0."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from trainwright.distributed.world import World, packed, unpacked


class Accumulator(Protocol):
    """Anything that adds up: `Sums`, `MetricSet`."""

    def state_dict(self) -> Any:
        """Return all that was added since the last `reset`."""

    def merge(self, state: Any) -> None:
        """Add the `state_dict` of another rank's."""

    def reset(self) -> None:
        """Start again at nothing."""


class Sums:
    """Sums and counts of numbers by name, in float64 on the host; each mean is weighted by the counts."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.counts: dict[str, float] = {}

    def add(self, name: str, total: float, count: float) -> None:
        """Add a sum over `count` things; over nothing, `total` may be NaN and does not enter."""
        self.sums[name] = self.sums.get(name, 0.0) + (total if count else 0.0)
        self.counts[name] = self.counts.get(name, 0.0) + count

    def means(self) -> dict[str, float]:
        """Return sum / count by name; NaN over nothing."""
        return {name: self.sums[name] / count if count else math.nan for name, count in self.counts.items()}

    def merge(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Add the `state_dict` of another rank's sums."""
        for name, count in state["counts"].items():
            self.add(name, state["sums"][name], count)

    def drop(self, names: Iterable[str]) -> None:
        """Forget the numbers of these names."""
        for name in names:
            self.sums.pop(name, None)
            self.counts.pop(name, None)

    def reset(self) -> None:
        """Start again without names."""
        self.sums, self.counts = {}, {}

    def state_dict(self) -> dict[str, dict[str, float]]:
        """Return copies of the sums and counts."""
        return {"sums": dict(self.sums), "counts": dict(self.counts)}

    def load_state_dict(self, tree: Mapping[str, Mapping[str, float]]) -> None:
        """Load saved sums and counts."""
        self.sums, self.counts = dict(tree["sums"]), dict(tree["counts"])


def reduce_to_rank0(world: World, accumulators: Sequence[Accumulator], *, device: torch.device | None = None) -> None:
    """Add the accumulators of all ranks up on rank 0, in the order of the ranks, with one gather; reset the others'.

    A collective: every rank gives as many accumulators, of the same kinds. Rank 0 then holds everything, so that
    reducing again, or saving on rank 0 and loading there, counts nothing twice. Tensors of other ranks' accelerators
    come to `device`. With one rank it is a no-op.
    """
    if world.size == 1:
        return
    ranks = world.gather_on_rank0(packed([accumulator.state_dict() for accumulator in accumulators]))
    if not world.is_main:
        for accumulator in accumulators:
            accumulator.reset()
        return
    for data in ranks[1:]:
        for accumulator, state in zip(accumulators, unpacked(data, device), strict=True):
            accumulator.merge(state)
