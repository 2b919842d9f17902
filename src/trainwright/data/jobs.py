"""Worker processes that fetch the batches of a data set: each is asked for rows by number, whatever it has drawn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from trainwright.data.arrays import Table
from trainwright.data.dataloader.order import Order
from trainwright.data.dataloader.pool import Record, Workers
from trainwright.data.dataloader.proxy import view
from trainwright.data.dataloader.worker import Starting
from trainwright.data.seeded import SeededRows, mixed_seed


def by_workers(
    data: Table | SeededRows, rows: Iterator[Sequence[int]], *, seed: int, epoch: int, workers: int, name: str
) -> Iterator[Any]:
    """The batches of `rows`, in their order, fetched by so many processes."""
    loader: Any = DataLoader(
        _Jobs(data),
        batch_size=None,
        num_workers=workers,
        collate_fn=_as_it_is,
        # A generator of our own: the loader's draw must not move the global one.
        generator=torch.Generator().manual_seed(mixed_seed(seed, epoch, 1)),
    )
    jobs = (_Job(seed, epoch, numbers) for numbers in rows)
    starting = Starting(None, {}, None)
    return Workers(view(loader, Order(jobs, name=name), worker_init_fn=starting), Record())


class JobPool:
    """Worker processes that stay from one pass to the next; they fetch of the data set as it was when they came."""

    def __init__(self, data: SeededRows, workers: int, *, timeout: float) -> None:
        self.workers = workers
        self._loader: Any = DataLoader(
            _Jobs(data),
            batch_size=None,
            num_workers=workers,
            collate_fn=_as_it_is,
            generator=torch.Generator(),  # the loader's draws must not move the global one
            persistent_workers=True,
            timeout=timeout,
        )
        self._pool: Workers | None = None

    def begin(self, rows: Iterator[Sequence[int]], *, seed: int, epoch: int, name: str) -> Iterator[Any]:
        """The batches of a pass, in order; what is left of the last one is dropped."""
        order = Order((_Job(seed, epoch, numbers) for numbers in rows), name=name)
        looks = view(self._loader, order, worker_init_fn=Starting(None, {}, None))
        if self._pool is None:
            self._pool = Workers(looks, Record())
        else:
            self._pool.go_on(Record(), order, first=0)
            self._pool._reset(looks)
        return self._pool

    def end(self) -> None:
        """End the processes."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool._shutdown_workers()


class _Job(NamedTuple):
    """What a worker process is asked for."""

    seed: int
    epoch: int
    rows: Sequence[int]


class _Jobs(Dataset[Any]):
    """A data set of jobs: each gives a batch."""

    def __init__(self, data: Table | SeededRows) -> None:
        self._data = data

    def __getitem__(self, job: _Job) -> Any:
        return self._data.fetch(*job)


def _as_it_is(batch: Any) -> Any:
    return batch
