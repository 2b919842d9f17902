"""Sources of ready batches: iterables, endless streams cut into epochs, the first batches of other data, no data."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice, repeat
from typing import Any

from trainwright.core.errors import DataError
from trainwright.core.rng import random_state, rng_preserved, set_random_state
from trainwright.data.data_state import is_inside_pass, no_state_error, stateful_data
from trainwright.data.dataloader.order import restarted_if_empty
from trainwright.data.sharding import (
    is_alone_in_job,
    read_completely,
    read_own_part,
    refuse_sharding_sampler,
    saved_by_other_size,
    slice_batches,
    unsharded_stream,
)
from trainwright.data.source import (
    Source,
    begin_after,
    drop_first,
    length_of,
    set_epoch,
    shallow_copy,
)
from trainwright.distributed.mesh import Shard, Slice

_END = object()


class ReadyBatches(Source):
    """Ready batches from a list or any iterable, read when the loop needs them, and not changed."""

    kind = "ready batches"
    _sets_epoch = True
    """Whether `set_epoch` of the data is called."""

    def __init__(self, data: Any, role: str) -> None:
        self._data = data
        self._role = role
        self.length = length_of(data)
        self._own_length = self.length
        """Batches per epoch; `_own_length`: the length on this rank, which may be its part of the data."""
        self._stateful = stateful_data(data)
        self._epoch = -1
        self.repeatable = not hasattr(data, "__next__")
        self.draws_global_rng = not isinstance(data, list)
        if self.length == 0:
            raise self._no_batches()

    def describe(self) -> str:
        """Return the class and the number of batches as text."""
        name = type(self._data).__name__
        several = "batches" if self.length != 1 else "batch"
        own = " on each process" if self._part is not None and self.is_own_part else ""
        return f"a {name} of batches{own}" if self.length is None else f"a {name} of {self.length:,} {several}"

    def shard(self, part: Shard | None) -> None:
        """Make `epoch` yield this rank's `Slice` of each batch; None: complete batches.

        DataError for a stream, which each rank would read completely, and for data that shard rows themselves.
        """
        if part is not None and not self.is_own_part:
            refuse_sharding_sampler(self._data, role=self._role, processes=part.size, batch_size=None)
            if self._own_length is None:
                raise unsharded_stream(self._data, role=self._role, processes=part.size)
        self._part = part
        self.length = None if part is not None and self.is_own_part else self._own_length

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[Any]:
        """Return the batches after the first `skip`, which are read and dropped unless the data have a state."""
        if self._other_size and skip and self.is_own_part:
            raise saved_by_other_size(self.describe(), role=self._role)
        if self._part is None and (isinstance(self._data, list) or not is_alone_in_job()):
            return self._begin_pass(epoch, skip)
        begin = partial(self._begin_pass, epoch, skip)
        if self._part is None or self.is_own_part:
            return read_own_part(begin, self._part, aligned=not skip)
        if isinstance(self._data, list):
            return slice_batches(begin(), self._part, self.describe())
        return read_completely(begin, self._part, name=self.describe())

    def _begin_pass(self, epoch: int, skip: int) -> Iterator[Any]:
        sought, self._sought = self._sought, None
        if self._role == "train" and self._sets_epoch:
            set_epoch(epoch, self._data)
            if self.length is not None:
                self.length = length_of(self._data)  # may change between epochs
        if not skip and isinstance(self._data, list) and self._data:
            return iter(self._data)
        if self._stateful is None:
            return self._begin_after(skip)
        self._epoch = epoch
        if sought is None or sought["state"] is None:
            return self._stateful.count(self._begin_after(skip), skip)
        inside = sought["epoch"] == epoch
        self._stateful.seek(sought["state"], given=skip if inside else None)
        left = iter(self._data) if inside else restarted_if_empty(self._data, iter(self._data))
        return self._stateful.count(left, skip)

    def _begin_after(self, skip: int) -> Iterator[Any]:
        """Return the batches after the first `skip`."""
        batches: Iterator[Any] = iter(self._data)
        if self._part is None or not self.is_own_part:
            return begin_after(batches, skip, name=self.describe(), error=self._no_batches)
        deque(islice(batches, skip), maxlen=0)  # this rank's part may be empty, or end earlier than others
        return batches

    def commit(self) -> None:
        """Record that all batches yielded so far were trained."""
        if self._stateful is not None:
            self._stateful.commit()

    def fingerprint(self) -> dict[str, Any]:
        """Return the properties of the data that must be the same at a save and a resume."""
        return {"batches": None if self.is_own_part else self._own_length}

    @property
    def resume_caveat(self) -> str:
        """A line on what may be inexact in a resume inside an epoch, with a fix; empty if all is exact."""
        if isinstance(self._data, list) or self._stateful is not None:
            return ""
        name, again = type(self._data).__name__, "exact only if it yields the same batches again"
        if not self.repeatable:
            return f"a resume reads a new {name} up to the saved position: {again}; batches(...) reads nothing twice"
        return f"a resume reads {name} up to the saved position: {again}; give it state_dict and load_state_dict"

    def independent_copy(self) -> ReadyBatches:
        """Return a copy with a separate position, which does not call `set_epoch`."""
        other = shallow_copy(self)
        other._sets_epoch, other._stateful, other._sought = False, None, None
        return other

    def _position(self) -> dict[str, Any]:
        """Return the state of the data, if any; without one, the number of batches is the position."""
        return {"epoch": self._epoch, "state": None if self._stateful is None else self._stateful.position()}

    def _seek(self, position: dict[str, Any], *, ended: bool) -> str | None:
        """Set the data to a saved position, if no epoch follows.

        With another number of ranks, data with a separate part per rank can continue only at the start of an epoch.
        """
        if self._other_size and self.is_own_part:
            self._sought = position = {**position, "state": None}
        if ended and self._stateful is not None and position["state"] is not None:
            self._stateful.seek(position["state"], given=None)
            if is_inside_pass(self._data):
                self._stateful.seek(position["state"], given=None)
        return None

    def _no_batches(self) -> DataError:
        if self.repeatable:
            what = f"{self._role} data: {self.describe()} had no batch in this epoch"
            return DataError(what, want="at least one batch per epoch")
        return DataError(
            f"{self._role} data: the {type(self._data).__name__} is exhausted: it yields its batches once",
            want="batches that can be read again in each epoch",
            fix="a function that makes them again, `lambda epoch: make(epoch)`, or a list of the batches",
        )


class Continuing(Source):
    """A source whose epochs are consecutive parts of one stream: each continues where the previous one ended.

    At the end of the stream, the next pass starts; a source that is not repeatable ends there. The object is its own
    iterator, so that the next epoch continues where the loop has stopped.
    """

    kind = "data cut into epochs by a number of updates"
    _common: dict[str, Any] | None = None
    """The random state at the start of the next pass, equal on all ranks."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.batch_size = source.batch_size
        self.repeatable = source.repeatable
        self.draws_global_rng = source.draws_global_rng
        self._stream: Iterator[Any] | None = None
        self._epoch = -1
        self._pass = -1
        self._random: dict[str, Any] | None = None
        self._taken = 0
        """The number of batches taken from the current pass."""
        self._given = 0
        """The number of batches yielded in the current epoch."""
        self._committed = (0, 0)
        """Both numbers at the last commit."""
        self._before: dict[str, Any] | None = None
        """The position at the last commit, if its pass has ended since then."""

    def inner(self) -> Mapping[str, Source]:
        """Return the inner source."""
        return {"": self._source}

    def fingerprint(self) -> dict[str, Any]:
        """Return the properties of the data that must be the same at a save and a resume."""
        return self._source.fingerprint()

    def commit(self) -> None:
        """Record that all batches yielded so far were trained."""
        self._committed, self._before = (self._taken, self._given), None
        super().commit()

    def independent_copy(self) -> Continuing:
        """Return a copy with a separate position."""
        return shallow_copy(self)

    def describe(self) -> str:
        """Return a description of the source."""
        return f"{self._source.describe()}, continuing over the epochs"

    def shard(self, part: Shard | None) -> None:
        """Make `epoch` yield this rank's `Slice` of each batch; None: complete batches."""
        self._source.shard(part)
        self._part, self.batch_size = part, self._source.batch_size

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[Any]:
        """Return the next epoch of the stream; `skip`: its batches that were trained before a resume."""
        sought, self._sought = self._sought, None
        if self._part is not None and self._common is None:
            self._common = random_state()
        if sought is None:
            self._given = 0
            drop_first(self, skip, self._source.describe())
        elif sought["epoch"] == epoch and sought["given"] != skip:
            raise no_state_error(sought["given"], skip)
        else:
            self._rebuild_pass(sought)
        self._epoch, self._given, self._committed, self._before = epoch, skip, (self._taken, skip), None
        return self

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = _END if self._stream is None else next(self._stream, _END)
        if batch is _END:
            if not self.repeatable and self._given:
                raise StopIteration
            if self._before is None:
                self._before = self.position()
            self._begin_pass(self._pass + 1)
            assert self._stream is not None
            batch = next(self._stream)
        self._taken += 1
        self._given += 1
        return batch

    def position(self) -> Any:
        """Return the current pass, the number of batches taken from it, and the state from which to rebuild it."""
        return self._before or super().position()

    def _position(self) -> dict[str, Any]:
        return {
            "epoch": self._epoch,
            "given": self._committed[1],
            "pass": self._pass,
            "taken": self._committed[0],
            "random": self._random,
            "next": self._common,
            "source": self._source.position(),
        }

    def _seek(self, position: dict[str, Any], *, ended: bool) -> str | None:
        """Set the source to a saved position, if no epoch follows."""
        if ended and self.repeatable:
            self._source.seek(position["source"], other_size=self._other_size, ended=True)
        elif ended:
            self._rebuild_pass(position)
        return self.other_size_note if self._other_size else None

    def _begin_pass(self, number: int, skip: int = 0) -> None:
        self._pass, self._taken = number, skip
        if self._part is None:
            self._random = random_state() if self.draws_global_rng else None
            self._stream = self._source.epoch(number, skip)
            return
        with rng_preserved():  # ranks start a pass at different times, but with the same random state
            assert self._common is not None
            self._random = self._common
            set_random_state(self._common)
            self._stream = self._source.epoch(number, skip)
            self._common = random_state()

    def _rebuild_pass(self, position: dict[str, Any]) -> None:
        """Start the saved pass again, after the batches that were taken from it."""
        self._source.seek(position["source"], other_size=self._other_size)
        if self._part is not None:
            self._common = random_state() if position["random"] is None else position["random"]
        self._stream, self._pass, self._taken = None, max(position["pass"] - 1, -1), 0
        if position["taken"]:
            # The pass draws from its saved random state; the current global state is preserved.
            with rng_preserved():
                if position["random"] is not None and self._part is None:
                    set_random_state(position["random"])
                self._begin_pass(position["pass"], position["taken"])
            if self._part is not None and position["next"] is not None:
                self._common = position["next"]  # a pass that skips batches makes more draws than one that starts


