"""The save at the end must succeed: else `fit` raises, after the Result is set and the model left as promised."""

from __future__ import annotations

import os
import signal
import warnings

import pytest
import torch
from cut import BreaksError, Cut, breaks, go, send
from small import BATCHES, small

from trainwright import (
    Checkpoint,
    CheckpointError,
    EarlyStopping,
    Observer,
    Stopped,
    Trainer,
    Updates,
    latest_checkpoint,
)
from trainwright.fit import context


class Disk:
    """Refuses every fsync while it is full, and so every save."""

    def __init__(self, monkeypatch):
        self.full, fsync = False, os.fsync

        def refuse(file):
            if self.full:
                raise OSError(28, "No space left on device")
            fsync(file)

        monkeypatch.setattr(os, "fsync", refuse)

    def fill(self):
        self.full = True


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


class Ends(Observer):
    def __init__(self):
        self.results = []

    def on_fit_end(self, result):
        self.results.append(result)


def make(directory, cls=Trainer, **settings):
    saving = {name: settings.pop(name) for name in ("async_save", "every", "on_save_error") if name in settings}
    return small(cls, checkpoint=Checkpoint(directory, **saving), **settings)


def check_no_save_succeeds(async_save, every, tmp_path, disk):
    """A run of which no save succeeds raises, after its Result is set."""
    disk.fill()
    ends = Ends()
    trainer = make(tmp_path, async_save=async_save, every=every, observers=[ends])
    with pytest.raises(CheckpointError, match="there is no complete checkpoint of this run") as caught:
        trainer.fit(BATCHES, epochs=1)
    assert "the disk is full" in str(caught.value)
    result = trainer.result
    assert (result.stopped, result.updates, ends.results) == ("epochs=1 reached", 4, [result])
    assert "the last save failed: the disk is full; nothing is saved" in result.notes


@pytest.mark.parametrize("every", ["auto", Updates(100)], ids=str)
@pytest.mark.parametrize("async_save", [True, False])
def test_a_run_of_which_no_save_succeeded_raises(async_save, every, tmp_path, disk):
    check_no_save_succeeds(async_save, every, tmp_path, disk)


def test_the_law_sees_a_last_save_that_only_warns(tmp_path, disk, monkeypatch):
    monkeypatch.setattr(context, "_await_last_save", lambda _: None)
    with warnings.catch_warnings(), pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        warnings.simplefilter("ignore")
        check_no_save_succeeds(True, "auto", tmp_path, disk)


@pytest.mark.parametrize("async_save", [True, False])
def test_where_the_last_save_fails_the_error_names_the_newest_complete_checkpoint(async_save, tmp_path, disk):
    class Fills(Observer):
        def on_save(self, saved):
            if saved.update == 2:
                disk.fill()

    trainer = make(tmp_path, async_save=async_save, every=Updates(2), observers=[Fills()])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the save at update 4 or 6, if it is reported before the end
        with pytest.raises(CheckpointError) as caught:
            trainer.fit(BATCHES, epochs=2)
    newest = latest_checkpoint(tmp_path)
    assert newest.name != "update-0000000008"
    assert f"the newest complete checkpoint is {newest}" in str(caught.value)
    assert trainer.result.updates == 8

    disk.full = False
    resumed = make(tmp_path).fit(BATCHES, epochs=2, resume="auto")  # as a scheduler does that starts it again
    whole = make(tmp_path / "whole")
    assert resumed.history == whole.fit(BATCHES, epochs=2).history


def test_a_save_before_the_last_that_fails_is_a_warning(tmp_path, disk):
    class Empties(Observer):
        def on_update(self, update):
            disk.full = update.update < 4

    trainer = make(tmp_path, every=Updates(1), async_save=False, observers=[Empties()])
    with pytest.warns(UserWarning, match="training continues"):
        assert trainer.fit(BATCHES, epochs=1).stopped == "epochs=1 reached"
    assert latest_checkpoint(tmp_path).name == "update-0000000004"


