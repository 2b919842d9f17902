"""Law Same, captured: what is changed between updates holds for those that come."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from laws.graph_runs import both, check_same, fitted
from trainwright import Observer, StepLR, Trainer, Updates

pytestmark = pytest.mark.slow

TAU = [1.0]


class Settings:
    """Settings of one's own."""

    def __init__(self) -> None:
        self.tau = 1.0


class Own(Trainer[Any]):
    """A step that reads many things beside its batch."""

    def __init__(self, *given: Any, **slots: Any) -> None:
        super().__init__(*given, **slots)
        TAU[0] = 1.0
        taken = [1.0]
        self.tau: Any = 1.0
        self.names, self.listed, self.inner = {"tau": 1.0}, [1.0], SimpleNamespace(tau=1.0)
        self.settings, self.here = Settings(), torch.tensor(1.0)
        self.array = np.ones(1)
        self.factor = lambda: taken[0]
        self.smooth = 0.0

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        loss = F.cross_entropy(self.model(x), y, label_smoothing=self.smooth) * self.tau
        loss = loss * self.names["tau"] * self.listed[0] * self.inner.tau * self.settings.tau
        return loss * self.here * self.factor() * TAU[0] * float(self.array[0])


def sets(name: str, value: Any = 0.25) -> Callable[[Any], None]:
    return lambda trainer: setattr(trainer, name, value)


def fills(trainer: Any) -> None:
    with torch.no_grad():
        trainer.here.fill_(0.25)


def freezes(trainer: Any) -> None:
    for parameter in trainer.model[0].parameters():
        parameter.requires_grad_(not parameter.requires_grad)
        parameter.grad = None


def loads(trainer: Any) -> None:
    trainer.model.load_state_dict({name: value * 0.5 for name, value in trainer.model.state_dict().items()})


def loads_assigned(trainer: Any) -> None:
    trainer.model[1].load_state_dict({name: value * 0.5 for name, value in trainer.model[1].state_dict().items()})
    trainer.optimizer.load_state_dict(copy.deepcopy(trainer.optimizer.state_dict()))


def activates(trainer: Any) -> None:
    trainer.model[2] = nn.ReLU() if type(trainer.model[2]) is nn.Tanh else nn.Tanh()


def replaces(trainer: Any) -> None:
    trainer.model[3].weight.data = trainer.model[3].weight.data.clone() * 0.5


def group(name: str, value: Any) -> Callable[[Any], None]:
    return lambda trainer: trainer.optimizer.param_groups[0].update({name: value})


def drop(trainer: Any) -> None:
    trainer.model[4].p = 0.5 - trainer.model[4].p


def evaluates(trainer: Any) -> None:
    trainer.model[1].train(not trainer.model[1].training)


CHANGES: dict[str, Callable[[Any], None]] = {
    "an attribute": sets("tau"),
    "an option": sets("smooth"),
    "a setting in a dict": lambda trainer: trainer.names.update(tau=0.25),
    "a setting in a list": lambda trainer: trainer.listed.__setitem__(0, 0.25),
    "a namespace": lambda trainer: setattr(trainer.inner, "tau", 0.25),
    "settings of one's own": lambda trainer: setattr(trainer.settings, "tau", 0.25),
    "a tensor's values": fills,
    "another tensor": lambda trainer: setattr(trainer, "here", torch.tensor(0.25)),
    "what a function closes over": lambda trainer: trainer.factor.__closure__[0].cell_contents.__setitem__(0, 0.25),
    "a variable of the module": lambda trainer: TAU.__setitem__(0, 0.25),
    "an array": lambda trainer: trainer.array.fill(0.25),
    "what is trained": freezes,
    "loaded weights": loads,
    "a loaded optimizer": loads_assigned,
    "other weights' memory": replaces,
    "a module": activates,
    "dropout": drop,
    "eval mode of a layer": evaluates,
    "weight_decay": group("weight_decay", 0.5),
    "betas": group("betas", (0.5, 0.9)),
    "lr": group("lr", 0.01),
    "eps": group("eps", 0.1),
}


def deep() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 3))
    return nn.Sequential(*layers)


def at_hooks(change: Callable[[Any], None], hook: str) -> type[Trainer[Any]]:
    """A trainer that makes the change in the third epoch, before or after it."""

    class Changes(Own):
        if hook == "begin_epoch":

            def begin_epoch(self, epoch: int) -> None:
                if epoch in (2, 4):
                    change(self)

        else:

            def end_epoch(self, metrics: dict[str, float]) -> None:
                if self.progress.epoch in (2, 4):
                    change(self)

    return Changes


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_epochs_holds(change: str) -> None:
    hook = "begin_epoch" if sum(map(ord, change)) % 2 else "end_epoch"
    ran = both(kind=at_hooks(CHANGES[change], hook), model=deep, watched=False, least=8)
    assert ran.trainer.fast_path.startswith("L3")


@pytest.mark.parametrize("change", ["weight_decay", "an attribute", "dropout", "lr"])
def test_a_change_between_epochs_holds_for_gradients_alone(change: str) -> None:
    if change == "lr":
        how = {"optimizer": lambda p: torch.optim.Adamax(p, lr=0.02), "nonfinite": "ignore"}
        ran = both(kind=at_hooks(CHANGES[change], "end_epoch"), model=deep, **how)
    else:
        ran = both(
            kind=at_hooks(CHANGES[change], "end_epoch"),
            model=deep,
            schedule=StepLR(Updates(3), 0.9),
            optimizer=lambda p: torch.optim.Adamax(p, lr=0.02),
            nonfinite="ignore",
        )
    assert ran.trainer.fast_path.startswith("L2")


