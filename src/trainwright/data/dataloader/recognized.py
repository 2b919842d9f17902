"""A user's loader of tensors in memory, recognised: its own order and draws, and one `index_select` per batch."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from trainwright.core.rng import rng_preserved
from trainwright.core.torch_private import (
    collate_tensor_fn,
    default_collate_fn_map,
    host_fetcher,
    index_sampler_of,
    sampler_iterator_of,
)
from trainwright.data.arrays import Table

_WHOLE = frozenset({int, np.int32, np.int64})
"""Types of row numbers by which a tensor gives one row, whatever stands beside them in a list."""


def from_memory(loader: DataLoader[Any], iterator: Iterator[Any]) -> Iterator[Any]:
    """The batches of torch's `iterator` over a loader, bit for bit, without Python code per row.

    Where `loader` is a `DataLoader` itself, of a `TensorDataset` or subsets of one, with torch's collate function and
    neither workers nor pinned memory; else `iterator` as it is. torch has begun the pass: its draws are made, and the
    row numbers are pulled out of the sampler that it would pull them out of.
    """
    fetcher: Any = host_fetcher(iterator) if type(loader) is DataLoader else None
    if fetcher is None or not fetcher.auto_collation or not _joins(fetcher.collate_fn):
        return iterator
    table = tensors_of(fetcher.dataset)
    if table is None:
        return iterator
    given: Any = loader.batch_sampler
    if index_sampler_of(iterator) is given and type(given) is BatchSampler and _is_known(given.sampler, len(table)):
        return chain.from_iterable(_passed(table, given))
    return map(_Rows(table, fetcher), sampler_iterator_of(iterator))


def tensors_of(data: Any) -> Table | None:
    """The table of a `TensorDataset` or of subsets of one, whose batches are what torch joins out of its rows.

    None for other data, and where a batch by `index_select` could differ in anything: memory format, gradients,
    subclasses of tensors, row numbers that are none.
    """
    if type(data) is Subset:
        inner = tensors_of(data.dataset)
        at = None if inner is None else _positions(data.indices, len(inner))
        return None if inner is None or at is None else inner.part(at)
    if type(data) is not TensorDataset or hasattr(data, "__getitems__"):
        return None
    columns: tuple[Any, ...] = data.tensors
    if not all(map(_is_plain, columns)) or len({(len(one), one.device) for one in columns}) != 1:
        return None
    return Table(columns, list)  # torch's default collate function makes a list of the columns


def _joins(collate: Any) -> bool:
    """Whether it is torch's collate function, and joins tensors as torch made it to: users may add to its map."""
    known = default_collate_fn_map
    if collate is not default_collate or known.get(Tensor) is not collate_tensor_fn:
        return False
    return not any(issubclass(tuple, kind) for kind in known)


def _is_plain(column: Any) -> bool:
    if type(column) is not Tensor or column.layout is not torch.strided or column.requires_grad:
        return False
    if column.is_nested or column.is_quantized or column.is_conj() or column.is_neg() or not column.ndim:
        return False
    # By their strides convolutions and products choose how they add up.
    wanted = 1
    for size, stride in zip(reversed(column.shape), reversed(column.stride()), strict=True):
        if stride != wanted:
            return False
        wanted *= max(size, 1)
    return True


def _positions(indices: Any, rows: int) -> Tensor | None:
    """The row numbers of a subset, from 0; None where they are of another kind, or none of `rows` is meant."""
    at = _numbers(indices)
    if at is None or not bool(((at >= -rows) & (at < rows)).all()):
        return None
    return torch.where(at < 0, at + rows, at)


def _numbers(rows: Any) -> Tensor | None:
    """Row numbers as a tensor, int64 on the CPU; None where they are of another kind, or there are none."""
    if isinstance(rows, list | tuple | range):
        if not rows or not _WHOLE.issuperset(map(type, rows)):
            return None
        try:
            return torch.frombuffer(array("q", rows), dtype=torch.int64)
        except OverflowError:
            return None
    numbers: Any = rows
    if type(rows) is np.ndarray and rows.dtype in (np.int32, np.int64):
        numbers = torch.from_numpy(np.array(rows, dtype=np.int64))
    plain = type(numbers) is Tensor and numbers.dtype is torch.int64 and numbers.device.type == "cpu"
    return numbers if plain and numbers.ndim == 1 and len(numbers) else None


