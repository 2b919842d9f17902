"""`Batches`: the rows of a data set in batches, in an order that depends on (seed, epoch) only.

Epochs are counted from 0 in each `fit`, so that a second `fit` repeats the orders of the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from trainwright.core.checks import check_flag, check_form, check_whole, is_count, is_dict, is_none_or
from trainwright.core.errors import DataError, SettingError
from trainwright.data.arrays import Table
from trainwright.data.data_state import Generators, StatefulData, is_stateful, unsaved_generators
from trainwright.data.dataloader.order import (
    draws_at_most_at_first,
    refuse_draws,
    restarted_if_empty,
    watch_draws,
)
from trainwright.data.seeded import SeededRows, mixed_seed
from trainwright.data.sharding import ShardedIndices, draw_limit, own_slices, refuse_sharding_sampler, slices
from trainwright.data.source import (
    Source,
    begin_after,
    length_of,
    set_epoch,
    shallow_copy,
)
from trainwright.distributed.mesh import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """The settings of `batches(...)`."""

    batch_size: int | None
    per_rank: int | None = None
    ranks: int = 1
    """The number of ranks, if `per_rank` is used."""
    shuffle: bool = False
    seed: int | None = None
    drop_last: bool = False
    workers: int = 0
    varies: bool = False
    """Whether other batches than the last one may have fewer rows than `size`."""

    def __post_init__(self) -> None:
        self._check_sizes()
        if self.seed is not None:
            check_whole(self.seed, f"batches(seed={self.seed!r})", least=None)
        check_whole(self.workers, f"batches(workers={self.workers!r})", least=0, fix="workers=4")
        for name, flag in (("shuffle", self.shuffle), ("drop_last", self.drop_last)):
            check_flag(flag, f"batches({name}={flag!r})")

    def _check_sizes(self) -> None:
        if self.per_rank is None:
            check_whole(self.batch_size, f"batches(batch_size={self.batch_size!r})", fix="batches(data, 64)")
            return
        check_whole(self.per_rank, f"batches(per_rank={self.per_rank!r})", fix="batches(data, per_rank=64)")
        if self.batch_size is not None:
            raise SettingError(
                f"batches(batch_size={self.batch_size!r}, per_rank={self.per_rank})",
                want="one of the two: rows over all processes, or rows of each",
                fix="batches(data, 64), which gives the same batches on any number of processes",
            )

    @property
    def size(self) -> int:
        """The rows of a full batch, over all ranks."""
        if self.batch_size is not None:
            return self.batch_size
        assert self.per_rank is not None
        return self.per_rank * self.ranks

    def length(self, rows: int) -> int:
        """Return the number of batches of `rows` rows."""
        return rows // self.size if self.drop_last else -(-rows // self.size)


class Batches(Source):
    """A source of batches of rows, made by `batches`."""

    kind = "batches(...)"
    _sets_epoch = True
    """Whether `set_epoch` of the data set and the sampler is called."""
    _resident: Table | None = None
    """A copy of the table on the device of a run."""

    def __init__(self, rows: Table | SeededRows, settings: BatchSettings, sampler: Iterable[int] | None) -> None:
        self._data, self._settings, self._sampler = rows, settings, sampler
        self._seed = settings.seed
        self._passes = 0
        self._generators = Generators({} if sampler is None else {"sampler": sampler})
        self._sampler_generators = self._generators.found
        self._restarts_if_empty = False
        """Whether to start a new pass if the sampler's loaded state was the end of a pass."""
        self._draws_on = False
        """Whether a sampler was accepted that draws from global generators inside a pass."""
        alone = isinstance(rows, SeededRows) and not settings.workers and is_stateful(rows.dataset)
        self._stateful = StatefulData(self.data_set) if alone else None
        self.draws_global_rng = not (sampler is None or isinstance(sampler, list | tuple | range | Tensor))
        self._measure()

    @property
    def generators(self) -> Sequence[Any]:
        """The random generators of the sampler, which an evaluation restores."""
        return self._sampler_generators

    @property
    def restarts_order(self) -> bool:  # type: ignore[override]
        """Whether a seed is set, so that each fit begins with the shuffled order of epoch 0 again."""
        return self._settings.shuffle and self._sampler is None and self._seed is not None

    def __len__(self) -> int:
        if self._own_length is None:
            raise TypeError(f"the sampler {type(self._sampler).__name__} has no length")
        return self._own_length

    def __iter__(self) -> Iterator[Any]:
        self._passes += 1
        if self._part is None and self._resident is None:
            return self.epoch(self._passes - 1)
        self._draw_seed()
        complete = copy(self)  # outside of a run, yield complete batches on the host
        complete._part = complete._resident = None
        return complete.epoch(self._passes - 1)

    @property
    def data_set(self) -> Any:
        """The data set whose rows are fetched; None for a table."""
        return self._data.dataset if isinstance(self._data, SeededRows) else None

    @property
    def in_memory(self) -> bool:
        """Whether a batch is one gather from a table."""
        return isinstance(self._data, Table) and self._sampler is None and not self._settings.workers

    def shard(self, part: Shard | None) -> None:
        """Make `epoch` yield this rank's `Slice` of each batch; None: complete batches.

        With `per_rank`, the batch size grows with the number of ranks. DataError for a sampler that shards rows itself,
        or whose order cannot be drawn equally on all ranks.
        """
        if part is not None and self._sampler is not None and not self.is_own_part:
            size = self._settings.batch_size
            refuse_sharding_sampler(self._sampler, role="the", processes=part.size, batch_size=size)
            draw_limit(self._sampler)
        self._part = part
        if self._settings.per_rank is not None:
            self._settings = replace(self._settings, ranks=1 if part is None or self.is_own_part else part.size)
        self._measure()

    def bytes_on(self, device: torch.device) -> int | None:
        """Return the size in bytes of a copy of the data on `device`; None if the data are no table."""
        return self._data.bytes_on(device) if isinstance(self._data, Table) and self.in_memory else None

    def reside(self, device: torch.device | None) -> None:
        """Make `epoch` gather batches on `device`, from a copy of the data; None: on the host.

        Order and rows are the same, since the order is drawn on the host. Iteration outside of a run yields host
        batches.
        """
        assert device is None or self.bytes_on(device) is not None
        self._resident = self._data.on(device) if device is not None and isinstance(self._data, Table) else None

    def describe(self) -> str:
        """Return rows, batch size and order as text."""
        order = "shuffled" if self._settings.shuffle else "in order"
        order = order if self._sampler is None else f"by {type(self._sampler).__name__}"
        rows = "" if self.rows is None else f"{self.rows:,} rows in "
        size = f"at most {self._size}" if self._settings.varies else str(self._size)
        if self._part is not None:
            size = f"{size} on each process" if self.is_own_part else self._part.layout_text(self._size)
        return f"{rows}batches of {size} from {self._data.describe()}, {order}"

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[Any]:
        """Return the batches of `epoch` after the first `skip`, which are not read."""
        if not self.in_memory:
            return self._fetched_epoch(epoch, skip)
        self._sought = None
        table, order = self._resident or self._data, self._order(self._draw_seed(), epoch)
        assert isinstance(table, Table) and self._own_rows is not None
        rows = range(min(skip * self._size, self._own_rows), self._own_rows)
        if self._part is None:
            return table.batches(order, self._size, rows)
        if self.is_own_part:
            return own_slices(table.batches(order, self._size, rows))
        return table.slices(order, self._size, rows, part=self._part)

    def independent_copy(self) -> Batches:
        """Return a copy with a separate position, which does not call `set_epoch`."""
        other = shallow_copy(self)
        other._sets_epoch, other._stateful = False, None
        other._generators = self._generators.independent_copy()
        return other

    def commit(self) -> None:
        """Record that all batches yielded so far were trained."""
        if self._stateful is not None:
            self._stateful.commit()

    @property
    def resume_caveat(self) -> str:
        """A line on what may be inexact in a resume inside an epoch; empty if all is exact."""
        return "" if self.data_set is None and self._sampler is None else "; ".join(self._why_inexact())

    def _why_inexact(self) -> Iterator[str]:
        name = self._data.describe()
        if is_stateful(self.data_set) and self._stateful is None:
            yield f"the state of {name} in workers is not saved; write workers=0"
        collate = self._data.collate if isinstance(self._data, SeededRows) else None
        yield from unsaved_generators(self.data_set, collate, self._generators)

    def _position(self) -> dict[str, Any]:
        """Return the seed, the number of direct iterations, and the states of sampler and data set."""
        stateful = self._stateful
        return {
            "seed": self._seed,
            "passes": self._passes,
            "generators": self._generators.position(),
            "state": None if stateful is None else stateful.position(),
        }

    def _seek(self, position: dict[str, Any], *, ended: bool) -> str | None:
        """Set seed and generators to a saved position; DataError if a given seed differs from the saved one.

        Returns a line of text if the data set has a state that was saved on another number of ranks.
        """
        check_form(position, seed=is_none_or(lambda seed: type(seed) is int), passes=is_count, generators=is_dict)
        if self._settings.seed not in (None, position["seed"]):
            have, want = f"seed={self._settings.seed}", f"seed={position['seed']}"
            raise DataError("the data are not what they were when the state was saved", have=have, want=want)
        self._generators.seek(position["generators"], ended=ended)
        self._seed, self._passes = position["seed"], position["passes"]
        if ended:
            self._sought = None
        if self._stateful is None:
            return None
        if ended:
            self._stateful.seek(position["state"], given=None)
        if self._other_size:
            return f"saved on another number of processes: {self._data.describe()} continues from the state of rank 0"
        return None

    def fingerprint(self) -> dict[str, Any]:
        """Return the properties of the data that must be the same at a save and a resume."""
        settings = self._settings
        properties = {
            "rows": None if self.is_own_part else len(self._data),
            "batch_size": self._size,
            "shuffle": settings.shuffle,
            "drop_last": settings.drop_last,
            "sampler": self._sampler is not None,
        }
        return properties if settings.per_rank is None else {**properties, "processes": settings.ranks}

    def _measure(self) -> None:
        """Set length and number of rows; DataError if there is no batch."""
        settings = self._settings
        rows = len(self._data) if self._sampler is None else length_of(self._sampler)
        length = None if rows is None else settings.length(rows)
        self._set_lengths(length, None if length is None or rows is None else min(rows, length * settings.size))
        self._check_filled(rows)

    def _set_lengths(self, length: int | None, rows: int | None) -> None:
        self._size = self._settings.size
        self._own_length = length
        self._own_rows = rows
        apart = self.is_own_part and self._part is not None
        self.batch_size: int | None = None if apart else self._size
        self.length = None if apart else length
        self.rows = None if apart else rows

    def _check_filled(self, rows: int | None) -> None:
        if not len(self._data):
            raise DataError("data set of 0 rows", want="at least one row")
        if rows == 0:
            raise DataError(f"the sampler {type(self._sampler).__name__} has 0 rows", want="at least one")
        if self._own_length == 0:
            what = f"{rows} rows, batch_size {self._size}, drop_last=True leaves 0 batches"
            raise DataError(what, fix=f"drop_last=False, or a batch_size of at most {rows}")

    def _draw_seed(self) -> int:
        # Unshuffled arrays need no seed, so nothing is drawn from the global generator.
        if self._seed is None and (self._settings.shuffle or isinstance(self._data, SeededRows)):
            self._seed = int(torch.empty((), dtype=torch.int64).random_())
        return self._seed or 0

    def _order(self, seed: int, epoch: int) -> Tensor | None:
        if not self._settings.shuffle:
            return None
        generator = torch.Generator().manual_seed(mixed_seed(seed, epoch))
        return torch.randperm(len(self._data), generator=generator)

    def _fetched_epoch(self, epoch: int, skip: int) -> Iterator[Any]:
        """Return the batches of `epoch`, fetched row by row or in the order of a sampler."""
        sought, self._sought = self._sought, None
        inside = self._generators.epoch == epoch
        self._restarts_if_empty = sought is not None and self._generators.stateful
        self._generators.begin(epoch)
        if self._sets_epoch:
            set_epoch(epoch, self._sampler, self.data_set)
        batches = self._fetched(self._draw_seed(), epoch, skip)
        if self._stateful is None:
            return batches
        if sought is not None:
            self._stateful.seek(sought["state"], given=skip if inside else None)
        return self._stateful.count(batches, skip)

    def _fetched(self, seed: int, epoch: int, skip: int) -> Iterator[Any]:
        part, numbers = self._part, self._row_numbers(seed, epoch, skip)
        if part is None:
            return self._fetch(seed, epoch, numbers)
        if self.is_own_part:
            return own_slices(self._fetch(seed, epoch, numbers))
        limit = None if self._sampler is None else draw_limit(self._sampler)
        indices = ShardedIndices(numbers, part, limit=limit, by_lists=True)
        indices.draw()
        return slices(self._fetch(seed, epoch, indices), indices, part, name=self.describe())

    def _row_numbers(self, seed: int, epoch: int, skip: int) -> Iterator[Sequence[int]]:
        """Return the row indices of each batch after the first `skip`."""
        if self._sampler is not None:
            numbers = self._sampled(self._sampler)
            draws_ahead = self._part is not None and not self.is_own_part  # all ranks draw the complete order first
            if self.must_resume and not draws_ahead and not draws_at_most_at_first(self._sampler):
                numbers = watch_draws(numbers, self._accept_draws)
            return begin_after(numbers, skip, name="the sampler", error=self._empty_sampler)
        assert self._own_rows is not None
        order, rows = self._order(seed, epoch), range(self._own_rows)
        parts = (rows[start : start + self._size] for start in range(skip * self._size, len(rows), self._size))
        return parts if order is None else (order[part.start : part.stop].tolist() for part in parts)

    def _sampled(self, sampler: Iterable[int]) -> Iterator[Sequence[int]]:
        numbers = restarted_if_empty(sampler, iter(sampler)) if self._restarts_if_empty else iter(sampler)
        while rows := list(islice(numbers, self._size)):
            if len(rows) < self._size and self._settings.drop_last:
                return
            yield [_row_number(row, of=len(self._data), sampler=sampler) for row in rows]

    def _accept_draws(self) -> None:
        if not self._draws_on:
            refuse_draws(self._sampler, workers=self._settings.workers, role="train")
        self._draws_on = True

    def _empty_sampler(self) -> DataError:
        what = f"the sampler {type(self._sampler).__name__} has no batch of {self.batch_size} rows"
        return DataError(what, have=f"drop_last={self._settings.drop_last}", want="at least one batch")

    def _fetch(self, seed: int, epoch: int, numbers: Iterator[Sequence[int]]) -> Iterator[Any]:
        """Return the batches of these row indices, fetched in this process or by workers."""
        if self._settings.workers:
            return self._fetched_by_workers(seed, epoch, numbers)
        fetch = self._data.fetch
        return (fetch(seed, epoch, rows) for rows in numbers)

    def _fetched_by_workers(self, seed: int, epoch: int, numbers: Iterator[Sequence[int]]) -> Iterator[Any]:
        from trainwright.data.dataloader.workers import InitWorker, Workers, WorkerStates

        requests: Any = (_Request(seed, epoch, rows) for rows in numbers)
        loader: Any = DataLoader(
            _RequestedBatches(self._data),
            batch_size=None,
            sampler=requests,
            num_workers=self._settings.workers,
            collate_fn=_unchanged,
            worker_init_fn=InitWorker(None, {}, None),
            # A separate generator, so that the draw of the loader does not change the global one.
            generator=torch.Generator().manual_seed(mixed_seed(seed, epoch, 1)),
        )
        return Workers(loader, WorkerStates())


class _Request(NamedTuple):
    """The request for a batch to a worker process."""

    seed: int
    epoch: int
    rows: Sequence[int]


class _RequestedBatches(Dataset[Any]):
    """A data set whose items are batches, indexed by requests."""

    def __init__(self, data: Table | SeededRows) -> None:
        self._data = data

    def __getitem__(self, request: _Request) -> Any:
        return self._data.fetch(*request)


def _unchanged(batch: Any) -> Any:
    return batch


def _row_number(row: Any, *, of: int, sampler: Any) -> int:
    """Return the row index of a sampler as an int; DataError unless it is from 0 to `of` - 1."""
    number = row if isinstance(row, int) else int(row) if hasattr(row, "__index__") else None
    if number is None or not 0 <= number < of:
        raise DataError(
            f"the sampler {type(sampler).__name__} gave {row!r}",
            want=f"a row number from 0 to {of - 1}",
            fix="for a batch sampler write DataLoader(data, batch_sampler=...)" if number is None else "",
        )
    return number
