"""A hook that takes other arguments than the loop gives is refused when the Trainer is made."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainwright import Observer, Trainer

BATCHES = [(torch.ones(3, 2), torch.ones(3, 1))]


def trainer_with(accumulate=1, **hooks):
    model = nn.Linear(2, 1)
    return type("Own", (Trainer,), hooks)(
        model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), accumulate=accumulate, console=False
    )


def fits(trainer):
    return trainer.fit(BATCHES, BATCHES, epochs=1).updates == 1


def with_index(self, batch, batch_idx):
    return self.model(batch[0]).mean()


@pytest.mark.parametrize(
    ("name", "hook", "have", "fix"),
    [
        (
            "training_step",
            with_index,
            "training_step(batch, batch_idx)",
            "def training_step(self, batch):   # self.progress.batch: the batches of the epoch before this window\n",
        ),
        (
            "validation_step",
            with_index,
            "validation_step(batch, batch_idx)",
            "def validation_step(self, batch):   # self.evaluating: the name of the set; "
            "batches are not counted here: count calls yourself\n",
        ),
        (
            "predict_step",
            with_index,
            "predict_step(batch, batch_idx)",
            "def predict_step(self, batch):   # batches are not counted here: count calls yourself\n",
        ),
        ("begin_epoch", lambda self: None, "begin_epoch()", "def begin_epoch(self, epoch):"),
        ("after_update", lambda self, window: None, "after_update(window)", "def after_update(self):"),
        ("end_epoch", lambda self: None, "end_epoch()", "def end_epoch(self, metrics):"),
        ("update", lambda self: None, "update()", "def update(self, window):"),
        ("evaluate", lambda self, data: {}, "evaluate(data)", 'def evaluate(self, data, name="val"):'),
        ("evaluate", lambda self, data, *names: {}, "evaluate(data, *names)", 'def evaluate(self, data, name="val"):'),
        ("evaluate", lambda self, d, n, /: {}, "evaluate(d, n, /)", 'def evaluate(self, data, name="val"):'),
    ],
)
def test_a_hook_with_other_arguments_is_refused_with_the_line_to_write(name, hook, have, fix):
    with pytest.raises(TypeError) as caught:
        trainer_with(**{name: hook})
    text = str(caught.value)
    assert f"Own.{name} cannot be called as the loop calls it" in text
    assert f"  have  {have}\n" in text and f"  fix   {fix}" in text and "test_hook_arguments.py" in text


def test_hooks_that_take_more_than_they_are_given_are_no_mistake():
    @staticmethod
    def split(batch):
        return (batch[0],), batch[1]

    assert fits(trainer_with(training_step=lambda self, *given, **named: self.model(given[0][0]).square().mean()))
    assert fits(trainer_with(begin_epoch=lambda self, epoch, quiet=True: None, split=split))


def with_default(self, data, name="val", *, batch_size=None):
    return Trainer.evaluate(self, data, name)


def without_default(self, data, name):
    return Trainer.evaluate(self, data, name)


def by_any_name(self, batches, **named):
    return Trainer.evaluate(self, batches, **named)


@pytest.mark.parametrize("evaluate", [with_default, without_default, by_any_name])
def test_an_evaluate_that_takes_data_and_name_is_called_for_every_validation(evaluate):
    trainer = trainer_with(evaluate=evaluate)
    assert fits(trainer) and set(trainer.history[0]) >= {"val_loss"}


@pytest.mark.parametrize("returned", [None, 0.5])
def test_an_evaluate_that_returns_no_dict_is_named_with_the_line_to_write(returned):
    trainer = trainer_with(evaluate=lambda self, data, name="val": returned)
    with pytest.raises(TypeError, match=r"^Own\.evaluate returned (None|float)\n") as caught:
        fits(trainer)
    assert "fix   return super().evaluate(data, name)" in str(caught.value)


@pytest.mark.parametrize(
    ("event", "function", "fix"),
    [
        ("on_epoch", lambda self: None, "def on_epoch(self, record):"),
        ("on_update", lambda self, trainer, update: None, "def on_update(self, update):"),
        ("on_fit_end", lambda self: None, "def on_fit_end(self, result):"),
    ],
)
def test_an_observer_with_other_arguments_is_refused_when_the_trainer_is_made(event, function, fix):
    model = nn.Linear(2, 1)
    watches = type("Watches", (Observer,), {event: function})()
    with pytest.raises(TypeError, match=rf"^Watches\.{event} cannot be called as the loop calls it") as caught:
        Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), observers=[watches])
    assert f"  fix   {fix}" in str(caught.value)


@pytest.mark.parametrize("name", ["loss", "metrics", "schedule", "model"])
def test_a_method_that_an_argument_would_hide_is_refused_when_the_class_is_defined(name):
    with pytest.raises(TypeError, match=rf"Mine\.{name} is never called(.|\n)*Trainer\(\.\.\., {name}=\.\.\.\)"):
        type("Mine", (Trainer,), {name: lambda self, output, target: output.mean()})


@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_is_said_of_progress_is_true(accumulate):
    """In a training step it counts the batches before the window; in a validation step it stands still."""
    seen = {"train": [], "val": []}

    def training_step(self, batch):
        seen["train"].append(self.progress.batch)
        return self.model(batch[0]).mean()

    def validation_step(self, batch):
        seen["val"].append(self.progress.batch)
        return self.model(batch[0]).mean()

    batches = BATCHES * 4
    own = {"training_step": training_step, "validation_step": validation_step}
    trainer_with(accumulate=accumulate, **own).fit(batches, batches, epochs=1)
    n = len(batches)
    assert seen["train"] == [at - at % accumulate for at in range(n)]
    assert len(set(seen["val"][-n:])) == 1
