"""`batches(...)`: a data set cut into batches, in an order that depends on (seed, epoch) alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor

from trainwright.core.checks import check_flag, check_form, is_count, is_dict, is_none_or
from trainwright.core.errors import DataError, SettingError
from trainwright.core.suggestions import suggests
from trainwright.data.arrays import Table
from trainwright.data.batch_settings import Dealing
from trainwright.data.dataloader.order import asked_again, draws_at_most_at_first, refuse_draws, watched
from trainwright.data.dataloader.position import BATCHES, check_facts, check_kind, length_of, opened, tell_epoch
from trainwright.data.generators import Generators, hidden_in, knows_its_state
from trainwright.data.rows import choosing, rows_of
from trainwright.data.seeded import SeededRows, mixed_seed
from trainwright.data.source import Source
from trainwright.data.stateful import Asked
from trainwright.distributed.batch_layout import Shard


@suggests
def batches(
    data: Any,
    batch_size: int | None = None,
    *,
    shuffle: bool = False,
    seed: int | None = None,
    drop_last: bool = False,
    collate: Callable[[list[Any]], Any] | None = None,
    sampler: Iterable[int] | None = None,
    per_rank: int | None = None,
    workers: int | Literal["auto"] = "auto",
    in_memory: bool = False,
    augment: Any = None,
) -> Batches:
    """Batches of `batch_size` rows of a data set; each pass over the result is the next epoch.

    `data` is a map-style `Dataset`, a tensor, an array, or a tuple or dict of equally long ones; a batch of arrays
    is the same container of tensors. The order is a function of (seed, epoch); `seed=None` is drawn once from
    torch's global generator at the first pass and kept in the state. A data set's own random draws depend on
    (seed, epoch, row), and leave the generators of the process as they were. `sampler` gives row numbers instead.
    `batch_size` counts rows over all processes of a run, each of which runs its part of every batch; `per_rank`, in
    its place, counts those of each, and such a run resumes only on as many processes. `workers` is the number of
    worker processes; "auto" measures, and takes as many as make training faster, of the cores that are there: neither
    the order nor a number depends on it. `in_memory=True` reads a small data set, whose rows are always the same, once
    into memory. `augment` changes images on the device of the run: `Augment(...)`, `Normalize(...)`, a function of
    (images, draws), or a list of these. Raises DataError for data without a batch.
    """
    dealing = Dealing(
        batch_size=batch_size, per_rank=per_rank, shuffle=shuffle, seed=seed, drop_last=drop_last, workers=workers
    )
    if collate is not None and not callable(collate):
        raise SettingError(f"collate={collate!r}", want="a function from a list of rows to a batch")
    check_flag(in_memory, f"batches(in_memory={in_memory!r})")
    if sampler is not None:
        from trainwright.data.sampled import check_sampler

        check_sampler(sampler, shuffle=shuffle)
    if in_memory:
        from trainwright.data.reading import read_whole

        rows: Table | SeededRows = read_whole(data, collate=collate, workers=workers)
    else:
        rows = rows_of(data, collate)
    if augment is None:
        return Batches(rows, dealing, sampler)
    from trainwright.data.transforms.augmented import AugmentedBatches

    return AugmentedBatches(rows, dealing, sampler, augment=augment)


class Batches(Source):
    """A data set, dealt into batches; made by `batches`."""

    own_length: int | None = None
    """Batches of an epoch on this process, where it has data of its own; else as `length`."""
    _tells_epoch = True
    """Whether data set and sampler hear which epoch it is."""
    _part: Shard | None = None
    """The part of each batch that this process runs; None: all of it."""
    keeps_workers = False
    """Whether workers that were chosen stay from one pass to the next."""
    _resident: Table | None = None
    """A copy of the table on the device of a run, which epochs are read out of."""

    def __init__(self, rows: Table | SeededRows, dealing: Dealing, sampler: Iterable[int] | None) -> None:
        self._data = rows
        self._dealing = dealing
        self._sampler = sampler
        self._seed = dealing.seed
        self._passes = 0
        self._generators = Generators({} if sampler is None else {"sampler": sampler})
        self._asks_again = False
        """Whether a sampler was loaded that may stand at the end of a pass."""
        self._draws_on = False
        data_set = getattr(rows, "dataset", None)
        alone = dealing.workers in ("auto", 0) and knows_its_state(data_set)
        self._asked = Asked(data_set) if alone else None
        self._chosen = choosing(rows, dealing.workers)
        self._loaded: dict[str, Any] | None = None
        self.draws_global_rng = not (sampler is None or isinstance(sampler, list | tuple | range | Tensor))
        self._measure()

    def __len__(self) -> int:
        if self.own_length is None:
            raise TypeError(f"the sampler {type(self._sampler).__name__} has no length")
        return self.own_length

    def __iter__(self) -> Iterator[Any]:
        self._passes += 1
        if self._part is None and self._resident is None:
            return self.epoch(self._passes - 1)
        self._settled_seed()
        whole = copy(self)  # whoever iterates by hand gets what one process gets, on the host
        whole._part = whole._resident = None
        return whole.epoch(self._passes - 1)

    def deal(self, part: Shard | None) -> None:
        """From now on `epoch` gives a `Slice` of each batch: this process's part of it; None: whole batches again.

        With `per_rank` the batches grow with the number of processes. DataError for a sampler that deals rows to
        processes itself, or whose order cannot be drawn alike on all of them.
        """
        if part is not None and self._sampler is not None and not self.sharded:
            from trainwright.data.dataloader.slicing import most_to_pull, refuse_what_knows_its_rank

            size = self._dealing.batch_size
            refuse_what_knows_its_rank(self._sampler, role="the", processes=part.size, batch_size=size)
            most_to_pull(self._sampler)
        self._part = part
        if self._dealing.per_rank is not None:
            self._dealing = replace(self._dealing, processes=1 if part is None or self.sharded else part.size)
        self._measure()

    def size_beside(self, device: torch.device) -> int | None:
        """Bytes that a copy of the data would take on `device`; None where they are not in memory as a whole."""
        return self._data.size_beside(device) if isinstance(self._data, Table) and self.in_memory else None

    def reside(self, device: torch.device | None) -> None:
        """From now on `epoch` gives batches that are gathered on `device`, out of a copy of the data; None: no more.

        Order and rows are the same: the order is drawn on the host. Who iterates by hand gets batches on the host.
        """
        assert device is None or self.size_beside(device) is not None
        self._resident = self._data.on(device) if device is not None and isinstance(self._data, Table) else None

    def describe(self) -> str:
        """Rows, batch size, order."""
        order = "shuffled" if self._dealing.shuffle else "in order"
        order = order if self._sampler is None else f"by {type(self._sampler).__name__}"
        rows = "" if self.rows is None else f"{self.rows:,} rows in "
        size = self._dealing.told
        if self._part is not None:
            size = f"{size} on each process" if self.sharded else self._part.told(self._dealing.size)
        workers = "" if self._chosen is None else self._chosen.describe()
        return f"{rows}batches of {size} from {self._data.describe()}, {order}{workers}"

    def end_workers(self) -> None:
        """End the workers that were kept for another pass."""
        if self._chosen is not None:
            self._chosen.end()

    def take_news(self) -> str:
        """A line about the workers that were chosen, once; else ""."""
        return "" if self._chosen is None else self._chosen.take_news()

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[Any]:
        """The batches of `epoch` without its first `skip`, which are not read."""
        loaded, self._loaded = self._loaded, None
        inside = self._generators.epoch == epoch
        self._asks_again = loaded is not None and self._generators.stateful
        self._generators.begin(epoch)
        if self._tells_epoch:
            tell_epoch(epoch, self._sampler, getattr(self._data, "dataset", None))
        iterator = self._begun(epoch, skip)
        if self._asked is None:
            return iterator
        if loaded is not None:
            self._asked.load(loaded["asked"], given=skip if inside else None)
        return self._asked.counted(iterator, skip)

    def settle(self) -> None:
        """Take a loaded state over at once, as it was when it was saved: no epoch follows, but another `fit`."""
        loaded, self._loaded = self._loaded, None
        self._generators.settle()
        if loaded is not None and self._asked is not None:
            self._asked.settle(loaded["asked"])

    def set_aside(self) -> None:
        """Read beside whoever else reads the data: data set and sampler stay in their epoch."""
        self._tells_epoch, self._asked = False, None
        self._generators.set_aside()

    def at_boundary(self) -> None:
        """Note that all batches given so far are trained on."""
        if self._asked is not None and self.must_resume is not False:
            self._asked.at_boundary()

    @property
    def resumes(self) -> str:
        """What is not known to be exact in a resume inside an epoch, and what to do; "" where nothing is."""
        data_set, name = getattr(self._data, "dataset", None), self._data.describe()
        if knows_its_state(data_set):
            return "" if self._asked is not None else f"the state of {name} in workers is not kept; write workers=0"
        hidden = hidden_in(data_set)
        fix = f"draw from the global ones, or give {name} state_dict and load_state_dict"
        return f"{hidden} is a generator that no checkpoint holds; {fix}" if hidden else ""

    @property
    def generators(self) -> list[Any]:
        """The generators of its own that a pass draws from; an evaluation puts them back."""
        return self._generators.found

    def state_dict(self) -> dict[str, Any]:
        """The seed, the passes that were begun by iterating, and what must not change."""
        return {
            "seed": self._seed,
            "passes": self._passes,
            "generators": self._generators.state_dict(),
            "facts": self.facts(),
            "asked": None if self._asked is None else self._asked.state_dict(),
        }

    def process_state(self) -> dict[str, Any]:
        """What of the state is this process's own: a data set's, where it tells its own."""
        loaded = self._loaded
        return {"asked": self.state_dict()["asked"] if loaded is None else loaded["asked"]}

    def load_process_state(self, tree: dict[str, Any] | None) -> str | None:
        """Take over this process's own state after the common one; None: it was saved on another number of them.

        Returns a line where then not all can be as it was.
        """
        if self._loaded is None or self._asked is None:
            return None
        if tree is None:
            return f"saved on another number of processes: {self._data.describe()} goes on from the first one's state"
        self._loaded = {**self._loaded, "asked": tree["asked"]}
        return None

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        """Go on with a saved seed; DataError where the data are dealt otherwise than when it was saved."""
        check_kind(tree, BATCHES)
        check_form(tree, facts=is_dict)
        have, saved = self.facts(), dict(tree["facts"])
        if self._dealing.seed is not None:
            have["seed"], saved["seed"] = self._dealing.seed, tree["seed"]
        what = "the data are dealt into batches otherwise than when the state was saved"
        fix = "write batches(...) as it was"
        if self._dealing.per_rank is not None and have["processes"] != saved.get("processes", have["processes"]):
            fix = f"{saved['processes']} processes, as when it was saved: per_rank counts the rows of each"
        check_facts(have, saved, what=what, fix=fix)
        check_form(tree, seed=is_none_or(lambda seed: type(seed) is int), passes=is_count, generators=is_dict)
        self._generators.load_state_dict(tree["generators"])
        self._seed, self._passes, self._loaded = tree["seed"], tree["passes"], tree

    def facts(self) -> dict[str, Any]:
        """What must not change between a save and a resume."""
        dealing = self._dealing
        facts = {
            "rows": None if self.sharded else len(self._data),
            "batch_size": dealing.size,
            "shuffle": dealing.shuffle,
            "drop_last": dealing.drop_last,
            "sampler": self._sampler is not None,
        }
        return facts if dealing.per_rank is None else {**facts, "processes": dealing.processes}

    def _begun(self, epoch: int, skip: int) -> Iterator[Any]:
        seed, part = self._settled_seed(), self._part
        if part is not None and not self.sharded:
            return self._sliced(seed, epoch, skip, part=part)
        if self.in_memory:
            whole = self._table.batches(self._order(seed, epoch), self._dealing.size, self._left(skip))
        else:
            whole = self._read(seed, epoch, self._dealt(seed, epoch, skip))
        if part is None:
            return whole
        from trainwright.data.dataloader.slicing import own_slices

        return own_slices(whole)

    def _sliced(self, seed: int, epoch: int, skip: int, *, part: Shard) -> Iterator[Any]:
        """What this process runs of each batch."""
        if self.in_memory:
            return self._table.slices(self._order(seed, epoch), self._dealing.size, self._left(skip), part=part)
        from trainwright.data.dataloader.slicing import Dealt, most_to_pull, slices

        most = None if self._sampler is None else most_to_pull(self._sampler)
        dealt = Dealt(self._dealt(seed, epoch, skip), part, most=most, by_lists=True)
        dealt.draw()
        return slices(self._read(seed, epoch, dealt), dealt, part, name=self.describe())

    @property
    def in_memory(self) -> bool:
        """Whether a batch is a few tensor operations on the whole of the data, into memory of its own."""
        return isinstance(self._data, Table) and self._sampler is None and self._dealing.workers in ("auto", 0)

    @property
    def _table(self) -> Table:
        """The data in memory, where epochs are read."""
        assert isinstance(self._data, Table)
        return self._data if self._resident is None else self._resident

    def _measure(self) -> None:
        """Tell length and rows; DataError where no batch is left."""
        dealing = self._dealing
        dealt = len(self._data) if self._sampler is None else length_of(self._sampler)
        length = None if dealt is None else dealing.length(dealt)
        self.own_length = length  # pyright: ignore[reportIncompatibleMethodOverride]
        """Batches of an epoch on this process, where it has rows of its own; else as `length`."""
        self._own_rows = None if dealt is None else min(dealt, dealing.length(dealt) * dealing.size)
        apart = self.sharded and self._part is not None
        self.batch_size: int | None = None if apart else dealing.size
        self.length = None if apart else self.own_length
        self.rows = None if apart else self._own_rows
        self._check_filled(dealt)

    def _check_filled(self, dealt: int | None) -> None:
        if not len(self._data):
            raise DataError("data set of 0 rows", want="at least one row")
        if dealt == 0:
            raise DataError(f"the sampler {type(self._sampler).__name__} gives 0 rows", want="at least one")
        if self.own_length == 0:
            what = f"{dealt} rows, batch_size {self._dealing.size}, drop_last=True leaves 0 batches"
            raise DataError(what, fix=f"drop_last=False, or a batch_size of at most {dealt}")

    def _settled_seed(self) -> int:
        # Arrays in their own order draw nothing, so that nothing is drawn for them.
        if self._seed is None and (self._dealing.shuffle or isinstance(self._data, SeededRows)):
            self._seed = int(torch.empty((), dtype=torch.int64).random_())
        return self._seed or 0

    def _order(self, seed: int, epoch: int) -> Tensor | None:
        if not self._dealing.shuffle:
            return None
        generator = torch.Generator().manual_seed(mixed_seed(seed, epoch))
        return torch.randperm(len(self._data), generator=generator)

    def _left(self, skip: int) -> range:
        """The positions of the epoch that are left after `skip` batches."""
        assert self._own_rows is not None
        return range(min(skip * self._dealing.size, self._own_rows), self._own_rows)

    def _dealt(self, seed: int, epoch: int, skip: int) -> Iterator[Sequence[int]]:
        """The row numbers of each batch."""
        if self._sampler is not None:
            dealt = self._sampled(self._sampler)
            if self.must_resume and (self._part is None or self.sharded) and not draws_at_most_at_first(self._sampler):
                dealt = watched(dealt, self._note_draws)
            return opened(dealt, skip, name="the sampler", complaint=self._empty_sampler)
        size, left, order = self._dealing.size, self._left(skip), self._order(seed, epoch)
        parts = (left[start : start + size] for start in range(0, len(left), size))
        return parts if order is None else (order[part.start : part.stop].tolist() for part in parts)

    def _sampled(self, sampler: Iterable[int]) -> Iterator[Sequence[int]]:
        from trainwright.data.sampled import row_number

        numbers = asked_again(sampler, iter(sampler)) if self._asks_again else iter(sampler)
        while rows := list(islice(numbers, self._dealing.size)):
            if len(rows) < self._dealing.size and self._dealing.drop_last:
                return
            yield [row_number(row, of=len(self._data), sampler=sampler) for row in rows]

    def _note_draws(self) -> None:
        if not self._draws_on:
            workers = 0 if self._dealing.workers == "auto" else self._dealing.workers
            refuse_draws(self._sampler, workers=workers, role="train")
        self._draws_on = True

    def _empty_sampler(self) -> DataError:
        what = f"the sampler {type(self._sampler).__name__} gave not one batch of {self.batch_size} rows"
        return DataError(what, have=f"drop_last={self._dealing.drop_last}", want="at least one batch")

    def _read(self, seed: int, epoch: int, dealt: Iterator[Sequence[int]]) -> Iterator[Any]:
        """The batches of these row numbers."""
        workers, name = self._dealing.workers, self.describe()
        if self._chosen is not None:
            where: dict[str, Any] = {"sampler": self._sampler, "part": self._part, "keeps": self.keeps_workers}
            chosen: Iterator[Any] = self._chosen.begin(dealt, seed=seed, epoch=epoch, name=name, **where)
            return chosen
        if workers in ("auto", 0):
            return self._fetched(seed, epoch, dealt)
        from trainwright.data.jobs import by_workers

        return by_workers(self._data, dealt, seed=seed, epoch=epoch, workers=int(workers), name=name)

    def _fetched(self, seed: int, epoch: int, dealt: Iterator[Sequence[int]]) -> Iterator[Any]:
        fetch = self._data.fetch
        for rows in dealt:
            yield fetch(seed, epoch, rows)
