"""Reads a small map-style data set into memory: a table whose batches are those of torch's collate function."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from trainwright.core.errors import DataError, SettingError
from trainwright.data.arrays import Table
from trainwright.data.data_state import is_stateful
from trainwright.data.seeded import SeededRows, open_rows

_BLOCK = 256
"""Rows that are read, joined and compared in one block."""
_FETCHED = "leave in_memory out: the rows are then fetched in each epoch"
_Kinds = list[tuple[str, str]]
"""The place and the kind of each value of a row."""


class ReadRows(Table):
    """The rows of a data set that was read into memory."""

    def __init__(self, columns: Sequence[Tensor], pack: Callable[[Any], Any] | None, name: str) -> None:
        super().__init__(columns, pack)
        self._name = name

    def describe(self) -> str:
        """Return the location of the rows, and their data set."""
        return f"memory ({self._name}, read once)"


def read_into_memory(data: Any, *, collate: Any, workers: Any) -> Table:
    """Read every row of a map-style data set into memory, twice; a table in memory is returned as it is.

    A batch is then the one of torch's collate function. DataError where the two readings differ, where a row has
    anything but plain tensors, numbers and arrays, alone or in tuples, lists and dicts, and where rows differ in shape
    or type; SettingError with a collate function or workers. The process's generators are restored.
    """
    _refuse_settings(collate, workers)
    given = open_rows(data, None)
    if isinstance(given, Table):
        return given
    _refuse_what_changes(data)
    if not len(data):
        raise DataError("data set of 0 rows", want="at least one row")
    return _Reading(data).read()


def _refuse_settings(collate: Any, workers: Any) -> None:
    if collate is not None:
        raise SettingError(
            "batches(in_memory=True, collate=...): rows in memory are columns, which no function joins",
            want="one of the two",
            fix="rows = [data[i] for i in range(len(data))]; batches(rows, 64, collate=collate)",
        )
    if workers:
        what = f"batches(in_memory=True, workers={workers}): workers would have nothing to fetch"
        raise SettingError(what, want="one of the two", fix="leave workers out")


def _refuse_what_changes(data: Any) -> None:
    name = type(data).__name__
    method = "set_epoch" if callable(getattr(data, "set_epoch", None)) else "state_dict" if is_stateful(data) else ""
    if method:
        what = f"batches({name}, in_memory=True): its rows may change, for it has {method}"
        raise DataError(what, want="a data set whose rows are always the same", fix=_FETCHED)


class _Reading:
    """Reads a data set, some rows at a time, each twice and with other random draws."""

    def __init__(self, data: Any) -> None:
        self._rows = SeededRows(data, list)
        self._name = type(data).__name__
        self._kinds: _Kinds = []
        self._columns: list[Tensor] = []

    def read(self) -> ReadRows:
        """Return all rows."""
        rows, pack = len(self._rows), None
        for start in range(0, rows, _BLOCK):
            numbers = range(start, min(start + _BLOCK, rows))
            joined, again = self._joined(numbers, reading=0), self._joined(numbers, reading=1)
            if not start:
                pack = _packing(joined)
                self._allocate(joined, rows)
            for at, (part, second, column) in enumerate(
                zip(*map(_leaves, (joined, again)), self._columns, strict=True)
            ):
                self._check_again(part, second, at=at, start=start)
                column[start : numbers.stop] = part
        return ReadRows(self._columns, pack, self._name)

    def _joined(self, numbers: range, *, reading: int) -> Any:
        """Return these rows, joined by torch's collate function."""
        fetched: list[Any] = self._rows.fetch(0, reading, numbers)
        if len(fetched) != len(numbers):
            what = f"{self._name}.__getitems__ was given {len(numbers)} row numbers, and returned {len(fetched)} rows"
            raise DataError(what, fix=_FETCHED)
        for number, row in zip(numbers, fetched, strict=True):
            kinds = list(self._kinds_of(row, ""))
            self._kinds = self._kinds or kinds
            if kinds != self._kinds:
                raise self._differs(number, have=kinds)
        return default_collate(fetched)

    def _allocate(self, joined: Any, rows: int) -> None:
        shapes = [(rows, *part.shape[1:]) for part in _leaves(joined)]
        self._columns = [
            torch.empty(shape, dtype=part.dtype, device="meta")
            for shape, part in zip(shapes, _leaves(joined), strict=True)
        ]
        size = sum(column.numel() * column.element_size() for column in self._columns)
        room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else size
        if size > room:
            what = f"batches({self._name}, in_memory=True): {rows:,} rows need {size >> 20:,} MB"
            raise DataError(what, want=f"at most the memory of this machine, {room >> 20:,} MB", fix=_FETCHED)
        self._columns = [torch.empty_like(column, device="cpu") for column in self._columns]

    def _check_again(self, part: Tensor, second: Tensor, *, at: int, start: int) -> None:
        """Refuse rows that differ in any bit in a second reading."""
        one, two = (tensor.reshape(len(tensor), -1).contiguous().view(torch.uint8) for tensor in (part, second))
        if torch.equal(one, two):
            return
        row = int((one != two).any(1).nonzero()[0])
        where = self._kinds[at][0]
        raise DataError(
            f"batches({self._name}, in_memory=True): row {start + row} is not the same in two readings",
            have=f"{where or 'it'}: {_shown(part[row])}, then {_shown(second[row])}",
            want="rows without random draws, which do not depend on earlier reads",
            fix=f"{_FETCHED}; or draw in the step, for a complete batch",
        )

    def _differs(self, number: int, *, have: _Kinds) -> DataError:
        pairs = [(one, other) for one, other in zip(have, self._kinds, strict=False) if one != other]
        texts = [
            ", ".join(f"{at or 'it'} {kind}" for at, kind in some)
            for some in (zip(*pairs, strict=True) if pairs else ())
        ]
        one, other = texts or [f"{len(have)} values", f"{len(self._kinds)} values"]
        return DataError(
            f"batches({self._name}, in_memory=True): row {number} differs in kind from row 0",
            have=one,
            want=f"{other}, as in row 0",
            fix=f"{_FETCHED}, with a collate function where they differ in shape",
        )

    def _kinds_of(self, value: Any, at: str) -> Iterator[tuple[str, str]]:
        """Yield places and kinds of tensors, arrays and numbers in a row; DataError for anything else."""
        if type(value) is dict:
            for key, inner in value.items():
                yield from self._kinds_of(inner, f"{at}[{key!r}]")
        elif type(value) is list or isinstance(value, tuple):
            for index, inner in enumerate(value):
                yield from self._kinds_of(inner, f"{at}[{index}]")
        elif _is_array(value):
            yield at, f"{value.dtype} {tuple(value.shape)} {type(value).__name__}"
        elif isinstance(value, bool | int | float | np.number | np.bool_):
            yield at, type(value).__name__
        else:
            raise DataError(
                f"batches({self._name}, in_memory=True): {at or 'a row'} is a {type(value).__name__}",
                want="tensors, numbers and arrays of numbers, alone or in tuples, lists and dicts",
                fix=_FETCHED,
            )


