"""Sharding of data: each rank runs its slice of every batch, or streams shard themselves by `shard()` and `sharded`."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from itertools import chain, islice
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, get_worker_info

from trainwright.core.errors import DataError, SettingError
from trainwright.core.rng import random_state, rng_preserved, set_random_state
from trainwright.core.trees import leaves_of, map_tree, sequence_like
from trainwright.data.dataloader.order import draws_at_most_at_first
from trainwright.data.source import Source, length_of
from trainwright.distributed.mesh import Shard, Slice

_END = object()


class Sharded:
    """Data that are already this rank's part; made by `sharded`."""

    def __init__(self, data: Any) -> None:
        given: Any = data.data if isinstance(data, Sharded) else data
        # A source is copied, since the mark must not change the user's object.
        self.data: Any = copy(given) if isinstance(given, Source) else given

    def __repr__(self) -> str:
        return f"sharded({self.data!r})"


def sharded(data: Any) -> Sharded:
    """Mark `data` as already sharded: this process reads its part, and the parts of all processes hold each row once.

    Numbers of batches and rows are then those of this process, and may differ between processes. With one process, the
    mark has no effect.

    Args:
        data: A `DataLoader`, an iterable of batches, `batches(...)` of the rows of this process, or a function
            `epoch -> one of these`.
    """
    return Sharded(data)


def shard() -> tuple[int, int]:
    """Return (index, total): the index of this process and dataloader worker among all, and their number.

    For `itertools.islice(rows, index, None, total)` in the `__iter__` of an iterable data set; mark the data by
    `sharded`. (0, 1) for one process without workers.
    """
    part = _here.part
    rank, size = _rank_and_size() if part is None else (part.rank, part.size)
    info = get_worker_info()
    worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
    return rank * workers + worker, size * workers


class _Here(threading.local):
    part: Shard | None = None
    """The part of the data that this thread reads; None outside of a pass."""


_here = _Here()


def set_part(part: Shard | None) -> None:
    """Set the part that `shard` uses in this thread, such as in a dataloader worker."""
    _here.part = part


@contextmanager
def reading_part(part: Shard) -> Iterator[None]:
    """Make `shard` use this part inside the block."""
    before = _here.part
    set_part(part)
    try:
        yield
    finally:
        set_part(before)


def read_as(batches: Iterator[Any], part: Shard) -> Iterator[Any]:
    """Yield `batches`; `shard` uses this part while each is read."""
    while True:
        with reading_part(part):
            batch = next(batches, _END)
        if batch is _END:
            return
        yield batch


def saved_by_other_size(name: str, *, role: str) -> DataError:
    """Return the error for a resume of a stream inside an epoch that another number of processes saved."""
    return DataError(
        f"{role} data: each process has a part of its own of {name}, which was saved inside an epoch",
        have="another number of processes",
        want="as many processes as when it was saved, or a checkpoint between two epochs",
        fix="fit(..., resume_data=False) to begin the epoch again",
    )


def is_alone_in_job() -> bool:
    """Return whether the environment states several processes, although this run has one."""
    return not matches_environment(Shard(0, 1))


def matches_environment(part: Shard) -> bool:
    """Return whether the environment states the same rank and number of processes as the run."""
    try:
        return _rank_and_size() == (part.rank, part.size)
    except SettingError:
        return False


def _rank_and_size() -> tuple[int, int]:
    from trainwright.distributed.environment import rank_and_size  # imported on use: few runs need it

    return rank_and_size()


# Slices of batches.

_RANK_ATTRIBUTES = (("num_replicas", "rank"), ("num_processes", "process_index"), ("world_size", "rank"))
"""Attributes of sharding samplers with the number of ranks and this rank: torch's, Accelerate's, others'."""