class NoData(Source):
    """The source of `fit(None)`: an endless sequence of None; the steps make their data."""

    kind = "data that the steps make"
    repeatable = False
    is_own_part = True

    def describe(self) -> str:
        """Return a short description for the header of the console."""
        return self.kind

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[Any]:
        """Return None for each batch; with several ranks, slices of one row each."""
        return repeat(None) if self._part is None else repeat(Slice(None, 1, self._part.size))

    def shard(self, part: Shard | None) -> None:
        """Set the part of this rank, which makes its own data."""
        self._part = part


class FirstBatches(Source):
    """The first `most` batches of each pass over other data, for a partial evaluation."""

    def __init__(self, source: Source, most: int) -> None:
        self._source, self.most = source, most
        length = source.length
        self.length = None if length is None else min(length, most)
        self.limit = f"first {most} batches" if length is None else f"first {most} of {length} batches"
        self.repeatable, self.draws_global_rng = source.repeatable, source.draws_global_rng
        self.batch_size, self.is_own_part = source.batch_size, source.is_own_part

    @property
    def generators(self) -> Sequence[Any]:
        """The random generators from which the data draw, besides the global ones."""
        return self._source.generators

    def independent_copy(self) -> FirstBatches:
        """Return a copy with a separate position."""
        return FirstBatches(self._source.independent_copy(), self.most)

    def describe(self) -> str:
        """Return a description of the data and of the included batches."""
        return f"{self._source.describe()}: {self.limit}"

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[Any]:
        """Return the first batches of a pass; no other batch is read."""
        return islice(self._source.epoch(epoch, skip), max(0, self.most - skip))

    def fingerprint(self) -> dict[str, Any]:
        """Return the fingerprint of the data."""
        return self._source.fingerprint()


def first_batches(source: Source, most: int | None) -> Source:
    """Return a source of the first `most` batches of each pass; the source itself if it has no more."""
    has_more = most is not None and (source.length is None or source.length > most)
    return FirstBatches(source, most) if most is not None and has_more else source
