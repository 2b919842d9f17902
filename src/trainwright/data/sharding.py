"""Streams of which each process reads a part of its own: marked by `sharded`, found by `shard`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

from trainwright.core.errors import DataError, SettingError
from trainwright.data.source import Source
from trainwright.distributed.batch_layout import Shard

_END = object()


class Sharded:
    """Data that are this process's own part already; made by `sharded`."""

    def __init__(self, data: Any) -> None:
        given: Any = data.data if isinstance(data, Sharded) else data
        # What was made by `batches` is marked itself; the user's own object stays as it is.
        self.data: Any = copy(given) if isinstance(given, Source) else given

    def __repr__(self) -> str:
        return f"sharded({self.data!r})"


def sharded(data: Any) -> Sharded:
    """Mark `data` as this process's own part already: over all processes they are the whole, each row once.

    `data` is a `DataLoader`, any iterable of batches, `batches(...)` of rows of this process's own, or a function
    `epoch -> one of these`. Batches and rows are then this process's, and processes may have more or fewer of them.
    On one process the mark says nothing.
    """
    return Sharded(data)


def shard() -> tuple[int, int]:
    """The position of this process and loader worker among all of them, and their number: (index, total).

    For `itertools.islice(rows, index, None, total)` in the `__iter__` of an iterable data set, which then is to be
    marked by `sharded`. (0, 1) for one process without workers.
    """
    from torch.utils.data import get_worker_info

    part = _here.part
    rank, size = place() if part is None else (part.rank, part.size)
    info = get_worker_info()
    worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
    return rank * workers + worker, size * workers


class _Here(threading.local):
    part: Shard | None = None
    """The part of the data that is being read in this thread; None where nobody reads."""


_here = _Here()


def stand(part: Shard | None) -> None:
    """Have `shard` tell this part from now on: for a loader's worker process, or a thread that reads."""
    _here.part = part


def told_part() -> Shard | None:
    """The part that `shard` tells here and now; None where nobody reads."""
    return _here.part


@contextmanager
def standing(part: Shard) -> Iterator[None]:
    """Have `shard` tell this part inside."""
    before = _here.part
    stand(part)
    try:
        yield
    finally:
        stand(before)


def told(batches: Iterator[Any], part: Shard) -> Iterator[Any]:
    """`batches`, each read while `shard` tells this part."""
    while True:
        with standing(part):
            batch = next(batches, _END)
        if batch is _END:
            return
        yield batch


def elsewhere(name: str, *, role: str) -> DataError:
    """The error of a stream that is to go on inside an epoch, saved on another number of processes."""
    return DataError(
        f"{role} data: each process has a part of its own of {name}, which was saved inside an epoch",
        have="another number of processes",
        want="as many processes as when it was saved, or a checkpoint between two epochs",
        fix="fit(..., resume_data=False) to begin the epoch anew",
    )


def alone_in_a_job() -> bool:
    """Whether the environment speaks of several processes, so that `shard` must be told where a run has only one."""
    return not tells(Shard(0, 1))


def tells(part: Shard) -> bool:
    """Whether the environment tells what a run says of this process; a run of one process is asked nothing else."""
    try:
        return place() == (part.rank, part.size)
    except SettingError:
        return False


def place() -> tuple[int, int]:
    """Rank and number of the processes, where no run tells them."""
    from trainwright.distributed import place as told_by

    return told_by.place()
