"""`LoaderBatches`: a user's `DataLoader` as a source, iterated exactly as in a plain loop, with the same draws."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from trainwright.core.errors import DataError
from trainwright.core.rng import rng_preserved
from trainwright.core.torch_private import is_under_way, iterator_of, persistent_iterator, set_persistent_iterator
from trainwright.data.data_state import Generators, is_stateful, stateful_data, unsaved_generators
from trainwright.data.dataloader.order import (
    Order,
    draws_at_most_at_first,
    has_twin,
    iterates_itself,
    refuse_draws,
    twin,
    view,
)
from trainwright.data.dataloader.workers import (
    InitWorker,
    StateSendingCollate,
    Workers,
    WorkerStates,
    warn_of_duplicates,
)
from trainwright.data.sharding import (
    ShardedIndices,
    draw_limit,
    is_alone_in_job,
    read_completely,
    read_own_part,
    refuse_loader,
    saved_by_other_size,
    slices,
)
from trainwright.data.source import (
    Source,
    begin_after,
    length_of,
    set_epoch,
    shallow_copy,
)
from trainwright.distributed.mesh import Shard

_ALONE = Shard(0, 1)


class LoaderBatches(Source):
    """The batches of a `DataLoader`; DataError if it has none.

    A resume inside an epoch is exact if rows depend only on their index, the sampler and the random states of the
    processes: the order is drawn again, its first part is skipped without a read, and each worker continues from the
    random state that came with its last batch. For iterable data sets, and for loaders that override `__iter__`, the
    first batches are read and dropped.
    """

    kind = "a DataLoader"
    draws_global_rng = True
    _sets_epoch = True
    """Whether `set_epoch` of the data set and the samplers is called."""
    _draw_limit: int | None = None
    """The most items of the sampler to draw at the start of an epoch; None if its first item makes all draws."""
    _compared = False
    """Whether the first batches of the workers of a stream were compared."""
    in_memory = False
    """Whether the current pass gathers batches from tensors in memory."""
    _keeps_workers: bool | None = None
    """Whether an evaluation uses the persistent workers of the loader; None: unless training is inside a pass."""

    def __init__(self, loader: DataLoader[Any], role: str) -> None:
        self._loader = loader
        self._role = role
        self._record = WorkerStates()
        self._draws_on = False
        """Whether the sampler has drawn from the global random state after its first item."""
        sampler, batch_sampler = loader.sampler, loader.batch_sampler
        inner = getattr(batch_sampler, "sampler", None)
        self._with_set_epoch = (sampler, batch_sampler, inner, loader.dataset)
        self._generators = Generators(
            {"loader": loader, "sampler": sampler, "batch_sampler": batch_sampler, "batch_sampler.sampler": inner}
        )
        self._stateful = stateful_data(loader)
        self.length = self._own_length = length_of(loader)
        """Batches per epoch; `_own_length`: the loader's length on this rank, which may be its part of the data."""
        size = getattr(batch_sampler, "batch_size", None)
        self.batch_size = size if isinstance(size, int) else None
        self._drops_last = bool(getattr(batch_sampler, "drop_last", False))
        rows = self._sampled_rows()
        short = rows % self.batch_size if rows and self.batch_size and self._drops_last else 0
        self.rows = self._own_rows = None if rows is None else rows - short
        self._order = Order(_index_sampler(loader), name=self.describe())
        if self.length == 0:
            raise self._no_batches()

    def _measure(self) -> None:
        """Update the length, since that of a batch sampler may change between epochs."""
        if self.length is not None:
            self.length = length_of(self._loader)
            self._own_length = self.length

    def describe(self) -> str:
        """Return as text the rows, batch size and workers and, if the rows are not shuffled, their order."""
        rows = "" if self.rows is None else f"{self.rows:,} rows in "
        size = "batches" if self.batch_size is None else f"batches of {self.batch_size}"
        if self._part is not None and self.batch_size is not None and not self.is_own_part:
            size = f"batches of {self._part.layout_text(self.batch_size)}"
        size += " on each process" if self._part is not None and self.is_own_part else ""
        n = self._loader.num_workers
        workers = f", {n} worker{'s' if n > 1 else ''}" if n else ""
        order = ", in order" if self._is_in_order() else ""
        return f"{rows}{size} from a {type(self._loader).__name__}{workers}{order}"

    def _is_in_order(self) -> bool:
        """Return whether the loader reads the rows of its data set in their order: `shuffle=True` was not given."""
        by = self._loader.batch_sampler
        return type(by) is BatchSampler and type(by.sampler) is SequentialSampler

    def shard(self, part: Shard | None) -> None:
        """Make `epoch` yield this rank's `Slice` of each batch; None: complete batches.

        DataError for data that cannot be sharded: a stream, a loader that shards rows itself, or one whose order cannot
        be drawn equally on all ranks.
        """
        if part is not None and not self.is_own_part:
            refuse_loader(self._loader, role=self._role, processes=part.size, batch_size=self.batch_size)
            self._draw_limit = draw_limit(_index_sampler(self._loader)) if self.fetches_by_index else None
        self._part = part
        apart = part is not None and self.is_own_part
        self.length, self.rows = (None, None) if apart else (self._own_length, self._own_rows)

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[Any]:
        """Return a pass over the loader without its first `skip` batches, but with the draws for all of them."""
        stream = isinstance(self._loader.dataset, IterableDataset)
        if self._other_size and skip and self.is_own_part:
            raise saved_by_other_size(self.describe(), role=self._role)
        if self._part is None and not (stream and is_alone_in_job()):
            doubts = stream and self._loader.num_workers > 1 and not skip and not self._compared
            return self._compared_once(self._begin_pass(epoch, skip)) if doubts else self._begin_pass(epoch, skip)
        begin = partial(self._begin_pass, epoch, skip)
        if self._part is None or self.is_own_part:
            return read_own_part(begin, self._part, aligned=not skip)
        if not self.fetches_by_index:
            return read_completely(begin, self._part, name=self.describe())
        iterator = begin()
        assert self._order.sharded is not None
        return slices(iterator, self._order.sharded, self._part, name=self.describe())

    def _compared_once(self, batches: Iterator[Any]) -> Iterator[Any]:
        self._compared = True
        return warn_of_duplicates(batches, workers=self._loader.num_workers, name=type(self._loader.dataset).__name__)

    @property
    def _fetches_own_rows(self) -> bool:
        """Whether this rank fetches only its own rows of a batch."""
        return self._part is not None and self.fetches_by_index

    @property
    def fetches_by_index(self) -> bool:
        """Whether a rank can fetch only its own rows of a batch; else it reads complete batches."""
        return has_twin(self._loader) and not iterates_itself(self._loader) and not self.is_own_part

    @property
    def _differs_by_rank(self) -> bool:
        """Whether ranks read different rows; else each reads complete batches."""
        return self.fetches_by_index or self.is_own_part

    def _begin_pass(self, epoch: int, skip: int) -> Iterator[Any]:
        sought, self._sought = self._sought, None
        apart = self._part is not None and self.is_own_part
        if apart and self._own_length is not None:
            skip = min(skip, self._own_length)  # other ranks may have more batches
        inside = sought is not None and self._generators.epoch == epoch
        mode = self._skip_mode(sought)
        unread = skip if mode == "skip" else 0
        self._record = WorkerStates(unread)
        if sought is not None:
            self._order.restarts_if_empty = self._generators.stateful
            self._restore_workers(sought, inside=inside, given=skip if inside and mode == "skip" else None)
        self._generators.begin(epoch)
        if self._role == "train" and self._sets_epoch:
            set_epoch(epoch, *self._with_set_epoch)
            self._measure()
        if sought is not None and mode == "seek":
            self._restore_data(sought, skip if inside else None)
        iterator = self._start_pass(unread)
        past = skip if mode == "past" else 0
        if apart:
            deque(islice(iterator, past), maxlen=0)  # this rank's part may be empty, or end earlier than others
        elif past or not skip:
            iterator = begin_after(iterator, past, name=self.describe(), error=self._no_batches)
        if sought is not None and mode != "seek":
            self._restore_data(sought, skip if inside else None)
        return iterator if self._stateful is None else self._stateful.count(iterator, skip)

    def commit(self) -> None:
        """Record that all batches yielded so far were trained."""
        self._record.commit()
        if self._stateful is not None:
            self._stateful.commit()

    def fingerprint(self) -> dict[str, Any]:
        """Return the properties of the data that must be the same at a save and a resume."""
        loader = self._loader
        samplers = (loader.sampler, loader.batch_sampler)
        has_no_rows = self.is_own_part or isinstance(loader.dataset, IterableDataset)
        return {
            "rows": None if has_no_rows else length_of(loader.dataset),
            "batch_size": self.batch_size if self.batch_size is not None else loader.batch_size,
            "drop_last": self._drops_last,
            "sampler": "/".join(type(sampler).__name__ for sampler in samplers if sampler is not None),
        }

    @property
    def resume_caveat(self) -> str:
        """A line on what may be inexact in a resume inside an epoch, with a fix; empty if all is exact."""
        return "; ".join(_why_inexact(self._loader, self._generators))

    def independent_copy(self) -> LoaderBatches:
        """Return a copy with a separate position, which does not call `set_epoch`."""
        other = shallow_copy(self)
        other._sets_epoch, other._sought, other._stateful = False, None, None
        other._generators = self._generators.independent_copy()
        return other

    def keep_workers(self, *, keeps: bool) -> None:
        """Set whether this source uses the persistent workers of the loader, not only training."""
        self._keeps_workers = keeps

    @property
    def generators(self) -> list[Any]:
        """The random generators of loader and samplers, which an evaluation restores."""
        return self._generators.found

    def _position(self) -> dict[str, Any]:
        """Return the states of generators, samplers, workers and data set."""
        return {
            "generators": self._generators.position(),
            "workers": self._record.position(self._loader.num_workers),
            "draws_on": self._draws_on,
            "state": None if self._stateful is None else self._stateful.position(),
        }

    def _seek(self, position: dict[str, Any], *, ended: bool) -> str | None:
        """Set the generators to a saved position.

        Returns a line of text if rows will be the same but random draws in workers will not. With another number of
        ranks, a stream with a separate part per rank can continue only at the start of an epoch.
        """
        have, saved = self._loader.num_workers, position["workers"]["number"]
        lines = []
        if have != saved:
            same = "the rows are the same, their random draws are not"
            lines.append(f"resumed with num_workers={have}, saved with {saved}: {same}")
        if self._other_size and self._differs_by_rank:  # otherwise each rank reads all batches, as rank 0 did
            self._sought = position = {**position, "workers": WorkerStates().position(have)}
            if self.is_own_part:
                position["state"] = None
            if self.other_size_note:
                lines.append(self.other_size_note)
        self._generators.seek(position["generators"], ended=ended)
        if ended:
            self._record = WorkerStates()
            self._restore_workers(position, inside=False, given=None)
            self._restore_data(position, None)
        return "; ".join(lines) or None

    @property
    def other_size_note(self) -> str:
        """A line on the differences after a resume on another number of processes; empty if there are none."""
        if not self._loader.num_workers or not self._differs_by_rank:
            return ""
        return "resumed on another number of processes: the rows are the same, the random draws of workers are not"

    def _skip_mode(self, sought: dict[str, Any] | None) -> str:
        """Return how to skip batches: "skip" (in the order), "past" (read and drop) or "seek" (by the data's state)."""
        loader = self._loader
        if sought is not None and self._stateful is not None and not self._stateful.rows_by_index:
            return "seek"
        draws_on = not loader.num_workers and sought is not None and sought["draws_on"] and not self._fetches_own_rows
        past = isinstance(loader.dataset, IterableDataset) or iterates_itself(loader) or not has_twin(loader)
        return "past" if past or draws_on else "skip"

    def _restore_workers(self, position: dict[str, Any], *, inside: bool, given: int | None) -> None:
        """Restore the random states of the workers of the saved run."""
        workers, record = position["workers"], self._record
        if workers["number"] != self._loader.num_workers or not has_twin(self._loader):
            return
        persistent = self._loader.persistent_workers
        if persistent:
            set_persistent_iterator(self._loader, None)  # its workers have other random states
        if workers["seed"] is None or not (inside or persistent):
            return
        record.restore(workers, given=given, inside=inside)
        if persistent and (not inside or workers["persisted"]):
            self._order.is_empty = True
            try:
                with rng_preserved(self._generators.found):
                    stand_in = twin(self._loader, self._order)
                    set_persistent_iterator(self._loader, self._start_workers(stand_in, seed=workers["seed"]))
            finally:
                self._order.is_empty = False

    def _restore_data(self, position: dict[str, Any], given: int | None) -> None:
        if self._stateful is not None:
            self._stateful.seek(position["state"], given=given)

    def _start_pass(self, skip: int) -> Iterator[Any]:
        """Return a pass after `skip` batches of the order, which is drawn now from the current random state."""
        loader, order = self._loader, self._order
        order.skip = skip
        if self._part is not None and self.fetches_by_index:
            lists = loader.batch_sampler is not None
            order.shard = partial(ShardedIndices, part=self._part, limit=self._draw_limit, by_lists=lists)
        elif self.must_resume and not draws_at_most_at_first(_index_sampler(loader)):
            order.on_draw = self._note_draws
        try:
            iterator = self._iterator()
            if not loader.num_workers:
                order.drop_skipped()
        except RuntimeError as error:
            pool = persistent_iterator(loader)
            if isinstance(pool, Workers):
                pool.explain(error)
            raise
        finally:
            order.skip, order.on_draw, order.restarts_if_empty, order.shard = 0, None, False, None
        return iterator

    def _iterator(self) -> Iterator[Any]:
        """Return a pass over the loader, with new workers if the persistent ones are in use by another pass."""
        loader: Any = self._loader
        order = self._order
        changes_order = order.skip or order.on_draw or order.restarts_if_empty or order.shard
        if has_twin(loader) and (loader.num_workers or changes_order):
            loader = twin(loader, order, self._start_workers if loader.num_workers else None)
        pool = persistent_iterator(loader)
        under_way = is_under_way(pool)
        apart = under_way if self._keeps_workers is None else not self._keeps_workers
        if apart and loader.persistent_workers and not self._sets_epoch:
            return iterator_of(loader)
        if isinstance(pool, Workers):
            pool.begin_next_pass(self._record, order, first=self._first_worker())
        if type(self._loader) is not DataLoader or self._loader.num_workers:
            return iter(loader)
        from trainwright.data.dataloader.tensor_dataset import index_select_batches

        iterator = iter(loader)
        batches = index_select_batches(self._loader, iterator)
        self.in_memory = batches is not iterator
        return batches

    def _start_workers(self, stand_in: Any, seed: int | None = None) -> Workers:
        """Start new workers for the loader."""
        stand_in.check_worker_number_rationality()
        sends_states = stand_in.persistent_workers or self._role == "train"
        collate = StateSendingCollate(stand_in.collate_fn) if sends_states else None
        part = self._part or _ALONE
        init = InitWorker(stand_in.worker_init_fn, self._record.states, collate, part=part)
        attributes = {} if collate is None else {"collate_fn": collate}
        prepared = view(stand_in, self._order, worker_init_fn=init, **attributes)
        apart = self._fetches_own_rows or self.is_own_part  # otherwise the workers of all ranks read the same batches
        return Workers(prepared, self._record, seed=seed, first=self._first_worker(), rank=part.rank if apart else 0)

    def _first_worker(self) -> int:
        """Return the worker for the first batch of a pass that starts in the middle."""
        loader: Any = self._loader
        return self._order.skip % loader.num_workers if getattr(loader, "in_order", True) else 0

    def _note_draws(self) -> None:
        if not self._draws_on:
            refuse_draws(_index_sampler(self._loader), workers=self._loader.num_workers, role=self._role)
        self._draws_on = True

    def _sampled_rows(self) -> int | None:
        """Return the rows per epoch of torch's BatchSampler; None for another sampler or an iterable data set."""
        batch_sampler = self._loader.batch_sampler
        if type(batch_sampler) is not BatchSampler or isinstance(self._loader.dataset, IterableDataset):
            return None
        return length_of(batch_sampler.sampler)

    def _no_batches(self) -> DataError:
        loader, data_set = self._loader, self._loader.dataset
        rows = self._sampled_rows() if self._sampled_rows() is not None else length_of(data_set)
        what, want, fix = f"an epoch of the {type(loader).__name__} had no batch", "at least one batch per epoch", ""
        if rows == 0:
            what = f"data set of 0 rows in the {type(loader).__name__}"
        elif rows is not None and self._drops_last and self.batch_size is not None and rows < self.batch_size:
            what = f"{rows} rows, batch_size {self.batch_size}, drop_last=True leaves 0 batches"
            fix = f"drop_last=False, or a batch_size of at most {rows}"
        elif isinstance(data_set, IterableDataset):
            want = f"{type(data_set).__name__}.__iter__ to give a new iterator with rows in each epoch"
        else:
            sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
            want = f"at least one batch of {rows} rows from {type(sampler).__name__}"
        return DataError(f"{self._role} data: {what}", want=want, fix=fix)


def _index_sampler(loader: DataLoader[Any]) -> Any:
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def _why_inexact(loader: DataLoader[Any], generators: Generators) -> Iterator[str]:
    """Yield the reasons for which a resume inside an epoch may be inexact, each with a fix."""
    name, data_name = type(loader).__name__, type(loader.dataset).__name__
    same = "exact only if they yield the same again"
    if is_stateful(loader):
        if loader.num_workers:
            yield f"random draws in the workers of {name} are as exact as its state_dict makes them"
        return
    if not getattr(loader, "in_order", True) and loader.num_workers:
        yield "in_order=False yields batches as they arrive: a resume may repeat or omit rows; write in_order=True"
    if isinstance(loader.dataset, IterableDataset):
        if loader.num_workers or not is_stateful(loader.dataset):
            yield f"a resume reads the training data ({data_name}) up to the saved position: {same}"
    elif iterates_itself(loader) or not has_twin(loader):
        yield f"a resume reads the training data again ({name} iterates in its own way): {same}"
    elif loader.persistent_workers and not isinstance(persistent_iterator(loader), Workers | None):
        yield "the persistent workers were started before fit: their random draws do not resume; give fit a new loader"
    yield from unsaved_generators(loader.dataset, loader.collate_fn, generators)
