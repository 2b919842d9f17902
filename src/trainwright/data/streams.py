"""Ready batches, with a length or without, and an endless stream that epochs are cut from."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch

from trainwright.core.errors import DataError
from trainwright.core.rng import random_state, rng_preserved, set_random_state
from trainwright.data.dataloader.order import asked_again
from trainwright.data.dataloader.position import (
    CUT,
    READY,
    check_facts,
    check_kind,
    length_of,
    opened,
    set_epoch,
    skipped,
)
from trainwright.data.generators import is_inside_pass
from trainwright.data.sharding import is_alone_in_job, saved_by_other_size
from trainwright.data.source import Source, shallow_copy
from trainwright.data.stateful import own_state_of
from trainwright.distributed.mesh import Shard

_END = object()


class ReadyBatches(Source):
    """Ready batches: a list, or any iterable of them.

    A batch is read only when the loop needs it, and passed on as it is.
    """

    own_length: int | None = None
    """Batches of an epoch on this rank, where it has data of its own; else as `length`."""
    _other_size = False
    """Whether another number of processes saved the loaded state."""
    _sets_epoch = True
    """Whether `set_epoch` of the data is called."""

    def __init__(self, data: Any, role: str) -> None:
        self._data = data
        self._role = role
        self.length = length_of(data)
        self.own_length = self.length  # pyright: ignore[reportIncompatibleMethodOverride]
        """Batches of an epoch; `own_length` is what the data tell on this process, whose own they may be."""
        self._own_state = own_state_of(data)
        self._loaded: dict[str, Any] | None = None
        self._epoch = -1
        self.repeatable = not hasattr(data, "__next__")
        self.draws_global_rng = not isinstance(data, list)
        if self.length == 0:
            raise self._no_batches()

    def describe(self) -> str:
        """Return the class and the number of batches."""
        name = type(self._data).__name__
        several = "batches" if self.length != 1 else "batch"
        own = " on each process" if self._part is not None and self.sharded else ""
        return f"a {name} of batches{own}" if self.length is None else f"a {name} of {self.length:,} {several}"

    def deal(self, part: Shard | None) -> None:
        """Have `epoch` yield a `Slice` of each batch: the part of this rank; None: complete batches again.

        DataError for a stream, which each process would read whole, and for data that deal rows to processes.
        """
        if part is not None and not self.sharded:
            from trainwright.data.dataloader.slicing import refuse_what_knows_its_rank, unshared

            refuse_what_knows_its_rank(self._data, role=self._role, processes=part.size, batch_size=None)
            if self.own_length is None:
                raise unshared(self._data, role=self._role, processes=part.size)
        self._part = part
        self.length = None if part is not None and self.sharded else self.own_length

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[Any]:
        """Return the batches of a pass; its first `skip` are read and dropped, unless the data save their position."""
        if self._other_size and skip and self.sharded:
            raise saved_by_other_size(self.describe(), role=self._role)
        if self._part is None and (isinstance(self._data, list) or not is_alone_in_job()):
            return self._begun(epoch, skip)
        from trainwright.data.cutting import cut_batches
        from trainwright.data.dataloader import slicing

        begin = partial(self._begun, epoch, skip)
        if self._part is None or self.sharded:
            return slicing.own(begin, self._part, aligned=not skip)
        if isinstance(self._data, list):
            return cut_batches(begin(), self._part, self.describe())
        return slicing.read_whole(begin, self._part, name=self.describe())

    def _begun(self, epoch: int, skip: int) -> Iterator[Any]:
        loaded, self._loaded = self._loaded, None
        if self._role == "train" and self._sets_epoch:
            set_epoch(epoch, self._data)
            if self.length is not None:
                self.length = length_of(self._data)  # data may have other lengths from epoch to epoch
        if not skip and isinstance(self._data, list) and self._data:
            return iter(self._data)
        if self._own_state is None:
            return self._read_past(skip)
        self._epoch = epoch
        if loaded is None or loaded["asked"] is None:
            return self._own_state.counted(self._read_past(skip), skip)
        inside = loaded["epoch"] == epoch
        self._own_state.load(loaded["asked"], given=skip if inside else None)
        left = iter(self._data) if inside else asked_again(self._data, iter(self._data))
        return self._own_state.counted(left, skip)

    def _read_past(self, skip: int) -> Iterator[Any]:
        """Return the batches after the first `skip`."""
        batches: Iterator[Any] = iter(self._data)
        if self._part is None or not self.sharded:
            return opened(batches, skip, name=self.describe(), complaint=self._no_batches)
        deque(islice(batches, skip), maxlen=0)  # one part may be empty, or end before others
        return batches

    def seek_loaded(self) -> None:
        """Seek the loaded position at once: no epoch follows, but another `fit` reads the data."""
        if self._loaded is None or self._own_state is None or self._loaded["asked"] is None:
            return
        self._own_state.load(self._loaded["asked"], given=None)
        if is_inside_pass(self._data):
            self._own_state.load(self._loaded["asked"], given=None)

    def at_boundary(self) -> None:
        """Record that all batches given so far are trained on."""
        if self._own_state is not None and self.must_resume is not False:
            self._own_state.at_boundary()

    def facts(self) -> dict[str, Any]:
        """Return the properties of the data that must not change between a save and a resume."""
        return {"batches": None if self.sharded else self.own_length}

    @property
    def resumes(self) -> str:
        """A line on what may be inexact in a resume inside an epoch, with a fix; empty where nothing is."""
        if isinstance(self._data, list) or self._own_state is not None:
            return ""
        name, again = type(self._data).__name__, "exact only if it gives the same batches again"
        if not self.repeatable:
            return f"a resume reads a new {name} up to where this one stood: {again}; batches(...) reads nothing twice"
        return f"a resume reads {name} up to where it stood: {again}; give it state_dict and load_state_dict"

    def beside(self) -> ReadyBatches:
        """Return a copy for a pass beside training: the epoch of the data stays as it is."""
        other = shallow_copy(self)
        other._sets_epoch, other._own_state, other._loaded = False, None, None
        return other

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the data; without one the position is the number of batches that were read."""
        asked = None if self._own_state is None else self._own_state.state_dict()
        return self._loaded or {"epoch": self._epoch, "facts": self.facts(), "asked": asked}

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        """Load a saved state, for the next epoch; DataError where the number of batches is another one."""
        check_kind(tree, READY)
        what = "the data are not what they were when the state was saved"
        check_facts(self.facts(), tree["facts"], what=what, fix="give the batches that the run was started with")
        self._loaded, self._other_size = tree, False

    def process_state(self) -> dict[str, Any]:
        """Return the state of this rank: that of the data."""
        return {"asked": self.state_dict()["asked"]}

    def load_process_state(self, tree: dict[str, Any] | None) -> str | None:
        """Load the state of this rank after the common one; None: another number of processes saved it.

        Then data of which each process has a part of its own go on only at the start of an epoch.
        """
        if self._loaded is not None and tree is not None:
            self._loaded = {**self._loaded, **tree}
        elif self._loaded is not None:
            self._other_size = True
            if self.sharded:
                self._loaded = {**self._loaded, "asked": None}
        return None

    def _no_batches(self) -> DataError:
        if self.repeatable:
            what = f"{self._role} data: {self.describe()} had no batch in this epoch"
            return DataError(what, want="at least one batch per epoch")
        return DataError(
            f"{self._role} data: the {type(self._data).__name__} is used up: it gives its batches once",
            want="batches that can be read again in each epoch",
            fix="a function that makes them anew, `lambda epoch: make(epoch)`, or a list of the batches",
        )


