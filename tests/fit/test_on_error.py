"""`on_error="save"`: a run that fails inside an update is saved as it was before it; the error stays what it was."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from pathlib import Path

import pytest
import torch
from cut import BreaksError, Cut, Cuttable, breaks, check_equal, go
from torch import nn
from torch.nn import functional

from trainwright import (
    SWA,
    Checkpoint,
    MixedPrecision,
    NonFiniteError,
    SettingError,
    Trainer,
    Updates,
    batches,
    latest_checkpoint,
)
from trainwright.checkpointing.format import load_tree

NOTHING = 'nothing is saved: fit(..., resume="auto") starts at the beginning'


class Kept(Cuttable):
    """Has a part of its own, which each step changes in place."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.memory = nn.Linear(2, 2, bias=False)
        with torch.no_grad():
            self.memory.weight.zero_()

    def parts(self):
        return super().parts() | {"memory": self.memory}

    def training_step(self, batch):
        with torch.no_grad():
            self.memory.weight += torch.rand(2, 2)
        self.state.setdefault("list", torch.zeros(2)).add_(1)
        return super().training_step(batch)


SETTINGS = {
    "usual": dict(cls=Kept),
    "fp16": dict(precision=MixedPrecision("fp16", init_scale=2.0**20, growth_interval=2), average=None),
    "swa": dict(average=SWA(Updates(2), Updates(1))),
    "skips": dict(on_nonfinite="skip", average=None),
    "generator": dict(kind="generator", cls=Kept, ends=dict(epochs=None, max_updates=8)),
}
_wholes = {}


def whole(which):
    if which not in _wholes:
        with tempfile.TemporaryDirectory() as made:
            _wholes[which] = go(made, on_error="save", **SETTINGS[which])
        assert _wholes[which][2] is None
    return _wholes[which]


def broken_and_resumed(directory, which, cut):
    """Break a run, resume it, and hold it against the one that never broke; gives the broken one."""
    broken = go(directory, cut, on_error="save", **SETTINGS[which])
    assert type(broken[2]) is BreaksError, broken[2]
    resumed = go(directory, on_error="save", resume="auto", **SETTINGS[which])
    assert resumed[2] is None
    check_equal(whole(which), resumed, reported=broken[1].reported + resumed[1].reported)
    return broken


PLACES = [
    ("training_step", 3),
    ("training_step", 6),  # the second micro-batch of a window
    ("training_step", 8),  # the first window of an epoch
    ("backward", 5),
    ("backward", 14),
    ("metric", 7),
    ("validation_step", 3),
    ("row", 10),
]
EVERY = [(which, place, n) for which in SETTINGS for place, n in PLACES if which != "swa" or n < 6]


@pytest.mark.sample(12)
@pytest.mark.parametrize(("which", "place", "n"), EVERY)
def test_an_error_inside_an_update_is_as_if_it_had_never_come(which, place, n, directory):
    trainer, _, error = broken_and_resumed(directory, which, Cut(place, n, breaks))
    assert trainer.result.stopped == "BreaksError: in the user's code"
    assert str(error) == "in the user's code"
    note = f'saved at update {trainer.result.updates}: fit(..., resume="auto") continues from there'
    assert note in trainer.result.notes


def test_an_error_before_anything_was_trained_leaves_nothing_that_a_mended_script_would_be_refused_for(directory):
    trainer, _, error = go(directory, Cut("training_step", 1, breaks), on_error="save")
    assert str(error) == "in the user's code"
    assert trainer.result.notes == (NOTHING,) and not list(Path(directory).glob("update-*"))
    assert go(directory)[2] is None


@pytest.mark.parametrize("place", ["training_step", "backward", "row", "validation_step"])
def test_the_traceback_ends_at_the_users_line(place, directory):
    _, _, error = go(directory, Cut(place, 5, breaks), on_error="save")
    frames = traceback.extract_tb(error.__traceback__)
    assert (frames[-1].name, Path(frames[-1].filename).name) == ("breaks", "cut.py")
    assert error.__cause__ is None and error.__context__ is None


