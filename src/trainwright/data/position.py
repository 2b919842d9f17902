"""Where an iterator stands: batches skipped, epochs without a batch, what must not change while one is resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

from trainwright.base.errors import DataError, message


def skipped(iterator: Iterator[Any], skip: int, name: str) -> Iterator[Any]:
    """Read `skip` batches of `iterator` at once and drop them."""
    dropped = sum(1 for _ in islice(iterator, skip))
    if dropped < skip:
        raise DataError(
            message(
                f"{name} ended while the batches were skipped that the run has trained on already",
                have=f"{dropped} batches",
                want=f"at least {skip}, as when the state was saved",
                fix="give the data that the run was started with, or fit(..., resume_data=False)",
            )
        )
    return iterator


def opened(iterator: Iterator[Any], skip: int, *, name: str, complaint: Callable[[], DataError]) -> Iterator[Any]:
    """`iterator` without its first `skip` batches, raising `complaint` where the epoch has not one."""
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
    """`len(data)`, or None where it has none."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def check_facts(have: dict[str, Any], saved: dict[str, Any], *, what: str, fix: str) -> None:
    """Raise DataError with the difference where the data are not what they were when a state was saved."""
    differing = [name for name in saved if have.get(name) != saved[name]]
    if differing:
        raise DataError(
            message(
                what,
                have=", ".join(f"{name}={have.get(name)}" for name in differing),
                want=", ".join(f"{name}={saved[name]}" for name in differing),
                fix=f"{fix}, or fit(..., resume_data=False)",
            )
        )


def tell_epoch(epoch: int, *owners: Any) -> None:
    """Call `set_epoch(epoch)` once on each of `owners` that has it."""
    for owner in {id(owner): owner for owner in owners}.values():
        if callable(getattr(owner, "set_epoch", None)):
            owner.set_epoch(epoch)
