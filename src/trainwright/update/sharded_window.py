"""A window of which each of several processes runs its part, weighed so that together they give one gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from trainwright.core.records import Count
from trainwright.distributed.batch_layout import Slice
from trainwright.distributed.world import World
from trainwright.update.window import Window, ratio


class DealtWindow(Window):
    """What one process runs of a window.

    Gradients are averaged over the processes, so that a loss over n_i of the window's N things, of `processes`, weighs

        processes * n_i / N

    N is not known before all steps have told what they count: the window's rows B stand in for it, and the gradients
    owe the factor B / N, for which N travels with them. A micro-batch no row of which is this process's weighs 0.
    """

    def __init__(
        self,
        batches: list[Any],
        rows: list[int],
        counts: list[Count] | None = None,
        *,
        whole: int,
        most: int,
        processes: int,
        move: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(batches, rows, counts, move=move)
        self.is_lone = False
        self.whole = whole
        """The rows of the window over all processes."""
        self.most = most
        """The micro-batches of the process that has most of them: by it the batches of an epoch are counted."""
        self.processes = processes
        self.is_plain_sum = False
        """Whether its losses are sums that nothing divides."""

    @property
    def all_rows(self) -> int:
        """The rows of the window, over all processes."""
        return self.whole

    @property
    def all_batches(self) -> int:
        """The micro-batches of the window, of the process that has most."""
        return self.most

    @property
    def stands_in(self) -> bool:
        """Whether no row of the micro-batch that comes next is this process's."""
        index = self.position + 1
        return index < len(self.rows) and not self.rows[index]

    def weight(self, count: Count | None, *, is_sum: bool, from_step: bool) -> Count:
        """Return the weight by which the mean of the gradients over all processes is the window's gradient."""
        return self.weight_of(count, is_sum=is_sum, here=self.rows[self.position] > 0)

    def weight_of(self, count: Count | None, *, is_sum: bool, here: bool) -> Count:
        """Return the weight of a loss; 0 where no row `here` counts."""
        self.is_plain_sum = count is None
        if not here:
            return 0.0
        if count is None:
            return float(self.processes)
        divisor = self.whole / self.processes
        if is_sum:
            return 1.0 / divisor
        return 1.0 if not isinstance(count, Tensor) and count == divisor else ratio(count, divisor)

    def missing_factor_of(self, count: Count) -> Count:
        """Return the factor that the gradients lack if all processes together have counted `count`; 1.0 for 0."""
        if self.is_plain_sum:
            return 1.0
        if isinstance(count, Tensor):
            return torch.where(count == 0, torch.ones_like(count), self.whole / count)
        return self.whole / count if count else 1.0

    def mean(self, count: Count, weighed: Count) -> Count:
        """The loss of the whole window in the user's own scale; NaN over nothing."""
        if self.is_plain_sum:
            return weighed
        if isinstance(count, Tensor):
            return weighed * self.whole / count  # 0 / 0 is NaN
        return weighed * self.whole / count if count else torch.nan


def dealt_windows(
    slices: Iterable[Slice],
    accumulate: int,
    *,
    world: World,
    in_step: bool,
    stands_in: bool,
    rows: Callable[[Any], int],
    count: Callable[[Any], Count] | None = None,
    move: Callable[[Any], Any] | None = None,
) -> Iterator[DealtWindow]:
    """Group slices into windows of `accumulate`; `rows` counts those of a stream's batch.

    Where the whole is not known (a stream of this process's own), the rows of each window are added up over all
    processes as it is fetched, and all go on until none has a batch. `in_step`: each runs as many micro-batches.
    `stands_in`: a micro-batch no row of which is this process's stands in beside others too, not only where there is
    no other: who joins the micro-batches of a window would take its rows for rows like any.
    """
    slices = iter(slices)
    last: Any = None
    while True:
        group = list(islice(slices, accumulate))
        if group and group[0].whole is not None:
            own = [rows(one.batch) if one.rows is None else one.rows for one in group]
            whole, most = sum(one.whole or 0 for one in group), len(group)
        elif group or last is None or not _is_dealt(last):
            own = [rows(one.batch) for one in group]
            whole, lengths = _agreed(own, world)
            most = max(lengths)
            if not most:
                return
            needed = most if in_step else 1
            if min(lengths) < needed:
                stand_in = _stand_in(group, last if whole else None, world=world, some_have_none=not min(lengths))
                missing = needed - len(group)
                group, own = group + missing * [stand_in], own + missing * [0]
        else:
            return
        last = group[-1]
        if not stands_in and any(own):
            group, own = [one for one, n in zip(group, own, strict=True) if n], [n for n in own if n]
        batches = [one.batch for one in group]
        counts: list[Count] | None = None
        if count is not None and len(group) > 1:  # what stands in counts nothing, in the shares of an own loop either
            counts = [count(batch) if n else 0 for batch, n in zip(batches, own, strict=True)]
        yield DealtWindow(batches, own, counts, whole=whole, most=most, processes=world.size, move=move)


def _is_dealt(one: Slice) -> bool:
    return one.whole is not None


def _agreed(own: list[int], world: World) -> tuple[int, list[int]]:
    """The rows of a window over all processes, and how many micro-batches each has: one collective on the host."""
    lengths = [float(len(own)) if rank == world.rank else 0.0 for rank in range(world.size)]
    whole, *each = world.total(sum(own), *lengths)
    return int(whole), [int(length) for length in each]


def _stand_in(group: list[Slice], last: Slice | None, *, world: World, some_have_none: bool) -> Slice:
    """What a process runs where it is short of a micro-batch: its last one, or the first that another has."""
    own = group[-1] if group else last
    if some_have_none and any(world.gather(own is None)):
        offered = world.gather(group[0].batch if group else None)
        first = next(batch for batch in offered if batch is not None)  # somebody has one
        own = Slice(first, 0, None) if own is None else own
    assert own is not None
    return Slice(own.batch, 0, None)
