"""A run ended early by `stop()` or `max_seconds` and resumed is, bit for bit, the run that never ended."""

from __future__ import annotations

import signal
from types import SimpleNamespace

import pytest
import torch
from cut import Cut, Cuttable, check_equal, go, send
from small import BATCHES, small

from trainwright import (
    Checkpoint,
    EarlyStopping,
    Epochs,
    Journal,
    Plateau,
    Stopped,
    Trainer,
    Updates,
    latest_checkpoint,
    load_weights,
)
from trainwright.checkpointing.format import load_tree
from trainwright.fit import boundary
from trainwright.fit import boundary as clock_of_fit
from trainwright.observers import read_journal

BY_VALIDATION = {"early_stopping": EarlyStopping("val_loss", patience=3), "schedule": Plateau("val_loss", patience=0)}
BY_TRAINING = {"early_stopping": EarlyStopping("loss", patience=3), "schedule": Plateau("loss", patience=0)}
SETTINGS = {
    "validated inside the epoch": dict(ends=dict(epochs=2, validate=Updates(3))),
    "validated by epochs": dict(ends=dict(epochs=3, validate=Epochs(1)), **BY_VALIDATION),
    "validated every other epoch": dict(ends=dict(epochs=4, validate=Epochs(2)), **BY_VALIDATION, average=None),
    "not validated": dict(ends=dict(epochs=3), **BY_TRAINING, validates=False, best="loss"),
    "generator": dict(kind="generator", ends=dict(epochs=None, max_updates=10, validate=Updates(4)), **BY_VALIDATION),
    "stream": dict(kind="iterable", accumulate=1, ends=dict(epochs=3, epoch_updates=3, validate=Updates(2))),
}
PLACES = [
    ("validated inside the epoch", "after_update", (1, 2, 3, 4, 5, 6, 7)),
    ("validated inside the epoch", "end_epoch", (1,)),
    ("validated inside the epoch", "begin_epoch", (2,)),
    ("validated by epochs", "after_update", (2, 4, 5, 7)),
    ("validated by epochs", "end_epoch", (1, 2)),
    ("validated every other epoch", "after_update", (1, 4, 6, 9, 12)),
    ("validated every other epoch", "end_epoch", (1, 3)),
    ("validated every other epoch", "begin_epoch", (2, 4)),
    ("not validated", "after_update", (1, 3, 4, 6)),
    ("not validated", "training_step", (5,)),
    ("generator", "after_update", (2, 7)),
    ("generator", "probe", (3,)),
    ("stream", "after_update", (1, 2, 5, 7)),
]
EVERY = [(which, place, n) for which, place, numbers in PLACES for n in numbers]


def run(directory, which, cut=None, *, resume=None, **more):
    """One session: the trainer, its observer, its error."""
    settings = SETTINGS[which] | more
    settings["ends"] = SETTINGS[which]["ends"] | more.get("ends", {})
    best = settings.pop("best", "val_loss")
    slots = {"observers": [Journal(directory / "journal.jsonl")], "checkpoint": Checkpoint(directory / "c", best=best)}
    return go(directory, cut, resume=resume, **slots, **settings)


def stopping(place, n):
    """A cut that stops the run."""
    cut = Cut(place, n)
    cut.what = lambda: cut.trainer.stop("enough")
    return cut


def lines(directory):
    """What a journal says of updates, validations and epochs, but for what a session measures of itself."""
    measured = ("seconds", "waiting", "rows")
    reported = [record for record in read_journal(directory / "journal.jsonl")]
    kept = [record for record in reported if record["event"] in ("update", "validate", "epoch")]
    return [{name: value for name, value in record.items() if name not in measured} for record in kept]


def flat(tree, where=""):
    """A tree of a checkpoint as plain pairs, but for seconds."""
    if isinstance(tree, dict):
        return [pair for name, value in tree.items() for pair in flat(value, f"{where}.{name}")]
    if isinstance(tree, list | tuple):
        return [pair for index, value in enumerate(tree) for pair in flat(value, f"{where}.{index}")]
    value = tree.tolist() if hasattr(tree, "tolist") else tree
    return [] if where.endswith("seconds") else [(where, repr(value))]


