"""Streams that shard themselves: `shard()` is a rank's place, `sharded` marks data that are its own part."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

from trainwright.core.errors import DataError, SettingError
from trainwright.data.source import Source
from trainwright.distributed.mesh import Shard

_END = object()


class Sharded:
    """Data that are this rank's own part already; made by `sharded`."""

    def __init__(self, data: Any) -> None:
        given: Any = data.data if isinstance(data, Sharded) else data
        # A source is marked itself; the copy leaves the user's object unchanged.
        self.data: Any = copy(given) if isinstance(given, Source) else given

    def __repr__(self) -> str:
        return f"sharded({self.data!r})"


def sharded(data: Any) -> Sharded:
    """Mark `data` as this process's own part already: the parts of all processes hold each row once.

    Batches and rows are then this process's, and processes may have more or fewer of them. On one process the mark has
    no effect.

    Args:
        data: A `DataLoader`, any iterable of batches, `batches(...)` of rows of this process's own, or a function
            `epoch -> one of these`.
    """
    return Sharded(data)


def shard() -> tuple[int, int]:
    """Return the position of this process and loader worker among all of them, and their number: (index, total).

    For `itertools.islice(rows, index, None, total)` in the `__iter__` of an iterable data set, which then is to be
    marked by `sharded`. (0, 1) for one process without workers.
    """
    from torch.utils.data import get_worker_info

    part = _here.part
    rank, size = _rank_and_size() if part is None else (part.rank, part.size)
    info = get_worker_info()
    worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
    return rank * workers + worker, size * workers


class _Here(threading.local):
    part: Shard | None = None
    """The part of the data that this thread reads; None outside a pass."""


_here = _Here()


def set_part(part: Shard | None) -> None:
    """Set the part that `shard` returns, in a loader's worker process or a thread that reads."""
    _here.part = part


@contextmanager
def reading_part(part: Shard) -> Iterator[None]:
    """A context in which `shard` returns this part."""
    before = _here.part
    set_part(part)
    try:
        yield
    finally:
        set_part(before)


def read_as(batches: Iterator[Any], part: Shard) -> Iterator[Any]:
    """Yield `batches`, each read while `shard` returns this part."""
    while True:
        with reading_part(part):
            batch = next(batches, _END)
        if batch is _END:
            return
        yield batch


def saved_by_other_size(name: str, *, role: str) -> DataError:
    """Return the error of a stream resumed inside an epoch that another number of processes saved."""
    return DataError(
        f"{role} data: each process has a part of its own of {name}, which was saved inside an epoch",
        have="another number of processes",
        want="as many processes as when it was saved, or a checkpoint between two epochs",
        fix="fit(..., resume_data=False) to begin the epoch again",
    )


def is_alone_in_job() -> bool:
    """Return whether the environment names several processes, though this run has only one."""
    return not matches_environment(Shard(0, 1))


def matches_environment(part: Shard) -> bool:
    """Return whether the environment gives this process the same rank and number of processes as the run."""
    try:
        return _rank_and_size() == (part.rank, part.size)
    except SettingError:
        return False


def _rank_and_size() -> tuple[int, int]:
    from trainwright.distributed.environment import rank_and_size  # imported on use: few runs need it

    return rank_and_size()
