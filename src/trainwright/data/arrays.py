"""Batches of tensors and arrays in memory: one `index_select` per batch, without Python code per row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from functools import partial
from itertools import chain, repeat, tee
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from trainwright.core.errors import DataError
from trainwright.distributed.mesh import Shard, Slice

GATHER_LIMIT = 1 << 20
"""The most bytes of an epoch that are gathered at once; more do not fit into the cache."""
ALIGNED = 64
"""Alignment in bytes of the memory that torch allocates."""


class Table:
    """Columns of equal length in memory. A batch is the same container with some of the rows.

    Batches are copies, so a step may write to them.
    """

    def __init__(
        self, columns: Sequence[Tensor], pack: Callable[[Any], Any] | None, indices: Tensor | None = None
    ) -> None:
        self.columns = list(columns)
        self._pack = pack
        """Makes the container from a tuple of columns; None if it is a tuple."""
        self._indices = indices
        """Row indices into the columns, if the table is a subset; else None."""

    def __len__(self) -> int:
        return self.columns[0].shape[0] if self._indices is None else self._indices.shape[0]

    def describe(self) -> str:
        """Return the location of the rows, for the header."""
        return "memory"

    def bytes_on(self, device: torch.device) -> int:
        """Return the size in bytes of a copy of the rows on `device`; 0 for columns already there."""
        of_row = [one[:1].numel() * one.element_size() for one in self.columns if one.device != device]
        return len(self) * sum(of_row)

    def on(self, device: torch.device) -> Table:
        """Return a table of the same rows, copied to `device`."""
        there, indices = copy(self), self._indices
        rows = [one if indices is None else one.index_select(0, indices.to(one.device)) for one in self.columns]
        there.columns, there._indices = [one.to(device) for one in rows], None
        return there

    def batches(self, order: Tensor | None, size: int, rows: range, *, only: range | None = None) -> Iterator[Any]:
        """Return batches of `size` rows, for the positions `rows` of `order`; None: in the order of the table.

        `only`: the positions within each batch to return; None: all.
        """
        if not rows:
            return iter(())
        if only is None and self._fits_at_once(len(rows), size):
            columns = self._gathered_at_once(order, size, rows)
        else:
            columns = self._gathered_by_batch(order, size, rows, only=only)
        # map and zip run in C: no Python frame per batch.
        joined = zip(*columns, strict=True)
        return joined if self._pack is None else map(self._pack, joined)

    def slices(self, order: Tensor | None, size: int, rows: range, *, part: Shard) -> Iterator[Slice]:
        """Return the slices of these batches for one rank; a short last batch is split by its own size."""
        full = len(rows) // size * size
        return chain(
            self._slices(order, size, rows[:full], part=part),
            self._slices(order, len(rows) - full, rows[full:], part=part),
        )

    def _slices(self, order: Tensor | None, size: int, rows: range, *, part: Shard) -> Iterator[Slice]:
        own = self.batches(order, size, rows, only=part.run(size))
        return map(Slice, own, repeat(len(part.of(size))), repeat(size))

    def fetch(self, seed: int, epoch: int, rows: Sequence[int]) -> Any:
        """Return the batch of `rows`."""
        return self.take(torch.as_tensor(rows, dtype=torch.int64))

    def take(self, rows: Tensor) -> Any:
        """Return the batch of `rows`, an int64 tensor; IndexError for an index out of range."""
        picked = self._picked(rows)
        batch = tuple([column.index_select(0, picked) for column in self.columns])
        return batch if self._pack is None else self._pack(batch)

    def part(self, indices: Tensor) -> Table:
        """Return a table of the rows at `indices`, without a copy."""
        return Table(
            self.columns, self._pack, indices if self._indices is None else self._indices.index_select(0, indices)
        )

    def row(self, index: int) -> Any:
        """Return one row, without the row dimension."""
        index = index if self._indices is None else int(self._indices[index])
        row = tuple(column[index] for column in self.columns)
        return row if self._pack is None else self._pack(row)

    def _fits_at_once(self, rows: int, size: int) -> bool:
        """Return whether gathering all rows at once is faster and keeps each batch aligned as when gathered alone.

        Alignment matters, since the summation order of a matrix product may depend on it.
        """
        total = 0
        for column in self.columns:
            if not column.is_cpu or not column.is_contiguous():
                return False
            each = column.nbytes // max(column.shape[0], 1)
            total += rows * each
            if total > GATHER_LIMIT or size * each % ALIGNED:
                return False
        return True

    def _gathered_at_once(self, order: Tensor | None, size: int, rows: range) -> list[Iterator[Tensor]]:
        if order is None and self._indices is None:
            parts = [column if len(rows) == len(column) else column[rows.start : rows.stop] for column in self.columns]
            gathered = [part.clone() for part in parts]
        else:
            picked = self._picked(order)[rows.start : rows.stop]
            gathered = [column.index_select(0, picked) for column in self.columns]
        # `unsafe_split`: no shared version counter, since a step may write to one batch while another is in a graph.
        return [iter(torch.unsafe_split(column, size)) for column in gathered]

    def _gathered_by_batch(
        self, order: Tensor | None, size: int, rows: range, *, only: range | None
    ) -> list[Iterator[Tensor]]:
        if order is None and self._indices is None:
            parts = [_parts(_chunks(column[rows.start : rows.stop], size), only) for column in self.columns]
            return [map(torch.clone, part) for part in parts]
        picked = self._picked(order)[rows.start : rows.stop]
        shared = tee(_parts(_chunks(picked, size), only), len(self.columns))
        return [map(partial(column.index_select, 0), part) for column, part in zip(self.columns, shared, strict=True)]

    def _picked(self, order: Tensor | None) -> Tensor:
        if self._indices is not None:
            order = self._indices if order is None else self._indices.index_select(0, order)
        assert order is not None
        device = self.columns[0].device
        # One copy per pass, from pinned memory, so that the host does not wait for the device.
        return order.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else order.to(device)


class TableRows:
    """The rows of a table as a map-style data set, for a custom collate function."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> Any:
        return self._table.row(index)


