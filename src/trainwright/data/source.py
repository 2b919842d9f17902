"""The base class of everything that batches come from, and the helpers that its subclasses share."""

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
    kind: str = "a source of another class"
    """The kind of data, for the error of a resume with data of another one."""
    must_resume: bool = False
    """Whether the run saves checkpoints: data that cannot be resumed are then refused (`require_resume`)."""
    is_own_part: bool = False
    """Whether the data are this rank's own part already, as `sharded` marks them."""
    restarts_order: bool = False
    """Whether each fit begins with the shuffled order of epoch 0 again, because the order depends on seed and epoch."""
    limit: str = ""
    """Which batches of the data it has, in words: "first 20 of 100 batches"; empty where it has all of them."""
    _part: Shard | None = None
    """The part of each batch that this rank runs; None: all of it."""
    _sought: dict[str, Any] | None = None
    """The position to continue at when the next epoch begins."""
    _other_size: bool = False
    """Whether another number of ranks saved the position sought."""

    def describe(self) -> str:
        """Return a few words for the header of the console."""
        raise NotImplementedError

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[Any]:
        """Return the batches of one epoch without its first `skip`."""
        raise NotImplementedError

    def inner(self) -> Mapping[str, Source]:
        """Return the sources that this one reads, by name; empty here."""
        return {}

    def commit(self) -> None:
        """Record that all batches yielded so far are trained on: `position` is after them."""
        for one in self.inner().values():
            one.commit()

    def position(self) -> Any:
        """Return the position of this rank after the committed batches, as plain data and tensors.

        With kind and fingerprint of the data, which `seek` compares.
        """
        return self._sought or {"kind": self.kind, "fingerprint": self.fingerprint(), **self._position()}

    def seek(self, position: Any, *, other_size: bool = False, ended: bool = False) -> str | None:
        """Continue at a saved position when the next epoch begins; may return a line for the console.

        `other_size`: it is the position of rank 0 of a run on another number of ranks. `ended`: no epoch follows, but
        another `fit` may read the same data: loaders, samplers and data sets are set to the position at once.
        DataError where the data are not those of the save.
        """
        self.check_same(position)
        self._sought, self._other_size = position, other_size
        try:
            return self._seek(position, ended=ended)
        except BaseException:  # a refused resume leaves the user's data as they were
            self._sought = None
            raise

    def check_same(self, position: Any) -> None:
        """Raise DataError where a position was saved by data of another kind or with another fingerprint."""
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
        """Prepare to continue at `position`, which was checked; as `seek`. No-op here."""
        return None

    def shard(self, part: Shard | None) -> None:
        """Have `epoch` yield a `Slice` of each batch: the part of this rank; None: complete batches again."""
        if part is not None:
            name = type(self).__name__
            raise DataError(
                f"the source {name} does not shard its batches over {part.size} processes",
                want="shard(part), after which epoch(...) yields a Slice(batch, rows, all_rows) for each batch",
                fix=f"def shard(self, part) in {name}, or parallel=None for a run of one process",
            )

    def independent_copy(self) -> Source:
        """Return a copy for a pass apart from training, with a position of its own. The source itself here."""
        return self

    def fingerprint(self) -> dict[str, Any]:
        """Return the properties of the data that must be the same at a save and a resume."""
        return {}

    def bytes_on(self, device: torch.device) -> int | None:
        """Return the bytes of a copy of the data on a device; None where they cannot be copied."""
        return None

    @property
    def generators(self) -> Sequence[Any]:
        """The random generators that the data draw from, apart from the process's."""
        return [generator for one in self.inner().values() for generator in one.generators]

    @property
    def resume_caveat(self) -> str:
        """A line for the header on what may be inexact in a resume inside an epoch; empty where all is exact."""
        return join_lines({name: one.resume_caveat for name, one in self.inner().items()})

    @property
    def other_size_note(self) -> str:
        """A line on what differs after a resume on another number of processes; empty where nothing does."""
        return join_lines({name: one.other_size_note for name, one in self.inner().items()})

    @property
    def note(self) -> str:
        """A line for the console's header; empty for none."""
        return ""


def require_resume(source: Source) -> None:
    """Have a source, and those that it reads, refuse data that could not be resumed."""
    source.must_resume = True
    for one in source.inner().values():
        require_resume(one)


def join_lines(lines: Mapping[str, str | None]) -> str:
    """Return the lines of several sources as one line, each after the name of its source."""
    return "; ".join(f"{name}: {line}" if name else line for name, line in lines.items() if line)


def shallow_copy(source: S) -> S:
    """Return what `copy.copy` returns for a source of this package, in a tenth of the time."""
    other: S = object.__new__(type(source))
    other.__dict__.update(source.__dict__)
    return other


def drop_first(iterator: Iterator[Any], skip: int, name: str) -> Iterator[Any]:
    """Read and drop the first `skip` batches of `iterator`, now; return the rest."""
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
    """Return `iterator` without its first `skip` batches; raises `error()` where the epoch has no batch."""
    if skip:
        return drop_first(iterator, skip, name)
    # A chain: no Python frame after the first batch, and nothing is read before it is requested.
    return chain(_first(iterator, error), iterator)


def _first(iterator: Iterator[Any], error: Callable[[], DataError]) -> Iterator[Any]:
    for batch in iterator:
        yield batch
        return
    raise error()


def length_of(data: Any) -> int | None:
    """Return `len(data)`; None where it has none."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def set_epoch(epoch: int, *owners: Any) -> None:
    """Call `set_epoch(epoch)` once on each of `owners` that has it."""
    for owner in {id(owner): owner for owner in owners}.values():
        if callable(getattr(owner, "set_epoch", None)):
            owner.set_epoch(epoch)
