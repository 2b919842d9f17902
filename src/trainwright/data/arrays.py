"""Tensors and arrays in memory as batches: one `index_select` per batch, without Python code per row."""

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
from trainwright.distributed.batch_layout import Shard, Slice

AT_ONCE = 1 << 20
"""Bytes up to which the rows of an epoch are gathered at once: beyond, the batches would not stay in the cache."""
ALIGNED = 64
"""Bytes of which the place of a tensor of torch's own is a multiple."""


class Table:
    """Equally long columns in memory; a batch is the same container of their rows.

    Batches are copies, so a step may write into them.
    """

    def __init__(self, columns: Sequence[Tensor], pack: Callable[[Any], Any] | None, at: Tensor | None = None) -> None:
        self.columns = list(columns)
        self._pack = pack
        """From a tuple of columns to the container; None where it is a tuple."""
        self._at = at
        """Row numbers in the columns, where the table is a subset of them."""

    def __len__(self) -> int:
        return self.columns[0].shape[0] if self._at is None else self._at.shape[0]

    def describe(self) -> str:
        """Where the rows are."""
        return "memory"

    def size_beside(self, device: torch.device) -> int:
        """Bytes that a copy of the rows takes on `device`; 0 where they lie there."""
        of_row = [one[:1].numel() * one.element_size() for one in self.columns if one.device != device]
        return len(self) * sum(of_row)

    def on(self, device: torch.device) -> Table:
        """A table of the same rows, copied to `device`."""
        there, at = copy(self), self._at
        rows = [one if at is None else one.index_select(0, at.to(one.device)) for one in self.columns]
        there.columns, there._at = [one.to(device) for one in rows], None
        return there

    def batches(self, order: Tensor | None, size: int, rows: range, *, only: range | None = None) -> Iterator[Any]:
        """Batches of `size` of those positions `rows` of `order`; of the table's own order where it is None.

        With `only` those rows of each batch, by their positions in it.
        """
        if not rows:
            return iter(())
        if only is None and self._fits_at_once(len(rows), size):
            streams = self._at_once(order, size, rows)
        elif order is None and self._at is None:
            streams = [
                map(torch.clone, _parts(_chunks(column[rows.start : rows.stop], size), only)) for column in self.columns
            ]
        else:
            picked = self._picked(order)[rows.start : rows.stop]
            shared = tee(_parts(_chunks(picked, size), only), len(self.columns))
            streams = [
                map(partial(column.index_select, 0), part) for column, part in zip(self.columns, shared, strict=True)
            ]
        # map and zip run in C: no Python frame per batch.
        joined = zip(*streams, strict=True)
        return joined if self._pack is None else map(self._pack, joined)

    def slices(self, order: Tensor | None, size: int, rows: range, *, part: Shard) -> Iterator[Slice]:
        """What one process runs of these batches; the last may be short, and is cut into other parts."""
        full = len(rows) // size * size
        return chain(
            self._slices(order, size, rows[:full], part=part),
            self._slices(order, len(rows) - full, rows[full:], part=part),
        )

    def _slices(self, order: Tensor | None, size: int, rows: range, *, part: Shard) -> Iterator[Slice]:
        own = self.batches(order, size, rows, only=part.run(size))
        return map(Slice, own, repeat(len(part.of(size))), repeat(size))

    def fetch(self, seed: int, epoch: int, rows: Sequence[int]) -> Any:
        """The batch of `rows`."""
        return self.take(torch.as_tensor(rows, dtype=torch.int64))

    def take(self, rows: Tensor) -> Any:
        """The batch of `rows`, an int64 tensor; IndexError for a number below 0 or beyond the end."""
        picked = self._picked(rows)
        batch = tuple([column.index_select(0, picked) for column in self.columns])
        return batch if self._pack is None else self._pack(batch)

    def part(self, at: Tensor) -> Table:
        """The table of those rows, without a copy."""
        return Table(self.columns, self._pack, at if self._at is None else self._at.index_select(0, at))

    def row(self, index: int) -> Any:
        """One row, without the dimension of rows."""
        index = index if self._at is None else int(self._at[index])
        row = tuple(column[index] for column in self.columns)
        return row if self._pack is None else self._pack(row)

    def _fits_at_once(self, rows: int, size: int) -> bool:
        """Whether so many rows are gathered faster at once, into batches that lie as if each had been made alone.

        How a product adds up may depend on where its factors begin.
        """
        whole = 0
        for column in self.columns:
            if not column.is_cpu or not column.is_contiguous():
                return False
            each = column.nbytes // max(column.shape[0], 1)
            whole += rows * each
            if whole > AT_ONCE or size * each % ALIGNED:
                return False
        return True

    def _at_once(self, order: Tensor | None, size: int, rows: range) -> list[Iterator[Tensor]]:
        if order is None and self._at is None:
            parts = [column if len(rows) == len(column) else column[rows.start : rows.stop] for column in self.columns]
            gathered = [part.clone() for part in parts]
        else:
            picked = self._picked(order)[rows.start : rows.stop]
            gathered = [column.index_select(0, picked) for column in self.columns]
        # Batches that know nothing of each other: a step may write into one while another's graph is kept.
        return [iter(torch.unsafe_split(whole, size)) for whole in gathered]

    def _picked(self, order: Tensor | None) -> Tensor:
        if self._at is not None:
            order = self._at if order is None else self._at.index_select(0, order)
        assert order is not None
        device = self.columns[0].device
        # One copy for the pass, out of pinned memory, so that the host does not wait for what the device has to do.
        return order.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else order.to(device)


class TableRows:
    """A table row by row, for a user's own collate function."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> Any:
        return self._table.row(index)


def table_of(data: Any) -> Table | None:
    """The table of tensors, arrays, a tuple or dict of them, or a `TensorDataset`; None for anything else."""
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
    at = torch.as_tensor(list(data.indices), dtype=torch.int64)
    at = torch.where(at < 0, at + len(inner), at)
    return inner.part(at)


def _keyed(keys: tuple[Any, ...], batch: Iterable[Any]) -> dict[Any, Any]:
    return dict(zip(keys, batch, strict=True))


def _chunks(rows: Tensor, size: int) -> Iterator[Tensor]:
    # In blocks, so that an epoch of millions of batches does not begin with millions of views.
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
        raise DataError("the tensors of one data set lie on different devices", have=have, fix="move them")
    return list(columns.values())


def _column(name: str, value: Any) -> Tensor:
    want = "tensors or NumPy arrays of numbers, their rows in dimension 0"
    if not isinstance(value, Tensor | np.ndarray):
        raise DataError(
            f"{name} of a tuple or dict that should be one data set is no array",
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
    """A read-only array as a writable one, without a copy.

    torch warns about read-only memory; a table only reads it, and its batches are copies.
    """

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array
        interface = dict(array.__array_interface__)
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}
