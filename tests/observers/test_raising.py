"""An observer that raises hides no error of the run, and keeps no other observer from hearing of the end."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainwright import Checkpoint, Journal, Observer, Trainer
from trainwright.observers import read_journal


class Watches(Observer):
    """Notes what is reported to it; raises at one event."""

    def __init__(self, raises="", error=RuntimeError):
        self.raises, self.error, self.reported = raises, error, []

    def _at(self, event):
        self.reported.append(event)
        if event == self.raises:
            raise self.error(f"planted in {event}")

    def on_fit_start(self, plan):
        self._at("start")

    def on_update(self, update):
        self._at("update")

    def on_fit_end(self, result):
        self.stopped = result.stopped
        self._at("end")


class OnlyEnds(Observer):
    ended = 0

    def on_fit_end(self, result):
        self.ended += 1


class Fails(Trainer):
    def training_step(self, batch):
        raise ZeroDivisionError("the run's own")


def make(*observers, cls=Trainer, **settings):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return cls(model, optimizer, nn.MSELoss(), observers=observers, console=False, **settings)


DATA = [(torch.ones(2, 2), torch.ones(2, 1))] * 2


def test_one_that_raises_at_the_end_does_not_keep_others_from_it(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    bad, good, only = Watches("end"), Watches(), OnlyEnds()
    trainer = make(bad, good, only, journal)
    with pytest.raises(RuntimeError, match="planted in end"):
        trainer.fit(DATA, epochs=1)
    assert good.reported[-1] == "end" and only.ended == 1
    assert read_journal(tmp_path / "journal.jsonl")[-1]["event"] == "end"
    assert trainer.result.stopped == good.stopped == "epochs=1 reached"


def test_of_several_that_raise_at_the_end_the_first_is_raised_and_the_others_are_notes():
    first, second = Watches("end", KeyError), Watches("end", ValueError)
    with pytest.raises(KeyError) as caught:
        make(first, second).fit(DATA, epochs=1)
    (note,) = caught.value.__notes__
    assert note.startswith("trainwright: Watches.on_fit_end failed too: ValueError: planted in end (test_raising.py:")


@pytest.mark.parametrize("error", [RuntimeError, SystemExit, KeyboardInterrupt])
def test_one_that_raises_at_the_end_of_a_run_that_failed_is_a_note_on_its_error(error):
    bad, good = Watches("end", error), Watches()
    trainer = make(bad, good, cls=Fails)
    with pytest.raises(ZeroDivisionError, match="the run's own") as caught:
        trainer.fit(DATA, epochs=1)
    assert f"on_fit_end failed too: {error.__name__}: planted in end" in caught.value.__notes__[-1]
    assert caught.value.__context__ is None
    assert good.reported == ["start", "end"]
    assert trainer.result.stopped == good.stopped == "ZeroDivisionError: the run's own"


def test_one_that_raises_in_the_middle_ends_the_run_and_all_hear_of_it():
    bad, good = Watches("update"), Watches()
    trainer = make(bad, good)
    with pytest.raises(RuntimeError, match="planted in update"):
        trainer.fit(DATA, epochs=1)
    assert bad.reported == ["start", "update", "end"] and good.reported[-1] == "end"
    assert trainer.result.stopped == "RuntimeError: planted in update"


@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_that_raises_at_the_start_leaves_no_other_without_its_end(place, tmp_path):
    journal, only = Journal(tmp_path / "journal.jsonl"), OnlyEnds()
    others = [Watches(), Watches()]
    bad = Watches("start")
    observers = [*others[:place], bad, *others[place:], journal, only]
    trainer = make(*observers)
    weight = trainer.model.weight.detach().clone()
    with pytest.raises(RuntimeError, match="planted in start"):
        trainer.fit(DATA, epochs=1)
    assert [one.reported for one in others] == 2 * [["start", "end"]] and only.ended == 1
    assert bad.reported == ["start"]
    assert [record["event"] for record in read_journal(tmp_path / "journal.jsonl")] == ["start", "end"]
    assert others[0].stopped == "RuntimeError: planted in start"

    # Such a `fit` was refused: it has trained nothing, and the next is the first.
    assert trainer.result is None and torch.equal(trainer.model.weight, weight)
    bad.raises = ""
    result = trainer.fit(DATA, epochs=1)
    assert (result.updates, result.history[-1]["update"]) == (2, 2)


def test_several_that_raise_at_the_start_are_all_named():
    with pytest.raises(KeyError) as caught:
        make(Watches("start", KeyError), Watches("start", ValueError)).fit(DATA, epochs=1)
    assert "on_fit_start failed too: ValueError: planted in start" in caught.value.__notes__[0]


def test_the_end_of_a_run_that_an_observer_has_spoilt_is_saved(tmp_path):
    trainer = make(Watches("end"), checkpoint=Checkpoint(tmp_path))
    with pytest.raises(RuntimeError):
        trainer.fit(DATA, epochs=1)
    again = make(checkpoint=Checkpoint(tmp_path)).fit(DATA, epochs=1, resume="auto")
    assert again.history == trainer.result.history and again.updates == 2
