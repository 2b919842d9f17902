"""Cuts batches along their rows: each rank runs its part of every batch."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, islice
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from trainwright.core.errors import DataError
from trainwright.core.rng import random_state, rng_preserved, set_random_state
from trainwright.core.trees import mapping_like, sequence_like
from trainwright.data.dataloader.order import draws_at_most_at_first
from trainwright.data.sharding import read_as, reading_part
from trainwright.data.source import length_of
from trainwright.distributed.mesh import Shard, Slice

_KNOW_THEIR_RANK = (("num_replicas", "rank"), ("num_processes", "process_index"), ("world_size", "rank"))
"""What samplers call the number of processes and their own: torch's, accelerate's, others'."""
_END = object()


class Dealt:
    """One pass over the row numbers of all batches: this process's part of each.

    The numbers are pulled, as far as their draws reach, at the first pull or at `draw`, so that all processes draw
    them with the same random state. `part` is None where batches are read whole and cut when they are there.
    """

    def __init__(self, numbers: Iterator[Any], part: Shard | None, *, most: int | None, by_lists: bool) -> None:
        self._numbers = numbers
        self._part = part
        self._most = most
        """How many are pulled at once; None where all is drawn at the first."""
        self._by_lists = by_lists
        self._drawn = False
        self.wholes: deque[int | None] = deque()
        """Rows over all processes of the batches that were asked for and are not there yet; None: to be counted."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self._drawn:
            self.draw()
        rows = next(self._numbers)
        if self._part is None or not (self._by_lists or isinstance(rows, list | Tensor | np.ndarray)):
            self.wholes.append(None)  # one number, say, of a data set whose items are batches
            return rows
        rows = rows if isinstance(rows, list | tuple | range | Tensor | np.ndarray) else list(rows)
        self.wholes.append(len(rows))
        run = self._part.run(len(rows))
        return rows[run.start : run.stop]

    def draw(self) -> None:
        """Pull all that draws, with the random state that there is now."""
        self._drawn = True
        first = list(islice(self._numbers, 1 if self._most is None else self._most + 1))
        if self._most is not None and len(first) > self._most:
            raise DataError(
                "the order of the data is drawn at the start of an epoch, for all processes alike, and has no end",
                have=f"a sampler of more than {self._most:,} batches, many more than its length tells",
                want="a sampler that ends with the epoch",
                fix="a __len__ that tells how many batches an epoch has",
            )
        self._numbers = chain(first, self._numbers)


def slices(batches: Iterator[Any], dealt: Dealt, part: Shard, *, name: str) -> Iterator[Slice]:
    """Batches of a pass as slices; those that were not asked for by row numbers are cut here."""
    for batch in batches:
        whole = dealt.wholes.popleft()
        if whole is None:
            whole = rows_of(batch, name)
            batch = cut(batch, part.run(whole), of=whole)  # noqa: PLW2901 - the whole one is not to be kept
        yield Slice(batch, len(part.of(whole)), whole)


def own(begin: Callable[[], Iterator[Any]], part: Shard | None, *, aligned: bool) -> Iterator[Any]:
    """Batches that are this process's own; slices, where there are several.

    With `aligned` all processes read their first batch with the same random state: an iterable that shuffles before
    it leaves out what is not its own does it there. The rest draws for its rows.
    """
    stands = Shard(0, 1) if part is None else part
    with reading_part(stands):
        batches = begin()
    batches = read_as(batches, stands)
    if part is None:
        return batches
    return own_slices(in_step(batches, only_first=True) if aligned else batches)


def own_slices(batches: Iterator[Any]) -> Iterator[Slice]:
    """Batches that are this process's own."""
    for batch in batches:
        yield Slice(batch, None, None)


def read_whole(begin: Callable[[], Iterator[Any]], part: Shard, *, name: str) -> Iterator[Slice]:
    """Slices of batches that every process reads whole, with the same random state."""
    return cut_batches(in_step(begin(), only_first=False), part, name)


def in_step(batches: Iterator[Any], *, only_first: bool) -> Iterator[Any]:
    """`batches`, each read with a random state of their own that begins as the one now: the same on all processes.

    With `only_first` the first one alone.
    """
    return _in_step(batches, random_state(), only_first=only_first)


def _in_step(batches: Iterator[Any], state: dict[str, Any], *, only_first: bool) -> Iterator[Any]:
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


def most_to_pull(sampler: Any) -> int | None:
    """How many items of a sampler are to be pulled at once so that all is drawn; None where the first pull does it.

    DataError where nobody knows.
    """
    if _draws_all_at_first(sampler):
        return None
    length = length_of(sampler)
    if length is None:
        name = type(sampler).__name__
        raise DataError(
            f"the sampler {name} has no length, and its order cannot be drawn for all processes alike",
            want="a sampler whose __len__ tells how many items an epoch has, so that they are drawn at its start",
            fix=f"def __len__(self) in {name}",
        )
    return 4 * length + 1000  # lengths of samplers by size are often estimates