def table_of(data: Any) -> Table | None:
    """Return the table of tensors, arrays, a tuple or dict of them, or a `TensorDataset`; None for anything else."""
    if isinstance(data, Tensor | np.ndarray):
        return Table(_columns({"the data": data}), itemgetter(0))
    if isinstance(data, dict):
        return Table(_columns({f"[{key!r}]": value for key, value in data.items()}), partial(_keyed, tuple(data)))
    if isinstance(data, tuple):
        columns = _columns({f"[{index}]": value for index, value in enumerate(data)})
        return Table(columns, getattr(type(data), "_make", None))
    if type(data) is TensorDataset:
        # torch's default collate function makes a list of the columns.
        return Table(_columns({f"[{index}]": one for index, one in enumerate(data.tensors)}), list)
    return _subset(data) if type(data) is Subset else None


def _subset(data: Subset[Any]) -> Table | None:
    inner = table_of(data.dataset) if type(data.dataset) in (TensorDataset, Subset) else None
    if inner is None:
        return None
    indices = torch.as_tensor(list(data.indices), dtype=torch.int64)
    indices = torch.where(indices < 0, indices + len(inner), indices)
    return inner.part(indices)


def _keyed(keys: tuple[Any, ...], batch: Iterable[Any]) -> dict[Any, Any]:
    return dict(zip(keys, batch, strict=True))


def _chunks(rows: Tensor, size: int) -> Iterator[Tensor]:
    # In blocks: otherwise an epoch of millions of batches would start with millions of views.
    return chain.from_iterable(block.split(size) for block in rows.split(256 * size))


def _parts(chunks: Iterator[Tensor], only: range | None) -> Iterator[Tensor]:
    return chunks if only is None else map(itemgetter(slice(only.start, only.stop)), chunks)


def _columns(named: dict[str, Any]) -> list[Tensor]:
    columns = {name: _column(name, value) for name, value in named.items()}
    shapes = ", ".join(f"{name} {tuple(column.shape)}" for name, column in columns.items()) or "no array"
    if len({column.shape[0] for column in columns.values()}) != 1:
        raise DataError(
            "the arrays of one data set differ in their number of rows",
            have=shapes,
            want="arrays or tensors that are equally long in dimension 0",
            fix="write a list for ready batches: [(x1, y1), (x2, y2)]",
        )
    if len({column.device for column in columns.values()}) != 1:
        have = ", ".join(f"{name} on {column.device}" for name, column in columns.items())
        raise DataError("the tensors of one data set are on different devices", have=have, fix="move them")
    return list(columns.values())


def _column(name: str, value: Any) -> Tensor:
    want = "tensors or NumPy arrays of numbers, their rows in dimension 0"
    if not isinstance(value, Tensor | np.ndarray):
        raise DataError(
            f"{name} of a tuple or dict of columns is no array",
            have=type(value).__name__,
            want=want,
            fix="np.asarray(...) for rows; a list for ready batches: [(x1, y1), (x2, y2)]",
        )
    if value.ndim == 0:
        raise DataError(f"{name} is a single number and has no rows", want=want)
    return value if isinstance(value, Tensor) else _tensor(name, value)


def _tensor(name: str, array: np.ndarray[Any, Any]) -> Tensor:
    if any(stride < 0 for stride in array.strides) or not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="), order="C")
    try:
        return torch.from_numpy(array if array.flags.writeable else np.asarray(_Alias(array)))
    except (TypeError, ValueError) as error:
        have = f"{name}: {array.dtype}, shape {array.shape}"
        want = "an array of a dtype that torch has"
        fix = "array.astype(np.float32), or an integer dtype for classes"
        raise DataError("torch has no tensor of this array", have=have, want=want, fix=fix) from error


class _Alias:
    """Presents a read-only array as writable, without a copy.

    Avoids torch's warning about read-only memory: a table only reads it, and batches are copies.
    """

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array
        interface = dict(array.__array_interface__)
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}
