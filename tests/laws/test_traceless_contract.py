"""The Traceless law for the whole contract: a run that looks at itself anywhere is the run that does not."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from trainwright import EMA, Trainer, Updates

from .guest_cases import adamw, equal, generators, loader, network, seed_all
from .traceless_cases import (
    PLACES,
    SETTINGS,
    Merging,
    ScheduleFree,
    Tells,
    foreign,
    listed,
    look_everywhere,
    ours,
    run_of,
    undisturbed,
)


def check_run(settings="accumulate", place="before the loss", *, look=look_everywhere, data=foreign):
    disturbed = run_of(settings, place=place, look=look, data=data)
    quiet = undisturbed(settings, data)
    assert settings != "fp16" or {update[4] for update in quiet["updates"]} == {True, False}
    assert len(quiet["order"]) == 8 and len(quiet["history"]) == 2
    for name, value in quiet.items():
        assert equal(value, disturbed[name]), name


FULLY = ("accumulate", "bf16, EMA")
IN_STEPS = ("before the loss", "after the loss", "between gradients and step")


@pytest.mark.sample(12)
@pytest.mark.parametrize(
    ("settings", "place"),
    [(settings, place) for settings in SETTINGS for place in (PLACES if settings in FULLY else IN_STEPS)],
)
def test_a_run_that_looks_at_itself_is_the_run_that_does_not(settings, place):
    check_run(settings, place)


@pytest.mark.parametrize("data", [ours, listed])
@pytest.mark.parametrize("place", ["begin_epoch", "before the loss", "end_epoch", "probe"])
def test_the_order_of_the_data_is_the_same_whatever_they_are(data, place):
    check_run("accumulate", place, data=data)


class Compares(Trainer):
    """Evaluates the same weights before a step, and in it when the step has cast weights for itself."""

    def update(self, window):
        self.reported.append([])
        self.ask()
        return super().update(window)

    def training_step(self, batch):
        loss = super().training_step(batch)
        self.ask()
        return loss

    def ask(self):
        if torch.is_grad_enabled():
            self.reported[-1].append((self.evaluate(self.held_out), self.predict(self.held_out)))


def check_numbers(average=EMA(0.5), precision="bf16"):  # noqa: B008
    """The numbers of the weights that count, whatever the step around has cast for itself."""
    model = network()
    model.norm.eval()
    trainer = Compares(model, adamw(model), nn.CrossEntropyLoss(), precision=precision, average=average, console=False)
    trainer.reported, trainer.held_out = [], list(loader(seed=1))
    seed_all()
    trainer.fit(loader(), epochs=2)
    assert len(trainer.reported) == 8 and all(len(reported) == 2 for reported in trainer.reported)
    for before, inside in trainer.reported:
        assert equal(before, inside)
    assert trainer.reported[3][0][0] != trainer.reported[4][0][0]


@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
@pytest.mark.parametrize("average", [None, EMA(0.5)], ids=["none", "EMA"])
def test_the_same_weights_have_the_same_numbers_inside_a_step(average, precision):
    check_numbers(average, precision)


def use_without_care(trainer, train):
    """A probe that samples, draws and changes as if nobody trained."""
    torch.rand(3)
    assert not any(module.training for module in trainer.model.modules())
    trainer.state["steps"] = -1
    trainer.model.train()
    trainer.model(torch.randn(4, 6))
    random.random(), np.random.rand()


def test_a_probe_that_takes_no_care_changes_nothing():
    check_run("accumulate", "probe", look=use_without_care)
    check_run("bf16, SWA", "probe", look=use_without_care)


VALIDATIONS = {
    "the same loader": lambda train: (train, {}),
    "the same loader at each update": lambda train: (train, {"validate": Updates(1)}),
    "a dict of loaders": lambda train: (
        {"same": train, "other": DataLoader(Tells(10), 4, shuffle=True)},
        {"validate": Updates(3)},
    ),
}


def check_validated(settings="accumulate", kind="the same loader", data=foreign):
    disturbed = run_of(settings, validates=VALIDATIONS[kind], data=data)
    quiet = undisturbed(settings, data)
    for name, value in quiet.items():
        if name == "history":  # rows of validations inside an epoch come on top
            rows = [row for row in disturbed[name] if row["update"] % quiet["counters"]["updates"] == 0]
            assert equal(value[-1], rows[-1]), name
        else:
            assert equal(value, disturbed[name]), name


@pytest.mark.parametrize("data", [foreign, ours, listed])
@pytest.mark.parametrize("kind", VALIDATIONS)
def test_a_run_with_validations_on_its_own_data_is_the_run_without(kind, data):
    check_validated("accumulate", kind, data)


@pytest.mark.parametrize("settings", ["SWA", "bf16, EMA", "schedule-free", "skip"])
def test_a_run_with_several_validation_sets_is_the_run_without(settings):
    check_validated(settings, "a dict of loaders")


def check_workers(validate=None):
    """Persistent workers of a loader that training and validation share are training's."""
    ends = []
    for validates in (False, True):
        train = loader(16, num_workers=1, persistent_workers=True)
        model = network()
        trainer = Trainer(model, adamw(model), nn.CrossEntropyLoss(), console=False)
        seed_all()
        trainer.fit(train, train if validates else None, epochs=2, **({"validate": validate} if validate else {}))
        ends.append((model.state_dict(), generators()))
        train._iterator._shutdown_workers()  # torch waits 5 s for them where the garbage collector ends them
    assert equal(*ends)