class Continuing(Source):
    """A source whose epochs are cut from one stream: each goes on where the last one stopped.

    Where the stream ends, the next pass begins; a source that cannot be repeated ends there. It is its own
    iterator, so that a loop that leaves an epoch early leaves the stream where it is.
    """

    _common: dict[str, Any] | None = None
    """The random state that the next pass begins with on all processes, where there are several."""

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
        """Batches taken from the pass in hand."""
        self._given = 0
        """Batches given to the epoch in hand."""
        self._boundary = 0
        """Batches given to the epoch when its window in hand was begun."""
        self._before: dict[str, Any] | None = None
        """The state at the end of the last pass, where the window in hand was begun in it."""
        self._loaded: dict[str, Any] | None = None

    @property
    def must_resume(self) -> bool | None:
        """Whether a checkpoint may be saved: data that could not be resumed are then refused."""
        return self._source.must_resume

    @must_resume.setter
    def must_resume(self, must: bool | None) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self._source.must_resume = must

    @property
    def resumes(self) -> str:
        """A line on what may be inexact in a resume inside an epoch, with a fix; empty where nothing is."""
        return self._source.resumes

    def facts(self) -> dict[str, Any]:
        """Return the properties of the data that must not change between a save and a resume."""
        return self._source.facts()

    def at_boundary(self) -> None:
        """Record that all batches given so far are trained on: a rollback of the next window ends here."""
        self._boundary, self._before = self._given, None
        self._source.at_boundary()

    @property
    def generators(self) -> list[torch.Generator]:
        """The random generators of the source, apart from the process's."""
        return list(self._source.generators)

    def beside(self) -> Continuing:
        """Return a copy for a pass beside training."""
        return shallow_copy(self)

    def describe(self) -> str:
        """Return a description of the source."""
        return f"{self._source.describe()}, going on over the epochs"

    def deal(self, part: Shard | None) -> None:
        """Have this rank be one of several; None: the only one."""
        self._source.deal(part)
        self._part, self.batch_size = part, self._source.batch_size

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[Any]:
        """Return the next epoch of the stream; `skip` batches of it were trained on before a resume."""
        loaded, self._loaded = self._loaded, None
        if self._part is not None and self._common is None:
            self._common = random_state()
        if loaded is not None:
            self._go_back(loaded, skip - (loaded["given"] if loaded["epoch"] == epoch else 0))
        else:
            self._given = 0
            skipped(self, skip, self._source.describe())
        self._epoch, self._given, self._boundary, self._before = epoch, skip, skip, None
        return self

    def seek_loaded(self) -> None:
        """Seek the loaded position at once: no epoch follows, but another `fit` reads the data."""
        if self._loaded is None:
            return
        if not self.repeatable:
            self._go_back(self._loaded, 0)
            return
        self._source.load_state_dict(self._loaded["source"])
        self._source.seek_loaded()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = _END if self._stream is None else next(self._stream, _END)
        if batch is _END:
            if not self.repeatable and self._given:
                raise StopIteration
            if self._given > self._boundary:
                self._before = self.state_dict()
            self._begin_pass(self._pass + 1)
            assert self._stream is not None
            batch = next(self._stream)
        self._taken += 1
        self._given += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The pass in hand, how much of it was taken, and what makes it again."""
        return self._loaded or {
            "epoch": self._epoch,
            "given": self._given,
            "pass": self._pass,
            "taken": self._taken,
            "random": self._random,
            "source": self._source.state_dict(),
            "before": self._before,
            **({} if self._part is None else {"process": self._source.process_state()}),
        }

    def process_state(self) -> dict[str, Any]:
        """What of the state is this process's own: how much it has read of which pass."""
        return self.state_dict()

    def load_process_state(self, tree: dict[str, Any] | None) -> str | None:
        """Load the state of this rank after the common one; None: another number of processes saved it."""
        if self._loaded is not None:
            self._loaded = {**self._loaded, "process": None, "before": None} if tree is None else tree
        return None if tree is not None else self._source.other_size_note

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        """Take over a saved position, for the next epoch; DataError where the source is another one."""
        check_kind(tree, CUT)
        what = "the data are not what they were when the state was saved"
        saved = tree["source"].get("facts", {}) if isinstance(tree["source"], dict) else {}
        check_facts(self.facts(), saved, what=what, fix="give the data that the run was started with")
        self._loaded = tree

    def _begin_pass(self, number: int, skip: int = 0) -> None:
        self._pass, self._taken = number, skip
        if self._part is None:
            self._random = random_state() if self.draws_global_rng else None
            self._stream = self._source.epoch(number, skip)
            return
        with rng_preserved():  # processes begin a pass at different times, and all with the same random state
            assert self._common is not None
            self._random = self._common
            set_random_state(self._common)
            self._stream = self._source.epoch(number, skip)
            self._common = random_state()

    def _go_back(self, loaded: dict[str, Any], by: int) -> None:
        """Make the saved pass again, up to `by` batches (0 or fewer) from where it was saved."""
        left = loaded["taken"] + by
        if left < 0 and loaded["before"] is not None:  # the window was begun in the pass before
            return self._go_back(loaded["before"], by + loaded["given"] - loaded["before"]["given"])
        self._source.load_state_dict(loaded["source"])
        if "process" in loaded:
            self._source.load_process_state(loaded["process"])
        if self._part is not None:
            self._common = random_state() if loaded["random"] is None else loaded["random"]
        self._stream, self._pass = None, max(loaded["pass"] - 1, -1)
        if left > 0:
            # The pass is drawn as it was drawn first, and the state of the process stays where it is.
            with rng_preserved():
                if loaded["random"] is not None and self._part is None:
                    set_random_state(loaded["random"])
                self._begin_pass(loaded["pass"], left)
        elif left < 0:
            have = f"{loaded['taken']} batches taken from pass {loaded['pass']}, {-by} of them not trained on"
            what = "the saved state lies before the pass over the data that it was saved in"
            raise DataError(what, have=have, fix="resume from another checkpoint of the run")