def check_same(whole, resumed, directories, *, reported):
    """Weights, optimizer, history, patience, Plateau, best, random states, journal and the last checkpoint."""
    check_equal(whole, resumed, reported=reported)
    assert whole[0].result.final_validation is resumed[0].result.final_validation is None
    assert lines(directories[0]) == lines(directories[1])
    last, other = (latest_checkpoint(directory / "c") for directory in directories)
    assert last.name == other.name
    first, second = (load_tree(path) for path in (last, other))
    for part in sorted(set(first) - {"data"}):  # the position in data that are at their end: the workers' memory of it
        assert flat(first[part]) == flat(second[part]), part


@pytest.fixture(scope="module")
def wholes(tmp_path_factory):
    """The runs that nobody ends, each made once."""
    made = {}

    def whole(which):
        if which not in made:
            directory = tmp_path_factory.mktemp("whole")
            made[which] = directory, run(directory, which)
            assert made[which][1][2] is None
        return made[which]

    return whole


def check_stopped(which, place, n, tmp_path, wholes):
    """Stop a run, resume it, and compare it with the run that nobody stopped."""
    directory, whole = wholes(which)
    cut = stopping(place, n)
    stopped = run(tmp_path, which, cut)
    assert cut.left <= 0 and stopped[2] is None and stopped[0].result.stopped == "enough"
    resumed = run(tmp_path, which, resume="auto")
    check_same(whole, resumed, (directory, tmp_path), reported=stopped[1].reported + resumed[1].reported)
    if stopped[1].final:
        ((_, update, metrics),) = stopped[1].final
        assert stopped[0].result.final_validation == metrics and metrics["update"] == update
        assert all(row["update"] < update or "val_loss" not in row for row in stopped[0].result.history)


@pytest.mark.sample(12)
@pytest.mark.parametrize(("which", "place", "n"), EVERY)
def test_a_run_that_was_stopped_and_is_resumed_is_the_run_that_never_stopped(which, place, n, tmp_path, wholes):
    check_stopped(which, place, n, tmp_path, wholes)


def test_the_law_sees_a_final_validation_that_counts(tmp_path, wholes, monkeypatch):
    measure = boundary.Boundary.validate_early_end

    def counts(self, *args, **settings):
        measure(self, *args, **settings)
        final = self.record.outcome.final_validation
        self.history.extend([] if final is None else [final])

    wholes("validated inside the epoch")  # made without the fault
    monkeypatch.setattr(boundary.Boundary, "validate_early_end", counts)
    with pytest.raises(AssertionError):
        check_stopped("validated inside the epoch", "after_update", 2, tmp_path, wholes)


def test_a_run_stopped_again_and_again_is_the_run_that_never_stopped(tmp_path, wholes):
    which = "validated by epochs"
    directory, whole = wholes(which)
    reported, resume = [], None
    for place, n in (("after_update", 1), ("after_update", 2), ("end_epoch", 1), ("begin_epoch", 2), ("row", 4)):
        stopped = run(tmp_path, which, stopping(place, n), resume=resume)
        assert stopped[0].result.stopped == "enough"
        reported, resume = reported + stopped[1].reported, "auto"
    resumed = run(tmp_path, which, resume="auto")
    check_same(whole, resumed, (directory, tmp_path), reported=reported + resumed[1].reported)


