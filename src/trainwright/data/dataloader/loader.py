"""A user's own `DataLoader`, iterated exactly as the plain loop does, its random draws included."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from trainwright.core.errors import DataError
from trainwright.core.rng import rng_preserved
from trainwright.core.torch_private import is_under_way, iterator_of
from trainwright.data.data_state import Generators, hidden_in, is_stateful, stateful_data
from trainwright.data.dataloader.order import (
    Order,
    draws_at_most_at_first,
    has_twin,
    iterates_itself,
    refuse_draws,
    twin,
    view,
)
from trainwright.data.dataloader.workers import Carrying, Starting, Workers, WorkerStates
from trainwright.data.sharding import is_alone_in_job, saved_by_other_size
from trainwright.data.source import (
    LOADER,
    Source,
    check_fingerprint,
    check_kind,
    length_of,
    opened,
    set_epoch,
    shallow_copy,
)
from trainwright.distributed.mesh import Shard

_ALONE = Shard(0, 1)


class LoaderBatches(Source):
    """The batches of a `DataLoader`; raises DataError where it has none.

    A resume inside an epoch is exact where rows depend only on their index, the sampler and the random states of the
    processes: the order is drawn again and its first part left out unread, and each worker goes on with the random
    state that came with its last batch. Iterable data sets, and loaders with an `__iter__` of their own, are read
    past.
    """

    draws_global_rng = True
    own_length: int | None = None
    """Batches of an epoch on this rank, where it has data of its own; else as `length`."""
    _sets_epoch = True
    """Whether `set_epoch` of the data set and the samplers is called."""
    _most: int | None = None
    """How many items of the sampler all processes pull at once; None where the first pull draws them all."""
    _other_size = False
    """Whether another number of processes saved the loaded state."""
    _compared = False
    """Whether the first batches of the workers of a stream were compared."""
    in_memory = False
    """Whether a batch of the pass in hand is a few tensor operations on the whole of the data."""
    _keeps_workers: bool | None = None
    """Whether passes beside training use the loader's persistent workers; None: unless these are under way."""

    def __init__(self, loader: DataLoader[Any], role: str) -> None:
        self._loader = loader
        self._role = role
        self._sought: dict[str, Any] | None = None
        self._record = WorkerStates()
        self._draws_on = False
        """Whether the sampler has drawn from the process's random state after its first pull."""
        sampler, batch_sampler = loader.sampler, loader.batch_sampler
        inner = getattr(batch_sampler, "sampler", None)
        self._tellable = (sampler, batch_sampler, inner, loader.dataset)
        self._generators = Generators(
            {"loader": loader, "sampler": sampler, "batch_sampler": batch_sampler, "batch_sampler.sampler": inner}
        )
        self._stateful = stateful_data(loader)
        self.length = self.own_length = length_of(loader)
        """Batches of an epoch; `own_length` is what the loader tells on this process, whose own it may be."""
        size = getattr(batch_sampler, "batch_size", None)
        self.batch_size = size if isinstance(size, int) else None
        self._drops_last = bool(getattr(batch_sampler, "drop_last", False))
        dealt = self._dealt()
        short = dealt % self.batch_size if dealt and self.batch_size and self._drops_last else 0
        self.rows = self._own_rows = None if dealt is None else dealt - short
        self._order = Order(_index_sampler(loader), name=self.describe())
        if self.length == 0:
            raise self._no_batches()

    def _measure(self) -> None:
        """Read the length of the loader: that of a batch sampler may change from epoch to epoch."""
        if self.length is not None:
            self.length = length_of(self._loader)
            self.own_length = self.length  # pyright: ignore[reportIncompatibleMethodOverride]

    def describe(self) -> str:
        """Return rows, batch size and workers."""
        rows = "" if self.rows is None else f"{self.rows:,} rows in "
        size = "batches" if self.batch_size is None else f"batches of {self.batch_size}"
        if self._part is not None and self.batch_size is not None and not self.already_sharded:
            size = f"batches of {self._part.layout_text(self.batch_size)}"
        size += " on each process" if self._part is not None and self.already_sharded else ""
        n = self._loader.num_workers
        workers = f", {n} worker{'s' if n > 1 else ''}" if n else ""
        return f"{rows}{size} from a {type(self._loader).__name__}{workers}"

    def shard(self, part: Shard | None) -> None:
        """Have `epoch` yield a `Slice` of each batch: the part of this rank; None: complete batches again.

        DataError for what cannot be dealt: a stream, a loader that deals rows to processes itself, one whose order
        cannot be drawn alike on all of them.
        """
        if part is not None and not self.already_sharded:
            from trainwright.data import slicing

            slicing.refuse_loader(self._loader, role=self._role, processes=part.size, batch_size=self.batch_size)
            self._most = slicing.most_to_pull(_index_sampler(self._loader)) if self.by_numbers else None
        self._part = part
        apart = part is not None and self.already_sharded
        self.length, self.rows = (None, None) if apart else (self.own_length, self._own_rows)

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[Any]:
        """Return one pass over the loader without its first `skip` batches; the random draws of all are made."""
        stream = isinstance(self._loader.dataset, IterableDataset)
        if self._other_size and skip and self.already_sharded:
            raise saved_by_other_size(self.describe(), role=self._role)
        if self._part is None and not (stream and is_alone_in_job()):
            doubts = stream and self._loader.num_workers > 1 and not skip and not self._compared
            return self._compared_once(self._begun(epoch, skip)) if doubts else self._begun(epoch, skip)
        from trainwright.data import slicing

        begin = partial(self._begun, epoch, skip)
        if self._part is None or self.already_sharded:
            return slicing.own(begin, self._part, aligned=not skip)
        if not self.by_numbers:
            return slicing.read_whole(begin, self._part, name=self.describe())
        iterator = begin()
        assert self._order.dealt is not None
        return slicing.slices(iterator, self._order.dealt, self._part, name=self.describe())

    def _compared_once(self, batches: Iterator[Any]) -> Iterator[Any]:
        from trainwright.data.dataloader.workers import looked_at

        self._compared = True
        return looked_at(batches, workers=self._loader.num_workers, name=type(self._loader.dataset).__name__)

    @property
    def _cuts(self) -> bool:
        """Whether this process asks for its rows of a batch alone."""
        return self._part is not None and self.by_numbers

    @property
    def by_numbers(self) -> bool:
        """Whether one of several processes can ask for its rows of a batch alone; else it reads all of it."""
        return has_twin(self._loader) and not iterates_itself(self._loader) and not self.already_sharded

    def _begun(self, epoch: int, skip: int) -> Iterator[Any]:
        sought, self._sought = self._sought, None
        apart = self._part is not None and self.already_sharded
        if apart and self.own_length is not None:
            skip = min(skip, self.own_length)  # others may have more
        inside = sought is not None and self._generators.epoch == epoch
        way = self._way(sought)
        skipped = skip if way == "skip" else 0
        self._record = WorkerStates(skipped)
        if sought is not None:
            self._order.once_more = self._generators.stateful
            self._restore_workers(sought, inside=inside, given=skip if inside and way == "skip" else None)
        self._generators.begin(epoch)
        if self._role == "train" and self._sets_epoch:
            set_epoch(epoch, *self._tellable)
            self._measure()
        if sought is not None and way == "seek":
            self._restore_data(sought, skip if inside else None)
        iterator = self._opened(skipped)
        past = skip if way == "past" else 0
        if apart:
            deque(islice(iterator, past), maxlen=0)  # one part may be empty, or end before others
        elif past or not skip:
            iterator = opened(iterator, past, name=self.describe(), complaint=self._no_batches)
        if sought is not None and way != "seek":
            self._restore_data(sought, skip if inside else None)
        return iterator if self._stateful is None else self._stateful.counted(iterator, skip)

    def commit(self) -> None:
        """Record that all batches yielded so far are trained on."""
        self._record.commit()
        if self._stateful is not None and self.must_resume is not False:
            self._stateful.commit()

    def fingerprint(self) -> dict[str, Any]:
        """Return the properties of the data that must not change between a save and a resume."""
        loader = self._loader
        samplers = (loader.sampler, loader.batch_sampler)
        return {
            "rows": None
            if self.already_sharded or isinstance(loader.dataset, IterableDataset)
            else length_of(loader.dataset),
            "batch_size": self.batch_size if self.batch_size is not None else loader.batch_size,
            "drop_last": self._drops_last,
            "sampler": "/".join(type(sampler).__name__ for sampler in samplers if sampler is not None),
        }

    @property
    def resume_caveat(self) -> str:
        """A line on what may be inexact in a resume inside an epoch, with a fix; empty where nothing is."""
        return "; ".join(_why_inexact(self._loader))

    def independent_copy(self) -> LoaderBatches:
        """Return a copy for a pass beside training: the epoch of data set and sampler stays as it is."""
        other = shallow_copy(self)
        other._sets_epoch, other._sought, other._stateful = False, None, None
        other._generators = self._generators.independent_copy()
        return other

    def keep_workers(self, *, keeps: bool) -> None:
        """Set whether these passes use the loader's persistent workers, or training alone does."""
        self._keeps_workers = keeps

    @property
    def generators(self) -> list[Any]:
        """The loader's and samplers' own random generators: an evaluation restores them."""
        return self._generators.found

    def position(self) -> dict[str, Any]:
        """Return the states of the loader's and samplers' own generators, and the random states of the workers."""
        return self._sought or {
            "generators": self._generators.position(),
            "fingerprint": self.fingerprint(),
            "workers": self._record.position(self._loader.num_workers),
            "draws_on": self._draws_on,
            "state": None if self._stateful is None else self._stateful.position(),
        }

    def seek(self, position: dict[str, Any], *, other_size: bool = False, ended: bool = False) -> str | None:
        """Continue at a saved position; DataError where the loader is another one.

        Returns a line where the rows will be the same, and the random draws in workers will not. On another number of
        ranks, a stream of which each has a part of its own continues only at the start of an epoch.
        """
        check_kind(position, LOADER)
        what = "the loader is not what it was when the state was saved"
        check_fingerprint(self.fingerprint(), position["fingerprint"], what=what, fix="build the loader as it was")
        have, saved = self._loader.num_workers, position["workers"]["number"]
        lines = []
        if have != saved:
            same = "the rows are the same, their random draws are not"
            lines.append(f"resumed with num_workers={have}, saved with {saved}: {same}")
        if other_size and (
            self.by_numbers or self.already_sharded
        ):  # else each rank reads all, and so as the first one did
            position = {**position, "workers": WorkerStates().position(have)}
            if self.already_sharded:
                position["state"] = None
            if self.other_size_note:
                lines.append(self.other_size_note)
        self._generators.seek(position["generators"], ended=ended)
        self._sought, self._other_size = position, other_size
        if ended:
            self._record = WorkerStates()
            self._restore_workers(position, inside=False, given=None)
            self._restore_data(position, None)
        return "; ".join(lines) or None

    @property
    def other_size_note(self) -> str | None:
        """A line on what differs after a resume on another number of processes; None where nothing does."""
        if not self._loader.num_workers or not (self.by_numbers or self.already_sharded):
            return None
        return "resumed on another number of processes: the rows are the same, the random draws of workers are not"

    def _way(self, sought: dict[str, Any] | None) -> str:
        """Return how the first batches are left out: "skip" in the order, read "past", or the data "seek" them."""
        loader = self._loader
        if sought is not None and self._stateful is not None and not self._stateful.rows_by_number:
            return "seek"
        draws_on = not loader.num_workers and sought is not None and sought["draws_on"] and not self._cuts
        past = isinstance(loader.dataset, IterableDataset) or iterates_itself(loader) or not has_twin(loader)
        return "past" if past or draws_on else "skip"

    def _restore_workers(self, position: dict[str, Any], *, inside: bool, given: int | None) -> None:
        """Restore the random states of the workers of the saved run."""
        workers, attributes = position["workers"], vars(self._loader)
        record = self._record
        if workers["number"] != self._loader.num_workers or not has_twin(self._loader):
            return
        persistent = self._loader.persistent_workers
        if persistent:
            attributes["_iterator"] = None  # its workers have another history
        if workers["seed"] is None or not (inside or persistent):
            return
        record.restore(workers, given=given, inside=inside)
        if persistent and (not inside or workers["persisted"]):
            self._order.closed = True
            try:
                with rng_preserved(self._generators.found):
                    attributes["_iterator"] = self._made(twin(self._loader, self._order), seed=workers["seed"])
            finally:
                self._order.closed = False

    def _restore_data(self, position: dict[str, Any], given: int | None) -> None:
        if self._stateful is not None:
            self._stateful.seek(position["state"], given=given)

    def _opened(self, skip: int) -> Iterator[Any]:
        """A pass that begins after `skip` batches of the order, which are pulled at once, with the random state now."""
        loader, order = self._loader, self._order
        order.skip = skip
        if self._cuts:
            from trainwright.data.slicing import Dealt

            lists = loader.batch_sampler is not None
            order.deals = partial(Dealt, part=self._part, most=self._most, by_lists=lists)
        elif self.must_resume and not draws_at_most_at_first(_index_sampler(loader)):
            order.moved = self._note_draws
        try:
            iterator = self._iterator()
            if not loader.num_workers:
                order.pass_over()
        except RuntimeError as error:
            pool = vars(loader).get("_iterator")
            if isinstance(pool, Workers):
                pool.explain(error)
            raise
        finally:
            order.skip, order.moved, order.once_more, order.deals = 0, None, False, None
        return iterator

    def _iterator(self) -> Iterator[Any]:
        """A pass over the loader; one apart where its persistent workers are not to be taken from another pass."""
        loader: Any = self._loader
        order = self._order
        if has_twin(loader) and (loader.num_workers or order.skip or order.moved or order.once_more or order.deals):
            loader = twin(loader, order, self._made if loader.num_workers else None)
        pool = vars(loader).get("_iterator")
        under_way = is_under_way(pool)
        apart = under_way if self._keeps_workers is None else not self._keeps_workers
        if apart and loader.persistent_workers and not self._sets_epoch:
            return iterator_of(loader)
        if isinstance(pool, Workers):
            pool.go_on(self._record, order, first=self._first())
        if type(self._loader) is not DataLoader or self._loader.num_workers:
            return iter(loader)
        from trainwright.data.dataloader.recognized import from_memory

        iterator = iter(loader)
        batches = from_memory(self._loader, iterator)
        self.in_memory = batches is not iterator
        return batches

    def _made(self, stand_in: Any, seed: int | None = None) -> Workers:
        """New workers of the loader."""
        stand_in.check_worker_number_rationality()
        carries = stand_in.persistent_workers or (self._role == "train" and self.must_resume is not False)
        carrying = Carrying(stand_in.collate_fn) if carries else None
        part = self._part or _ALONE
        starting = Starting(stand_in.worker_init_fn, self._record.states, carrying, part=part)
        collate = {} if carrying is None else {"collate_fn": carrying}
        dressed = view(stand_in, self._order, worker_init_fn=starting, **collate)
        apart = self._cuts or self.already_sharded  # else workers read what those of every process read
        return Workers(dressed, self._record, seed=seed, first=self._first(), rank=part.rank if apart else 0)

    def _first(self) -> int:
        """The worker whose turn it is in a pass that begins in the middle."""
        loader: Any = self._loader
        return self._order.skip % loader.num_workers if getattr(loader, "in_order", True) else 0

    def _note_draws(self) -> None:
        if not self._draws_on:
            refuse_draws(_index_sampler(self._loader), workers=self._loader.num_workers, role=self._role)
        self._draws_on = True

    def _dealt(self) -> int | None:
        """Rows that torch's own BatchSampler deals; None where another one does, or rows come unnumbered."""
        batch_sampler = self._loader.batch_sampler
        if type(batch_sampler) is not BatchSampler or isinstance(self._loader.dataset, IterableDataset):
            return None
        return length_of(batch_sampler.sampler)

    def _no_batches(self) -> DataError:
        loader, data_set = self._loader, self._loader.dataset
        rows = self._dealt() if self._dealt() is not None else length_of(data_set)
        what, want, fix = f"an epoch of the {type(loader).__name__} had no batch", "at least one batch per epoch", ""
        if rows == 0:
            what = f"data set of 0 rows in the {type(loader).__name__}"
        elif rows is not None and self._drops_last and self.batch_size is not None and rows < self.batch_size:
            what = f"{rows} rows, batch_size {self.batch_size}, drop_last=True leaves 0 batches"
            fix = f"drop_last=False, or a batch_size of at most {rows}"
        elif isinstance(data_set, IterableDataset):
            want = f"{type(data_set).__name__}.__iter__ to give a fresh iterator with rows in each epoch"
        else:
            sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
            want = f"at least one batch of {rows} rows from {type(sampler).__name__}"
        return DataError(f"{self._role} data: {what}", want=want, fix=fix)


