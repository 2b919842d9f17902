"""Every mistake of a setting is refused before the first update: what was given, what was expected, what to write."""

from __future__ import annotations

import functools
import traceback

import pytest
import torch
from refusals import make, network, pieces
from torch import nn

from trainwright import (
    Checkpoint,
    DataError,
    EarlyStopping,
    MeanLoss,
    Observer,
    OneCycle,
    Plateau,
    SettingError,
    StepError,
    StepOutput,
    Trainer,
    accuracy,
)


def refused(trainer, error, match, train=None, val=None, **ends):
    """`fit` raises, names what is to be written, and not one update has run."""
    before = [p.clone() for p in trainer.model.parameters()]
    with pytest.raises(error, match=match) as caught:
        trainer.fit(pieces() if train is None else train, val, **(ends or {"epochs": 1}))
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
    assert trainer.progress.updates == 0
    return str(caught.value)


# Data.


def test_a_batch_that_is_none():
    text = refused(make(), DataError, "rows of a batch of type int", [3, 4])
    assert "override count" in text


def test_a_batch_without_a_target():
    text = refused(make(), DataError, "holds no target", [torch.randn(4, 4)])
    assert "override split" in text
    assert "override split" in refused(make(), DataError, "holds no target", [{"input": torch.randn(4, 4)}])


def test_a_batch_of_a_form_that_no_step_can_read():
    class Odd:
        def __init__(self):
            self.x = torch.randn(4, 4)

        def to(self, device):
            return self

    text = refused(make(), DataError, "Odd has no inputs and target", [Odd()])
    assert "training_step(self, batch)" in text


@pytest.mark.parametrize("empty", [[], iter(()), (torch.zeros(0, 4), torch.zeros(0, dtype=torch.long))])
def test_empty_data(empty):
    ends = {"epochs": 1, "batch_size": 4} if isinstance(empty, tuple) else {"epochs": 1}
    refused(make(), DataError, "train|0 rows", empty, **ends)


def test_empty_validation_data():
    refused(make(), DataError, "val", pieces(), [])


def test_rows_without_a_batch_size():
    data = (torch.randn(8, 4), torch.zeros(8, dtype=torch.long))
    assert "batch_size=64" in refused(make(), DataError, "without a batch size", data)


def test_a_data_set_class_and_a_string():
    refused(make(), DataError, "the class", torch.utils.data.TensorDataset)
    refused(make(), DataError, "no source of batches", "train.csv")


# Model, optimizer, loss.


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: Trainer(nn.Linear), "the class Linear"),
        (lambda: Trainer("model"), "a str"),
        (lambda: make(loss=nn.CrossEntropyLoss), r"loss=CrossEntropyLoss\(\)"),
        (lambda: make(loss="mse"), "loss='mse'"),
        (lambda: Trainer(network(), "adam"), "optimizer='adam'"),
        (lambda: Trainer(network(), lambda model: None), "an Optimizer"),
        (lambda: make(metrics=[accuracy]), 'metrics={"accuracy": accuracy}'),
        (lambda: make(observers=[print]), "is no Observer"),
    ],
)
def test_a_wrong_type_is_refused_when_the_trainer_is_built(build, match):
    with pytest.raises(TypeError, match=match):
        build()


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"accumulate": 0}, "accumulate=0"),
        ({"accumulate": {1: 2}}, "epoch 0"),
        ({"clip": -1.0}, "max_norm"),
        ({"on_nonfinite": "skp"}, "Did you mean 'skip'"),
        ({"precision": "bf61"}, "Did you mean 'bf16'"),
        ({"schedule": OneCycle}, r"OneCycle\(\)"),
        ({"schedule": torch.optim.lr_scheduler.StepLR}, "TorchSchedule"),
        ({"device": "gpu0"}, "device='gpu0'"),
        ({"metrics": {"loss": accuracy}}, "reserved"),
        ({"metrics": {"val_accuracy": accuracy}}, "val_"),
    ],
)
def test_a_wrong_value_is_refused_when_the_trainer_is_built(settings, match):
    with pytest.raises(SettingError, match=match):
        make(**settings)


def test_a_trainable_parameter_in_no_optimizer():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))
    trainer = Trainer(model, torch.optim.SGD(model[0].parameters(), lr=0.1), nn.CrossEntropyLoss(), console=False)
    text = refused(trainer, SettingError, "2 trainable parameters are in no optimizer")
    assert "model.1.weight" in text
    assert "fix   an optimizer over model.parameters(), or parameter.requires_grad_(False)" in text
    model[1].requires_grad_(False)
    trainer.fit(pieces(), epochs=1)


# Monitors, metrics, schedules.


MONITORS = [
    {"early_stopping": EarlyStopping("val_acuracy", mode="max")},
    {"checkpoint": "val_acuracy"},
    {"schedule": Plateau("val_acuracy", mode="max")},
]