class ShardedIndices:
    """A pass over the row indices of all batches, which yields this rank's part of each.

    All random draws are made at the first item or in `draw`, so that all ranks draw from the same random state. An item
    that is a single index is passed on; its batch is sliced after it was read.
    """

    def __init__(self, numbers: Iterator[Any], part: Shard, *, limit: int | None, by_lists: bool) -> None:
        self._numbers = numbers
        self._part = part
        self._limit = limit
        """The most items to draw at once; None if the first item makes all draws."""
        self._by_lists = by_lists
        self._drawn = False
        self.totals: deque[int | None] = deque()
        """Rows over all ranks of the batches requested but not yet yielded; None: still to be counted."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self._drawn:
            self.draw()
        rows = next(self._numbers)
        if not (self._by_lists or isinstance(rows, list | Tensor | np.ndarray)):
            self.totals.append(None)  # a single index, of a data set whose items are batches
            return rows
        rows = rows if isinstance(rows, list | tuple | range | Tensor | np.ndarray) else list(rows)
        self.totals.append(len(rows))
        run = self._part.run(len(rows))
        return rows[run.start : run.stop]

    def draw(self) -> None:
        """Make all random draws of the pass, from the current random state."""
        self._drawn = True
        first = list(islice(self._numbers, 1 if self._limit is None else self._limit + 1))
        if self._limit is not None and len(first) > self._limit:
            raise DataError(
                "the order of the data is drawn at the start of an epoch, for all processes alike, and has no end",
                have=f"a sampler of more than {self._limit:,} batches, many more than its length",
                want="a sampler that ends with the epoch",
                fix="a __len__ with the number of batches of an epoch",
            )
        self._numbers = chain(first, self._numbers)


def slices(batches: Iterator[Any], indices: ShardedIndices, part: Shard, *, name: str) -> Iterator[Slice]:
    """Yield the batches of a pass as slices; batches that were read completely are sliced here."""
    for batch in batches:
        total = indices.totals.popleft()
        if total is None:
            total = sliceable_rows(batch, name)
            batch = slice_rows(batch, part.run(total), of=total)  # noqa: PLW2901 - frees the complete batch
        yield Slice(batch, len(part.of(total)), total)


def read_own_part(begin: Callable[[], Iterator[Any]], part: Shard | None, *, aligned: bool) -> Iterator[Any]:
    """Return the batches of this rank's part of the data; on several ranks, as slices.

    `aligned`: whether all ranks read their first batch with the same random state, since an iterable may shuffle all
    rows there before it selects its part. Later batches draw for different rows.
    """
    place = Shard(0, 1) if part is None else part
    with reading_part(place):
        batches = begin()
    batches = read_as(batches, place)
    if part is None:
        return batches
    return own_slices(with_common_random_state(batches, only_first=True) if aligned else batches)


def own_slices(batches: Iterator[Any]) -> Iterator[Slice]:
    """Yield batches of this rank's part of the data as slices."""
    for batch in batches:
        yield Slice(batch, None, None)


def read_completely(begin: Callable[[], Iterator[Any]], part: Shard, *, name: str) -> Iterator[Slice]:
    """Yield slices of complete batches, which every rank reads with the same random state."""
    return slice_batches(with_common_random_state(begin(), only_first=False), part, name)


def with_common_random_state(batches: Iterator[Any], *, only_first: bool) -> Iterator[Any]:
    """Yield `batches`, read with a separate random state, which starts as a copy of the global one.

    All ranks start with the same state. `only_first`: whether to use it for the first batch only.
    """
    return _with_common_random_state(batches, random_state(), only_first=only_first)


def _with_common_random_state(batches: Iterator[Any], state: dict[str, Any], *, only_first: bool) -> Iterator[Any]:
    while True:
        with rng_preserved():
            set_random_state(state)
            batch = next(batches, _END)
            state = random_state()
        if batch is _END:
            return
        yield batch
        if only_first:
            yield from batches
            return


def draw_limit(sampler: Any) -> int | None:
    """Return the most items to draw from a sampler so that it makes all draws; None if its first item makes them.

    DataError if the sampler has no length.
    """
    if _draws_all_at_first(sampler):
        return None
    length = length_of(sampler)
    if length is None:
        name = type(sampler).__name__
        raise DataError(
            f"the sampler {name} has no length, and its order cannot be drawn for all processes alike",
            want="a sampler whose __len__ is the number of items of an epoch, so that they are drawn at its start",
            fix=f"def __len__(self) in {name}",
        )
    return 4 * length + 1000  # the length of a sampler is often an estimate


def _draws_all_at_first(sampler: Any) -> bool:
    """Return whether a sampler makes no draws from shared generators after its first item."""
    if type(sampler) is BatchSampler:
        return _draws_all_at_first(sampler.sampler)
    if type(sampler) is RandomSampler and sampler.generator is not None:
        once = length_of(sampler.data_source) or 0
        return not sampler.replacement and sampler.num_samples <= once
    return draws_at_most_at_first(sampler)