def _index_sampler(loader: DataLoader[Any]) -> Any:
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def _why_inexact(loader: DataLoader[Any]) -> Iterator[str]:
    """Yield the reasons why a resume inside an epoch may be inexact, each with a fix."""
    name, data_name = type(loader).__name__, type(loader.dataset).__name__
    same = "exact only if they give the same again"
    if is_stateful(loader):
        if loader.num_workers:
            yield f"random draws in the workers of {name} are as exact as its state_dict makes them"
        return
    if not getattr(loader, "in_order", True) and loader.num_workers:
        yield "in_order=False gives batches as they come: a resume may repeat and leave out rows; write in_order=True"
    if isinstance(loader.dataset, IterableDataset):
        if loader.num_workers or not is_stateful(loader.dataset):
            yield f"a resume reads the training data ({data_name}) up to where they stood: {same}"
    elif iterates_itself(loader) or not has_twin(loader):
        yield f"a resume reads the training data again ({name} iterates in its own way): {same}"
    elif loader.persistent_workers and not isinstance(getattr(loader, "_iterator", None), Workers | None):
        yield "the persistent workers were started before fit: their random draws do not resume; give fit a new loader"
    hidden = hidden_in(loader.dataset)
    if hidden and not is_stateful(loader.dataset):
        yield f"{hidden} is a generator that no checkpoint holds; give {data_name} state_dict and load_state_dict"
