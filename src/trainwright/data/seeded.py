"""Rows of a map-style data set, fetched with random draws by (seed, epoch, row) only, or read into memory once."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset, default_collate

from trainwright.core.errors import DataError, SettingError
from trainwright.core.trees import leaves_of, map_tree, tensors_in
from trainwright.data.arrays import Table, TableRows, table_of
from trainwright.data.data_state import is_stateful
from trainwright.data.source import Source

_MASK = (1 << 64) - 1


def mixed(*numbers: int) -> int:
    """Return a 64-bit hash of integers, by SplitMix64 (Steele, Lea and Flood 2014)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def mixed_seed(*numbers: int) -> int:
    """Return the lower 32 bits of `mixed`, as a seed for torch or NumPy."""
    return mixed(*numbers) & 0xFFFFFFFF


class SeededRows:
    """A map-style data set with its collate function; `fetch` returns a batch.

    The global CPU generators of Python, NumPy and torch are seeded before each row and restored after the batch. A data
    set with `__getitems__` fetches a complete batch, seeded by its first row. Separate generators of the data set, and
    new ones seeded by the operating system, are not covered.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] | None) -> None:
        self.dataset = dataset
        self.collate = collate
        self._has_getitems = _fetches_batches(dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def describe(self) -> str:
        """Return the class name of the data set."""
        return type(self.dataset).__name__

    def fetch(self, seed: int, epoch: int, rows: Sequence[int]) -> Any:
        """Return the batch of `rows`, independent of earlier random draws of the process."""
        base = mixed(seed, epoch)
        # Row indices are below 2^63; draws for the complete batch use numbers above.
        batch = rows[0] + (1 << 63)
        with _generators_restored():
            if self._has_getitems:
                _seed(mixed(base, batch))
                fetched = self.dataset.__getitems__(list(rows))
            else:
                fetched = [self._row(base, row) for row in rows]
            if self.collate is None:
                return self._collated(fetched, len(rows))
            _seed(mixed(base, batch, 1))
            return self.collate(fetched)

    def _collated(self, fetched: Any, rows: int) -> Any:
        if not isinstance(fetched, list | tuple) or len(fetched) != rows:
            raise self._no_rows(fetched, rows)
        try:
            return default_collate(list(fetched))
        except (TypeError, RuntimeError) as error:
            error.add_note(
                "trainwright: torch's default_collate makes no batch of these rows\n"
                f"  have  {len(fetched)} rows of {type(self.dataset).__name__}, each a {type(fetched[0]).__name__}\n"
                "  want  rows of tensors of one shape, numbers, or tuples or dicts of these\n"
                "  fix   batches(..., collate=collate), a function from a list of rows to a batch, such as pad()"
            )
            raise

    def _no_rows(self, fetched: Any, rows: int) -> DataError:
        name = type(self.dataset).__name__
        sized = f" of {len(fetched)}" if isinstance(fetched, list | tuple) else ""
        return DataError(
            f"{name}.__getitems__ was given {rows} row numbers, and returned something else",
            have=f"a {type(fetched).__name__}{sized}",
            want=f"a list of {rows} rows, each as {name}[i] returns it",
            fix="for complete batches batches(..., collate=collate), with def collate(batch): return batch",
        )

    def _row(self, base: int, row: int) -> Any:
        _seed(mixed(base, row))
        return self.dataset[row]


def open_rows(data: Any, collate: Callable[[list[Any]], Any] | None) -> Table | SeededRows:
    """Return the rows of `data`, with `collate` if given; DataError if `data` are no data set of rows."""
    table = table_of(data)
    if table is not None:
        return table if collate is None else SeededRows(TableRows(table), collate)
    check_rows(data, f"batches({type(data).__name__}, ...)")
    if collate is None:  # a custom collate function may join rows of any shapes
        _refuse_list_of_columns(data)
    return SeededRows(data, collate)


def check_rows(data: Any, written: str) -> None:
    """Raise DataError if data are no map-style data set; `written`: the user's call."""
    if isinstance(data, DataLoader | IterableDataset) or not _is_map_style(data):
        raise DataError(
            f"{written}: no data set of rows",
            want="a map-style Dataset (len and []), a tensor, an array, or a tuple or dict of equally long ones",
            fix=_fix_for(data),
        )