class _Rows:
    """Gives the batch of the row numbers that a sampler gave; those that a tensor takes otherwise are torch's."""

    def __init__(self, table: Table, fetcher: Any) -> None:
        self._table = table
        self._fetcher = fetcher
        self._checks = table.columns[0].device.type != "cpu"
        """Whether a number that is none would be met on a device, too late."""

    def __call__(self, rows: Any) -> Any:
        """The batch of `rows`."""
        numbers = _numbers(rows)
        if numbers is None or (self._checks and not self._are_there(numbers)):
            return self._fetcher.fetch(rows)
        try:
            return self._table.take(numbers)
        except IndexError:  # below 0, or beyond the end: what torch gives, or its own error
            return self._fetcher.fetch(rows)

    def _are_there(self, numbers: Tensor) -> bool:
        least, most = numbers.aminmax()
        return int(least) >= 0 and int(most) < len(self._table)


class _Drawn(NamedTuple):
    """What a sampler of torch's gives in a pass."""

    order: Tensor | None
    """The row numbers; None: all of them as they come."""
    rows: int
    generator: torch.Generator | None = None
    """What it draws an order from once more when it is asked for more rows than there are."""


def _drawn(sampler: Any) -> _Drawn:
    """Draw what a known sampler draws when its first row is pulled."""
    if type(sampler) is SequentialSampler:
        return _Drawn(None, len(sampler))
    if type(sampler) is WeightedRandomSampler:
        weights: Any = sampler.weights
        order = torch.multinomial(weights, sampler.num_samples, sampler.replacement, generator=sampler.generator)
        return _Drawn(order, sampler.num_samples)
    if type(sampler) is SubsetRandomSampler:
        indices = _numbers(sampler.indices)
        assert indices is not None
        order = torch.randperm(len(indices), generator=sampler.generator)
        return _Drawn(indices.index_select(0, order), len(indices))
    rows, generator = len(sampler.data_source), sampler.generator
    if generator is None:
        generator = torch.Generator()
        generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    return _Drawn(torch.randperm(rows, generator=generator), rows, sampler.generator)


def _passed(table: Table, given: BatchSampler) -> Iterator[Iterator[Any]]:
    """A pass over the batches of a known sampler, which draws where torch's does: at the first pull, and the last."""
    drawn, size = _drawn(given.sampler), given.batch_size
    full = drawn.rows // size * size
    yield table.batches(drawn.order, size, range(full))
    if drawn.generator is not None:  # the short last batch asks for more, or the end does
        torch.randperm(drawn.rows, generator=drawn.generator)
    if full < drawn.rows and not given.drop_last:
        yield table.batches(drawn.order, size, range(full, drawn.rows))


def _is_known(sampler: Any, rows: int) -> bool:
    """Whether this module draws what the sampler draws, and all that it gives are numbers of `rows` rows."""
    kind: Any = type(sampler)
    if kind is WeightedRandomSampler:
        fits = len(sampler.weights) <= rows
    elif kind is SequentialSampler:
        fits = len(sampler) <= rows
    elif kind is SubsetRandomSampler:
        indices = _numbers(sampler.indices)
        fits = indices is not None and int(indices.min()) >= 0 and int(indices.max()) < rows
    else:
        fits = kind is RandomSampler and not sampler.replacement
        fits = fits and sampler.num_samples == len(sampler.data_source) <= rows
    return fits and _draws_alike(kind)


@cache
def _draws_alike(kind: type[Sampler[int]]) -> bool:
    """Whether this torch's sampler gives what `_passed` gives, and leaves its generators where it does: tried once."""
    own = [False] if kind is SequentialSampler else [False, True]
    with rng_preserved():
        return all(_tried(kind, own=one, ours=False) == _tried(kind, own=one, ours=True) for one in own)


def _tried(kind: Any, *, own: bool, ours: bool) -> list[list[int]]:
    """The row numbers of a pass over seven rows, and the states of all generators at the end."""
    torch.default_generator.manual_seed(5)
    settings: dict[str, Any] = {"generator": torch.Generator().manual_seed(5)} if own else {}
    weighted = kind is WeightedRandomSampler
    given = BatchSampler(kind([1.0, 2.0], 7, **settings) if weighted else kind(range(7), **settings), 3, False)
    batches: Any = given
    if ours:
        table = Table([torch.arange(7)], list)
        batches = (column.tolist() for (column,) in chain.from_iterable(_passed(table, given)))
    return [*batches, *(one.get_state().tolist() for one in (torch.default_generator, *settings.values()))]
