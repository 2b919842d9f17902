"""Data sets, loaders and ready batches, and what is compared of them: shared by the tests of sources."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

X = torch.arange(40.0).reshape(20, 2)
Y = torch.arange(20)


class Noisy(Dataset):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return index, random.random(), np.random.rand(2), torch.rand(2)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        for index in range(10):
            yield torch.tensor(index) + torch.rand(1)


def generator(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


LOADERS = {
    "plain": lambda: DataLoader(Noisy(), batch_size=8),
    "shuffle": lambda: DataLoader(Noisy(), batch_size=8, shuffle=True),
    "generator": lambda: DataLoader(Noisy(), batch_size=8, shuffle=True, generator=generator()),
    "drop_last": lambda: DataLoader(Noisy(), batch_size=8, shuffle=True, drop_last=True),
    "sampler": lambda: DataLoader(Noisy(), batch_size=8, sampler=SubsetRandomSampler(range(5, 18), generator())),
    "weighted": lambda: DataLoader(
        Noisy(), batch_size=8, sampler=WeightedRandomSampler(torch.ones(20), 17, generator=generator())
    ),
    "batch_sampler": lambda: DataLoader(
        Noisy(), batch_sampler=BatchSampler(RandomSampler(range(20), generator=generator()), 6, True)
    ),
    "tensors": lambda: DataLoader(TensorDataset(X, Y), batch_size=8, shuffle=True),
    "unbatched": lambda: DataLoader(Noisy(), batch_size=None),
    "iterable": lambda: DataLoader(Stream(), batch_size=4),
    "workers": lambda: DataLoader(Noisy(), batch_size=8, shuffle=True, num_workers=2),
    "persistent": lambda: DataLoader(
        TensorDataset(X, Y), batch_size=8, shuffle=True, generator=generator(), num_workers=1, persistent_workers=True
    ),
    "persistent without a generator": lambda: DataLoader(
        TensorDataset(X, Y), batch_size=8, shuffle=True, num_workers=1, persistent_workers=True
    ),
}


def seeded() -> None:
    torch.manual_seed(1), random.seed(1), np.random.seed(1)


def text(batch: Any) -> str:
    if isinstance(batch, list | tuple):
        return f"{type(batch).__name__}({', '.join(map(text, batch))})"
    return f"{type(batch).__name__} {batch.dtype} {batch.tolist()}" if hasattr(batch, "tolist") else repr(batch)


READY = [(X[:5], Y[:5]), (X[5:7], Y[5:7]), (X[7:], Y[7:])]


def committed(source: Any) -> Any:
    """The position behind all batches that were yielded."""
    source.commit()
    return source.position()