class Default(Trainer[Any]):
    """The step of every trainer, with another loss after two epochs."""

    change: Any = None

    def end_epoch(self, metrics: dict[str, float]) -> None:
        if self.progress.epoch == 2:
            type(self).change(self)


LOSSES: dict[str, Callable[[Any], None]] = {
    "an option": lambda trainer: setattr(trainer.loss, "label_smoothing", 0.3),
    "its weights": lambda trainer: trainer.loss.weight.mul_(torch.tensor([1.0, 0.5, 2.0])),
    "other weights": lambda trainer: setattr(trainer.loss, "weight", torch.tensor([1.0, 0.5, 2.0])),
    "another loss": lambda trainer: setattr(trainer, "loss", nn.MultiMarginLoss()),
    "its clip": lambda trainer: setattr(trainer.clip, "limit", 0.05),
}


class Clips:
    """A clip of one's own, with a limit that may be changed."""

    limit = 0.5

    def __call__(self, parameters: Any) -> Any:
        return nn.utils.clip_grad_norm_(parameters, self.limit)


@pytest.mark.parametrize("change", LOSSES)
def test_a_change_of_what_was_given_holds(change: str) -> None:
    kind = type("Changes", (Default,), {"change": LOSSES[change]})
    loss = nn.CrossEntropyLoss(weight=torch.ones(3))
    captured, eager = (
        fitted(graphs, kind=kind, loss=loss, watched=False, clip=Clips()) for graphs in ("require", False)
    )
    check_same(captured, eager, exact=False)
    assert captured.error is None
    assert sum(captured.replays) > 8


def group_added(trainer: Any) -> None:
    if len(trainer.optimizer.param_groups) == 1:
        for parameter in trainer.model[0].parameters():
            parameter.requires_grad_()
        trainer.optimizer.add_param_group({"params": trainer.model[0].parameters(), "lr": 0.02})


@pytest.mark.parametrize("schedule", [None, StepLR(Updates(4), 0.5)])
def test_a_group_that_is_added_is_trained(schedule: Any) -> None:
    def first(trainer: Any) -> None:
        for parameter in trainer.model[0].parameters():
            parameter.requires_grad_(False)

    ran = both(
        kind=at_hooks(group_added, "begin_epoch"),
        optimizer=lambda p: torch.optim.AdamW(list(p)[2:], lr=0.05, fused=True),
        prepare=first,
        watched=False,
        schedule=schedule,
        exact=schedule is None,
    )
    assert len(ran.records) == 0
    assert len(ran.replays) == 2


def halves(optimizer: Any, *_: Any) -> None:
    with torch.no_grad():
        optimizer.param_groups[0]["params"][0].mul_(0.5)


def hooked(trainer: Any) -> None:
    trainer.optimizer.register_step_post_hook(halves)


def wrapped(trainer: Any) -> None:
    real = trainer.optimizer.step

    def step(closure: Any = None) -> None:
        real(closure)
        halves(trainer.optimizer)

    trainer.optimizer.step = step


@pytest.mark.parametrize("change", [hooked, wrapped])
def test_what_comes_to_run_with_each_step_runs(change: Callable[[Any], None]) -> None:
    ran = both(graphs="auto", kind=at_hooks(change, "end_epoch"), watched=False)
    assert ran.trainer.fast_path.startswith("L2")


class Alters(Observer):
    """Changes something after an update now and then."""

    def __init__(self, change: Callable[[Any], None], every: int) -> None:
        self.change, self.each = change, every
        self.trainer: Any = None

    def on_update(self, update: Any) -> None:
        if update.update % self.each == 0:
            self.change(self.trainer)


@pytest.mark.parametrize("change", ["dropout", "weight_decay", "an attribute", "another tensor", "a module"])
@pytest.mark.parametrize("every", [7, 1])
def test_an_observer_that_changes_something_after_updates_is_heeded(every: int, change: str) -> None:
    def run_with(trainer: Any) -> None:
        trainer.observers[-1].trainer = trainer

    how = {"model": deep, "kind": Own, "prepare": run_with, "fits": ({"epochs": 6},), "watched": False}
    both(graphs="auto", least=0 if every == 1 else 5, observers=[Alters(CHANGES[change], every)], **how)


class Clears(Own):
    """Drops the gradients after each update."""

    def after_update(self) -> None:
        assert all(parameter.grad is not None for parameter in self.model.parameters())
        self.optimizer.zero_grad()


@pytest.mark.parametrize("whole", [True, False])
def test_gradients_are_there_after_each_update(whole: bool) -> None:
    optimizer: Any = "adamw" if whole else lambda p: torch.optim.Adamax(p, lr=0.02)
    ran = both(kind=Clears, nonfinite="ignore", optimizer=optimizer)
    assert ran.trainer.fast_path.startswith("L3" if whole else "L2")


def test_draws_of_the_host_are_not_moved_by_a_recording() -> None:
    drawn = []

    class Draws(Own):
        def end_epoch(self, metrics: dict[str, float]) -> None:
            drawn.append((random.random(), np.random.rand(), torch.rand(())))

    def seeded(trainer: Any) -> None:
        random.seed(0)
        np.random.seed(0)

    both(kind=Draws, model=deep, prepare=seeded)
    assert drawn[:5] == drawn[5:]
