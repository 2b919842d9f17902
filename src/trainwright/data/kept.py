"""Sources whose workers stay from epoch to epoch while a run reads them, and what they have to tell of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from trainwright.data.own import Batches


@contextmanager
def workers_kept(*sources: Any) -> Iterator[None]:
    """Have workers that were chosen stay from one pass to the next inside; afterwards none is left."""
    held = [one for one in sources if isinstance(one, Batches)]
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
    return tuple(filter(None, [one.take_news() for one in sources if isinstance(one, Batches)]))
