"""What a sampler of the user's own gives to `batches`: row numbers, anew in each epoch."""

from __future__ import annotations

from typing import Any

from trainwright.core.errors import DataError, SettingError


def check_sampler(sampler: Any, *, shuffle: bool) -> None:
    """Refuse a sampler beside `shuffle`, and one that can be iterated once."""
    if shuffle:
        raise SettingError("batches(shuffle=True, sampler=...)", want="one of the two", fix="leave one out")
    if hasattr(sampler, "__next__") or not hasattr(sampler, "__iter__"):
        raise SettingError(
            f"batches(sampler={type(sampler).__name__})",
            want="row numbers that can be iterated anew in each epoch",
            fix="a list, or an object of a torch Sampler class",
        )


def row_number(row: Any, *, of: int, sampler: Any) -> int:
    """The number that a sampler gave for one `of` so many rows; DataError for anything else."""
    number = row if isinstance(row, int) else int(row) if hasattr(row, "__index__") else None
    if number is None or not 0 <= number < of:
        raise DataError(
            f"the sampler {type(sampler).__name__} gave {row!r}",
            want=f"a row number from 0 to {of - 1}",
            fix="for a batch sampler write DataLoader(data, batch_sampler=...)" if number is None else "",
        )
    return number