def test_what_a_loss_counts_in_a_buffer_is_saved_as_before_the_window(directory):
    class Counting(nn.Module):
        def __init__(self, breaks_at=None):
            super().__init__()
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))
            self.breaks_at = breaks_at

        def forward(self, output, target):
            self.calls += self.training
            if self.calls == self.breaks_at:
                breaks()
            return functional.cross_entropy(output, target)

    broken = go(directory, loss=Counting(5), on_error="save")
    assert type(broken[2]) is BreaksError
    saved = load_tree(latest_checkpoint(directory))
    assert saved["loss"]["calls"] == saved["progress"]["counters"]["batch"] > 0


def test_a_loss_that_is_not_finite_is_saved_as_before_its_window(directory):
    class Poisoned(Cuttable):
        def training_step(self, batch):
            step = super().training_step(batch)
            self.cut.at("poison")
            step.loss = step.loss * self.poison
            return step

        poison = 1.0

    def poison():
        Poisoned.poison = float("nan")

    usual = go(directory / "a", cls=Poisoned, on_error="save")
    broken = go(directory / "b", Cut("poison", 6, poison), cls=Poisoned, on_error="save")
    Poisoned.poison = 1.0
    assert type(broken[2]) is NonFiniteError
    resumed = go(directory / "b", cls=Poisoned, on_error="save", resume="auto")
    assert resumed[2] is None
    check_equal(usual, resumed, reported=broken[1].reported + resumed[1].reported)


# Updates of the user's own.


class Twice(Trainer):
    """Two optimizers, as a GAN has them."""

    place = None
    left = 0

    def at(self, place):
        if place == self.place:
            self.left -= 1
            if not self.left:
                breaks()

    def update(self, window):
        for batch in window:
            x, y = batch
            self.state["seen"] = self.state.get("seen", 0) + 1
            first = functional.mse_loss(self.model[0](x), y)
            self.at("before")
            self.minimize(first, "first")
            self.at("between")
            second = functional.mse_loss(self.model[1](x * (1 + 0.1 * torch.rand(1))), y)
            self.minimize(second, "second")
            self.at("after")


def two(directory, place=None, n=0, resume=None):
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(3, 1), nn.Linear(3, 1)])
    torch.manual_seed(1)
    trainer = Twice(
        model,
        {
            "first": torch.optim.Adam(model[0].parameters(), lr=0.1),
            "second": torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9),
        },
        checkpoint=Checkpoint(directory, every=Updates(3)),
        on_error="save",
        console=False,
    )
    trainer.place, trainer.left = place, n
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(20, 3, generator=generator), torch.randn(20, 1, generator=generator)
    error = None
    try:
        trainer.fit(batches(data, 4, shuffle=True), epochs=2, resume=resume)
    except BreaksError as raised:
        error = raised
    return trainer, error


def check_same(one, other):
    assert all(torch.equal(*pair) for pair in zip(one.model.parameters(), other.model.parameters(), strict=True))
    assert (one.state, one.result.history) == (other.state, other.result.history)


@pytest.mark.parametrize(("place", "goes_on"), [("before", 7), ("between", 6), ("after", 6)])
def test_an_update_of_ones_own_is_saved_as_long_as_no_step_was_made(place, goes_on, directory):
    trainer, error = two(directory / "a", place, 8)
    assert error is not None
    assert latest_checkpoint(directory / "a").name == f"update-{goes_on:010d}"
    saved = 'saved at update 7: fit(..., resume="auto") continues from there'
    lost = 'not saved at its end: fit(..., resume="auto") continues from update 6'
    assert trainer.result.notes == (saved if goes_on == 7 else lost,)
    resumed, _ = two(directory / "a", resume="auto")
    check_same(two(directory / "b")[0], resumed)


# Where nothing whole is there to be saved.


