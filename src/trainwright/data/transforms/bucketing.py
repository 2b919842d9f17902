"""`bucketed(...)`: batches of rows of neighboring lengths, with little padding."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainwright.core.checks import check_number, check_whole
from trainwright.core.errors import DataError, SettingError
from trainwright.core.rng import rng_preserved
from trainwright.core.suggestions import suggests
from trainwright.data.arrays import Table, TableRows
from trainwright.data.row_batches import Batches, BatchSettings
from trainwright.data.seeded import SeededRows, mixed_seed, open_rows

_STREAM = 3
"""Mixed with seed and epoch into the seed of the order, so that it differs from that of `batches`."""


@suggests
def bucketed(
    data: Any,
    batch_size: int | None = None,
    *,
    lengths: Sequence[int] | Tensor | np.ndarray[Any, Any] | Callable[[Any], int],
    tokens: int | None = None,
    shuffle: bool = False,
    seed: int | None = None,
    drop_last: bool = False,
    collate: Callable[[list[Any]], Any] | None = None,
    workers: int = 0,
    slack: float = 0.1,
) -> Bucketed:
    """Return batches of rows of neighboring lengths, each row once; a variant of `batches`.

    A batch has at most `batch_size` rows, and padded to its longest row at most `tokens` positions; one of the two, or
    both. The order is a function of (seed, epoch), and every epoch has as many batches.

    Args:
        data: As in `batches`.
        batch_size: The most rows of a batch.
        lengths: The lengths of all rows, or a function of a row, which is called once with each.
        tokens: The most positions of a batch, padding included.
        shuffle: Mix rows of similar length, and batches. Without it the longest come first.
        seed: As in `batches`.
        drop_last: Whether short batches are left out.
        collate: A function from a list of rows to a batch, such as `pad(...)`.
        workers: As in `batches`.
        slack: How much shorter than the longest of its batch a mixed row may be, as a part of that length.

    Raises:
        DataError: For a row that is longer than `tokens`, and for lengths that are not those of the rows.
    """
    if collate is not None and not callable(collate):
        raise SettingError(f"collate={collate!r}", want="a function from a list of rows to a batch")
    rows = open_rows(data, collate)
    buckets = Buckets(lengths=_lengths_of(rows, lengths), batch_size=batch_size, tokens=tokens, slack=slack)
    if drop_last and tokens is not None:
        raise SettingError("bucketed(drop_last=True, tokens=...)", want="one of the two: all batches but one are full")
    order: dict[str, Any] = {"shuffle": shuffle, "seed": seed, "drop_last": drop_last, "workers": workers}
    settings = BatchSettings(batch_size=buckets.most_rows(), varies=tokens is not None, **order)
    return Bucketed(rows, settings, buckets)


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """The division of rows of these lengths into batches."""

    lengths: Tensor
    """Of all rows, int64."""
    batch_size: int | None
    tokens: int | None
    slack: float

    def __post_init__(self) -> None:
        if self.batch_size is None and self.tokens is None:
            what = "bucketed() without a size of a batch"
            raise SettingError(what, want="batch_size, tokens, or both", fix="bucketed(data, 64, lengths=...)")
        check_number(self.slack, f"bucketed(slack={self.slack!r})", least=0, most=1, what="a share", fix="slack=0.1")
        for name in ("batch_size", "tokens"):
            value: Any = getattr(self, name)
            if value is not None:
                check_whole(value, f"bucketed({name}={value!r})")
        longest = int(self.lengths.max()) if len(self.lengths) else 0
        if self.tokens is not None and longest > self.tokens:
            raise DataError(
                f"row {int(self.lengths.argmax())} is {longest:,} long, and no batch has more than {self.tokens:,}",
                want="rows that fit into a batch",
                fix=f"tokens={longest}, or rows[:{self.tokens}] in the data",
            )

    def most_rows(self) -> int:
        """Return the most rows that a batch can have."""
        shortest = int(self.lengths.min()) if len(self.lengths) else 0
        return self._size(shortest)

    def number(self, *, drop_last: bool) -> int:
        """Return the batches of an epoch: a function of the lengths alone."""
        if drop_last:
            assert self.batch_size is not None
            return len(self.lengths) // self.batch_size
        return sum(-(-(stop - start) // size) for start, stop, size in self._pools(self.lengths.sort()[0].flip(0)))

    def batches(self, seed: int, epoch: int, *, shuffle: bool, drop_last: bool) -> list[Tensor]:
        """Return the row numbers of every batch of an epoch."""
        lengths = self.lengths
        draws = torch.Generator().manual_seed(mixed_seed(seed, epoch, _STREAM))
        rows = torch.randperm(len(lengths), generator=draws) if shuffle else torch.arange(len(lengths))
        if drop_last:  # drop random rows, not always the shortest
            assert self.batch_size is not None
            rows = rows[: len(rows) // self.batch_size * self.batch_size]
        sorted_lengths, at = lengths[rows].sort(descending=True, stable=True)
        rows, batches = rows[at], []
        for start, stop, size in self._pools(sorted_lengths):
            pool = rows[start:stop]
            if shuffle:
                pool = pool[torch.randperm(len(pool), generator=draws)]
            batches += pool.split(size)
        order = torch.randperm(len(batches), generator=draws).tolist() if shuffle else range(len(batches))
        return [batches[index] for index in order]

    def _pools(self, lengths: Tensor) -> Iterator[tuple[int, int, int]]:
        """Yield the ranges in which rows are mixed, longest first: (start, stop, rows of a batch)."""
        start, negative = 0, -lengths.to(torch.float64)
        while start < len(lengths):
            longest = int(lengths[start])
            size = self._size(longest)
            alike = int(torch.searchsorted(negative, -(1.0 - self.slack) * longest, right=True)) - start
            stop = min(len(lengths), start + max(1, alike // size) * size)
            yield start, stop, size
            start = stop

    def _size(self, longest: int) -> int:
        by_tokens = None if self.tokens is None else self.tokens // max(longest, 1)
        return min(size for size in (self.batch_size, by_tokens) if size is not None)


def padding_share(lengths: Tensor, batches: Sequence[Tensor]) -> float:
    """Return the share of padding among all positions, where each batch is padded to its longest row; 0 for none.

    `lengths` are those of all rows, `batches` the row numbers of each.
    """
    padded = sum(len(rows) * int(lengths[rows].max()) for rows in batches)
    return 1.0 - sum(int(lengths[rows].sum()) for rows in batches) / padded if padded else 0.0


class Bucketed(Batches):
    """A data set in batches of neighboring lengths; made by `bucketed`."""

    _padding: str | None = None
    """The share of padding, for the header; None before it is computed."""

    def __init__(self, rows: Table | SeededRows, settings: BatchSettings, buckets: Buckets) -> None:
        self._buckets = buckets
        super().__init__(rows, settings, None)

    def order(self, epoch: int = 0) -> list[list[int]]:
        """Return the row numbers of every batch of an epoch, to sort outputs by row."""
        return [rows.tolist() for rows in self._batches(self._draw_seed(), epoch)]

    def padding(self, epoch: int = 0) -> float:
        """Return the share of padding in an epoch, where each batch is padded to its longest row."""
        return padding_share(self._buckets.lengths, self._batches(self._seed or 0, epoch))

    def padding_mixed(self, epoch: int = 0) -> float:
        """Return the share of padding of as many batches in random order."""
        lengths = self._buckets.lengths
        draws = torch.Generator().manual_seed(mixed_seed(self._seed or 0, epoch))
        rows = torch.randperm(len(lengths), generator=draws)
        return padding_share(lengths, rows.tensor_split(self._buckets.number(drop_last=False)))

    @property
    def note(self) -> str:
        """A line for the header."""
        if self._padding is None:
            self._padding = f"{self.padding():.1%} of a batch is padding, {self.padding_mixed():.1%} without"
        return f"bucketed by length: {self._padding}"

    def describe(self) -> str:
        """Return rows, batch size and order."""
        return f"{super().describe()}, by length"

    def fingerprint(self) -> dict[str, Any]:
        """Return the properties of the data that must not change between a save and a resume."""
        buckets = self._buckets
        lengths = f"{zlib.crc32(buckets.lengths.numpy().tobytes()):08x}"
        return {**super().fingerprint(), "tokens": buckets.tokens, "slack": buckets.slack, "lengths": lengths}

    @property
    def in_memory(self) -> bool:
        """Whether a batch is one gather from a table: False, since rows are fetched."""
        return False

    def _measure(self) -> None:
        rows, settings = len(self._data), self._settings
        length = self._buckets.number(drop_last=settings.drop_last)
        self._set_lengths(length, length * settings.size if settings.drop_last else rows)
        if self._buckets.tokens is not None:
            self.batch_size = None
        self._check_filled(rows)

    def _batches(self, seed: int, epoch: int) -> list[Tensor]:
        settings = self._settings
        return self._buckets.batches(seed, epoch, shuffle=settings.shuffle, drop_last=settings.drop_last)

    def _row_numbers(self, seed: int, epoch: int, skip: int) -> Iterator[Sequence[int]]:
        return (rows.tolist() for rows in self._batches(seed, epoch)[skip:])


def _lengths_of(rows: Table | SeededRows, lengths: Any) -> Tensor:
    """Return the lengths as whole numbers, one for each row."""
    if callable(lengths):
        given: Any = TableRows(rows) if isinstance(rows, Table) else rows.dataset
        with rng_preserved():
            lengths = [lengths(given[index]) for index in range(len(rows))]
    try:
        found = torch.as_tensor(lengths) if len(lengths) > 0 else torch.zeros(0, dtype=torch.int64)
    except (TypeError, ValueError, RuntimeError):
        raise _no_lengths(rows, f"a {type(lengths).__name__}") from None
    integral = not (found.is_floating_point() or found.is_complex() or found.dtype == torch.bool)
    if not integral or found.shape != (len(rows),) or (len(rows) and int(found.min()) < 0):
        raise _no_lengths(rows, f"{tuple(found.shape)} {found.dtype}")
    return found.to("cpu", torch.int64)


def _no_lengths(rows: Table | SeededRows, have: str) -> DataError:
    return DataError(
        "bucketed(lengths=...) are not the lengths of the rows",
        have=have,
        want=f"{len(rows)} whole numbers from 0 on, or a function of a row",
        fix="lengths=[len(row) for row in data], or lambda row: len(row[0])",
    )
