"""`Source`, the base class of sources of batches, and helper functions for its subclasses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, TypeVar

import torch

from trainwright.core.checks import check_form, is_dict, is_text
from trainwright.core.errors import DataError
from trainwright.distributed.mesh import Shard

S = TypeVar("S")


class Source:
    """Base class of sources: the batches of an epoch, from any position. Derive from it for custom data.

    Subclasses implement `describe` and `epoch`; all other methods have defaults.
    """

    length: int | None = None
    """Batches per epoch; None if it is unknown."""
    rows: int | None = None
    """Rows per epoch; None if it is unknown."""
    batch_size: int | None = None
    """Rows of a full batch; None if it is unknown."""
    repeatable: bool = True
    """Whether it can be iterated more than once."""
    draws_global_rng: bool = False
    """Whether an iteration draws from the global random state, so that a resume must replay it."""
    kind: str = "a source of another class"
    """The kind of data, for the error of a resume with another kind."""
    must_resume: bool = False
    """Whether the run saves checkpoints, so that data that cannot be resumed raise an error (`require_resume`)."""
    is_own_part: bool = False
    """Whether the data are already this rank's part, as marked by `sharded`."""
    restarts_order: bool = False
    """Whether each fit begins with the shuffled order of epoch 0 again, because the order depends on seed and epoch."""
    limit: str = ""
    """The batches that are included, as text: "first 20 of 100 batches"; empty for all."""
    _part: Shard | None = None
    """The part of each batch that this rank runs; None: all of it."""
    _sought: dict[str, Any] | None = None
    """The position to restore at the start of the next epoch."""
    _other_size: bool = False
    """Whether another number of ranks saved this position."""

    def describe(self) -> str:
        """Return a short description for the header of the console."""
        raise NotImplementedError

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[Any]:
        """Return the batches of one epoch after its first `skip`."""
        raise NotImplementedError

    def inner(self) -> Mapping[str, Source]:
        """Return the sources that this one reads, by name; empty here."""
        return {}

    def commit(self) -> None:
        """Record that all batches yielded so far were trained, so that `position` is after them."""
        for one in self.inner().values():
            one.commit()

    def position(self) -> Any:
        """Return the position of this rank after the committed batches, as plain data and tensors.

        Includes kind and fingerprint of the data, which `seek` compares.
        """
        return self._sought or {"kind": self.kind, "fingerprint": self.fingerprint(), **self._position()}

    def seek(self, position: Any, *, other_size: bool = False, ended: bool = False) -> str | None:
        """Continue at a saved position from the next epoch on; may return a line for the console.

        `other_size`: whether the position is that of rank 0 of a run on another number of ranks. `ended`: whether no
        epoch follows; loaders, samplers and data sets are then set to the position immediately, since another `fit` may
        use them. DataError if the data differ from those of the save.
        """
        self.check_same(position)
        self._sought, self._other_size = position, other_size
        try:
            return self._seek(position, ended=ended)
        except BaseException:  # a failed resume must not change the user's data
            self._sought = None
            raise

    def check_same(self, position: Any) -> None:
        """Raise DataError if a position was saved for data of another kind or with another fingerprint."""
        fix = "give the data that the run was started with, or fit(..., resume_data=False)"
        if not isinstance(position, dict) or "kind" not in position:
            position = {"kind": Source.kind, "fingerprint": {}}
        check_form(position, kind=is_text, fingerprint=is_dict)
        kind, saved, have = position["kind"], position["fingerprint"], self.fingerprint()
        if kind != self.kind:
            known = ", ".join(f"{name}={value}" for name, value in saved.items())
            what, want = "the data are of another kind than when the state was saved", f"{kind}: {known}"
            raise DataError(what, have=self.kind, want=want.removesuffix(": "), fix=fix)
        differing = [name for name in saved if have.get(name) != saved[name]]
        if differing:
            raise DataError(
                "the data are not what they were when the state was saved",
                have=", ".join(f"{name}={have.get(name)}" for name in differing),
                want=", ".join(f"{name}={saved[name]}" for name in differing),
                fix=fix,
            )

    def _position(self) -> dict[str, Any]:
        """Return the position without kind and fingerprint."""
        return {}

    def _seek(self, position: dict[str, Any], *, ended: bool) -> str | None:
        """Prepare to continue at a checked `position`; called by `seek`. No-op here."""
        return None

    def shard(self, part: Shard | None) -> None:
        """Make `epoch` yield this rank's `Slice` of each batch; None: complete batches. DataError here."""
        if part is not None:
            name = type(self).__name__
            raise DataError(
                f"the source {name} does not shard its batches over {part.size} processes",
                want="shard(part), after which epoch(...) yields a Slice(batch, rows, all_rows) for each batch",
                fix=f"def shard(self, part) in {name}, or parallel=None for a run of one process",
            )

    def independent_copy(self) -> Source:
        """Return a copy with a separate position, for a pass besides training. The source itself here."""
        return self

    def fingerprint(self) -> dict[str, Any]:
        """Return the properties of the data that must be the same at a save and a resume."""
        return {}

    def bytes_on(self, device: torch.device) -> int | None:
        """Return the size in bytes of a copy of the data on a device; None if they cannot be copied."""
        return None

    @property
    def generators(self) -> Sequence[Any]:
        """The random generators from which the data draw, besides the global ones."""
        return [generator for one in self.inner().values() for generator in one.generators]

    @property
    def resume_caveat(self) -> str:
        """A line for the header on what may be inexact in a resume inside an epoch; empty if all is exact."""
        return join_lines({name: one.resume_caveat for name, one in self.inner().items()})

    @property
    def other_size_note(self) -> str:
        """A line on the differences after a resume on another number of processes; empty if there are none."""
        return join_lines({name: one.other_size_note for name, one in self.inner().items()})

    @property
    def note(self) -> str:
        """A line for the header of the console; empty for none."""
        return ""