def _is_map_style(data: Any) -> bool:
    named = isinstance(data, str | bytes | type) or hasattr(data, "iloc")
    return hasattr(data, "__getitem__") and hasattr(data, "__len__") and not named


def _fix_for(data: Any) -> str:
    if isinstance(data, DataLoader | Source):
        return "it has batches already: use it as it is"
    if isinstance(data, IterableDataset):
        return "DataLoader(data, batch_size=...)"
    return "data.to_numpy()" if hasattr(data, "iloc") else ""


def _refuse_list_of_columns(data: Any) -> None:
    if not isinstance(data, list) or not 2 <= len(data) <= 8 or not all(hasattr(one, "shape") for one in data):
        return
    shapes = [tuple(one.shape) for one in data]
    if len(set(shapes)) > 1:
        raise DataError(
            "batches([...]): the items of a list are rows, and these rows differ in shape",
            have=", ".join(map(str, shapes)),
            want="a tuple for the columns of one data set",
            fix="batches((x, y), ...)",
        )


def _fetches_batches(dataset: Any) -> bool:
    # A Subset always has `__getitems__`, so the data set inside decides.
    if type(dataset) is Subset:
        return _fetches_batches(dataset.dataset)
    return callable(getattr(dataset, "__getitems__", None))


def _seed(bits: int) -> None:
    random.seed(bits)
    # Torch and NumPy seed the same Mersenne Twister with 32 bits: equal seeds would give equal streams.
    np.random.seed(bits >> 32)
    torch.default_generator.manual_seed(bits & 0xFFFFFFFF)


@contextmanager
def _generators_restored() -> Iterator[None]:
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.default_generator.set_state(cpu)


# Rows that are read into memory once.

_BLOCK = 256
"""The number of rows that are read, collated and compared at a time."""
_FETCHED = "leave in_memory out: the rows are then fetched in each epoch"


class ReadRows(Table):
    """The table of a data set that was read into memory."""

    def __init__(self, columns: Sequence[Tensor], pack: Callable[[Any], Any] | None, name: str) -> None:
        super().__init__(columns, pack)
        self._name = name

    def describe(self) -> str:
        """Return the location of the rows and the name of their data set."""
        return f"memory ({self._name}, read once)"


