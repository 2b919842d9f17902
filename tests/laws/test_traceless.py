"""The Traceless law: evaluation leaves the run, the model and the process as it found them, also inside an epoch."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainwright import Trainer, accuracy, batches
from trainwright.metrics import Derived

from .guest_cases import equal, generators


def rows_of_data(rows=30, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 6, generator=generator), torch.randint(0, 3, (rows,), generator=generator)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))


class Noisy(Trainer):
    """Draws from every generator of the process in each validation step."""

    def validation_step(self, batch):
        random.random()
        np.random.rand()
        torch.rand(3)
        assert not torch.is_grad_enabled()
        assert not any(module.training for module in self.model.modules())
        return super().validation_step(batch)


def make(cls=Noisy, **settings):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return cls(model, optimizer, nn.CrossEntropyLoss(), metrics={"accuracy": accuracy}, console=False, **settings)


def everything(trainer):
    model = trainer.model
    return copy.deepcopy(
        {
            "state": model.state_dict(),
            "optimizer": trainer.optimizer.state_dict(),
            "gradients": [p.grad for p in model.parameters()],
            "modes": [module.training for module in model.modules()],
            "trainable": [p.requires_grad for p in model.parameters()],
            "generators": generators(),
            "autocast": torch.is_autocast_enabled("cpu"),
            "grad": torch.is_grad_enabled(),
            "progress": repr(trainer.progress),
            "history": trainer.history,
        }
    )


def loader_with_noise():
    return DataLoader(TensorDataset(*rows_of_data(seed=1)), 8, shuffle=True)


DATA = {
    "batches": lambda: batches(rows_of_data(seed=1), 8),
    "shuffled": lambda: batches(rows_of_data(seed=1), 8, shuffle=True),
    "DataLoader": loader_with_noise,
    "list": lambda: list(zip(*(column.split(8) for column in rows_of_data(seed=1)), strict=True)),
}


@pytest.mark.parametrize("kind", DATA)
def test_evaluation_and_prediction_leave_everything_as_it_was(kind):
    trainer = make()
    trainer.fit(batches(rows_of_data(), 8), epochs=1)
    frozen, still = trainer.model[1], trainer.model[0]
    frozen.eval()
    still.requires_grad_(False)
    before = everything(trainer)
    trainer.evaluate(DATA[kind]())
    trainer.predict(DATA[kind]())
    assert equal(before, everything(trainer))


def test_a_failing_evaluation_leaves_everything_as_it_was():
    class Fails(Noisy):
        def validation_step(self, batch):
            super().validation_step(batch)
            raise RuntimeError("no")

    trainer = make(Fails)
    trainer.fit(batches(rows_of_data(), 8), epochs=1)
    trainer.model[1].eval()
    before = everything(trainer)
    with pytest.raises(RuntimeError, match="no"):
        trainer.evaluate(loader_with_noise())
    assert equal(before, everything(trainer))
    trainer.fit(batches(rows_of_data(), 8), epochs=1)


def test_a_metric_object_of_the_users_own_is_not_touched():
    class Counts:
        def __init__(self):
            self.rows = 0

        def update(self, output, target):
            self.rows += len(target)

        def compute(self):
            return self.rows

        def reset(self):
            self.rows = 0

    mine = Counts()
    model = network()
    trainer = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        nn.CrossEntropyLoss(),
        metrics={"seen": mine, "twice": Derived(lambda numbers: 2 * numbers["seen"])},
        console=False,
    )
    row = trainer.fit(batches(rows_of_data(), 8), batches(rows_of_data(12), 8), epochs=1).history[0]
    assert (row["seen"], row["val_seen"], row["val_twice"]) == (30, 12, 24)
    assert mine.rows == 0


class Calls(nn.Module):
    """Counts its calls in a buffer, in eval mode too: in place, or by another tensor."""

    def __init__(self, inner, *, in_place):
        super().__init__()
        self.inner, self.in_place = inner, in_place
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, *given):
        if self.in_place:
            self.calls.add_(1)
        else:
            self.calls = self.calls + 1
        return self.inner(*given)


@pytest.mark.parametrize("in_place", [True, False])
def test_the_validation_batch_that_is_tried_before_the_first_update_moves_no_buffer(in_place):
    x, y = rows_of_data()
    model, loss = Calls(network(), in_place=in_place), Calls(nn.CrossEntropyLoss(), in_place=in_place)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, console=False)
    trainer.fit([(x[:10], y[:10]), (x[10:20], y[10:20])], [(x[20:], y[20:])], epochs=2)
    assert model.calls == loss.calls == 2 * 2 + 2  # as the plain loop with a validation after each epoch
