"""What happens between two updates: ends, validations, stages, best weights, saving."""

from __future__ import annotations

import itertools
import os
import threading

import pytest
import torch
from torch import nn

from trainwright import (
    Checkpoint,
    CheckpointError,
    EarlyStopping,
    Epochs,
    MeanLoss,
    Observer,
    Seconds,
    SettingError,
    Trainer,
    TrainwrightError,
    Updates,
)


def pieces(number=6, rows=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(rows, 4, generator=generator), torch.randint(0, 3, (rows,), generator=generator))
        for _ in range(number)
    ]


class Reported(Observer):
    def __init__(self):
        self.events = []

    def on_validate(self, record):
        self.events.append(("validate", record.update))

    def on_epoch(self, record):
        self.events.append(("epoch", record.epoch))

    def on_save(self, saved):
        self.events.append(("save", saved.update))

    def of(self, kind):
        return [at for event, at in self.events if event == kind]


class Planned(Trainer):
    """Validates to planned numbers, by the updates applied so far; notes the weights at each validation."""

    planned = (5.0, 3.0, 4.0, 1.0, 2.0, 2.0, 2.0)

    def validation_step(self, batch):
        self.weights = {**getattr(self, "weights", {}), self.progress.updates: self.model.weight.detach().clone()}
        return MeanLoss(torch.tensor(self.planned[max(self.progress.updates // 6 - 1, 0)]), 1)


def make(cls=Trainer, **settings):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    return cls(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), console=False, **settings)


# Ends.


@pytest.mark.parametrize(("n", "epochs"), [(4, 0), (6, 1), (9, 1), (12, 2)])
def test_max_updates_end_a_run_exactly_also_inside_an_epoch(n, epochs):
    reported = Reported()
    result = make(observers=[reported]).fit(pieces(), pieces(1), max_updates=n)
    assert (result.updates, result.epochs, result.stopped) == (n, epochs, f"max_updates={n} reached")
    assert reported.of("validate") == sorted({*range(6, n + 1, 6), n})
    assert len(result.history) == len(reported.of("validate"))


def test_max_seconds_end_a_run_after_the_update_in_hand():
    result = make().fit(itertools.cycle(pieces()), max_seconds=0.05)
    assert result.stopped == "max_seconds=0.05 reached"
    assert result.updates > 0
    assert 0.05 <= result.seconds < 5


def test_stop_outside_a_run_is_an_error():
    with pytest.raises(TrainwrightError, match="while fit"):
        make().stop("now")


def test_an_endless_stream_is_cut_into_epochs():
    given = []

    def stream():
        for number, batch in enumerate(itertools.cycle(pieces())):
            given.append(number)
            yield batch

    reported = Reported()
    trainer = make(observers=[reported], accumulate=2)
    result = trainer.fit(stream(), pieces(1), epochs=3, epoch_updates=4)
    assert (result.updates, result.epochs) == (12, 3)
    assert reported.of("epoch") == [1, 2, 3]
    assert reported.of("validate") == [4, 8, 12]
    assert given == list(range(24))  # nothing is read ahead, and nothing is lost between epochs


# Validation.


@pytest.mark.parametrize(
    ("span", "at"),
    [
        (Updates(4), [4, 8, 12, 16, 18]),
        (Updates(6), [6, 12, 18]),
        (Updates(100), [18]),
        (Epochs(2), [12, 18]),
        (Epochs(1), [6, 12, 18]),
        (Seconds(1e-9), list(range(1, 19))),
        (Seconds(1000), [18]),
    ],
)
def test_validation_falls_due_by_its_span_and_at_the_end_never_twice(span, at):
    reported = Reported()
    result = make(observers=[reported]).fit(pieces(), pieces(1), epochs=3, validate=span)
    assert reported.of("validate") == at
    assert reported.of("epoch") == [1, 2, 3]
    updates = [row["update"] for row in result.history]
    assert updates == sorted({*at, 6, 12, 18})


@pytest.mark.parametrize("span", [Epochs(1.5), 3, "epoch"])
def test_a_span_that_validation_cannot_fall_on_is_refused(span):
    trainer = make()
    before = trainer.model.weight.clone()
    with pytest.raises(SettingError, match="validate="):
        trainer.fit(pieces(), pieces(1), epochs=1, validate=span)
    assert torch.equal(before, trainer.model.weight)


def test_a_row_inside_an_epoch_holds_the_epochs_numbers_so_far():
    rows = make().fit(pieces(), pieces(1), epochs=1, validate=Updates(3)).history
    torch.manual_seed(0)
    assert [row["update"] for row in rows] == [3, 6]
    assert [row["epoch"] for row in rows] == [0, 1]


# Early stopping and best weights.


@pytest.mark.parametrize("where", ["memory", "checkpoint", "other number"])
def test_the_best_weights_are_restored_from_memory_and_from_the_checkpoint(where, tmp_path):
    best = {"memory": None, "checkpoint": Checkpoint(tmp_path, best="val_loss", keep=1)}
    slot = best.get(where, Checkpoint(tmp_path, best="loss"))
    trainer = make(Planned, early_stopping=EarlyStopping("val_loss", patience=3), checkpoint=slot)
    result = trainer.fit(pieces(), pieces(1), epochs=20)
    assert result.epochs == 7
    assert result.stopped.startswith("val_loss did not improve on its best, 1 (epoch 4), for 3 validations")
    assert result.weights == "best of epoch 4" + (" by val_loss" if where == "other number" else "")
    assert torch.equal(trainer.model.weight, trainer.weights[24])
    assert not torch.equal(trainer.model.weight, trainer.weights[42])
    if where != "other number":
        assert (result.best.name, result.best.value, result.best.epoch, result.best.update) == ("val_loss", 1.0, 4, 24)
        assert (result.best.path is not None) == (where == "checkpoint")


def test_the_best_is_restored_also_where_the_run_was_not_stopped_early():
    trainer = make(Planned, early_stopping=EarlyStopping("val_loss", patience=5))
    result = trainer.fit(pieces(), pieces(1), epochs=3)
    assert (result.stopped, result.weights) == ("epochs=3 reached", "best of epoch 2")
    assert torch.equal(trainer.model.weight, trainer.weights[12])


def test_without_restore_best_the_last_weights_stay(tmp_path):
    early = EarlyStopping("val_loss", patience=1, restore_best=False)
    trainer = make(Planned, early_stopping=early, checkpoint=Checkpoint(tmp_path, best="val_loss"))
    result = trainer.fit(pieces(), pieces(1), epochs=9)
    assert (result.epochs, result.weights) == (3, "last")
    assert torch.equal(trainer.model.weight, trainer.weights[18])


def test_patience_counts_validations_inside_an_epoch_too():
    class Worse(Planned):
        planned = (1.0,) * 7

    result = make(Worse, early_stopping=EarlyStopping("val_loss", patience=2)).fit(
        pieces(), pieces(1), epochs=7, validate=Updates(2)
    )
    assert (result.updates, result.epochs) == (6, 1)


# Saving.


@pytest.mark.parametrize(
    ("every", "val", "at"),
    [
        ("auto", True, [6, 12, 18]),
        ("auto", False, [6, 12, 18]),
        (Updates(5), True, [5, 10, 15, 18]),
        (Epochs(2), True, [12, 18]),
        (Seconds(1e-9), False, list(range(1, 19))),
        (Seconds(1000), False, [18]),
    ],
)
def test_a_checkpoint_is_written_at_every_span_and_at_the_end(every, val, at, tmp_path):
    reported = Reported()
    trainer = make(checkpoint=Checkpoint(tmp_path, every=every, keep=30), observers=[reported])
    trainer.fit(pieces(), pieces(1) if val else None, epochs=3)
    assert reported.of("save") == at
    assert sorted(path.name for path in tmp_path.glob("update-*")) == [f"update-{n:010d}" for n in at]


def test_save_from_a_hook_is_written_when_the_update_is_whole(tmp_path):
    class Saves(Trainer):
        def training_step(self, batch):
            if self.progress.updates == 2:
                self.save()
            return super().training_step(batch)

    reported = Reported()
    make(Saves, checkpoint=Checkpoint(tmp_path), observers=[reported], accumulate=2).fit(pieces(), epochs=2)
    assert reported.of("save") == [3, 6]  # asked for in update 3

    class Bare(Saves):
        pass

    with pytest.raises(SettingError, match="without a checkpoint slot"):
        make(Bare).fit(pieces(), epochs=1)


def test_save_from_begin_epoch_is_written_after_the_first_update_of_that_epoch(tmp_path):
    class Saves(Trainer):
        def begin_epoch(self, epoch):
            self.save()

    reported = Reported()
    make(Saves, checkpoint=Checkpoint(tmp_path, every=Updates(100)), observers=[reported]).fit(pieces(), epochs=2)
    assert reported.of("save") == [1, 7, 12]


def test_a_save_that_fails_during_a_validation_is_reported_at_the_next_update(tmp_path, monkeypatch):
    validates = threading.Event()

    def refuse(file):
        validates.wait()
        raise OSError(28, "No space left on device")

    class Fails(Trainer):
        def training_step(self, batch):
            if self.progress.updates == 1:
                monkeypatch.setattr(os, "fsync", refuse)
                self.save()
            return super().training_step(batch)

        def validation_step(self, batch):
            if self.progress.updates == 3:
                validates.set()
                self._boundary.manager._writer.wait()
            return super().validation_step(batch)

    trainer = make(Fails, checkpoint=Checkpoint(tmp_path, every=Updates(100), on_save_error="raise"))
    with pytest.raises(CheckpointError, match="update-0000000002 could not be written"):
        trainer.fit(pieces(), pieces(1), epochs=2, validate=Updates(3))
    assert trainer.progress.updates == 4


# Stages.


def test_a_second_fit_is_a_new_stage():
    reported = Reported()
    trainer = make(
        Planned, observers=[reported], early_stopping=EarlyStopping("val_loss", patience=3, restore_best=False)
    )
    first = trainer.fit(pieces(), pieces(1), epochs=2)
    second = trainer.fit(pieces(), pieces(1), epochs=2)
    assert (first.updates, second.updates, second.epochs) == (12, 12, 2)
    assert trainer.progress.updates == 12
    assert [row["update"] for row in second.history] == [6, 12, 18, 24]
    assert [row["epoch"] for row in second.history] == [1, 2, 3, 4]
    assert (first.best.epoch, second.best.epoch) == (2, 4)
    assert second.best.update == 24


def test_patience_starts_anew_in_a_next_stage():
    class Worse(Planned):
        planned = (1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0)

    trainer = make(Worse, early_stopping=EarlyStopping("val_loss", patience=2))
    assert trainer.fit(pieces(), pieces(1), epochs=2).stopped == "epochs=2 reached"
    second = trainer.fit(pieces(), pieces(1), epochs=7)
    assert second.epochs == 3


def test_the_numbers_of_a_stage_that_ended_inside_an_epoch_do_not_enter_the_next():
    trainer = make()
    for group in trainer.optimizer.param_groups:
        group["lr"] = 0.0
    trainer.fit(pieces(), max_updates=2)
    row = trainer.fit(pieces(), epochs=1).history[-1]
    fresh = make()
    fresh.optimizer.param_groups[0]["lr"] = 0.0
    assert row["loss"] == fresh.fit(pieces(), epochs=1).history[0]["loss"]


def test_weights_and_optimizer_state_go_on_in_a_next_stage():
    two = make()
    two.fit(pieces(), epochs=1)
    two.fit(pieces(), epochs=1)
    one = make()
    one.fit(pieces(), epochs=2)
    assert torch.equal(one.model.weight, two.model.weight)


# Ends in an error.