@pytest.mark.parametrize("slot", MONITORS, ids=["early stopping", "checkpoint", "plateau"])
def test_a_monitor_that_nobody_produces(slot, tmp_path):
    slot = dict(slot)
    if "checkpoint" in slot:
        slot["checkpoint"] = Checkpoint(tmp_path, best=slot["checkpoint"], mode="max")
    trainer = make(metrics={"accuracy": accuracy}, **slot)
    text = refused(trainer, SettingError, "which this run does not produce", val=pieces(1))
    assert "Did you mean 'val_accuracy'?" in text
    assert "val_loss" in text


@pytest.mark.parametrize("val", [True, False])
def test_metrics_that_are_never_fed(val):
    class Bare(Trainer):
        def training_step(self, batch):
            return self.loss(self.model(batch[0]), batch[1])

    trainer = make(Bare, metrics={"accuracy": accuracy})
    text = refused(trainer, SettingError, "^metric 'accuracy' is never fed", val=pieces(1) if val else None)
    assert "return StepOutput(loss, output, target)" in text


def test_metrics_that_only_validation_feeds_are_fed():
    class Bare(Trainer):
        def training_step(self, batch):
            return self.loss(self.model(batch[0]), batch[1])

        def validation_step(self, batch):
            output = self.model(batch[0])
            return StepOutput(self.loss(output, batch[1]), output, batch[1])

    row = make(Bare, metrics={"accuracy": accuracy}).fit(pieces(), pieces(1), epochs=1).history[0]
    assert "val_accuracy" in row
    assert "accuracy" not in row


# Names.


def test_an_unknown_setting_is_a_type_error():
    with pytest.raises(TypeError, match="accumulation"):
        make(accumulation=4)


# Processes and memory.


def test_what_on_oom_cannot_be_is_refused():
    with pytest.raises(SettingError, match="on_oom='save'\n  want  None, or \"split\""):
        make(on_oom="save")


def test_what_parallel_cannot_be_is_refused(monkeypatch):
    with pytest.raises(SettingError, match=r"parallel=.*is no setting"):
        make(parallel=object())
    with pytest.raises(SettingError, match="parallel='ddp'"):
        make(parallel="ddp")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SettingError, match="WORLD_SIZE"):
        make()


# What a step returns.


@pytest.mark.parametrize(
    ("returned", "match"),
    [
        (lambda loss: None, "None"),
        (lambda loss: loss.item(), "float"),
        (lambda loss: (loss, loss), "tuple"),
        (lambda loss: torch.stack([loss, loss]), r"shape \(2,\)"),
        (lambda loss: {}, "dict"),
        (lambda loss: {"a": loss, "b": MeanLoss(loss, 4)}, "not of one form"),
        (lambda loss: {"a": MeanLoss(loss, 4), "b": MeanLoss(loss, 3)}, "one and the same count"),
        (lambda loss: StepOutput(StepOutput(loss)), "StepOutput"),
    ],
)
def test_what_is_no_loss_is_refused_with_what_a_step_may_return(returned, match):
    class Returns(Trainer):
        def training_step(self, batch):
            return returned(self.loss(self.model(batch[0]), batch[1]))

    for val in (None, pieces(1)):
        refused(make(Returns), StepError, match, val=val)
        refused(make(Returns, accumulate=2), StepError, match, val=val)


# Exceptions of the user's own.


class OwnError(Exception):
    pass


def fails(*args, **kwargs):
    raise OwnError("of my own")


class FailingModel(nn.Linear):
    def forward(self, x):
        return fails()


class FailingStep(Trainer):
    training_step = fails


class FailingObserver(Observer):
    def on_update(self, update):
        fails()


class FailingEpoch(Observer):
    def on_epoch(self, record):
        fails()


def failing_data():
    yield pieces(1)[0]
    fails()


WAYS = {
    "model": lambda: (make(model=FailingModel(4, 3)), pieces()),
    "step": lambda: (make(FailingStep), pieces()),
    "loss": lambda: (make(loss=fails), pieces()),
    "metric": lambda: (make(metrics={"mine": functools.partial(fails)}), pieces()),
    "observer": lambda: (make(observers=[FailingObserver()]), pieces()),
    "observer of epochs": lambda: (make(observers=[FailingEpoch()]), pieces()),
    "data": lambda: (make(), failing_data()),
    "schedule": lambda: (make(schedule=lambda update, total: fails()), pieces()),
    "clip": lambda: (make(clip=fails), pieces()),
}


@pytest.mark.parametrize("way", WAYS)
def test_an_exception_of_the_users_code_keeps_type_message_and_traceback(way):
    trainer, data = WAYS[way]()
    with pytest.raises(OwnError) as caught:
        trainer.fit(data, epochs=1)
    assert type(caught.value) is OwnError
    assert str(caught.value) == "of my own"
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "fails"
    if trainer.result is not None and way != "observer of epochs":  # there the end was reached already
        assert trainer.result.stopped == "OwnError: of my own"