@pytest.mark.parametrize(("place", "n"), [("step", 5), ("after_update", 5), ("on_update", 5), ("on_validate", 2)])
def test_an_error_after_the_step_has_begun_saves_nothing_and_says_from_where_it_goes_on(place, n, directory):
    trainer, _, error = go(directory, Cut(place, n, breaks), on_error="save")
    assert type(error) is BreaksError
    assert latest_checkpoint(directory).name == "update-0000000003"
    assert trainer.result.notes == ('not saved at its end: fit(..., resume="auto") continues from update 3',)
    resumed = go(directory, resume="auto", on_error="save")
    check_equal(whole_without_part(), resumed, reported=whole_without_part()[1].reported[:4] + resumed[1].reported)


def whole_without_part():
    SETTINGS.setdefault("plain", {})
    return whole("plain")


def test_without_it_an_error_of_the_users_own_saves_nothing(directory):
    trainer, _, error = go(directory, Cut("training_step", 10, breaks))
    assert type(error) is BreaksError
    reached = trainer.result.updates
    assert reached > 3 and trainer.result.notes == (
        'not saved at its end: fit(..., resume="auto") continues from update 3; '
        f'Trainer(on_error="save") would have saved update {reached}',
    )
    assert latest_checkpoint(directory).name == "update-0000000003"
    resumed = go(directory, resume="auto")
    check_equal(whole_without_part(), resumed, reported=whole_without_part()[1].reported[:4] + resumed[1].reported)


@pytest.mark.parametrize(
    ("place", "n", "kept"),
    [
        ("training_step", 1, None),  # nothing was trained
        ("training_step", 3, 1),
        ("after_update", 1, None),  # a step was made, and what follows it was not done
        ("on_update", 2, None),
        ("validation_step", 3, 3),
    ],
)
def test_an_error_before_anything_was_saved_says_what_would_have_been(place, n, kept, directory):
    trainer, _, error = go(directory / "a", Cut(place, n, breaks))
    assert type(error) is BreaksError
    would = f'; Trainer(on_error="save") would have saved update {kept}'
    assert trainer.result.notes == (NOTHING + (would if kept else ""),)
    go(directory / "b", Cut(place, n, breaks), on_error="save")
    saved = latest_checkpoint(directory / "b")
    assert (None if saved is None else int(saved.name[-10:])) == kept  # so it is


def test_it_needs_a_checkpoint_slot_and_a_known_value(directory):
    with pytest.raises(SettingError, match=r'(?s)on_error="save" without a checkpoint.*checkpoint=Checkpoint\('):
        go(None, on_error="save")
    with pytest.raises(SettingError, match=r"on_error='keep'"):
        go(directory, on_error="keep")


def until_saved(path):
    """Wait until a background save is complete."""
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.001)


def refuse(file):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("async_save", [True, False])
def test_a_save_that_fails_too_is_a_note_on_the_error_which_stays(async_save, directory, monkeypatch):
    fsync = os.fsync

    def breaks_with_a_full_disk():
        until_saved(directory / "update-0000000003")
        monkeypatch.setattr(os, "fsync", refuse)
        breaks()

    slot = Checkpoint(directory, async_save=async_save)
    trainer, _, error = go(
        directory, Cut("training_step", 10, breaks_with_a_full_disk), on_error="save", checkpoint=slot
    )
    monkeypatch.setattr(os, "fsync", fsync)
    assert type(error) is BreaksError and error.__cause__ is None
    *_, note = error.__notes__
    assert note.startswith("trainwright: the state at the end could not be saved") and "the disk is full" in note
    assert f"the newest complete checkpoint is {directory / 'update-0000000003'}" in note
    assert trainer.result.stopped == "BreaksError: in the user's code"
    lost = "the last save failed: the disk is full; the newest complete checkpoint is update-0000000003"
    assert trainer.result.notes == (lost, 'not saved at its end: fit(..., resume="auto") continues from update 3')


def test_a_part_that_cannot_be_saved_any_more_does_not_mask_the_error(directory):
    class Grown(Cuttable):
        def training_step(self, batch):
            step = super().training_step(batch)
            if self.progress.updates == 4:
                self.state["open"] = object()
                breaks()
            return step

        def after_update(self):
            if self.progress.updates == 4:
                self.state["open"] = object()

    _, _, error = go(directory, cls=Grown, on_error="save")
    assert type(error) is BreaksError and "the state at the end could not be saved" in error.__notes__[-1]
