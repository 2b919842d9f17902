"""Loaders and data sets in memory, and what is compared of their batches, for the Same law of data."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
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
    random_split,
)

from trainwright import Trainer, batches
from trainwright.data.opening import open_source

from .models import MLP, assert_twins

ROWS = 37
X = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(ROWS) % 4
DATA = TensorDataset(X, Y)
WIDE = TensorDataset(torch.randn(ROWS, 4, 4, generator=torch.Generator().manual_seed(0)), X > 0, Y.double())


def own():
    return torch.Generator().manual_seed(3)


class Grouped(Sampler):
    """A batch sampler of a user's own: batches of unequal sizes, as lists, tuples, ranges, arrays and tensors."""

    def __init__(self, data=None):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        random.random()
        order = torch.randperm(ROWS).tolist()
        yield order[:5]
        yield tuple(order[5 : 7 + self.epoch])
        yield range(3, 9)
        yield np.array(order[20:24])
        yield torch.tensor(order[4:8])
        yield [np.int64(row) for row in order[8:11]]
        yield [torch.tensor(7), 3, -2, -ROWS]
        yield [True]
        yield (row for row in order[:3])

    def __len__(self):
        return 9


class Lazily(Sampler):
    """A sampler that draws a row at a time, from the process's random state, beginning when its iterator is made."""

    def __init__(self):
        pass

    def __iter__(self):
        first = int(torch.randint(ROWS, ()))
        return (first if row == 0 else int(torch.randint(ROWS, ())) for row in range(20))

    def __len__(self):
        return 20


SAMPLERS = {
    "in order": lambda: {"batch_size": 8},
    "dropped": lambda: {"batch_size": 8, "drop_last": True},
    "shuffled": lambda: {"batch_size": 8, "shuffle": True},
    "shuffled, dropped": lambda: {"batch_size": 8, "shuffle": True, "drop_last": True},
    "shuffled, its own generator": lambda: {"batch_size": 8, "shuffle": True, "generator": own()},
    "shuffled, its own generator, dropped": lambda: {
        "batch_size": 8,
        "shuffle": True,
        "generator": own(),
        "drop_last": True,
    },
    "shuffled, whole batches": lambda: {"batch_size": ROWS, "shuffle": True, "generator": own()},
    "one by one": lambda: {"batch_size": 1, "shuffle": True, "generator": own()},
    "larger than the data": lambda: {"batch_size": 99, "shuffle": True, "generator": own()},
    "replaced": lambda: {"batch_size": 8, "sampler": RandomSampler(DATA, replacement=True, generator=own())},
    "twice over": lambda: {"batch_size": 8, "sampler": RandomSampler(DATA, num_samples=2 * ROWS + 3, generator=own())},
    "weighted": lambda: {"batch_size": 8, "sampler": WeightedRandomSampler(torch.rand(ROWS, generator=own()), 29)},
    "weighted, without": lambda: {
        "batch_size": 8,
        "sampler": WeightedRandomSampler(X[:, 0].abs(), 20, replacement=False, generator=own()),
    },
    "of a subset": lambda: {"batch_size": 8, "sampler": SubsetRandomSampler(range(5, 30), own())},
    "of a subset from the end": lambda: {"batch_size": 8, "sampler": SubsetRandomSampler([-1, 3, -2, 5])},
    "of a few": lambda: {"batch_size": 8, "sampler": SequentialSampler(range(11))},
    "lazily": lambda: {"batch_size": 8, "sampler": Lazily()},
    "by a list": lambda: {"batch_size": 8, "sampler": [5, 3, 3, -1, 7, 0, 20, 21, 22, 23]},
    "by torch's batch sampler": lambda: {"batch_sampler": BatchSampler(RandomSampler(DATA, generator=own()), 6, True)},
    "by a batch sampler": lambda: {"batch_sampler": Grouped(DATA)},
}
SETS = {
    "pair": lambda: DATA,
    "several kinds": lambda: WIDE,
    "alone": lambda: TensorDataset(X),
    "of numbers": lambda: TensorDataset(Y, Y.double() / 3),
    "subset": lambda: Subset(DATA, [*range(30, 36), -1, *range(30)]),
    "subset of a subset": lambda: Subset(Subset(WIDE, np.random.default_rng(0).permutation(ROWS)), torch.arange(ROWS)),
    "split": lambda: random_split(TensorDataset(X.repeat(2, 1), Y.repeat(2)), [ROWS, ROWS], own())[1],
    "columns apart": lambda: TensorDataset(X.t().contiguous().t(), X[:, ::2], Y),
    "pictures, channels last": lambda: TensorDataset(
        torch.randn(ROWS, 3, 4, 4, generator=own()).to(memory_format=torch.channels_last)
    ),
    "larger than the cache": lambda: TensorDataset(torch.randn(ROWS, 8000, generator=own()), Y),
}


def seeded():
    torch.manual_seed(1), random.seed(1), np.random.seed(1)


def rng(loader):
    state = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    owners = (loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    own = [getattr(owner, "generator", None) for owner in owners]
    return state, [None if one is None else one.get_state().tolist() for one in own]


def exactly(batch):
    """A batch as text of every bit: containers, types, shapes, how it lies, values."""
    if isinstance(batch, list | tuple):
        return f"{type(batch).__name__}({', '.join(map(exactly, batch))})"
    bits = batch.contiguous().view(torch.uint8).tolist() if batch.numel() else []
    return f"{type(batch).__name__} {batch.dtype} {tuple(batch.shape)} {batch.stride()} {batch.requires_grad} {bits}"


def passes(read, loader, epochs=3):
    """Every batch of every epoch, and the random states after each; what a step would draw is drawn."""
    table = []
    for epoch in range(epochs):
        if hasattr(loader.batch_sampler, "set_epoch"):
            loader.batch_sampler.set_epoch(epoch)
        for batch in read(epoch):
            table.append((exactly(batch), rng(loader)))
            torch.rand(2), random.random(), np.random.rand()
        table.append(rng(loader))
    return table


def check_loader(settings=SAMPLERS["shuffled"], data=SETS["pair"]):
    """The batches of a recognized loader, all random states with each of them."""
    seeded()
    theirs = DataLoader(data(), **settings())
    expected = passes(lambda _: theirs, theirs)
    seeded()
    ours = DataLoader(data(), **settings())
    assert passes(open_source(ours).epoch, ours) == expected


def check_training(settings=SAMPLERS["shuffled"]):
    """Weights after a `fit` over a loader, with dropout, and the random state."""
    theirs, ours = trained_by_hand(DataLoader(DATA, **settings())), None
    torch.manual_seed(2)
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), console=False)
    trainer.fit(DataLoader(DATA, **settings()), epochs=3)
    ours = model, optimizer
    assert torch.equal(torch.get_rng_state(), theirs[1])
    assert_twins(ours, theirs[0])


def trained_by_hand(loader):
    torch.manual_seed(2)
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return (model, optimizer), torch.get_rng_state()


def check_batches(shuffle=True, data=SETS["pair"]):
    """`batches(...)` of a TensorDataset, against a loader that is given the same order."""
    source = batches(data(), 8, shuffle=shuffle, seed=4)
    for epoch in range(3):
        order = source._order(4, epoch)
        order = range(ROWS) if order is None else order.tolist()
        expected = [exactly(batch) for batch in DataLoader(data(), batch_size=8, sampler=order)]
        before = torch.get_rng_state()
        assert [exactly(batch) for batch in source.epoch(epoch)] == expected
        assert torch.equal(torch.get_rng_state(), before)
