"""Ready batches, with a length or without, and an endless stream that epochs are cut from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from trainwright.base.contracts import Source
from trainwright.base.errors import DataError, message
from trainwright.data.position import length_of, opened, skipped, tell_epoch
from trainwright.runtime.randomness import random_state, set_random_state, unmoved

_END = object()


class ReadyBatches:
    """Batches that are there already: a list, or anything that gives them when it is iterated.

    A batch is asked for only when the loop asks, and handed on as it is.
    """

    batch_size: int | None = None
    rows: int | None = None
    _tells_epoch = True
    """Whether the data hear which epoch it is."""

    def __init__(self, data: Any, role: str) -> None:
        self._data = data
        self._role = role
        self.length = length_of(data)
        self.repeatable = not hasattr(data, "__next__")
        self.draws_global_rng = not isinstance(data, list)
        if self.length == 0:
            raise self._no_batches()

    def describe(self) -> str:
        """The class, and the number of batches."""
        name = type(self._data).__name__
        several = "batches" if self.length != 1 else "batch"
        return f"a {name} of batches" if self.length is None else f"a {name} of {self.length:,} {several}"

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[Any]:
        """A pass over the batches; its first `skip` are read and dropped."""
        if self._role == "train" and self._tells_epoch:
            tell_epoch(epoch, self._data)
        if not skip and isinstance(self._data, list) and self._data:
            return iter(self._data)
        return opened(iter(self._data), skip, name=self.describe(), complaint=self._no_batches)

    def set_aside(self) -> None:
        """Read beside whoever else reads the data: they stay in their epoch."""
        self._tells_epoch = False

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the position is the number of batches that were read."""
        return {}

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        """Nothing to take over."""

    def _no_batches(self) -> DataError:
        if self.repeatable:
            what = f"{self._role} data: {self.describe()} had no batch in this epoch"
            return DataError(message(what, want="at least one batch per epoch"))
        return DataError(
            message(
                f"{self._role} data: the {type(self._data).__name__} is used up: it gives its batches once",
                want="batches that can be read again in each epoch",
                fix="a function that makes them anew, `lambda epoch: make(epoch)`, or a list of the batches",
            )
        )


class Continuing:
    """A source whose epochs are cut from one stream: each goes on where the last one stopped.

    Where the stream ends, the next pass begins; a source that cannot be repeated ends there. It is its own
    iterator, so that a loop that leaves an epoch early leaves the stream where it is.
    """

    length: int | None = None
    rows: int | None = None

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
        self._loaded: dict[str, Any] | None = None

    @property
    def generators(self) -> list[torch.Generator]:
        """The generators that the source draws from, apart from the process's."""
        return list(getattr(self._source, "generators", ()))

    def describe(self) -> str:
        """The source, without end."""
        return f"{self._source.describe()}, going on over the epochs"

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[Any]:
        """Go on with the stream; `skip` batches of this epoch have been trained on before a resume."""
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            self._go_back(loaded, skip - (loaded["given"] if loaded["epoch"] == epoch else 0))
        else:
            self._given = 0
            skipped(self, skip, self._source.describe())
        self._epoch, self._given = epoch, skip
        return self

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = _END if self._stream is None else next(self._stream, _END)
        if batch is _END:
            if not self.repeatable and self._given:
                raise StopIteration
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
        }

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        """Take over a saved position; it takes effect when the next epoch begins."""
        self._loaded = tree

    def _begin_pass(self, number: int, skip: int = 0) -> None:
        self._random = random_state() if self.draws_global_rng else None
        self._pass, self._taken = number, skip
        self._stream = self._source.epoch(number, skip)

    def _go_back(self, loaded: dict[str, Any], by: int) -> None:
        """Make the saved pass again, up to `by` batches (0 or fewer) from where it was saved."""
        self._source.load_state_dict(loaded["source"])
        left = loaded["taken"] + by
        self._stream, self._pass = None, max(loaded["pass"] - 1, -1)
        if left > 0:
            # The pass is drawn as it was drawn first, and the state of the process stays where it is.
            with unmoved():
                if loaded["random"] is not None:
                    set_random_state(loaded["random"])
                self._begin_pass(loaded["pass"], left)
        elif left < 0:
            have = f"{loaded['taken']} batches taken from pass {loaded['pass']}, {-by} of them not trained on"
            what = "the saved state lies before the pass over the data that it was saved in"
            raise DataError(message(what, have=have, fix="resume from another checkpoint of the run"))
