"""Sources whose workers stay from epoch to epoch while a run reads them, and what they have to tell of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from trainwright.data.batches import Batches


@contextmanager
def workers_kept(*sources: Any) -> Iterator[None]:
    """Have workers that were chosen stay from one pass to the next inside; afterwards none is left."""
    held = [one for one in _apart(sources) if isinstance(one, Batches)]
    for one in held:
        one.keeps_workers = True
    try:
        yield
    finally:
        for one in held:
            one.keeps_workers = False
            one.end_workers()


def news_of(sources: Iterable[Any]) -> tuple[str, ...]:
    """What was chosen since somebody asked last, in a line each."""
    return tuple(filter(None, [one.take_news() for one in _apart(sources) if isinstance(one, Batches)]))


def reads(train: Any, data: Any) -> bool:
    """Whether `data` are what training reads, or one of several loaders that it reads side by side."""
    inside = getattr(train, "loaders", None)
    return data is train or (isinstance(inside, dict) and any(data is one for one in inside.values()))


def _apart(sources: Iterable[Any]) -> Iterator[Any]:
    """Sources, of several loaders that are read side by side each."""
    for source in sources:
        inside = getattr(source, "sources", None)
        yield from _apart(inside.values()) if isinstance(inside, dict) else (source,)
