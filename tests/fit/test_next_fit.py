"""A `fit` after one that is found finished draws from the same data as if the process had never ended."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler

from trainwright import Checkpoint, Trainer, batches

X = torch.arange(12.0)[:, None]


class Rows(Dataset):
    """Rows with noise of their own code."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return X[index] + 0.1 * torch.rand(1), X[index]


class Placed(Sampler):
    """Tells where it stands in its order, and ends with an empty pass where it is loaded at the end of one."""

    def __init__(self):
        self._draws, self._order, self._at = 0, [], 0

    def __len__(self):
        return 12

    def __iter__(self):
        if self._at == 0:
            self._draws += 1
            self._order = random.Random(self._draws).sample(range(12), 12)
        while self._at < 12:
            self._at += 1
            yield self._order[self._at - 1]
        self._at = 0

    def state_dict(self):
        return {"draws": self._draws, "order": list(self._order), "at": self._at}

    def load_state_dict(self, state):
        self._draws, self._order, self._at = state["draws"], list(state["order"]), state["at"]


class Stream:
    """Batches that know their position, in another order in every pass."""

    def __init__(self):
        self._pass, self._at = 0, 0

    def __iter__(self):
        while self._at < 3:
            self._at += 1
            x = X[:4] + 4 * self._at + 100 * self._pass
            yield x, x
        self._pass, self._at = self._pass + 1, 0

    def state_dict(self):
        return {"pass": self._pass, "at": self._at}

    def load_state_dict(self, state):
        self._pass, self._at = state["pass"], state["at"]


def endless():
    """Batches that can be read once."""
    number = 0
    while True:
        number += 4
        yield X[:4] + number, X[:4]


def per_epoch():
    drawn = torch.Generator().manual_seed(7)
    return lambda epoch: DataLoader(Rows(), 4, shuffle=True, generator=drawn)


def drawn():
    return torch.Generator().manual_seed(7)


DATA = {
    "loader": lambda: DataLoader(Rows(), 4, shuffle=True, generator=drawn()),
    "batches": lambda: batches((X, X), 4, sampler=RandomSampler(X, generator=drawn())),
    "sampler with a state": lambda: DataLoader(Rows(), 4, sampler=Placed()),
    "batches by a sampler with a state": lambda: batches((X, X), 4, sampler=Placed()),
    "persistent workers": lambda: DataLoader(Rows(), 4, shuffle=True, num_workers=1, persistent_workers=True),
    "function": per_epoch,
    "data with a state": Stream,
    "readable once": endless,
}


class Noting(Trainer):
    def training_step(self, batch):
        self.seen.append(batch[0].flatten().tolist())
        return super().training_step(batch)


def script(directory, make, *, fits, epochs=1):
    """What the last of several fits is given; a process that ends here is one that was killed between two of them."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    trainer = Noting(model, optimizer, nn.MSELoss(), checkpoint=Checkpoint(directory), console=False)
    data = make()
    for _ in range(fits):
        trainer.seen = []
        size = {"epoch_updates": 3} if make is endless else {}
        trainer.fit(data, epochs=epochs, resume="auto", **size)
    return trainer.seen


@pytest.mark.parametrize("name", DATA)
def test_a_fit_after_a_finished_one_that_was_resumed_draws_the_same_data(name, tmp_path):
    whole = script(tmp_path / "whole", DATA[name], fits=2)
    script(tmp_path / "cut", DATA[name], fits=1)
    assert script(tmp_path / "cut", DATA[name], fits=2) == whole
    assert len(whole) == 3
