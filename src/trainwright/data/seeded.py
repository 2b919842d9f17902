"""Fetches rows of a map-style data set, whose random draws depend on (seed, epoch, row) alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, default_collate

from trainwright.core.errors import DataError
from trainwright.data.arrays import Table, TableRows, table_of
from trainwright.data.source import Source

_MASK = (1 << 64) - 1


def mixed(*numbers: int) -> int:
    """Return 64 well-mixed bits of any integers (SplitMix64, Steele, Lea and Flood 2014)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def mixed_seed(*numbers: int) -> int:
    """Return the lower 32 of these bits, which torch and NumPy take as a seed."""
    return mixed(*numbers) & 0xFFFFFFFF


class SeededRows:
    """A map-style data set and its collate function; `fetch` returns a batch.

    Python's, NumPy's and torch's CPU generator are seeded before each row and restored after the batch. A data set
    with `__getitems__` fetches a complete batch at once, seeded from the batch's first row. Generators of the
    data set's own, and fresh ones seeded by the operating system, are not reached.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] | None) -> None:
        self.dataset = dataset
        self.collate = collate
        self._has_getitems = _fetches_batches(dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def describe(self) -> str:
        """Return the class of the data set."""
        return type(self.dataset).__name__

    def fetch(self, seed: int, epoch: int, rows: Sequence[int]) -> Any:
        """Return the batch of `rows`, which does not depend on earlier draws of the process."""
        base = mixed(seed, epoch)
        # Row numbers are below 2^63: a draw for the complete batch has a number above.
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
    """Return the rows of `data`, joined by `collate` where one is given; DataError where `data` have no rows."""
    table = table_of(data)
    if table is not None:
        return table if collate is None else SeededRows(TableRows(table), collate)
    check_rows(data, f"batches({type(data).__name__}, ...)")
    if collate is None:  # a collate function may join rows of any shapes
        _refuse_list_of_columns(data)
    return SeededRows(data, collate)


def check_rows(data: Any, written: str) -> None:
    """Raise DataError where data are no map-style data set; `written`: the user's call."""
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
    # A Subset always has `__getitems__`; fetched row by row, each row has its own draws.
    if type(dataset) is Subset:
        return _fetches_batches(dataset.dataset)
    return callable(getattr(dataset, "__getitems__", None))


def _seed(bits: int) -> None:
    random.seed(bits)
    # torch and NumPy seed the same Mersenne twister with 32 bits: equal seeds would give equal streams.
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