def test_the_model_is_left_with_the_best_weights_before_the_error_is_raised(tmp_path, disk):
    class Rises(Trainer):
        def validation_step(self, batch):
            seen[self.progress.updates] = self.model.weight.detach().clone()
            return torch.tensor(float(self.progress.updates))  # the first is the best

        def end_epoch(self, metrics):
            if self.progress.epoch == 2:
                disk.fill()

    seen = {}
    trainer = make(tmp_path, Rises, early_stopping=EarlyStopping("val_loss"), async_save=False)
    with pytest.raises(CheckpointError):
        trainer.fit(BATCHES, BATCHES[:1], epochs=2)
    assert torch.equal(trainer.model.weight, seen[4]) and not torch.equal(trainer.model.weight, seen[8])
    assert trainer.result.weights == "best of epoch 1"


def test_a_fit_again_after_it_goes_on_as_the_same_stage(tmp_path, disk):
    trainer = make(tmp_path, async_save=False)
    disk.fill()
    with pytest.raises(CheckpointError):
        trainer.fit(BATCHES, epochs=1)
    disk.full = False
    result = trainer.fit(BATCHES, epochs=2, resume="auto")
    assert (result.updates, result.epochs) == (8, 2)
    assert latest_checkpoint(tmp_path).name == "update-0000000008"


@pytest.mark.parametrize("async_save", [True, False])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda one: one.name)
def test_where_a_signal_ends_the_run_the_failed_save_is_a_note_on_it(number, async_save, tmp_path, disk):
    def both():
        disk.fill()
        send(number)()

    slot = Checkpoint(tmp_path, async_save=async_save)
    trainer, _, error = go(None, Cut("training_step", 11, both), checkpoint=slot)
    assert type(error) is (Stopped if number == signal.SIGTERM else KeyboardInterrupt)
    (note,) = error.__notes__
    assert "the state at the end could not be saved" in note and "the disk is full" in note
    newest = latest_checkpoint(tmp_path)  # the save before may have been under way
    assert ("there is no complete checkpoint" if newest is None else str(newest)) in note
    assert trainer.result.stopped == ("SIGTERM" if number == signal.SIGTERM else "Ctrl-C")


def test_a_signal_that_comes_after_a_last_save_that_failed_has_it_as_a_note(tmp_path, disk):
    class Signals(Trainer):
        def end_epoch(self, metrics):
            disk.fill()
            send(signal.SIGTERM)()

    trainer = make(tmp_path, Signals, async_save=False)
    with pytest.raises(Stopped) as caught:
        trainer.fit(BATCHES, epochs=1)
    assert "there is no complete checkpoint of this run" in caught.value.__notes__[0]


def test_without_a_failed_save_an_error_has_no_note_of_one(tmp_path):
    _, _, error = go(None, Cut("after_update", 3, breaks), checkpoint=Checkpoint(tmp_path))
    assert type(error) is BreaksError and not hasattr(error, "__notes__")


@pytest.mark.parametrize("saves", [1, 2])
def test_a_state_that_cannot_be_stored_at_the_end_is_raised_after_all_is_left_right(saves, tmp_path):
    class Grown(Trainer):
        def end_epoch(self, metrics):
            if self.progress.epoch == saves:
                self.state["open"] = object()

    ends = Ends()
    trainer = make(tmp_path, Grown, early_stopping=EarlyStopping("val_loss"), observers=[ends])
    with pytest.raises(CheckpointError, match="open") as caught:
        trainer.fit(BATCHES, BATCHES[:1], epochs=saves)
    newest = latest_checkpoint(tmp_path)
    known = "there is no complete checkpoint of this run" if saves == 1 else f"the newest is {newest}"
    assert known in caught.value.__notes__[-1]
    assert trainer.result.stopped == f"epochs={saves} reached" and ends.results == [trainer.result]
    assert trainer.result.weights == f"best of epoch {saves}"
