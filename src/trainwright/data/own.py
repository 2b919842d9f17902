"""`batches(...)`: a data set cut into batches, in an order that depends on (seed, epoch) alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from trainwright.base.errors import DataError, SettingError, message, not_built
from trainwright.data.arrays import Table, TableRows, table_of
from trainwright.data.asked import Asked
from trainwright.data.generators import Generators, hidden_in, knows_its_state
from trainwright.data.order import Order, asked_again, draws_at_most_at_first, refuse_draws, watched
from trainwright.data.position import check_facts, length_of, opened, tell_epoch
from trainwright.data.seeded import SeededRows, mixed


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
) -> Batches:
    """Batches of `batch_size` rows of a data set; each pass over the result is the next epoch.

    `data` is a map-style `Dataset`, a tensor, an array, or a tuple or dict of equally long ones; a batch of arrays
    is the same container of tensors. The order is a function of (seed, epoch); `seed=None` is drawn once from
    torch's global generator at the first pass and kept in the state. A data set's own random draws depend on
    (seed, epoch, row), and leave the generators of the process as they were. `sampler` gives row numbers instead.
    `workers` is the number of worker processes; "auto" takes none. Raises DataError for data without a batch.
    """
    if per_rank is not None:
        raise not_built("batches(per_rank=...)", "batches(data, batch_size): rows over all processes")
    dealing = Dealing(batch_size=batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last, workers=workers)
    if collate is not None and not callable(collate):
        raise SettingError(message(f"collate={collate!r}", want="a function from a list of rows to a batch"))
    _check_sampler(sampler, dealing)
    return Batches(_rows_of(data, collate), dealing, sampler)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealing:
    """How the rows of a data set are dealt into batches."""

    batch_size: int | None
    shuffle: bool = False
    seed: int | None = None
    drop_last: bool = False
    workers: int | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        for name, value in (("batch_size", self.batch_size), ("seed", self.seed), ("workers", self.workers)):
            if (name == "seed" and value is None) or (name == "workers" and value == "auto"):
                continue
            least = {"batch_size": 1, "workers": 0}.get(name)
            if not isinstance(value, int) or isinstance(value, bool) or (least is not None and value < least):
                want = "a whole number" + ("" if least is None else f", at least {least}")
                fix = "batches(data, 64)" if name == "batch_size" else ""
                raise SettingError(message(f"batches({name}={value!r})", want=want, fix=fix))
        for name, flag in (("shuffle", self.shuffle), ("drop_last", self.drop_last)):
            if not isinstance(flag, bool):
                raise SettingError(message(f"batches({name}={flag!r})", want="True or False"))

    @property
    def size(self) -> int:
        """Rows of a full batch."""
        assert self.batch_size is not None
        return self.batch_size

    def length(self, rows: int) -> int:
        """Batches of `rows` rows."""
        return rows // self.size if self.drop_last else -(-rows // self.size)


class Batches:
    """A data set, dealt into batches; made by `batches`."""

    repeatable = True
    must_resume: bool | None = None
    """Whether a checkpoint may be asked for: then what could not be resumed is refused when it shows."""
    _tells_epoch = True
    """Whether data set and sampler hear which epoch it is."""

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
        self._loaded: dict[str, Any] | None = None
        dealt = len(rows) if sampler is None else length_of(sampler)
        self.batch_size: int | None = dealing.size
        self.length = None if dealt is None else dealing.length(dealt)
        self.rows = None if dealt is None else min(dealt, dealing.length(dealt) * dealing.size)
        self.draws_global_rng = not (sampler is None or isinstance(sampler, list | tuple | range | Tensor))
        self._check_filled(dealt)

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError(f"the sampler {type(self._sampler).__name__} has no length")
        return self.length

    def __iter__(self) -> Iterator[Any]:
        self._passes += 1
        return self.epoch(self._passes - 1)

    def describe(self) -> str:
        """Rows, batch size, order."""
        order = "shuffled" if self._dealing.shuffle else "in order"
        order = order if self._sampler is None else f"by {type(self._sampler).__name__}"
        rows = "" if self.rows is None else f"{self.rows:,} rows in "
        return f"{rows}batches of {self.batch_size} from {self._data.describe()}, {order}"

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

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        """Go on with a saved seed; DataError where the data are dealt otherwise than when it was saved."""
        have, saved = self.facts(), dict(tree["facts"])
        if self._dealing.seed is not None:
            have["seed"], saved["seed"] = self._dealing.seed, tree["seed"]
        what = "the data are dealt into batches otherwise than when the state was saved"
        check_facts(have, saved, what=what, fix="write batches(...) as it was")
        self._generators.load_state_dict(tree["generators"])
        self._seed, self._passes, self._loaded = tree["seed"], tree["passes"], tree

    def facts(self) -> dict[str, Any]:
        """What must not change between a save and a resume."""
        dealing = self._dealing
        sampled = self._sampler is not None
        return {
            "rows": len(self._data),
            "batch_size": dealing.size,
            "shuffle": dealing.shuffle,
            "drop_last": dealing.drop_last,
            "sampler": sampled,
        }

    def _begun(self, epoch: int, skip: int) -> Iterator[Any]:
        seed = self._settled_seed()
        if self._dealing.workers not in ("auto", 0):
            return self._by_workers(seed, epoch, skip)
        if isinstance(self._data, Table) and self._sampler is None:
            return self._data.batches(self._order(seed, epoch), self._dealing.size, self._left(skip))
        return self._fetched(seed, epoch, self._dealt(seed, epoch, skip))

    def _check_filled(self, dealt: int | None) -> None:
        if not len(self._data):
            raise DataError(message("data set of 0 rows", want="at least one row"))
        if dealt == 0:
            raise DataError(message(f"the sampler {type(self._sampler).__name__} gives 0 rows", want="at least one"))
        if self.length == 0:
            raise DataError(
                message(
                    f"{dealt} rows, batch_size {self.batch_size}, drop_last=True leaves 0 batches",
                    fix=f"drop_last=False, or a batch_size of at most {dealt}",
                )
            )

    def _settled_seed(self) -> int:
        # Arrays in their own order draw nothing, so that nothing is drawn for them.
        if self._seed is None and (self._dealing.shuffle or isinstance(self._data, SeededRows)):
            self._seed = int(torch.empty((), dtype=torch.int64).random_())
        return self._seed or 0

    def _order(self, seed: int, epoch: int) -> Tensor | None:
        if not self._dealing.shuffle:
            return None
        generator = torch.Generator().manual_seed(mixed(seed, epoch) & 0xFFFFFFFF)
        return torch.randperm(len(self._data), generator=generator)

    def _left(self, skip: int) -> range:
        """The positions of the epoch that are left after `skip` batches."""
        assert self.rows is not None
        return range(min(skip * self._dealing.size, self.rows), self.rows)

    def _dealt(self, seed: int, epoch: int, skip: int) -> Iterator[Sequence[int]]:
        """The row numbers of each batch."""
        if self._sampler is not None:
            dealt = self._sampled(self._sampler)
            if self.must_resume and not draws_at_most_at_first(self._sampler):
                dealt = watched(dealt, self._note_draws)
            return opened(dealt, skip, name="the sampler", complaint=self._empty_sampler)
        size, left, order = self._dealing.size, self._left(skip), self._order(seed, epoch)
        parts = (left[start : start + size] for start in range(0, len(left), size))
        return parts if order is None else (order[part.start : part.stop].tolist() for part in parts)

    def _sampled(self, sampler: Iterable[int]) -> Iterator[Sequence[int]]:
        numbers = asked_again(sampler, iter(sampler)) if self._asks_again else iter(sampler)
        while rows := list(islice(numbers, self._dealing.size)):
            if len(rows) < self._dealing.size and self._dealing.drop_last:
                return
            yield [self._row_number(row) for row in rows]

    def _note_draws(self) -> None:
        if not self._draws_on:
            workers = 0 if self._dealing.workers == "auto" else self._dealing.workers
            refuse_draws(self._sampler, workers=workers, role="train")
        self._draws_on = True

    def _row_number(self, row: Any) -> int:
        number = row if isinstance(row, int) else int(row) if hasattr(row, "__index__") else None
        if number is None or not 0 <= number < len(self._data):
            raise DataError(
                message(
                    f"the sampler {type(self._sampler).__name__} gave {row!r}",
                    want=f"a row number from 0 to {len(self._data) - 1}",
                    fix="for a batch sampler write DataLoader(data, batch_sampler=...)" if number is None else "",
                )
            )
        return number

    def _empty_sampler(self) -> DataError:
        what = f"the sampler {type(self._sampler).__name__} gave not one batch of {self.batch_size} rows"
        return DataError(message(what, have=f"drop_last={self._dealing.drop_last}", want="at least one batch"))

    def _fetched(self, seed: int, epoch: int, dealt: Iterator[Sequence[int]]) -> Iterator[Any]:
        fetch = self._data.fetch
        for rows in dealt:
            yield fetch(seed, epoch, rows)

    def _by_workers(self, seed: int, epoch: int, skip: int) -> Iterator[Any]:
        from trainwright.data.pool import Record, Workers
        from trainwright.data.twin import view
        from trainwright.data.worker import Starting

        loader: Any = DataLoader(
            _Jobs(self._data),
            batch_size=None,
            num_workers=int(self._dealing.workers),
            collate_fn=_as_it_is,
            # A generator of our own: the loader's draw must not move the global one.
            generator=torch.Generator().manual_seed(mixed(seed, epoch, 1) & 0xFFFFFFFF),
        )
        jobs = (_Job(seed, epoch, rows) for rows in self._dealt(seed, epoch, skip))
        starting = Starting(None, {}, None)
        return Workers(view(loader, Order(jobs, name=self.describe()), worker_init_fn=starting), Record())


class _Job(NamedTuple):
    """What a worker process is asked for."""

    seed: int
    epoch: int
    rows: Sequence[int]


class _Jobs(torch.utils.data.Dataset[Any]):
    """A data set of jobs: each gives a batch."""

    def __init__(self, data: Table | SeededRows) -> None:
        self._data = data

    def __getitem__(self, job: _Job) -> Any:
        return self._data.fetch(*job)


def _as_it_is(batch: Any) -> Any:
    return batch


def _check_sampler(sampler: Any, dealing: Dealing) -> None:
    if sampler is None:
        return
    if dealing.shuffle:
        raise SettingError(message("batches(shuffle=True, sampler=...)", want="one of the two", fix="leave one out"))
    if hasattr(sampler, "__next__") or not hasattr(sampler, "__iter__"):
        raise SettingError(
            message(
                f"batches(sampler={type(sampler).__name__})",
                want="row numbers that can be iterated anew in each epoch",
                fix="a list, or an object of a torch Sampler class",
            )
        )


def _rows_of(data: Any, collate: Callable[[list[Any]], Any] | None) -> Table | SeededRows:
    table = table_of(data)
    if table is not None:
        return table if collate is None else SeededRows(TableRows(table), collate)
    if isinstance(data, Batches | DataLoader | IterableDataset) or not _is_map_style(data):
        raise DataError(
            message(
                f"batches({type(data).__name__}, ...): no data set of rows",
                want="a map-style Dataset (len and []), a tensor, an array, or a tuple or dict of equally long ones",
                fix=_instead(data),
            )
        )
    _refuse_list_of_columns(data)
    return SeededRows(data, collate)


def _is_map_style(data: Any) -> bool:
    named = isinstance(data, str | bytes | type) or hasattr(data, "iloc")
    return hasattr(data, "__getitem__") and hasattr(data, "__len__") and not named


def _instead(data: Any) -> str:
    if isinstance(data, Batches | DataLoader):
        return "it has batches already: use it as it is"
    if isinstance(data, IterableDataset):
        return "DataLoader(data, batch_size=...)"
    return "data.to_numpy()" if hasattr(data, "iloc") else ""


def _refuse_list_of_columns(data: Any) -> None:
    if not isinstance(data, list) or not 2 <= len(data) <= 8 or not all(hasattr(one, "shape") for one in data):
        return
    shapes = [tuple(one.shape) for one in data]
    if len(set(shapes)) > 1:
        raise DataError(
            message(
                "batches([...]): the items of a list are rows, and these rows differ in shape",
                have=", ".join(map(str, shapes)),
                want="a tuple for the columns of one data set",
                fix="batches((x, y), ...)",
            )
        )
