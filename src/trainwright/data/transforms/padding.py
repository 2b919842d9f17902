"""Collate functions for rows of unequal length: padded with a mask, packed, or nested."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from numbers import Number
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad as widened
from torch.nn.utils.rnn import pack_sequence, pad_sequence

from trainwright.core.checks import check_choice, check_whole
from trainwright.core.errors import DataError, SettingError
from trainwright.core.records import TARGETS
from trainwright.core.suggestions import suggests

"""The keys under which a row holds its target, as for the default steps."""
_FIX = "tensors, arrays, lists of numbers or bytes, whose dimension 0 is their length"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pad:
    """Makes a batch of rows by padding; made by `pad`."""

    value: float = 0
    ignore_index: float = -100
    tell: Literal["mask", "lengths"] | None = "mask"
    of: str | int | None = None
    dtype: torch.dtype | None = None
    multiple: int = 1

    def __post_init__(self) -> None:
        check_choice(self.tell, "pad", "tell", choices=("mask", "lengths", None))
        check_whole(self.multiple, f"pad(multiple={self.multiple!r})")
        for name in ("value", "ignore_index"):
            if not isinstance(getattr(self, name), int | float) or isinstance(getattr(self, name), bool):
                raise SettingError(f"pad({name}={getattr(self, name)!r})", want="a number")
        _check_dtype(self.dtype, "pad")

    def __call__(self, rows: list[Any]) -> Any:
        """The batch of these rows."""
        told: dict[Any, Tensor] = {}

        def join(key: Any, sequences: list[Tensor], *, target: bool) -> Tensor:
            width = -(-max(map(len, sequences)) // self.multiple) * self.multiple
            if not target and self.tell is not None and self.of in (None, key):
                told[key] = self._told([len(one) for one in sequences], width)
            return self._padded(sequences, width, self.ignore_index if target else self.value)

        fields = _Fields(rows)
        joined = fields.joined(join, dtype=self.dtype)
        if self.of is not None and self.tell is not None and self.of not in told:
            have = ", ".join(map(repr, fields.keys))
            what = f"pad(of={self.of!r}): the rows have no such input of unequal lengths"
            raise DataError(what, have=have, want="the key or position of an input that is a sequence")
        return fields.packed(joined, self._named(told))

    def _told(self, lengths: list[int], width: int) -> Tensor:
        real = torch.tensor(lengths)
        return real if self.tell == "lengths" else torch.arange(width) < real[:, None]

    def _named(self, told: dict[Any, Tensor]) -> dict[str, Tensor]:
        if len(told) == 1:
            return {str(self.tell): next(iter(told.values()))}
        return {f"{key}_{self.tell}": one for key, one in told.items()}

    def _padded(self, sequences: list[Tensor], width: int, value: float) -> Tensor:
        dtype = sequences[0].dtype
        if not _holds(dtype, value):
            raise DataError(
                f"padding by {value} in {dtype}, which has no such number",
                want="a value of the type that is padded",
                fix="pad(value=..., ignore_index=...), or .long() for the targets",
            )
        padded = pad_sequence(sequences, batch_first=True, padding_value=value)
        missing = width - padded.shape[1]
        return widened(padded, (0, 0) * (padded.ndim - 2) + (0, missing), value=value) if missing else padded


@suggests
def pad(
    *,
    value: float = 0,
    ignore_index: float = -100,
    tell: Literal["mask", "lengths"] | None = "mask",
    of: str | int | None = None,
    dtype: torch.dtype | None = None,
    multiple: int = 1,
) -> Pad:
    """A collate function that pads sequences to the longest of a batch, and tells what is real.

    A row is a sequence (a tensor, an array, a list of numbers, bytes), a tuple of sequences and numbers whose last is
    the target, or a dict of them, whose target is under "target", "targets", "labels", "label" or "y". Inputs become
    (rows, width, ...) with `value` behind their end, targets that are sequences with `ignore_index`, which torch's
    losses leave out; numbers become (rows,). `tell="mask"` adds a tensor of bool (rows, width), True where an entry is
    real, "lengths" the lengths, int64 (rows,): in tuples before the target, in dicts under that name; with several
    input sequences for each, in dicts as `<key>_mask`, or only for the one under the key or position `of`. `dtype`
    is that of the inputs that are sequences; None leaves it (bytes become int64). Widths are multiples of `multiple`.
    """
    return Pad(value=value, ignore_index=ignore_index, tell=tell, of=of, dtype=dtype, multiple=multiple)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """Makes a batch of rows by packing; made by `pack`."""

    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        _check_dtype(self.dtype, "pack")

    def __call__(self, rows: list[Any]) -> Any:
        """The batch of these rows."""

        def join(key: Any, sequences: list[Tensor], *, target: bool) -> Any:
            if not all(map(len, sequences)):
                at = [len(one) for one in sequences].index(0)
                raise DataError(f"pack(): row {at} of a batch is empty", want="rows of at least one entry")
            return pack_sequence(sequences, enforce_sorted=False)

        fields = _Fields(rows)
        return fields.packed(fields.joined(join, dtype=self.dtype), {})


def pack(*, dtype: torch.dtype | None = None) -> Pack:
    """A collate function that packs sequences for `nn.RNN`, `nn.LSTM` and `nn.GRU`: no padding is computed.

    Rows are as for `pad`; each sequence, targets included, becomes a `PackedSequence`, in the same order of entries.
    """
    return Pack(dtype=dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Nest:
    """Makes a batch of rows by nesting; made by `nest`."""

    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        _check_dtype(self.dtype, "nest")
        if not hasattr(torch, "jagged") or not hasattr(torch.nested, "nested_tensor"):
            what = f"nest(): torch {torch.__version__} has no nested tensors of layout torch.jagged"
            raise SettingError(what, want="torch 2.4 or later", fix="pad(), with a mask")

    def __call__(self, rows: list[Any]) -> Any:
        """The batch of these rows."""

        def join(key: Any, sequences: list[Tensor], *, target: bool) -> Tensor:
            return torch.nested.nested_tensor(sequences, layout=torch.jagged)

        fields = _Fields(rows)
        return fields.packed(fields.joined(join, dtype=self.dtype), {})


def nest(*, dtype: torch.dtype | None = None) -> Nest:
    """A collate function that makes nested tensors (layout `torch.jagged`): sequences end to end, with offsets.

    Rows are as for `pad`; each sequence, targets included, becomes (rows, *, ...). `F.scaled_dot_product_attention`
    attends within each row, without a mask. Raises SettingError where this torch has no such tensors.
    """
    return Nest(dtype=dtype)


class _Fields:
    """The fields of rows: which are sequences, which is the target."""

    def __init__(self, rows: list[Any]) -> None:
        first = rows[0]
        self._keyed = isinstance(first, Mapping)
        self._alone = not self._keyed and not _has_fields(first)
        if self._keyed:
            self.keys: list[Any] = list(first)
            self._target: Any = next((key for key in TARGETS if key in first), None)
        else:
            self.keys = [0] if self._alone else list(range(len(first)))
            self._target = self.keys[-1] if len(self.keys) > 1 else None
        self._columns = {key: self._column(rows, key) for key in self.keys}

    def joined(self, join: Callable[..., Any], *, dtype: torch.dtype | None) -> dict[Any, Any]:
        """Every field of all rows: sequences by `join(key, sequences, target=)`, numbers as a tensor, texts listed."""
        joined: dict[Any, Any] = {}
        for key, column in self._columns.items():
            target = key == self._target
            if all(isinstance(one, str) for one in column):
                joined[key] = column
            elif all(_is_number(one) for one in column):
                plain = all(isinstance(one, int | float) for one in column)
                joined[key] = torch.tensor(column) if plain else torch.stack([torch.as_tensor(one) for one in column])
            else:
                joined[key] = join(key, self._sequences(key, column, None if target else dtype), target=target)
        return joined

    def packed(self, joined: dict[Any, Any], told: dict[str, Tensor]) -> Any:
        """The batch, in the form of a row; what is `told` stands before the target."""
        if self._keyed:
            if taken := [name for name in told if name in joined]:
                what = f"pad() adds {taken[0]!r} to the batch, and the rows have it already"
                raise DataError(what, fix="pad(tell=None), or another name in the rows")
            return {**joined, **told}
        if self._alone:
            return (joined[0], *told.values()) if told else joined[0]
        values = list(joined.values())
        end = len(values) if self._target is None else len(values) - 1
        return (*values[:end], *told.values(), *values[end:])

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

    def _sequences(self, key: Any, column: list[Any], dtype: torch.dtype | None) -> list[Tensor]:
        """The tensors of a field, of one dtype; DataError where they cannot be joined along their length."""
        found = [_tensor(one) for one in column]
        at = "the rows" if self._alone else f"field {key!r} of the rows"
        shapes = [None if one is None else tuple(one.shape[1:]) for one in found]
        if None in shapes or any(one is not None and not one.ndim for one in found) or len(set(shapes)) > 1:
            kinds = {f"{type(given).__name__} of shape {tuple(getattr(given, 'shape', ()))}" for given in column}
            have = ", ".join(sorted(kinds)[:4])
            raise DataError(f"{at} cannot be put together along their length", have=have, want=_FIX)
        tensors: list[Tensor] = [one for one in found if one is not None]
        # An empty list says nothing of its type, and torch would take it for one of floats.
        types = [one.dtype for one, given in zip(tensors, column, strict=True) if not _is_empty_list(given)]
        common = dtype or (reduce(torch.promote_types, types) if types else torch.int64)
        return [one.to(common) for one in tensors]


def _has_fields(row: Any) -> bool:
    """Whether a row is fields one after the other: any tuple, and a list of anything but numbers."""
    return isinstance(row, tuple) or (isinstance(row, list) and bool(row) and not _is_number(row[0]))


def _is_number(one: Any) -> bool:
    return isinstance(one, Number | np.generic) or (isinstance(one, Tensor | np.ndarray) and not one.ndim)


def _is_empty_list(one: Any) -> bool:
    return isinstance(one, list) and not one


def _tensor(one: Any) -> Tensor | None:
    """One sequence as a tensor; None for what is none."""
    if isinstance(one, bytes | bytearray):
        return torch.frombuffer(bytearray(one), dtype=torch.uint8).long() if one else torch.zeros(0, dtype=torch.int64)
    if isinstance(one, Tensor):
        return one
    if isinstance(one, np.ndarray):
        return torch.as_tensor(one if one.flags.writeable else one.copy())
    return torch.as_tensor(one) if isinstance(one, list) else None


def _holds(dtype: torch.dtype, value: float) -> bool:
    """Whether a number is one of this type."""
    if dtype.is_floating_point or dtype.is_complex:
        return True
    if dtype == torch.bool:
        return value in (0, 1)
    return value == int(value) and torch.iinfo(dtype).min <= value <= torch.iinfo(dtype).max


def _check_dtype(dtype: Any, name: str) -> None:
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise SettingError(f"{name}(dtype={dtype!r})", want="a dtype of torch", fix=f"{name}(dtype=torch.float32)")
