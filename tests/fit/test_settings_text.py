"""What a Trainer is set to stands in its checkpoints, and a resume under other settings says what has changed."""

from __future__ import annotations

import functools
import json

import pytest
import torch
from torch import nn
from torch.nn import functional

from trainwright import Checkpoint, Cosine, Observer, OneCycle, Trainer
from trainwright.fit.plan import changed, settings_of


class Header(Observer):
    def on_fit_start(self, plan):
        self.notes = plan.notes


def make(directory=None, **settings):
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    given = dict(loss=nn.MSELoss(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1), console=False) | settings
    slot = None if directory is None else Checkpoint(directory)
    return Trainer(model, given.pop("optimizer"), given.pop("loss"), checkpoint=slot, **given)


def fit(directory, epochs, **settings):
    header = Header()
    trainer = make(directory, observers=[header], **settings)
    trainer.fit([(torch.ones(2, 2), torch.ones(2, 1))] * 4, epochs=epochs, resume="auto")
    return header.notes


def test_equal_settings_have_one_text_and_others_another():
    one = settings_of(make(clip=1.0))
    assert (one["model"], one["optimizer"], one["accumulate"]) == ("Linear", "SGD", "1")
    assert one == settings_of(make(clip=1.0))
    others = [make(), make(clip=2.0), make(clip=1.0, accumulate=2), make(clip=1.0, schedule=Cosine())]
    others += [make(clip=1.0, loss=functional.mse_loss), make(clip=1.0, on_nonfinite="skip")]
    model = nn.Linear(2, 1)
    others.append(Trainer(model, torch.optim.Adam(model.parameters()), nn.MSELoss(), clip=1.0, console=False))
    texts = [json.dumps(settings) for settings in (one, *map(settings_of, others))]
    assert len(set(texts)) == len(others) + 1


def test_what_differs_in_every_process_is_not_in_the_text():
    class Loss:
        def __call__(self, output, target):
            return functional.mse_loss(output, target)

    for loss in (Loss(), lambda output, target: (output - target).mean(), functional.mse_loss):
        text = json.dumps(settings_of(make(loss=loss)))
        assert " at 0x" not in text
    assert settings_of(make(loss=Loss()))["loss"].endswith("Loss")
    partial = functools.partial(functional.mse_loss, reduction="mean")
    assert settings_of(make(loss=partial))["loss"] == "partial(mse_loss, reduction='mean')"


def test_two_objects_of_one_text_inside_another_have_no_address():
    assert " at 0x" not in json.dumps(
        settings_of(make(loss=functools.partial(lambda o, t, f: f(o, t), f=functional.l1_loss)))
    )


def test_a_resume_under_other_settings_says_so_in_one_line(tmp_path):
    fit(tmp_path, 1, clip=1.0)
    notes = fit(tmp_path, 2, clip=0.5, accumulate=2)
    (line,) = [note for note in notes if "settings" in note]
    assert line.startswith("settings changed since it was saved: ")
    assert "accumulate 1 -> 2" in line and "1.0" in line and "0.5" in line


def test_a_resume_under_the_same_settings_says_nothing(tmp_path):
    fit(tmp_path, 1, clip=1.0)
    assert not [note for note in fit(tmp_path, 2, clip=1.0) if "settings" in note]


def test_a_schedule_tells_of_itself():
    with pytest.warns(UserWarning, match="re-planned"):
        pass_schedule()
    saved, now = settings_of(make(schedule=OneCycle(0.1))), settings_of(make(schedule=Cosine()))
    assert saved != now and changed(saved, now) == ""


def pass_schedule():
    import tempfile

    with tempfile.TemporaryDirectory() as made:
        fit(made, 1, schedule=OneCycle(0.1))
        notes = fit(made, 2, schedule=OneCycle(0.1))
        assert [note for note in notes if "schedule re-planned: 4 -> 8 updates" in note]


def test_a_checkpoint_without_the_settings_says_nothing():
    assert changed({}, settings_of(make())) == ""