class Clock:
    """A clock that stands still until it is set."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


@pytest.mark.parametrize(("which", "n"), [("validated inside the epoch", 5), ("validated by epochs", 2)])
def test_a_run_whose_time_was_over_goes_on_with_more_time_as_if_it_never_ended(which, n, tmp_path, wholes, monkeypatch):
    directory, whole = wholes(which)
    clock = Clock()
    monkeypatch.setattr(clock_of_fit, "time", SimpleNamespace(perf_counter=clock.perf_counter))

    def pass_time():
        clock.now += 100

    ended = run(tmp_path, which, Cut("after_update", n, pass_time), ends=dict(max_seconds=100))
    assert ended[0].result.stopped == "max_seconds=100 reached" and ended[0].result.updates == n
    measured = ended[0].result.final_validation
    assert measured["update"] == n and "val_loss" in measured

    over = run(tmp_path, which, ends=dict(max_seconds=100), resume="auto")  # nothing goes on
    assert over[0].result.updates == n and over[0].result.final_validation == measured
    assert [line for line in lines(tmp_path) if line.get("final")] != []

    resumed = run(tmp_path, which, ends=dict(max_seconds=1000), resume="auto")
    check_same(whole, resumed, (directory, tmp_path), reported=ended[1].reported + resumed[1].reported)


@pytest.mark.parametrize("place", ["val row", "final"])
def test_a_signal_in_the_validation_of_an_early_end_has_it_done_by_the_resume(place, tmp_path, wholes):
    which = "validated by epochs"
    directory, whole = wholes(which)

    class Both(Cuttable):
        def after_update(self):
            super().after_update()
            if self.progress.updates == 2:
                self.stop("enough")

    cut = Cut(place, 6 if place == "val row" else 1, send(signal.SIGTERM))
    whole_stop = run(tmp_path / "whole", which, cls=Both)[0].result
    ended = run(tmp_path / "cut", which, cut, cls=Both)
    assert cut.left <= 0 and type(ended[2]) is Stopped
    resumed = run(tmp_path / "cut", which, cls=Both if place == "val row" else Cuttable, resume="auto")
    if place == "val row":
        again = resumed[0].result
        assert (again.updates, again.stopped) == (2, "enough") and again.history == whole_stop.history == []
        assert again.final_validation == whole_stop.final_validation
        resumed = run(tmp_path / "cut", which, resume="auto")
    check_same(whole, resumed, (directory, tmp_path / "cut"), reported=ended[1].reported + resumed[1].reported)


def test_a_later_stage_tells_the_early_end_of_the_one_it_passes(tmp_path):
    def script():
        class Stops(Trainer):
            ends = 2

            def after_update(self):
                if self.progress.updates == self.ends:
                    self.stop("enough")

        trainer = small(Stops, checkpoint=Checkpoint(tmp_path))
        first = trainer.fit(BATCHES, BATCHES[:1], epochs=1, resume="auto")
        trainer.ends = None
        second = trainer.fit(BATCHES, BATCHES[:1], epochs=1, resume="auto")
        return first, second

    (first, second), (passed, finished) = script(), script()
    assert first.final_validation["update"] == 2 and first.history == []
    assert passed.final_validation == first.final_validation
    assert second.final_validation is finished.final_validation is None
    assert [row["update"] for row in second.history] == [6]


def test_the_final_validation_is_no_candidate_for_the_best(tmp_path):
    class Stops(Trainer):
        def after_update(self):
            if self.progress.updates == 6:
                self.stop("enough")

    early = EarlyStopping("val_loss", restore_best=False)
    trainer = small(Stops, early_stopping=early, checkpoint=Checkpoint(tmp_path, best="val_loss"))
    result = trainer.fit(BATCHES, BATCHES[:1], epochs=3)
    assert result.final_validation["val_loss"] < result.history[-1]["val_loss"]
    assert result.best.update == 4 and [row["update"] for row in result.history] == [4]
    best = load_weights(tmp_path)
    assert not torch.equal(best["weight"], trainer.model.weight)


@pytest.mark.parametrize("ends", [dict(epochs=2), dict(max_updates=6), dict(epochs=5, max_updates=8)], ids=str)
def test_a_planned_end_has_a_row_of_the_history_and_no_final_validation(ends):
    result = small().fit(BATCHES, BATCHES[:1], validate=Epochs(3), **ends)
    assert result.final_validation is None
    assert result.history[-1]["update"] == result.updates and "val_loss" in result.history[-1]
