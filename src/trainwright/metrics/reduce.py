"""The reduction of numbers over ranks: adds the sums, counts and metrics of all ranks on rank 0."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from trainwright.distributed.world import World, packed, unpacked


class Accumulator(Protocol):
    """An object whose state is additive: `Sums`, `MetricSet`."""

    def state_dict(self) -> Any:
        """Return the state since the last `reset`."""

    def merge(self, state: Any) -> None:
        """Add the `state_dict` of another rank's accumulator."""

    def reset(self) -> None:
        """Reset to the empty state."""


class Sums:
    """Sums and counts by name, in float64 on the host, for count-weighted means."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.counts: dict[str, float] = {}

    def add(self, name: str, total: float, count: float) -> None:
        """Add a sum and its count; with a count of 0, `total` may be NaN and is ignored."""
        self.sums[name] = self.sums.get(name, 0.0) + (total if count else 0.0)
        self.counts[name] = self.counts.get(name, 0.0) + count

    def means(self) -> dict[str, float]:
        """Return sum / count by name; NaN for a count of 0."""
        return {name: self.sums[name] / count if count else math.nan for name, count in self.counts.items()}

    def merge(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Add the `state_dict` of another rank's sums."""
        for name, count in state["counts"].items():
            self.add(name, state["sums"][name], count)

    def drop(self, names: Iterable[str]) -> None:
        """Remove the numbers of these names."""
        for name in names:
            self.sums.pop(name, None)
            self.counts.pop(name, None)

    def reset(self) -> None:
        """Remove all numbers."""
        self.sums, self.counts = {}, {}

    def state_dict(self) -> dict[str, dict[str, float]]:
        """Return copies of the sums and counts."""
        return {"sums": dict(self.sums), "counts": dict(self.counts)}

    def load_state_dict(self, tree: Mapping[str, Mapping[str, float]]) -> None:
        """Load saved sums and counts."""
        self.sums, self.counts = dict(tree["sums"]), dict(tree["counts"])


def reduce_to_rank0(world: World, accumulators: Sequence[Accumulator], *, device: torch.device | None = None) -> None:
    """Merge the accumulators of all ranks on rank 0, in the order of the ranks, with one gather; reset the others.

    A collective: every rank passes accumulators of the same number and kinds. As only rank 0 then holds the sums,
    nothing is counted twice by a second reduction or by a save and load on rank 0. Tensors from accelerators of other
    ranks are moved to `device`. No-op with one rank.
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
