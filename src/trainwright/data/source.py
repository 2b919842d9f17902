"""The base class of everything that batches come from, and the helpers that its subclasses share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, TypeVar

import torch

from trainwright.core.checks import check_form, is_dict
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
    """Whether the run saves checkpoints: data that cannot be resumed are then refused; None: not known yet."""
    is_own_part: bool = False
    """Whether the data are this rank's own part already, as `sharded` marks them."""
    _part: Shard | None = None
    """The part of each batch that this rank runs; None: all of it."""

    def describe(self) -> str:
        """Return a few words for the header of the console."""
        raise NotImplementedError

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[Any]:
        """Return the batches of one epoch without its first `skip`."""
        raise NotImplementedError

    def commit(self) -> None:
        """Record that all batches yielded so far are trained on: `position` is after them. No-op here."""

    def position(self) -> Any:
        """Return the position of this rank after the committed batches, as plain data and tensors."""
        return {}

    def seek(self, position: Any, *, other_size: bool = False, ended: bool = False) -> str | None:
        """Continue at a saved position when the next epoch begins; may return a line for the console.

        `other_size`: it is the position of rank 0 of a run on another number of ranks. `ended`: no epoch follows, but
        another `fit` may read the same data: loaders, samplers and data sets are set to the position at once.
        """
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
    def own_length(self) -> int | None:
        """Batches of an epoch on this rank, where it has data of its own; else `length`."""
        return self.length

    @property
    def generators(self) -> Sequence[Any]:
        """The random generators that the data draw from, apart from the process's."""
        return ()

    @property
    def resume_caveat(self) -> str:
        """A line for the header on what may be inexact in a resume inside an epoch; empty where all is exact."""
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


LOADER, BATCHES, TOGETHER = "a DataLoader", "batches(...)", "together(...)"
CUT, PER_EPOCH, READY = "data cut into epochs by a number of updates", "a function of the epoch", "ready batches"
_KINDS = {
    "workers": LOADER,
    "passes": BATCHES,
    "loaders": TOGETHER,
    "pass": CUT,
    "source": PER_EPOCH,
    "fingerprint": READY,
}
"""The kind of data of a saved state, by the first of these keys that it has."""


def check_kind(tree: Any, kind: str) -> None:
    """Raise DataError where a state was saved by data of another kind than `kind`."""
    keys = tree if isinstance(tree, dict) else ()
    saved = next((kind for key, kind in _KINDS.items() if key in keys), "a source of another class")
    if saved != kind:
        known = tree["fingerprint"] if "fingerprint" in keys and isinstance(tree["fingerprint"], dict) else {}
        raise DataError(
            "the data are of another kind than when the state was saved",
            have=kind,
            want=": ".join(filter(None, (saved, ", ".join(f"{name}={value}" for name, value in known.items())))),
            fix="give the data that the run was started with, or fit(..., resume_data=False)",
        )


def check_fingerprint(have: dict[str, Any], saved: dict[str, Any], *, what: str, fix: str) -> None:
    """Raise DataError with the difference where the fingerprint of the data is not the saved one."""
    check_form({"fingerprint": saved}, fingerprint=is_dict)
    differing = [name for name in saved if have.get(name) != saved[name]]
    if differing:
        raise DataError(
            what,
            have=", ".join(f"{name}={have.get(name)}" for name in differing),
            want=", ".join(f"{name}={saved[name]}" for name in differing),
            fix=f"{fix}, or fit(..., resume_data=False)",
        )


def set_epoch(epoch: int, *owners: Any) -> None:
    """Call `set_epoch(epoch)` once on each of `owners` that has it."""
    for owner in {id(owner): owner for owner in owners}.values():
        if callable(getattr(owner, "set_epoch", None)):
            owner.set_epoch(epoch)