def _is_array(value: Any) -> bool:
    """Return whether it is a plain tensor on the CPU, or an array of numbers."""
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biufc"
    plain = type(value) is Tensor and value.layout is torch.strided and value.device.type == "cpu"
    return plain and not value.requires_grad


def _leaves(joined: Any) -> Iterator[Tensor]:
    """Yield the tensors of a batch, in order."""
    if isinstance(joined, Tensor):
        yield joined
        return
    for inner in joined.values() if isinstance(joined, dict) else joined:
        yield from _leaves(inner)


def _packing(joined: Any) -> Callable[[Any], Any]:
    """Return the function from columns to a batch of this form."""
    if isinstance(joined, Tensor):
        return itemgetter(0)
    if type(joined) is list and all(isinstance(inner, Tensor) for inner in joined):
        return list
    return partial(_packed, _containers(joined))


def _containers(joined: Any) -> Any:
    """Return the containers of a batch, without its tensors."""
    if isinstance(joined, Tensor):
        return None
    if isinstance(joined, dict):
        return {key: _containers(inner) for key, inner in joined.items()}
    kind: Any = type(joined)
    inside = [_containers(inner) for inner in joined]
    return kind(*inside) if hasattr(joined, "_fields") else inside


def _packed(form: Any, columns: Any) -> Any:
    return _filled(form, iter(columns))


def _filled(form: Any, columns: Iterator[Tensor]) -> Any:
    if form is None:
        return next(columns)
    if isinstance(form, dict):
        return {key: _filled(inner, columns) for key, inner in form.items()}
    kind: Any = type(form)
    inside = [_filled(inner, columns) for inner in form]
    return kind(*inside) if hasattr(form, "_fields") else inside


def _shown(row: Tensor) -> str:
    return str(row.reshape(-1)[:4].tolist()) if row.ndim else str(row.item())
