"""The Traceless law: evaluation leaves the run, the model and the process as it found them, also inside an epoch."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainwright import Cosine, Observer, Trainer, Updates, accuracy, batches
from trainwright.metrics import Derived


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


class Told(Observer):
    def __init__(self):
        self.updates = []

    def on_update(self, update):
        self.updates.append((update.loss, update.lr, update.rows))


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
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
            "autocast": torch.is_autocast_enabled("cpu"),
            "grad": torch.is_grad_enabled(),
            "progress": repr(trainer.progress),
            "history": trainer.history,
        }
    )


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(same(*pair) for pair in zip(one, other, strict=True))
    return one == other


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
    assert same(before, everything(trainer))


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
    assert same(before, everything(trainer))
    trainer.fit(batches(rows_of_data(), 8), epochs=1)


def trained(val, *, train=None, cls=Noisy, **settings):
    """A run with shuffling, dropout, BatchNorm, accumulation and a schedule; what came out of it."""
    told = Told()
    trainer = make(cls, accumulate=2, schedule=Cosine(), observers=[told])
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    train = DataLoader(TensorDataset(*rows_of_data()), 4, shuffle=True) if train is None else train()
    result = trainer.fit(train, val, epochs=3, **settings)
    losses = {row["update"]: row["loss"] for row in result.history if row["update"] % 4 == 0}
    state = [*trainer.model.state_dict().values()]
    return state, told.updates, losses, (random.random(), np.random.rand(), torch.rand(2))


def check_a_run_with_validation_is_the_run_without(kind, **settings):
    assert same(trained(None), trained(DATA[kind](), **settings))


@pytest.mark.parametrize("settings", [{}, {"validate": Updates(1)}, {"validate": Updates(3)}])
@pytest.mark.parametrize("kind", ["batches", "DataLoader", "list"])
def test_a_run_with_validations_is_the_run_without_them_bit_for_bit(kind, settings):
    check_a_run_with_validation_is_the_run_without(kind, **settings)


class Evaluates(Noisy):
    """Evaluates in the middle of a window, between two micro-batches, and in an update; on the training data too."""

    train = None

    def training_step(self, batch):
        if torch.is_grad_enabled() and self.progress.updates % 2 and self.train is not None:
            self.evaluate(self.train, name="train")
            self.predict(batches(rows_of_data(seed=1), 8))
        return super().training_step(batch)


def check_evaluating_inside_an_epoch_changes_nothing(make_train):
    class Here(Evaluates):
        def fit(self, train, *args, **kwargs):
            self.train = train
            return super().fit(train, *args, **kwargs)

    assert same(trained(None, train=make_train, cls=Evaluates), trained(None, train=make_train, cls=Here))


TRAIN = {
    "batches": lambda: batches(rows_of_data(), 4, shuffle=True, seed=1),
    "no seed": lambda: batches(rows_of_data(), 4, shuffle=True),
    "list": lambda: list(zip(*(column.split(4) for column in rows_of_data()), strict=True)),
    "DataLoader": lambda: DataLoader(TensorDataset(*rows_of_data()), 4, shuffle=True),
    "generator": lambda: DataLoader(
        TensorDataset(*rows_of_data()), 4, shuffle=True, generator=torch.Generator().manual_seed(7)
    ),
}


@pytest.mark.parametrize("kind", TRAIN)
def test_evaluating_the_training_data_from_within_a_step_changes_nothing(kind):
    check_evaluating_inside_an_epoch_changes_nothing(TRAIN[kind])


def test_numbers_of_an_evaluation_inside_an_epoch_do_not_enter_training_and_the_other_way_round():
    seen = []

    class Here(Evaluates):
        def training_step(self, batch):
            if torch.is_grad_enabled():
                seen.append(self.evaluate(batches(rows_of_data(seed=1), 8)))
            return Trainer.training_step(self, batch)

    trainer = make(Here)
    trainer.optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
    trainer.model[3].p = 0.0
    trainer.model[1].eval()
    row = trainer.fit(batches(rows_of_data(), 8), epochs=1).history[0]
    assert all(numbers == seen[0] for numbers in seen)
    assert row["loss"] == pytest.approx(trainer.evaluate(batches(rows_of_data(), 8))["val_loss"], rel=1e-6)
    assert "val_loss" not in row


def test_a_module_that_the_user_put_in_eval_mode_stays_there_through_training_and_validation():
    trainer = make()
    trainer.model[1].eval()
    before = trainer.model[1].running_mean.clone()
    trainer.fit(batches(rows_of_data(), 8), batches(rows_of_data(), 8), epochs=2, validate=Updates(1))
    assert torch.equal(before, trainer.model[1].running_mean)
    assert [module.training for module in trainer.model] == [True, False, True, True, True]


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
