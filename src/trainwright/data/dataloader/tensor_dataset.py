"""A `DataLoader` over a `TensorDataset`: torch's order and draws, but one `index_select` per batch."""

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

_INTEGERS = frozenset({int, np.int32, np.int64})
"""Types of row indices in a list that index a tensor like an int64 tensor does."""


def index_select_batches(loader: DataLoader[Any], iterator: Iterator[Any]) -> Iterator[Any]:
    """Return the batches of torch's `iterator` over a loader, bit for bit, without Python code per row.

    Applies to a plain `DataLoader` over a `TensorDataset` or subsets of one, with torch's collate function, without
    workers and pinned memory; for others, `iterator` is returned unchanged. Torch has already started the pass and made
    its first draws; the row indices come from its iterator over the sampler.
    """
    fetcher: Any = host_fetcher(iterator) if type(loader) is DataLoader else None
    if fetcher is None or not fetcher.auto_collation or not _is_default_collate(fetcher.collate_fn):
        return iterator
    table = tensor_table(fetcher.dataset)
    if table is None:
        return iterator
    given: Any = loader.batch_sampler
    if index_sampler_of(iterator) is given and type(given) is BatchSampler and _is_known(given.sampler, len(table)):
        return chain.from_iterable(_replay_pass(table, given))
    return map(_FetchRows(table, fetcher), sampler_iterator_of(iterator))


def tensor_table(data: Any) -> Table | None:
    """Return the table of a `TensorDataset` or of subsets of one, with the batches that torch collates.

    None for other data, and if a batch by `index_select` could differ, because of memory format, gradients, subclasses
    of Tensor or indices out of range.
    """
    if type(data) is Subset:
        inner = tensor_table(data.dataset)
        at = None if inner is None else _subset_indices(data.indices, len(inner))
        return None if inner is None or at is None else inner.part(at)
    if type(data) is not TensorDataset or hasattr(data, "__getitems__"):
        return None
    columns: tuple[Any, ...] = data.tensors
    if not all(map(_is_plain, columns)) or len({(len(one), one.device) for one in columns}) != 1:
        return None
    return Table(columns, list)  # torch's default collate function makes a list of the columns


def _is_default_collate(collate: Any) -> bool:
    """Return whether a function is torch's default collate, with torch's rules for tensors and tuples unchanged."""
    known = default_collate_fn_map
    if collate is not default_collate or known.get(Tensor) is not collate_tensor_fn:
        return False
    return not any(issubclass(tuple, kind) for kind in known)


def _is_plain(column: Any) -> bool:
    if type(column) is not Tensor or column.layout is not torch.strided or column.requires_grad:
        return False
    if column.is_nested or column.is_quantized or column.is_conj() or column.is_neg() or not column.ndim:
        return False
    # The strides may determine the summation order of convolutions and matrix products.
    wanted = 1
    for size, stride in zip(reversed(column.shape), reversed(column.stride()), strict=True):
        if stride != wanted:
            return False
        wanted *= max(size, 1)
    return True


def _subset_indices(indices: Any, rows: int) -> Tensor | None:
    """Return the indices of a subset as non-negative numbers; None if they are no integers or out of range."""
    at = _as_indices(indices)
    if at is None or not bool(((at >= -rows) & (at < rows)).all()):
        return None
    return torch.where(at < 0, at + rows, at)


def _as_indices(rows: Any) -> Tensor | None:
    """Return row indices as an int64 CPU tensor; None if they are no integers, or empty."""
    if isinstance(rows, list | tuple | range):
        if not rows or not _INTEGERS.issuperset(map(type, rows)):
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


class _FetchRows:
    """Fetches batches by `index_select`; uses torch's fetcher for indices that `index_select` treats differently."""

    def __init__(self, table: Table, fetcher: Any) -> None:
        self._table = table
        self._fetcher = fetcher
        self._checks = table.columns[0].device.type != "cpu"
        """Whether to check the range first: on a device, an index error is raised too late."""

    def __call__(self, rows: Any) -> Any:
        """Return the batch of `rows`."""
        numbers = _as_indices(rows)
        if numbers is None or (self._checks and not self._are_in_range(numbers)):
            return self._fetcher.fetch(rows)
        try:
            return self._table.take(numbers)
        except IndexError:  # negative or out of range: torch's own result or error
            return self._fetcher.fetch(rows)

    def _are_in_range(self, numbers: Tensor) -> bool:
        least, most = numbers.aminmax()
        return int(least) >= 0 and int(most) < len(self._table)


