"""Positions in a pass: skips batches, refuses empty epochs and data that changed since the save."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

from trainwright.core.checks import check_form, is_dict
from trainwright.core.errors import DataError


def skipped(iterator: Iterator[Any], skip: int, name: str) -> Iterator[Any]:
    """Read `skip` batches of `iterator` at once and drop them."""
    dropped = sum(1 for _ in islice(iterator, skip))
    if dropped < skip:
        raise DataError(
            f"{name} ended while the batches were skipped that the run has trained on already",
            have=f"{dropped} batches",
            want=f"at least {skip}, as when the state was saved",
            fix="give the data that the run was started with, or fit(..., resume_data=False)",
        )
    return iterator


def opened(iterator: Iterator[Any], skip: int, *, name: str, complaint: Callable[[], DataError]) -> Iterator[Any]:
    """Return `iterator` without its first `skip` batches; raises `complaint` where the epoch has no batch."""
    if skip:
        return skipped(iterator, skip, name)
    # A chain: no Python frame after the first batch, and nothing is read before it is asked for.
    return chain(_first(iterator, complaint), iterator)


def _first(iterator: Iterator[Any], complaint: Callable[[], DataError]) -> Iterator[Any]:
    for batch in iterator:
        yield batch
        return
    raise complaint()


def length_of(data: Any) -> int | None:
    """Return `len(data)`; None where it has none."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


LOADER, BATCHES, TOGETHER = "a DataLoader", "batches(...)", "together(...)"
CUT, PER_EPOCH, READY = "data cut into epochs by a number of updates", "a function of the epoch", "ready batches"
_KINDS = {"workers": LOADER, "passes": BATCHES, "loaders": TOGETHER, "pass": CUT, "source": PER_EPOCH, "facts": READY}
"""The kind of data of a saved state, by the first of these keys that it has."""


def check_kind(tree: Any, kind: str) -> None:
    """Raise DataError where a state was saved by data of another kind than `kind`."""
    keys = tree if isinstance(tree, dict) else ()
    saved = next((kind for key, kind in _KINDS.items() if key in keys), "a source of another class")
    if saved != kind:
        facts = tree["facts"] if "facts" in keys and isinstance(tree["facts"], dict) else {}
        raise DataError(
            "the data are of another kind than when the state was saved",
            have=kind,
            want=": ".join(filter(None, (saved, ", ".join(f"{name}={value}" for name, value in facts.items())))),
            fix="give the data that the run was started with, or fit(..., resume_data=False)",
        )


def check_facts(have: dict[str, Any], saved: dict[str, Any], *, what: str, fix: str) -> None:
    """Raise DataError with the difference where the data are not what they were when a state was saved."""
    check_form({"facts": saved}, facts=is_dict)
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
