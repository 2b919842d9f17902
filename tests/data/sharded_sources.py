"""Data whose batches tell their rows, and passes of several simulated processes over them."""

from __future__ import annotations

import random
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import torch
from passes import ORDERS, WORKERS, Globally, Passing
from sources import generator
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
)
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from trainwright.core.rng import random_state, set_random_state
from trainwright.data.opening import batches, open_source
from trainwright.distributed.mesh import Shard

Pair = namedtuple("Pair", ["rows", "twice"])


def table(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(rows), 2 * torch.arange(rows)


class Rows(Dataset):
    """Row `index` is its number, and its double."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, 2 * index


class Ready(Dataset):
    """Item `index` is a batch of five rows or fewer."""

    def __init__(self, rows: int) -> None:
        self.columns = table(rows)

    def __len__(self) -> int:
        return (len(self.columns[0]) + 4) // 5

    def __getitem__(self, index: int) -> Any:
        return tuple(column[5 * index : 5 * index + 5] for column in self.columns)


class Bulk(Rows):
    """Is asked for many rows at once."""

    def __getitem__(self, index: Any) -> Any:
        rows = torch.as_tensor(index)
        return rows, 2 * rows


class Lazily(Globally):
    """Draws its next row number when it is asked for it."""

    def __iter__(self) -> Iterator[int]:
        order = list(range(20))
        while order:
            yield order.pop(random.randrange(len(order)))


class Lists(Sampler[list[int]]):
    """Batches of growing sizes; their number is known, that of the rows is not."""

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[list[int]]:
        for rows in torch.randperm(20).split([1, 4, 7, 8]):
            yield rows.tolist()


class Apart(DataLoader):
    """Makes its iterator itself, so that nobody can stand in for it."""

    def _get_iterator(self) -> Any:
        return _SingleProcessDataLoaderIter(self)


class Sized:
    """An iterable of batches that shuffles when it is iterated, and goes on drawing."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return (self.rows + 3) // 4

    def __iter__(self) -> Iterator[Any]:
        for rows in torch.randperm(self.rows).split(4):
            yield {"rows": rows[torch.randperm(len(rows))], "twice": rows.new_zeros(len(rows))}


class Stream(IterableDataset):
    """Every `total`-th row from the `index`-th on, out of an order that is drawn when it is iterated."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        from trainwright.data.sharding import shard

        index, total = shard()
        yield from torch.randperm(self.rows)[index::total]


class Ordered(Stream):
    """The same in their own order."""

    def __iter__(self) -> Iterator[int]:
        from trainwright.data.sharding import shard

        index, total = shard()
        return iter(range(index, self.rows, total))


def made_of_rows(rows: int, **more: Any) -> Callable[[], Any]:
    return lambda: batches(Rows(rows), 8, seed=5, **more)


OWN: dict[str, Callable[[], Any]] = {
    "in order": lambda: batches(table(51), 8),
    "one row": lambda: batches(table(1), 8, shuffle=True),
    "shuffled": lambda: batches(table(51), 8, shuffle=True, seed=3),
    "drawn seed": lambda: batches(table(64), 8, shuffle=True),
    "dropped": lambda: batches(table(51), 8, shuffle=True, drop_last=True),
    "keyed": lambda: batches(dict(zip("ab", table(7), strict=True)), 4, shuffle=True),
    "subset": lambda: batches(torch.utils.data.Subset(TensorDataset(*table(60)), range(3, 50)), 6),
    "rows": made_of_rows(51, shuffle=True),
    "rows of workers": made_of_rows(51, shuffle=True, workers=2),
    "rows dropped": made_of_rows(13, drop_last=True),
    "sampler": lambda: batches(table(51), 8, sampler=SubsetRandomSampler(range(4, 40), generator())),
    "list": lambda: batches(Rows(51), 8, sampler=[3, 1, 4, 1, 5, 9, 2, 6, 5, 3]),
    "globally": lambda: batches(table(20), 8, sampler=Globally()),
    "lazily": lambda: batches(table(20), 8, sampler=Lazily()),
    "again": lambda: batches(table(20), 6, sampler=RandomSampler(range(20), True, 50, generator())),
}
LOADERS: dict[str, Callable[[], Any]] = {
    **{
        f"{order}, {workers}": lambda order=order, workers=workers: DataLoader(
            Rows(20), **ORDERS[order](), **WORKERS[workers]
        )
        for order in ORDERS
        for workers in ("0", "2", "2 persistent")
        if order != "one by one" and (workers == "0" or order in ("in order", "generator", "stateful"))
    },
    "dropped": lambda: DataLoader(Rows(23), batch_size=4, shuffle=True, drop_last=True),
    "tensors": lambda: DataLoader(TensorDataset(*table(51)), batch_size=8, shuffle=True),
    "lists": lambda: DataLoader(Rows(20), batch_sampler=Lists()),
    "lists, 2": lambda: DataLoader(Rows(20), batch_sampler=Lists(), num_workers=2),
    "lazily": lambda: DataLoader(Rows(20), batch_size=8, sampler=Lazily()),
    "again": lambda: DataLoader(Rows(20), batch_size=8, sampler=RandomSampler(range(20), True, 50, generator())),
    "ready items": lambda: DataLoader(Ready(23), batch_size=None, shuffle=True),
    "ready items, 2": lambda: DataLoader(Ready(23), batch_size=None, shuffle=True, num_workers=2),
    "bulk": lambda: DataLoader(Bulk(20), batch_size=None, sampler=BatchSampler(RandomSampler(range(20)), 8, False)),
    "passing": lambda: Passing(Rows(20), batch_size=8, shuffle=True),
    "passing, 2": lambda: Passing(Rows(20), batch_size=8, shuffle=True, num_workers=2),
    "apart": lambda: Apart(Rows(20), batch_size=8, shuffle=True),
}
READY: dict[str, Callable[[], Any]] = {
    "ready": lambda: [(a, {"rows": a, "names": [str(one) for one in a.tolist()]}) for a in torch.arange(23).split(4)],
    "named": lambda: [Pair(a, a.numpy()) for a in torch.arange(9).split(2)],
    "sized": lambda: Sized(23),
    "per epoch": lambda: lambda epoch: batches(table(20 + epoch), 8, shuffle=True),
    "per epoch, ready": lambda: lambda epoch: list(torch.arange(10 + epoch).split(4)),
}
ALL = OWN | LOADERS | READY


def rows_of(batch: Any) -> list[int]:
    """The row numbers that a batch of any of them tells first."""
    while not isinstance(batch, torch.Tensor):
        batch = next(iter(batch.values() if isinstance(batch, dict) else batch))
    return batch.tolist()


def starts() -> None:
    torch.manual_seed(7), random.seed(7)


class Alone:
    """What one process reads, with the random states that its epochs began with."""

    def __init__(self, make: Callable[[], Any], epochs: int = 2) -> None:
        starts()
        self.source: Any = open_source(make())
        self.begun: list[tuple[Any, list[Any]]] = []
        self.table: list[list[list[int]]] = []
        for epoch in range(epochs):
            self.begun.append((random_state(), [one.get_state() for one in generators_of(self.source)]))
            self.table.append([rows_of(batch) for batch in self.source.epoch(epoch)])


def generators_of(source: Any) -> list[Any]:
    return list(getattr(source, "generators", ()))


def opened(make: Callable[[], Any], part: Shard) -> Any:
    starts()
    source: Any = open_source(make())
    source.shard(part)
    return source


def read(source: Any, begun: tuple[Any, list[Any]], *, epoch: int, rank: int, skip: int = 0) -> list[Any]:
    """One epoch on a process: begun with the first one's random states, and gone on with its own."""
    state, generators = begun
    set_random_state(state)
    for one, at in zip(generators_of(source), generators, strict=True):
        one.set_state(at)
    iterator = source.epoch(epoch, skip)
    torch.manual_seed(100 + rank), random.seed(100 + rank)
    if rank:
        for one in generators_of(source):
            one.manual_seed(200 + rank)
    return list(iterator)


def joined(slices: list[Any]) -> list[int]:
    """The rows of one batch that all processes together count, in the order of the ranks."""
    return [row for one in slices for row in rows_of(one.batch)[: one.rows]]