class _Draws(NamedTuple):
    """The draws of a torch sampler in one pass."""

    order: Tensor | None
    """The row indices; None: all rows in order."""
    rows: int
    generator: torch.Generator | None = None
    """The generator from which torch draws a second order, at the end of the rows."""


def _draw_order(sampler: Any) -> _Draws:
    """Make and return the draws that a known sampler makes at its first row."""
    if type(sampler) is SequentialSampler:
        return _Draws(None, len(sampler))
    if type(sampler) is WeightedRandomSampler:
        weights: Any = sampler.weights
        order = torch.multinomial(weights, sampler.num_samples, sampler.replacement, generator=sampler.generator)
        return _Draws(order, sampler.num_samples)
    if type(sampler) is SubsetRandomSampler:
        indices = _as_indices(sampler.indices)
        assert indices is not None
        order = torch.randperm(len(indices), generator=sampler.generator)
        return _Draws(indices.index_select(0, order), len(indices))
    rows, generator = len(sampler.data_source), sampler.generator
    if generator is None:
        generator = torch.Generator()
        generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    return _Draws(torch.randperm(rows, generator=generator), rows, sampler.generator)


def _replay_pass(table: Table, given: BatchSampler) -> Iterator[Iterator[Any]]:
    """Yield the batches of a known sampler; draw when torch's sampler does, at the first row and after the last."""
    drawn, size = _draw_order(given.sampler), given.batch_size
    full = drawn.rows // size * size
    yield table.batches(drawn.order, size, range(full))
    if drawn.generator is not None:  # torch draws again for the short last batch, or at the end
        torch.randperm(drawn.rows, generator=drawn.generator)
    if full < drawn.rows and not given.drop_last:
        yield table.batches(drawn.order, size, range(full, drawn.rows))


def _is_known(sampler: Any, rows: int) -> bool:
    """Return whether this module can repeat the draws of a sampler, and all indices are below `rows`."""
    kind: Any = type(sampler)
    if kind is WeightedRandomSampler:
        fits = len(sampler.weights) <= rows
    elif kind is SequentialSampler:
        fits = len(sampler) <= rows
    elif kind is SubsetRandomSampler:
        indices = _as_indices(sampler.indices)
        fits = indices is not None and int(indices.min()) >= 0 and int(indices.max()) < rows
    else:
        fits = kind is RandomSampler and not sampler.replacement
        fits = fits and sampler.num_samples == len(sampler.data_source) <= rows
    return fits and _draws_like_torch(kind)


@cache
def _draws_like_torch(kind: type[Sampler[int]]) -> bool:
    """Return whether this torch version yields the same indices and generator states; tried once per class."""
    own = [False] if kind is SequentialSampler else [False, True]
    with rng_preserved():
        return all(_trial_pass(kind, own=one, ours=False) == _trial_pass(kind, own=one, ours=True) for one in own)


def _trial_pass(kind: Any, *, own: bool, ours: bool) -> list[list[int]]:
    """Return the indices of a pass over seven rows and the states of all generators after it."""
    torch.default_generator.manual_seed(5)
    settings: dict[str, Any] = {"generator": torch.Generator().manual_seed(5)} if own else {}
    weighted = kind is WeightedRandomSampler
    given = BatchSampler(kind([1.0, 2.0], 7, **settings) if weighted else kind(range(7), **settings), 3, False)
    batches: Any = given
    if ours:
        table = Table([torch.arange(7)], list)
        batches = (column.tolist() for (column,) in chain.from_iterable(_replay_pass(table, given)))
    return [*batches, *(one.get_state().tolist() for one in (torch.default_generator, *settings.values()))]
