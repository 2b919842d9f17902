"""Killed at any update and resumed is never killed: weights, state, history and data order, bit for bit."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from small import BATCHES, small
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainwright import (
    Checkpoint,
    CheckpointError,
    EarlyStopping,
    MixedPrecision,
    OneCycle,
    Trainer,
    Updates,
    accuracy,
    batches,
    latest_checkpoint,
    load_weights,
)


def rows_of_data(rows=52, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 6, generator=generator), torch.randint(0, 3, (rows,), generator=generator)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))


class KilledError(Exception):
    """Ends a run as a kill would: nothing is done after it."""


class Dies(Trainer):
    """Saves after one try of an update and dies in the next; draws from every random generator in each step."""

    at = None

    def training_step(self, batch):
        x, y = batch
        noise = 1 + 0.01 * (random.random() + np.random.rand())
        return super().training_step((x * noise + 0.01 * torch.randn_like(x), y))

    def update(self, window):
        tries = self.progress.updates + self.progress.skipped
        if self.at is not None and tries >= self.at:
            raise KilledError
        if self.at is not None and tries + 1 == self.at:
            self.save()
        return super().update(window)


def seed():
    random.seed(3)
    np.random.seed(4)
    torch.manual_seed(5)


def shuffled(data):
    return DataLoader(TensorDataset(*data), 4, shuffle=True)


def go(directory, *, cls=Dies, at=None, resume=None, epochs=4, loader=None, val=True, **settings):
    model = network()
    seed()
    slots = {
        "schedule": OneCycle(0.03),
        "precision": MixedPrecision("fp16", init_scale=2.0**22, growth_interval=5),
        "accumulate": 3,
        "clip": 1.0,
        "metrics": {"accuracy": accuracy},
        "early_stopping": EarlyStopping("val_loss", patience=50, restore_best=False),
        "checkpoint": Checkpoint(directory, best="val_accuracy", mode="max"),
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trainer = cls(model, optimizer, nn.CrossEntropyLoss(), console=False, **(slots | settings))
    trainer.at = at
    train = shuffled(rows_of_data()) if loader is None else loader()
    held_out = batches(rows_of_data(seed=1), 16) if val else None
    if at is None:
        return trainer, trainer.fit(train, held_out, epochs=epochs, resume=resume)
    with pytest.raises(KilledError):
        trainer.fit(train, held_out, epochs=epochs, resume=resume)
    return trainer, trainer.result


def state_of(trainer):
    state = trainer.optimizer.state_dict()["state"]
    tensors = [value for values in state.values() for value in values.values()]
    return [*trainer.model.state_dict().values(), *tensors]


def check_equal(one, other):
    (first, a), (second, b) = one, other
    assert all(torch.equal(x, y) for x, y in zip(state_of(first), state_of(second), strict=True))
    assert a.history == b.history
    assert (a.updates, a.epochs, a.skipped, a.stopped) == (b.updates, b.epochs, b.skipped, b.stopped)
    assert (a.best is None) == (b.best is None)
    if a.best is not None:
        assert (a.best.value, a.best.update, a.best.epoch) == (b.best.value, b.best.update, b.best.epoch)


def test_resume_of_an_older_checkpoint_by_its_path(tmp_path):
    whole = go(tmp_path / "whole", checkpoint=Checkpoint(tmp_path / "whole", every=Updates(3), keep=9))
    older = tmp_path / "whole" / "update-0000000006"
    again = go(
        tmp_path / "again", resume=str(older), checkpoint=Checkpoint(tmp_path / "again", every=Updates(3), keep=9)
    )
    check_equal((whole[0], whole[1]), again)


def test_a_finished_run_gives_its_result_without_training(tmp_path):
    class Never(Dies):
        def update(self, window):
            raise AssertionError("trained")

    check_equal(go(tmp_path), go(tmp_path, cls=Never, resume="auto"))


def test_a_run_that_stopped_early_stays_stopped_with_a_later_end_and_restores_its_best(tmp_path):
    slots = {"early_stopping": EarlyStopping("val_loss", patience=1, min_delta=10.0), "schedule": None}
    trainer, result = go(tmp_path, **slots)
    assert "did not improve" in result.stopped
    assert result.epochs == 2
    again, found = go(tmp_path, resume="auto", epochs=9, **slots)
    assert (found.stopped, found.epochs, found.weights) == (result.stopped, 2, "best of epoch 1 by val_loss")
    for mine, theirs in zip(trainer.model.state_dict().values(), again.model.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_later_end_goes_on_from_the_last_state(tmp_path):
    whole = go(tmp_path / "whole", schedule=None, epochs=5)
    go(tmp_path / "cut", schedule=None, epochs=2)
    check_equal(whole, go(tmp_path / "cut", schedule=None, epochs=5, resume="auto"))


# Refusals.


def untouched(trainer_call, error, match):
    with pytest.raises(error, match=match) as caught:
        trainer_call()
    return str(caught.value)


def test_a_trainer_with_other_parts_is_refused_by_their_names(tmp_path):
    go(tmp_path, epochs=1)
    text = untouched(lambda: go(tmp_path, resume="auto", schedule=None, precision=None), CheckpointError, "not used")
    assert "schedule" in text
    assert "precision" in text


def test_the_best_and_the_last_weights_are_found_in_the_directory(tmp_path):
    trainer, result = go(tmp_path, val=True)
    last = load_weights(tmp_path, which="last")
    assert all(torch.equal(last[name], value) for name, value in trainer.model.state_dict().items())
    assert latest_checkpoint(tmp_path).name == f"update-{result.updates:010d}"
    assert result.best.path is not None
    model = network()
    load_weights(tmp_path, model)
    best = load_weights(result.best.path)
    assert all(torch.equal(best[name], value) for name, value in model.state_dict().items())


def test_a_setting_of_the_optimizer_that_the_checkpoint_overrules_is_named(tmp_path):
    def run(lr, epochs):
        trainer = small(checkpoint=Checkpoint(tmp_path))
        trainer.optimizer.param_groups[0]["lr"] = lr
        return trainer.fit(BATCHES, epochs=epochs, resume="auto")

    run(0.01, 1)
    run(0.01, 2)
    with pytest.warns(UserWarning, match=r"lr=0\.01 .* is the checkpoint's, 0\.5 is not used"):
        run(0.5, 3)


class StopsEarly(Trainer):
    """Is stopped before the first window of an epoch, after a draw of its own."""

    at = None

    def begin_epoch(self, epoch):
        torch.rand(1)
        if epoch == self.at:
            self.stop("enough")


@pytest.mark.parametrize("at", [0, 2])
def test_a_run_stopped_in_begin_epoch_draws_the_order_of_that_epoch_on_resume(at, tmp_path):
    def fit(directory, at=None, resume=None):
        torch.manual_seed(3)
        model = network()
        slot = Checkpoint(tmp_path / directory)
        trainer = StopsEarly(
            model, torch.optim.Adam(model.parameters()), nn.CrossEntropyLoss(), checkpoint=slot, console=False
        )
        trainer.at = at
        result = trainer.fit(DataLoader(TensorDataset(*rows_of_data()), 8, shuffle=True), epochs=4, resume=resume)
        return model, result

    whole, result = fit("whole")
    assert fit("stopped", at=at)[1].stopped == "enough"
    resumed, after = fit("stopped", resume="auto")
    assert after.history == result.history
    assert all(torch.equal(*pair) for pair in zip(whole.parameters(), resumed.parameters(), strict=True))


@pytest.mark.parametrize(
    ("saved", "given"), [("AdamW", "SGD"), ("SGD", "AdamW"), ("AdamW", "Adam"), ("Adam", "Adamax")]
)
def test_an_optimizer_of_another_class_is_refused_and_nothing_is_changed(tmp_path, saved, given):
    def made(name):
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)
        return Trainer(model, optimizer, nn.MSELoss(), checkpoint=Checkpoint(tmp_path), console=False)

    data = batches((torch.ones(8, 2), torch.ones(8, 1)), 4)
    made(saved).fit(data, epochs=1)
    other = made(given)
    before = other.model.state_dict()["weight"].clone()
    with pytest.raises(CheckpointError, match=f"was saved with {saved}; this Trainer has {given}") as caught:
        other.fit(data, epochs=2, resume="auto")
    assert "load_weights(" in str(caught.value)
    assert torch.equal(other.model.weight, before)
    assert set(other.optimizer.param_groups[0]) == set(made(given).optimizer.param_groups[0])


def test_a_fit_that_resumes_after_a_failure_without_a_checkpoint_says_what_it_begins_with(tmp_path, capsys):
    class Fails(Trainer):
        broken = True

        def training_step(self, batch):
            if self.broken and self.progress.updates == 1:
                raise ValueError("mine")
            return super().training_step(batch)

    trainer = small(Fails, checkpoint=Checkpoint(tmp_path), console=True)
    with pytest.raises(ValueError, match="mine"):
        trainer.fit(BATCHES, epochs=1, resume="auto")
    assert "begins with" not in capsys.readouterr().out
    trainer.broken = False
    trainer.fit(BATCHES, epochs=1, resume="auto")
    said = " ".join(capsys.readouterr().out.split())
    assert "it begins with the weights and the optimizer as the fit that failed has left them" in said
