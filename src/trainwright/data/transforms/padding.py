"""`pad(...)`: a collate function for rows of unequal length, with a mask of the entries that are no padding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from numbers import Number
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad as pad_width
from torch.nn.utils.rnn import pad_sequence

from trainwright.core.checks import check_choice, check_whole
from trainwright.core.errors import DataError, SettingError
from trainwright.core.records import TARGETS
from trainwright.core.suggestions import suggests


@suggests
def pad(
    *,
    value: float = 0,
    ignore_index: float = -100,
    returns: Literal["mask", "lengths"] | None = "mask",
    of: str | int | None = None,
    dtype: torch.dtype | None = None,
    multiple: int = 1,
) -> Pad:
    """Return a collate function that pads sequences to the longest one of a batch.

    A row is a sequence (a tensor, an array, a list of numbers, or bytes); a tuple of sequences and numbers, of which
    the last one is the target; or a dict of them, with the target under "target", "targets", "labels", "label" or "y".
    Sequences become tensors of shape (rows, width, ...), numbers become tensors of shape (rows,).

    Args:
        value: The padding value of inputs.
        ignore_index: The padding value of targets that are sequences, which torch's losses ignore.
        returns: "mask" adds a bool tensor of shape (rows, width), False at padding. "lengths" adds the lengths, an
            int64 tensor of shape (rows,). It is added before the target in a tuple, and under this name in a dict. With
            several input sequences, one is added for each; in a dict as `<key>_mask`.
        of: The key or position of the only input whose mask or lengths are added.
        dtype: The dtype of input sequences. None: unchanged (bytes become int64).
        multiple: Widths are rounded up to a multiple of this.
    """
    return Pad(value=value, ignore_index=ignore_index, returns=returns, of=of, dtype=dtype, multiple=multiple)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pad:
    """A collate function that pads rows; made by `pad`."""

    value: float = 0
    ignore_index: float = -100
    returns: Literal["mask", "lengths"] | None = "mask"
    of: str | int | None = None
    dtype: torch.dtype | None = None
    multiple: int = 1

    def __post_init__(self) -> None:
        check_choice(self.returns, "pad", "returns", choices=("mask", "lengths", None))
        check_whole(self.multiple, f"pad(multiple={self.multiple!r})")
        for name in ("value", "ignore_index"):
            if not isinstance(getattr(self, name), int | float) or isinstance(getattr(self, name), bool):
                raise SettingError(f"pad({name}={getattr(self, name)!r})", want="a number")
        if self.dtype is not None and not isinstance(self.dtype, torch.dtype):
            raise SettingError(f"pad(dtype={self.dtype!r})", want="a dtype of torch", fix="pad(dtype=torch.float32)")

    def __call__(self, rows: list[Any]) -> Any:
        """Return the batch of these rows."""
        fields = _Fields(rows)
        batch: dict[Any, Any] = {}
        extra: dict[Any, Tensor] = {}
        for key, column in fields.columns.items():
            if all(isinstance(one, str) for one in column):
                batch[key] = column
            elif all(_is_number(one) for one in column):
                batch[key] = _stacked(column)
            elif key == fields.target:
                batch[key] = self._padded(fields.sequences(key, None), self.ignore_index)
            else:
                sequences = fields.sequences(key, self.dtype)
                batch[key] = self._padded(sequences, self.value)
                if self.returns is not None and self.of in (None, key):
                    extra[key] = self._extra(sequences, batch[key].shape[1])
        if self.of is not None and self.returns is not None and self.of not in extra:
            have = ", ".join(map(repr, fields.columns))
            what = f"pad(of={self.of!r}): the rows have no such input of unequal lengths"
            raise DataError(what, have=have, want="the key or position of an input that is a sequence")
        return fields.in_form_of_a_row(batch, self._by_name(extra))

    def _padded(self, sequences: list[Tensor], value: float) -> Tensor:
        dtype = sequences[0].dtype
        if not _represents(dtype, value):
            raise DataError(
                f"padding by {value} in {dtype}, which has no such number",
                want="a value of the type that is padded",
                fix="pad(value=..., ignore_index=...), or .long() for the targets",
            )
        padded = pad_sequence(sequences, batch_first=True, padding_value=value)
        missing = -padded.shape[1] % self.multiple
        return pad_width(padded, (0, 0) * (padded.ndim - 2) + (0, missing), value=value) if missing else padded

    def _extra(self, sequences: list[Tensor], width: int) -> Tensor:
        lengths = torch.tensor([len(one) for one in sequences])
        return lengths if self.returns == "lengths" else torch.arange(width) < lengths[:, None]

    def _by_name(self, extra: dict[Any, Tensor]) -> dict[str, Tensor]:
        if len(extra) == 1:
            return {str(self.returns): next(iter(extra.values()))}
        return {f"{key}_{self.returns}": one for key, one in extra.items()}


class _Fields:
    """The fields of rows as columns: the items of tuples, the values of dicts, or the row itself for sequences."""

    def __init__(self, rows: list[Any]) -> None:
        first = rows[0]
        self._keyed = isinstance(first, Mapping)
        self._alone = not self._keyed and not _has_fields(first)
        if self._keyed:
            keys: list[Any] = list(first)
            self.target: Any = next((key for key in TARGETS if key in first), None)
        else:
            keys = [0] if self._alone else list(range(len(first)))
            self.target = keys[-1] if len(keys) > 1 else None
        self.columns = {key: self._column(rows, key) for key in keys}

    def sequences(self, key: Any, dtype: torch.dtype | None) -> list[Tensor]:
        """Return the tensors of a column in one dtype; DataError if their shapes differ in more than the length."""
        column = self.columns[key]
        found = [_tensor(one) for one in column]
        at = "the rows" if self._alone else f"field {key!r} of the rows"
        shapes = [None if one is None else tuple(one.shape[1:]) for one in found]
        if None in shapes or any(one is not None and not one.ndim for one in found) or len(set(shapes)) > 1:
            kinds = {f"{type(given).__name__} of shape {tuple(getattr(given, 'shape', ()))}" for given in column}
            have = ", ".join(sorted(kinds)[:4])
            want = "tensors, arrays, lists of numbers or bytes, whose dimension 0 is their length"
            raise DataError(f"{at} cannot be joined along their length", have=have, want=want)
        tensors: list[Tensor] = [one for one in found if one is not None]
        # An empty list has no dtype; torch would make it a float tensor.
        types = [one.dtype for one, given in zip(tensors, column, strict=True) if not _is_empty_list(given)]
        common = dtype or (reduce(torch.promote_types, types) if types else torch.int64)
        return [one.to(common) for one in tensors]

    def in_form_of_a_row(self, batch: dict[Any, Any], extra: dict[str, Tensor]) -> Any:
        """Return the batch in the form of a row (sequence, tuple or dict), with `extra` before the target."""
        if self._keyed:
            if taken := [name for name in extra if name in batch]:
                what = f"pad() adds {taken[0]!r} to the batch, and the rows have it already"
                raise DataError(what, fix="pad(returns=None), or another name in the rows")
            return {**batch, **extra}
        if self._alone:
            return (batch[0], *extra.values()) if extra else batch[0]
        values = list(batch.values())
        end = len(values) if self.target is None else len(values) - 1
        return (*values[:end], *extra.values(), *values[end:])

    def _column(self, rows: list[Any], key: Any) -> list[Any]:
        if self._alone:
            return rows
        if self._keyed:
            alike = all(isinstance(row, Mapping) and row.keys() == rows[0].keys() for row in rows)
        else:
            alike = all(_has_fields(row) and len(row) == len(rows[0]) for row in rows)
        if not alike:
            raise DataError("the rows of a batch differ in form", want="tuples of one length, or dicts alike")
        return [row[key] for row in rows]


def _has_fields(row: Any) -> bool:
    """Return whether a row is a sequence of fields: a tuple, or a list of other things than numbers."""
    return isinstance(row, tuple) or (isinstance(row, list) and bool(row) and not _is_number(row[0]))


def _is_number(one: Any) -> bool:
    return isinstance(one, Number | np.generic) or (isinstance(one, Tensor | np.ndarray) and not one.ndim)


def _stacked(numbers: list[Any]) -> Tensor:
    if all(isinstance(one, int | float) for one in numbers):
        return torch.tensor(numbers)
    return torch.stack([torch.as_tensor(one) for one in numbers])


def _is_empty_list(one: Any) -> bool:
    return isinstance(one, list) and not one


def _tensor(one: Any) -> Tensor | None:
    """Return a sequence as a tensor; None for anything else."""
    if isinstance(one, bytes | bytearray):
        return torch.frombuffer(bytearray(one), dtype=torch.uint8).long() if one else torch.zeros(0, dtype=torch.int64)
    if isinstance(one, Tensor):
        return one
    if isinstance(one, np.ndarray):
        return torch.as_tensor(one if one.flags.writeable else one.copy())
    return torch.as_tensor(one) if isinstance(one, list) else None


def _represents(dtype: torch.dtype, value: float) -> bool:
    """Return whether `dtype` can represent a value."""
    if dtype.is_floating_point or dtype.is_complex:
        return True
    if dtype == torch.bool:
        return value in (0, 1)
    return value == int(value) and torch.iinfo(dtype).min <= value <= torch.iinfo(dtype).max
