"""The windows of what is left of an epoch: its data opened, watched for signals, grouped."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

from trainwright.update.hooks import mover
from trainwright.update.window import Window, windows

if TYPE_CHECKING:
    from trainwright.fit.run import Run


def fetched(run: Run) -> Iterator[Window]:
    """What is left of the epoch's batches, in windows; the part of this process, where there are several."""
    counters, hooks, plan, world = run.counters, run.owner.hooks, run.plan, run.owner.world
    size = plan.accumulated(counters.epoch)
    left = None if plan.epoch_updates is None else plan.epoch_updates - math.ceil(counters.batch / size)
    move = mover(run.owner, run.source, trains=True)
    with run.signals.waiting():
        opened = run.rollback.open_epoch()
    run.lengths.check_announced()
    batches = run.signals.batches(opened)
    run.signals.watch_children()
    rows, count = hooks.rows, hooks.count
    if run.spread is None:
        grouped = windows(batches, size, rows=rows, count=count, always_count=hooks.counts_itself, move=move)
        return run.lengths.checked(islice(grouped, left))
    from trainwright.update.sharded_window import dealt_windows

    spread = run.spread
    dealt = dealt_windows(
        batches,
        size,
        world=world,
        in_step=spread.in_step,
        stands_in=spread.shards or spread.is_default,
        rows=rows,
        count=count,
        move=move,
    )
    return run.lengths.checked(islice(dealt, left))