def refuse_loader(loader: DataLoader[Any], *, role: str, processes: int, batch_size: int | None) -> None:
    """Raise DataError for a loader of a stream, one that shards rows itself, or one without a fixed order."""
    batch_sampler = loader.batch_sampler
    for owner in (loader.sampler, batch_sampler, getattr(batch_sampler, "sampler", None)):
        refuse_sharding_sampler(owner, role=role, processes=processes, batch_size=batch_size)
    if isinstance(loader.dataset, IterableDataset):
        raise unsharded_stream(loader, role=role, processes=processes)
    if loader.num_workers and not getattr(loader, "in_order", True):
        raise DataError(
            f"{role} data: in_order=False yields batches as they arrive, differently on each of {processes} processes",
            want="the same order on all of them",
            fix="DataLoader(..., in_order=True)",
        )


def refuse_sharding_sampler(owner: Any, *, role: str, processes: int, batch_size: int | None) -> None:
    """Raise DataError for a sampler that shards rows itself, since they would be sharded twice."""
    for size, rank in _RANK_ATTRIBUTES:
        if not (hasattr(owner, size) and hasattr(owner, rank)) or getattr(owner, size) == 1:
            continue
        rows = "64" if batch_size is None else str(batch_size * processes)
        shuffle = getattr(owner, "shuffle", None)
        asked = f", shuffle={shuffle}" if isinstance(shuffle, bool) else ""
        name = type(owner).__name__
        raise DataError(
            f"{role} data: {name} shards rows over processes, and a Trainer on {processes} processes shards them too",
            have=f"{name}({size}={getattr(owner, size)}, {rank}={getattr(owner, rank)})",
            want="a loader as on one process; its batch size counts rows over all processes",
            fix=f"DataLoader(data, batch_size={rows}{asked}), or sharded(loader) to keep your own sharding",
        )


def unsharded_stream(data: Any, *, role: str, processes: int) -> DataError:
    """Return the error for a stream that every rank would read completely."""
    of_rows = isinstance(data, DataLoader)
    name = type(data.dataset if of_rows else data).__name__
    read, given = ("rows", "loader") if of_rows else ("batches", "data")
    place = f"before {given}" if hasattr(data, "__next__") else f"in {name}.__iter__"
    return DataError(
        f"{role} data: {name} is a stream, and each of {processes} processes would read all of it",
        want="a part of its own for each process (and loader worker), and a mark that says so",
        fix=f"index, total = shard(); {read} = itertools.islice({read}, index, None, total)   # {place}\n"
        f"        sharded({given})   # in place of {given}",
    )


_Plain = str | bytes | int | float | complex | np.generic | None
"""Values without rows."""


def slice_batches(batches: Iterator[Any], part: Shard, name: str) -> Iterator[Slice]:
    """Yield this rank's slice of each ready batch; DataError, with `name`, for a batch whose rows are unknown."""
    for batch in batches:
        rows = sliceable_rows(batch, name)
        yield Slice(slice_rows(batch, part.run(rows), of=rows), len(part.of(rows)), rows)


def sliceable_rows(batch: Any, name: str) -> int:
    """Return the rows of a nested batch: dimension 0 of all its tensors; DataError if they differ, or without one."""
    leaves = list(leaves_of(batch, "batch"))
    lengths = {at: len(leaf) for at, leaf in leaves if isinstance(leaf, Tensor | np.ndarray) and leaf.ndim}
    unknown = [
        f"{at} is a {type(leaf).__name__}" for at, leaf in leaves if not isinstance(leaf, Tensor | np.ndarray | _Plain)
    ]
    if unknown or len(set(lengths.values())) != 1:
        have = unknown or [f"{at} has {length} rows" for at, length in lengths.items()] or ["no tensor in it"]
        raise DataError(
            f"the rows of a ready batch of {name} are not known, and each process is to run a part of them",
            have=", ".join(have[:6]),
            want="tensors and arrays that are equally long in dimension 0, in tuples, lists, dicts or dataclasses",
            fix="batches(rows, 64) or a DataLoader, which shard rows; or sharded(data) of each process's own",
        )
    return next(iter(lengths.values()))


def slice_rows(batch: Any, rows: range, *, of: int) -> Any:
    """Return `rows` of a nested batch of `of` rows; containers keep their types, values without rows are shared."""

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, list | tuple):
            return sequence_like(leaf, leaf[rows.start : rows.stop])
        return leaf[rows.start : rows.stop] if isinstance(leaf, Tensor | np.ndarray) and leaf.ndim else leaf

    def is_list_of_rows(items: Any) -> bool:  # for example one name per row
        if not isinstance(items, list | tuple) or len(items) != of:
            return False
        return all(isinstance(leaf, _Plain) or _is_number(leaf) for _, leaf in leaves_of(items))

    return map_tree(cut, batch, is_leaf=is_list_of_rows)


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, Tensor | np.ndarray) and not leaf.ndim