def require_resume(source: Source) -> None:
    """Make a source and its inner sources raise an error for data that cannot be resumed."""
    source.must_resume = True
    for one in source.inner().values():
        require_resume(one)


def join_lines(lines: Mapping[str, str | None]) -> str:
    """Return the lines of several sources as one line, each with the name of its source."""
    return "; ".join(f"{name}: {line}" if name else line for name, line in lines.items() if line)


def shallow_copy(source: S) -> S:
    """Return the result of `copy.copy` for a source of this package, in a tenth of the time."""
    other: S = object.__new__(type(source))
    other.__dict__.update(source.__dict__)
    return other


def drop_first(iterator: Iterator[Any], skip: int, name: str) -> Iterator[Any]:
    """Read and drop the first `skip` batches of `iterator`; return the rest. DataError if there are fewer."""
    dropped = sum(1 for _ in islice(iterator, skip))
    if dropped < skip:
        raise DataError(
            f"{name} ended while the batches were skipped that the run has trained on already",
            have=f"{dropped} batches",
            want=f"at least {skip}, as when the state was saved",
            fix="give the data that the run was started with, or fit(..., resume_data=False)",
        )
    return iterator


def begin_after(iterator: Iterator[Any], skip: int, *, name: str, error: Callable[[], DataError]) -> Iterator[Any]:
    """Return `iterator` without its first `skip` batches; raises `error()` if the epoch has no batch."""
    if skip:
        return drop_first(iterator, skip, name)
    # A chain has no Python frame after the first batch, and reads nothing before it is requested.
    return chain(_first(iterator, error), iterator)


def _first(iterator: Iterator[Any], error: Callable[[], DataError]) -> Iterator[Any]:
    for batch in iterator:
        yield batch
        return
    raise error()


def length_of(data: Any) -> int | None:
    """Return `len(data)`; None if it has no length."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def set_epoch(epoch: int, *owners: Any) -> None:
    """Call `set_epoch(epoch)` once on each of `owners` that has the method."""
    for owner in {id(owner): owner for owner in owners}.values():
        if callable(getattr(owner, "set_epoch", None)):
            owner.set_epoch(epoch)