def _draws_all_at_first(sampler: Any) -> bool:
    """Whether after its first pull a sampler draws from nothing that anybody else draws from."""
    if type(sampler) is BatchSampler:
        return _draws_all_at_first(sampler.sampler)
    if type(sampler) is RandomSampler and sampler.generator is not None:
        once = length_of(sampler.data_source) or 0
        return not sampler.replacement and sampler.num_samples <= once
    return draws_at_most_at_first(sampler)


def refuse_loader(loader: DataLoader[Any], *, role: str, processes: int, batch_size: int | None) -> None:
    """Refuse a loader of a stream, one that deals rows itself, one that gives batches in another order each time."""
    batch_sampler = loader.batch_sampler
    for owner in (loader.sampler, batch_sampler, getattr(batch_sampler, "sampler", None)):
        refuse_what_knows_its_rank(owner, role=role, processes=processes, batch_size=batch_size)
    if isinstance(loader.dataset, IterableDataset):
        raise unshared(loader, role=role, processes=processes)
    if loader.num_workers and not getattr(loader, "in_order", True):
        raise DataError(
            f"{role} data: in_order=False gives batches as they come, differently on each of {processes} processes",
            want="the same order on all of them",
            fix="DataLoader(..., in_order=True)",
        )


def refuse_what_knows_its_rank(owner: Any, *, role: str, processes: int, batch_size: int | None) -> None:
    """Refuse a sampler that deals rows to processes itself, and would do it a second time."""
    for size, rank in _KNOW_THEIR_RANK:
        if not (hasattr(owner, size) and hasattr(owner, rank)) or getattr(owner, size) == 1:
            continue
        rows = "64" if batch_size is None else str(batch_size * processes)
        shuffle = getattr(owner, "shuffle", None)
        asked = f", shuffle={shuffle}" if isinstance(shuffle, bool) else ""
        name = type(owner).__name__
        raise DataError(
            f"{role} data: {name} deals rows to processes, and a Trainer on {processes} processes deals them too",
            have=f"{name}({size}={getattr(owner, size)}, {rank}={getattr(owner, rank)})",
            want="a loader as on one process; its batch size counts rows over all processes",
            fix=f"DataLoader(data, batch_size={rows}{asked}), or sharded(loader) to keep your own dealing",
        )


def unshared(data: Any, *, role: str, processes: int) -> DataError:
    """The error of a stream that every process would read whole."""
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


_PLAIN = (str, bytes, int, float, complex, np.generic, type(None))


def cut_batches(batches: Iterator[Any], part: Shard, name: str) -> Iterator[Slice]:
    """What one process runs of each ready batch; DataError, with `name`, for a batch whose rows are not known."""
    for batch in batches:
        rows = rows_of(batch, name)
        yield Slice(cut(batch, part.run(rows), of=rows), len(part.of(rows)), rows)


def rows_of(batch: Any, name: str) -> int:
    """Rows of a nested batch: what all its tensors and arrays are long in dimension 0; DataError where they differ."""
    leaves = dict(_leaves(batch, "batch"))
    unknown = [f"{at} {kind}" for at, kind in leaves.items() if isinstance(kind, str)]
    lengths = {length for length in leaves.values() if not isinstance(length, str)}
    if unknown or len(lengths) != 1:
        have = unknown or [f"{at} has {length} rows" for at, length in leaves.items()] or ["no tensor in it"]
        raise DataError(
            f"the rows of a ready batch of {name} are not known, and each process is to run a part of them",
            have=", ".join(have[:6]),
            want="tensors and arrays that are equally long in dimension 0, in tuples, lists, dicts or dataclasses",
            fix="batches(rows, 64) or a DataLoader, which deal rows; or sharded(data) of each process's own",
        )
    return int(lengths.pop())


def cut(batch: Any, rows: range, *, of: int) -> Any:
    """Those `rows` of a nested batch `of` so many; containers keep their types, and what has no rows stays whole."""
    if isinstance(batch, Tensor | np.ndarray):
        return batch[rows.start : rows.stop] if batch.ndim else batch
    if isinstance(batch, Mapping):
        return mapping_like(batch, {key: cut(value, rows, of=of) for key, value in batch.items()})
    if isinstance(batch, list | tuple):
        if len(batch) == of and not any(True for _ in _leaves(batch, "")):
            return sequence_like(batch, list(batch[rows.start : rows.stop]))  # one name, say, for each row
        return sequence_like(batch, [cut(item, rows, of=of) for item in batch])
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        part = copy.copy(batch)
        for field in dataclasses.fields(batch):
            object.__setattr__(part, field.name, cut(getattr(batch, field.name), rows, of=of))
        return part
    return batch


def _leaves(batch: Any, at: str) -> Iterator[tuple[str, int | str]]:
    """Where tensors and arrays are, with their rows; and what nobody knows how to cut, with its type."""
    if isinstance(batch, Tensor | np.ndarray):
        if batch.ndim:
            yield at, batch.shape[0]
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from _leaves(value, f"{at}[{key!r}]")
    elif isinstance(batch, list | tuple):
        for index, item in enumerate(batch):
            yield from _leaves(item, f"{at}[{index}]")
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for field in dataclasses.fields(batch):
            yield from _leaves(getattr(batch, field.name), f"{at}.{field.name}")
    elif not isinstance(batch, _PLAIN):
        yield at, f"is a {type(batch).__name__}"
