"""Looks whether the workers of a loader over a stream give the same batches, since each of them reads all rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from warnings import warn

from trainwright.data.bits import same_bits

_END = object()


def looked_at(batches: Iterator[Any], *, workers: int, name: str) -> Iterator[Any]:
    """The batches as they come, in turn from `workers`; a warning where the first two of each are those of all.

    Both rounds must be equal bit for bit, and differ from each other, as no data do that merely repeat a batch.
    """
    rounds: list[Any] = []
    for place in range(2 * workers):
        batch = next(batches, _END)
        if batch is _END:
            return
        alike = bool(place % workers) and same_bits(batch, rounds[-1])
        if not place % workers:
            rounds.append(batch)
        yield batch
        if place % workers and not alike:
            break
    else:
        if not same_bits(*rounds):
            warn(
                f"all {workers} workers give the same batches: each reads all of {name}, and every row comes "
                f"{workers} times; in its __iter__: index, total = shard(); "
                "return itertools.islice(rows, index, None, total)",
                stacklevel=2,
            )
    yield from batches
