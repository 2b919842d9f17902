"""Signals are handled from the call of `fit` to its return; interrupts raised in user code are saved where asked."""

from __future__ import annotations

import os
import signal
import sys

import pytest
from cut import ENDING, USUAL, Cut, Cuttable, check_ended, check_equal, go, send
from small import BATCHES, small

from trainwright import Observer, Stopped, Trainer, latest_checkpoint
from trainwright.fit import context


class Reported(Observer):
    """Sends a signal when something is reported to it."""

    def __init__(self, event, number):
        self.event, self.number, self.ends = event, number, []

    def _at(self, event):
        if event == self.event:
            send(self.number)()

    def on_fit_start(self, plan):
        self._at("on_fit_start")

    def on_fit_end(self, result):
        self.ends.append(result.stopped)
        self._at("on_fit_end")


def handlers():
    return [signal.getsignal(number) for number in ENDING]


# While the run is made ready.


@pytest.mark.parametrize("number", ENDING, ids=lambda one: one.name)
@pytest.mark.parametrize("place", ["begin_epoch", "validation_step", "val row", "on_fit_start", "data"])
def test_a_signal_before_the_first_window_ends_the_run_with_a_result(place, number, directory):
    before = handlers()
    reported = Reported(place, number)
    trainer, seen, error = go(directory, Cut(place, 1, send(number)), observers=[reported], kind=place)
    check_ended((trainer, seen, error), number)
    assert (trainer.result.updates, reported.ends) == (0, [trainer.result.stopped])
    assert trainer.result.notes == ('nothing is saved: fit(..., resume="auto") starts at the beginning',)
    assert not list(directory.glob("update-*")) and handlers() == before
    check_equal(USUAL.whole(), go(directory), reported=USUAL.whole()[1].reported)


@pytest.mark.parametrize("place", ["loading", "begin_epoch", "on_fit_start"])
def test_a_signal_while_a_run_is_resumed_loses_nothing(place, directory, monkeypatch):
    ended = go(directory, Cut("after_update", 5, send(signal.SIGTERM)))
    load = context.load_checkpoint

    def loading(*given, **named):
        if place == "loading":
            send(signal.SIGTERM)()
        return load(*given, **named)

    monkeypatch.setattr(context, "load_checkpoint", loading)
    reported = Reported(place, signal.SIGTERM)
    again = go(directory, Cut(place, 1, send(signal.SIGTERM)), resume="auto", observers=[reported])
    check_ended(again, signal.SIGTERM)
    assert again[0].result.updates == 5 and reported.ends == ["SIGTERM"]
    monkeypatch.undo()
    resumed = go(directory, resume="auto")
    check_equal(USUAL.whole(), resumed, reported=ended[1].reported + again[1].reported + resumed[1].reported)


def test_a_signal_while_a_finished_run_is_loaded_ends_it_too(directory, monkeypatch):
    assert go(directory)[2] is None
    load = context.load_checkpoint
    monkeypatch.setattr(context, "load_checkpoint", lambda *a, **k: (send(signal.SIGTERM)(), load(*a, **k))[1])
    again = go(directory, resume="auto")
    check_ended(again, signal.SIGTERM)
    assert again[0].result.updates == 8


def test_what_takes_longer_than_the_grace_to_make_ready_is_cut_off(directory):
    class Slow(Cuttable):
        def begin_epoch(self, epoch):
            send(signal.SIGTERM)()
            while True:
                signal.pause()  # until the timer of the grace has the handler called once more

    before = handlers()
    trainer, _, error = go(directory, cls=Slow, grace=0.05)
    assert type(error) is Stopped and error.code == 143
    assert trainer.result is None and handlers() == before
    assert go(directory)[2] is None  # it is not locked, and holds nothing


# After the last window.


@pytest.mark.parametrize("number", ENDING, ids=lambda one: one.name)
def test_a_signal_in_on_fit_end_lets_all_observers_end_and_ends_the_process(number, directory):
    before = handlers()
    first, second = Reported("on_fit_end", number), Reported("", number)
    ended = go(directory, observers=[first, second])
    check_ended(ended, number)
    assert first.ends == second.ends == ["epochs=2 reached"] and handlers() == before
    assert ended[0].result.history == USUAL.whole()[0].result.history
    assert latest_checkpoint(directory).name == "update-0000000008"


# Interrupts of the user's own.


def leaves(kind):
    def leave():
        raise kind(3)

    return leave


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize(("place", "n"), [("training_step", 6), ("backward", 5), ("validation_step", 3), ("row", 10)])
def test_an_interrupt_raised_in_user_code_is_saved_with_on_error(kind, place, n, directory):
    def run(directory, cut=None, **more):
        return go(directory, cut, on_error="save", **more)

    whole = run(directory / "whole")
    broken = run(directory / "cut", Cut(place, n, leaves(kind)))
    assert type(broken[2]) is kind and broken[2].args == (3,)
    note = f'saved at update {broken[0].result.updates}: fit(..., resume="auto") continues from there'
    assert note in broken[0].result.notes
    resumed = run(directory / "cut", resume="auto")
    check_equal(whole, resumed, reported=broken[1].reported + resumed[1].reported)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("place", ["training_step", "row"])
def test_without_it_nothing_is_saved_and_a_note_says_what_would_have_been(kind, place, directory):
    trainer, _, error = go(directory, Cut(place, 10, leaves(kind)))
    assert type(error) is kind
    (note,) = trainer.result.notes
    assert 'Trainer(on_error="save") would have saved update' in note
    assert f"update-{trainer.result.updates:010d}" not in [path.name for path in directory.glob("update-*")]


@pytest.mark.parametrize(("place", "n"), [("training_step", 6), ("row", 10), ("val row", 9)])
def test_a_handler_of_the_users_own_that_exits_is_saved_with_on_error(place, n, directory):
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(7))
    try:
        whole = go(directory / "whole", on_error="save")
        broken = go(directory / "cut", Cut(place, n, send(signal.SIGTERM)), on_error="save")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert type(broken[2]) is SystemExit and broken[2].code == 7
    assert any("continues from there" in note for note in broken[0].result.notes)
    resumed = go(directory / "cut", on_error="save", resume="auto")
    check_equal(whole, resumed, reported=broken[1].reported + resumed[1].reported)


@pytest.mark.parametrize("place", ["step", "after_update", "end_epoch"])
def test_where_a_step_has_begun_an_interrupt_saves_nothing(place, directory):
    trainer, _, error = go(directory, Cut(place, 1, leaves(SystemExit)), on_error="save")
    assert type(error) is SystemExit
    assert not any("continues from there" in note for note in trainer.result.notes)


def test_a_second_ctrl_c_saves_nothing_with_on_error_too(directory):
    class Twice(Cuttable):
        def training_step(self, batch):
            if self.progress.updates == 2:
                os.kill(os.getpid(), signal.SIGINT)
                raise KeyboardInterrupt
            return super().training_step(batch)

    _, _, error = go(directory, cls=Twice, on_error="save")
    assert type(error) is KeyboardInterrupt
    assert not list(directory.glob("update-*"))


def test_a_run_without_a_slot_is_ended_while_it_is_made_ready_too():
    class Signals(Trainer):
        def begin_epoch(self, epoch):
            send(signal.SIGTERM)()

    trainer = small(Signals)
    with pytest.raises(Stopped):
        trainer.fit(BATCHES, epochs=2)
    assert (trainer.result.stopped, trainer.result.updates) == ("SIGTERM", 0)
