"""`bucketed(...)`: batches of rows of similar length, with little padding."""

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
"""Mixed into the seed of the order, so that it differs from that of `batches`."""


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
    """Return batches of rows of similar length, with each row once; a variant of `batches`.

    The size of a batch is limited by `batch_size` (rows), by `tokens` (positions after padding to its longest row), or
    by both. The order depends on (seed, epoch) only, and every epoch has the same number of batches.

    Args:
        data: As in `batches`.
        batch_size: The most rows per batch.
        lengths: The lengths of all rows, or a function of a row, which is called once for each row.
        tokens: The most positions per batch, including padding.
        shuffle: Whether to shuffle rows of similar length, and the order of batches. False: longest rows first.
        seed: As in `batches`.
        drop_last: Whether to drop short batches.
        collate: A function from a list of rows to a batch, such as `pad(...)`.
        workers: As in `batches`.
        slack: The largest difference of lengths among shuffled rows, as a fraction of the longest.

    Raises:
        DataError: For a row longer than `tokens`, and for lengths that do not fit the rows.
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
    """Divides rows into batches by their lengths."""

    lengths: Tensor
    """The lengths of all rows, int64."""
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
        """Return the most rows of any batch."""
        shortest = int(self.lengths.min()) if len(self.lengths) else 0
        return self._size(shortest)

    def number(self, *, drop_last: bool) -> int:
        """Return the number of batches per epoch, which depends on the lengths only."""
        if drop_last:
            assert self.batch_size is not None
            return len(self.lengths) // self.batch_size
        return sum(-(-(stop - start) // size) for start, stop, size in self._pools(self.lengths.sort()[0].flip(0)))

    def batches(self, seed: int, epoch: int, *, shuffle: bool, drop_last: bool) -> list[Tensor]:
        """Return the row indices of every batch of an epoch."""
        lengths = self.lengths
        draws = torch.Generator().manual_seed(mixed_seed(seed, epoch, _STREAM))
        rows = torch.randperm(len(lengths), generator=draws) if shuffle else torch.arange(len(lengths))
        if drop_last:  # drops random rows, not always the shortest
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
        """Yield the ranges within which rows are shuffled, longest first: (start, stop, rows per batch)."""
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
    """Return the fraction of padding among all positions, with each batch padded to its longest row.

    `lengths`: those of all rows. `batches`: the row indices of each batch.
    """
    padded = sum(len(rows) * int(lengths[rows].max()) for rows in batches)
    return 1.0 - sum(int(lengths[rows].sum()) for rows in batches) / padded if padded else 0.0


class Bucketed(Batches):
    """A data set in batches of rows of similar length; made by `bucketed`."""

    _padding: str | None = None
    """The fraction of padding as text, for the header; None before it is computed."""

    def __init__(self, rows: Table | SeededRows, settings: BatchSettings, buckets: Buckets) -> None:
        self._buckets = buckets
        super().__init__(rows, settings, None)

    def order(self, epoch: int = 0) -> list[list[int]]:
        """Return the row indices of every batch of an epoch, for example to sort outputs by row."""
        return [rows.tolist() for rows in self._batches(self._draw_seed(), epoch)]

    def padding(self, epoch: int = 0) -> float:
        """Return the fraction of padding in an epoch, with each batch padded to its longest row."""
        return padding_share(self._buckets.lengths, self._batches(self._seed or 0, epoch))

    def padding_mixed(self, epoch: int = 0) -> float:
        """Return the fraction of padding for the same number of batches in random order."""
        lengths = self._buckets.lengths
        draws = torch.Generator().manual_seed(mixed_seed(self._seed or 0, epoch))
        rows = torch.randperm(len(lengths), generator=draws)
        return padding_share(lengths, rows.tensor_split(self._buckets.number(drop_last=False)))

    @property
    def note(self) -> str:
        """A line for the header of the console."""
        if self._padding is None:
            self._padding = f"{self.padding():.1%} of a batch is padding, {self.padding_mixed():.1%} without"
        return f"bucketed by length: {self._padding}"

    def describe(self) -> str:
        """Return rows, batch size and order as text."""
        return f"{super().describe()}, by length"

    def fingerprint(self) -> dict[str, Any]:
        """Return the properties of the data that must be the same at a save and a resume."""
        buckets = self._buckets
        lengths = f"{zlib.crc32(buckets.lengths.numpy().tobytes()):08x}"
        return {**super().fingerprint(), "tokens": buckets.tokens, "slack": buckets.slack, "lengths": lengths}

    @property
    def in_memory(self) -> bool:
        """Whether a batch is one gather from a table. False: rows are fetched."""
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
    """Return the lengths as int64, one per row; DataError if they do not fit the rows."""
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
