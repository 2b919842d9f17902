"""The base class of everything that batches come from: a position in the data that can be saved and sought."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from trainwright.core.errors import DataError
from trainwright.distributed.mesh import Shard

S = TypeVar("S")


class Source:
    """The batches of an epoch, from any position in it. Subclass it to read data of your own.

    `describe` and `epoch` are to be written; everything else does nothing by default.
    """

    length: int | None = None
    """Batches of an epoch; None where it is not known."""
    rows: int | None = None
    """Rows of an epoch; None where it is not known."""
    batch_size: int | None = None
    """Rows of a full batch; None where it is not known."""
    repeatable: bool = True
    """Whether it can be iterated again from the start."""
    draws_global_rng: bool = False
    """Whether iterating draws from the process's random state: resuming then replays it."""
    must_resume: bool | None = None
    """Whether a checkpoint may be asked for: data that could not be resumed are then refused."""
    sharded: bool = False
    """Whether the batches are this rank's own part of the data already."""
    _part: Shard | None = None
    """The part of each batch that this rank runs; None: all of it."""

    def describe(self) -> str:
        """Return a few words for the header of the console."""
        raise NotImplementedError

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[Any]:
        """Return the batches of one epoch without its first `skip`."""
        raise NotImplementedError

    def state_dict(self) -> Any:
        """Return the position and the state of the order, as plain data and tensors."""
        return {}

    def load_state_dict(self, tree: Any, /) -> str | None:
        """Load a saved state, for the next epoch; may return a line for the console."""
        return None

    def process_state(self) -> Any:
        """Return the part of the state that differs between ranks; None where there is none."""
        return None

    def load_process_state(self, tree: Any, /) -> str | None:
        """Load the part of this rank; None: another number of processes saved it."""
        return None

    def deal(self, part: Shard | None) -> None:
        """Have `epoch` yield a `Slice` of each batch: the part of this rank; None: complete batches again."""
        if part is not None:
            name = type(self).__name__
            raise DataError(
                f"the source {name} does not deal its batches to {part.size} processes",
                want="deal(part), after which epoch(...) gives a Slice(batch, rows, all_rows) for each batch",
                fix=f"def deal(self, part) in {name}, or parallel=None for a run of one process",
            )

    def at_boundary(self) -> None:
        """Record that all batches given so far are trained on. No-op here."""

    def seek_loaded(self) -> None:
        """Seek the loaded position at once: no epoch follows, but another `fit` may read the data. No-op here."""

    def beside(self) -> Source:
        """Return a source for a pass beside training, which leaves the position of this one as it is. Itself here."""
        return self

    def facts(self) -> dict[str, Any]:
        """Return the properties of the data that must not change between a save and a resume."""
        return {}

    def finishing(self, move: Callable[[Any], Any] | None, *, trains: bool) -> Callable[[Any], Any] | None:
        """Return the function that moves and changes the batches of the next pass; `trains`: with random changes."""
        return move

    def size_beside(self, device: torch.device) -> int | None:
        """Return the bytes of a copy of the data on a device; None where they cannot be copied."""
        return None

    @property
    def own_length(self) -> int | None:
        """Batches of an epoch on this rank, where it has data of its own; else `length`."""
        return self.length

    @property
    def generators(self) -> Sequence[Any]:
        """The random generators that the data draw from, apart from the process's."""
        return ()

    @property
    def resumes(self) -> str:
        """A line on what may be inexact in a resume inside an epoch; empty where nothing is."""
        return ""

    @property
    def other_size_note(self) -> str | None:
        """A line on what differs after a resume on another number of processes; None where nothing does."""
        return None

    @property
    def note(self) -> str:
        """A line for the console's header; empty for none."""
        return ""


def shallow_copy(source: S) -> S:
    """Return what `copy.copy` returns for a source of this package, in a tenth of the time."""
    other: S = object.__new__(type(source))
    other.__dict__.update(source.__dict__)
    return other
