"""The part of a window that one of several ranks runs, weighted so that the mean over the ranks is one gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from trainwright.core.records import Count
from trainwright.distributed.mesh import Slice
from trainwright.distributed.world import World
from trainwright.update.window import Move, Window


class ShardedWindow(Window):
    """The micro-batches of a window that this rank runs.

    Gradients are averaged over the ranks, so that a loss over `count` of the `all_count` things that the window counts
    has the weight

        ranks * count / all_count

    `all_count` is known only when all steps have run. The rows of the window take its place, and `missing_factor` is
    `all_rows / all_count`, where `all_count` is reduced with the gradients. A dummy, a micro-batch without a row of
    this rank, has the weight 0.
    """

    def __init__(
        self,
        batches: list[Any],
        rows: list[int],
        counts: list[Count] | None = None,
        *,
        all_rows: int,
        all_batches: int,
        ranks: int,
        move: Move | None = None,
    ) -> None:
        super().__init__(batches, rows, counts, move=move)
        self.is_single = False
        self.all_rows, self.all_batches, self.ranks = all_rows, all_batches, ranks
        self.all_count: Count | None = None
        """The count of the window, once it is reduced after the last `backward`; None for a plain sum."""
        self.is_plain_sum = False
        """Whether its losses are sums that nothing divides."""

    @property
    def is_dummy(self) -> bool:
        """Whether the micro-batch that comes next has no row of this rank."""
        index = self.position + 1
        return index < len(self.rows) and not self.rows[index]

    def weight(self, count: Count | None, *, is_sum: bool) -> Count:
        """Return the weight by which the mean of the gradients over all ranks is the window's gradient."""
        return self.weight_of(count, is_sum=is_sum, has_rows=self.rows[self.position] > 0)

    def weight_of(self, count: Count | None, *, is_sum: bool, has_rows: bool) -> Count:
        """Return the weight of a loss; 0 for one of a micro-batch in which no row of this rank counts."""
        self.is_plain_sum = count is None
        if not has_rows:
            return 0.0
        if count is None:
            return float(self.ranks)
        divisor = self.all_rows / self.ranks
        return (1.0 if is_sum else count) / divisor

    @property
    def missing_factor(self) -> Count:
        """The factor that the gradients still lack: all_rows / all_count; 1.0 for a plain sum, and over nothing."""
        count = self.all_count
        if count is None:
            return 1.0
        if isinstance(count, Tensor):
            return torch.where(count == 0, torch.ones_like(count), self.all_rows / count)
        return self.all_rows / count if count else 1.0

    def mean(self, count: Count, weighted_loss: Count) -> Count:
        """Return the loss of the window over all ranks, unscaled; NaN over nothing."""
        if self.is_plain_sum:
            return weighted_loss
        if isinstance(count, Tensor):
            return weighted_loss * self.all_rows / count  # 0 / 0 is NaN
        return weighted_loss * self.all_rows / count if count else torch.nan


def sharded_windows(
    slices: Iterable[Slice],
    accumulate: int,
    *,
    world: World,
    same_number: bool,
    dummies_beside_rows: bool,
    rows: Callable[[Any], int],
    count: Callable[[Any], Count] | None = None,
    move: Move | None = None,
) -> Iterator[ShardedWindow]:
    """Group slices into windows of `accumulate`; `rows` counts those of a stream's batch.

    Batches that all ranks share are cut by arithmetic: each rank knows the rows of all. Where each rank reads a stream
    of its own, the rows of each window are summed over the ranks as it is fetched, until no rank has a batch.

    A rank that has no row of a window runs a dummy, since all ranks take part in its collectives. `same_number`: all
    ranks run equally many micro-batches. `dummies_beside_rows=False`: no dummy is run by a rank that has rows; for code
    that may join the micro-batches of a window, where rows of a dummy would be rows like any.
    """
    slices, ranks = iter(slices), world.mesh.data
    last: Slice | None = None
    while True:
        group = list(islice(slices, accumulate))
        nearest = group[0] if group else last
        if nearest is not None and nearest.all_rows is not None:  # batches that all ranks share
            if not group:
                return
            own = [rows(one.batch) if one.rows is None else one.rows for one in group]
            all_rows, most = sum(one.all_rows or 0 for one in group), len(group)
        else:
            own = [rows(one.batch) for one in group]
            all_rows, lengths = _sum_over_ranks(own, world)
            most = max(lengths)
            if not most:
                return
            needed = most if same_number else 1
            if min(lengths) < needed:
                dummy = _dummy(group, last if all_rows else None, world=world, some_have_none=not min(lengths))
                missing = needed - len(group)
                group, own = group + missing * [dummy], own + missing * [0]
        last = group[-1]
        if not dummies_beside_rows and any(own):
            group, own = [one for one, n in zip(group, own, strict=True) if n], [n for n in own if n]
        batches = [one.batch for one in group]
        counts: list[Count] | None = None
        if count is not None and len(group) > 1:  # a dummy counts nothing, in the shares of a custom loop either
            counts = [count(batch) if n else 0 for batch, n in zip(batches, own, strict=True)]
        yield ShardedWindow(batches, own, counts, all_rows=all_rows, all_batches=most, ranks=ranks, move=move)


def _sum_over_ranks(own: list[int], world: World) -> tuple[int, list[int]]:
    """Return the rows of a window over all ranks, and the micro-batches of each rank: one collective on the host."""
    mesh = world.mesh
    lengths = [float(len(own)) if rank == mesh.rank else 0.0 for rank in range(mesh.data)]
    rows, *each = world.sum_numbers(sum(own), *lengths)
    return int(rows), [int(length) for length in each]


def _dummy(group: list[Slice], last: Slice | None, *, world: World, some_have_none: bool) -> Slice:
    """Return the dummy for a rank that has too few micro-batches: its last one, or the first of another rank."""
    own = group[-1] if group else last
    if some_have_none and any(world.all_gather(own is None)):
        offered = world.all_gather(group[0].batch if group else None)
        first = next(batch for batch in offered if batch is not None)  # some rank has one
        own = Slice(first, 0, None) if own is None else own
    assert own is not None
    return Slice(own.batch, 0, None)