def read_into_memory(data: Any, *, collate: Any, workers: Any) -> Table:
    """Return a table of all rows of a map-style data set, read twice for comparison; tensors are returned unchanged.

    Batches are those of torch's default collate function. Global generators are restored.

    Raises DataError if the two readings differ, if rows differ in shape or type, or if a row has other values than
    plain tensors, numbers and arrays in tuples, lists and dicts; SettingError for a collate function or workers.
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
    """Reads a data set in blocks, each row twice, with different random draws."""

    def __init__(self, data: Any) -> None:
        self._rows = SeededRows(data, list)
        self._name = type(data).__name__
        self._kinds: list[tuple[str, str]] = []
        """Path and kind of each value of row 0."""

    def read(self) -> ReadRows:
        """Return all rows."""
        rows, columns, form = len(self._rows), [], None
        for start in range(0, rows, _BLOCK):
            numbers = range(start, min(start + _BLOCK, rows))
            joined, again = self._joined(numbers, reading=0), self._joined(numbers, reading=1)
            if not start:
                form = map_tree(lambda _: None, joined)
                columns = self._allocated(list(tensors_in(joined)), rows)
            parts = zip(columns, tensors_in(joined), tensors_in(again), strict=True)
            for (at, _), (column, part, second) in zip(self._kinds, parts, strict=True):
                self._check_same(part, second, at=at, start=start)
                column[start : numbers.stop] = part
        return ReadRows(columns, partial(_packed, form), self._name)

    def _joined(self, numbers: range, *, reading: int) -> Any:
        """Return these rows, collated by torch's default function."""
        fetched: list[Any] = self._rows.fetch(0, reading, numbers)
        if len(fetched) != len(numbers):
            what = f"{self._name}.__getitems__ was given {len(numbers)} row numbers, and returned {len(fetched)} rows"
            raise DataError(what, fix=_FETCHED)
        for number, row in zip(numbers, fetched, strict=True):
            kinds = [(at, self._kind(leaf, at)) for at, leaf in leaves_of(row)]
            self._kinds = self._kinds or kinds
            if kinds != self._kinds:
                self._refuse_other_kinds(number, kinds)
        return default_collate(fetched)

    def _kind(self, value: Any, at: str) -> str:
        """Return dtype and shape of a tensor or array, or the type of a number; DataError for anything else."""
        if _is_array(value):
            return f"{value.dtype} {tuple(value.shape)} {type(value).__name__}"
        if isinstance(value, bool | int | float | np.number | np.bool_):
            return type(value).__name__
        raise DataError(
            f"batches({self._name}, in_memory=True): {at or 'a row'} is a {type(value).__name__}",
            want="tensors, numbers and arrays of numbers, alone or in tuples, lists and dicts",
            fix=_FETCHED,
        )

    def _refuse_other_kinds(self, number: int, kinds: list[tuple[str, str]]) -> None:
        have, want = f"{len(kinds)} values", f"{len(self._kinds)} values"
        for one, other in zip(kinds, self._kinds, strict=False):
            if one != other:
                have, want = (f"{at or 'it'} {kind}" for at, kind in (one, other))
                break
        raise DataError(
            f"batches({self._name}, in_memory=True): row {number} differs in kind from row 0",
            have=have,
            want=f"{want}, as in row 0",
            fix=f"{_FETCHED}, with a collate function where they differ in shape",
        )

    def _allocated(self, first: list[Tensor], rows: int) -> list[Tensor]:
        """Return uninitialized columns for all rows; `first`: the columns of the first block."""
        size = sum(part.nbytes // len(part) * rows for part in first)
        room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else size
        if size > room:
            what = f"batches({self._name}, in_memory=True): {rows:,} rows need {size >> 20:,} MB"
            raise DataError(what, want=f"at most the memory of this machine, {room >> 20:,} MB", fix=_FETCHED)
        return [torch.empty((rows, *part.shape[1:]), dtype=part.dtype) for part in first]

    def _check_same(self, part: Tensor, second: Tensor, *, at: str, start: int) -> None:
        """Raise DataError for rows that differ in any bit in the second reading."""
        one, two = (tensor.reshape(len(tensor), -1).contiguous().view(torch.uint8) for tensor in (part, second))
        if torch.equal(one, two):
            return
        row = int((one != two).any(1).nonzero()[0])
        first, then = (str(values[row].tolist())[:60] for values in (part, second))
        raise DataError(
            f"batches({self._name}, in_memory=True): row {start + row} is not the same in two readings",
            have=f"{at or 'it'}: {first}, then {then}",
            want="rows without random draws, which do not depend on earlier reads",
            fix=f"{_FETCHED}; or draw in the step, for a complete batch",
        )


def _is_array(value: Any) -> bool:
    """Return whether a value is a plain CPU tensor or an array of numbers."""
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biufc"
    plain = type(value) is Tensor and value.layout is torch.strided and value.device.type == "cpu"
    return plain and not value.requires_grad


def _packed(form: Any, columns: Any) -> Any:
    """Return a batch of these columns in the nested containers of `form`."""
    left = iter(columns)
    return map_tree(lambda _: next(left), form)