def test_persistent_workers_that_are_shared_are_trainings():
    check_workers(Updates(1))


def test_the_schedule_free_optimizer_of_these_tests_is_the_published_one():
    """The optimizer of these tests is the published one: x is the mean of all z, gradients are taken at y."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    optimizer = ScheduleFree(model.parameters(), lr=0.1, beta=0.9)
    x = z = model.weight.detach().clone()
    bias = {"x": model.bias.detach().clone(), "z": model.bias.detach().clone()}
    inputs, target = torch.randn(5, 3).double(), torch.randn(5, 1).double()
    for t in range(6):
        y, b = 0.1 * z + 0.9 * x, 0.1 * bias["z"] + 0.9 * bias["x"]
        torch.testing.assert_close(model.weight.detach(), y)
        optimizer.zero_grad()
        (model(inputs) - target).square().mean().backward()
        optimizer.step()
        error = 2 * (inputs @ y.t() + b - target) / 5
        z, bias["z"] = z - 0.1 * error.t() @ inputs, bias["z"] - 0.1 * error.sum(0)
        x, bias["x"] = x + (z - x) / (t + 1), bias["x"] + (bias["z"] - bias["x"]) / (t + 1)
        optimizer.eval()
        torch.testing.assert_close(model.weight.detach(), x)
        optimizer.train()


def test_weights_that_are_merged_in_eval_mode_come_back_to_the_last_bit():
    torch.manual_seed(0)
    model = nn.Sequential(Merging(6, 3))
    drifting = copy.deepcopy(model)
    for _ in range(20):
        drifting.eval()
        drifting.train()
    assert not torch.equal(model[0].weight, drifting[0].weight)
    before = copy.deepcopy(model.state_dict())
    trainer = Trainer(model, adamw(model), nn.CrossEntropyLoss(), console=False)
    one = trainer.evaluate(loader(seed=1))
    for _ in range(20):
        trainer.evaluate(loader(seed=1))
    assert equal(before, model.state_dict()) and not model[0].merged
    assert one["val_loss"] == pytest.approx(trainer.evaluate(loader(seed=1))["val_loss"])


@pytest.mark.parametrize("settings", ["bf16, EMA", "bf16, SWA"])
def test_weights_saved_in_the_midst_of_a_step_change_nothing(settings, tmp_path):
    def save(trainer, train):
        trainer.save_weights(tmp_path / "weights.safetensors")

    check_run(settings, "after the loss", look=save)
