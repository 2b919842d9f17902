"""A signal ends a run at an exact boundary, wherever it comes, and the resumed run is the one that never was ended."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from multiprocessing import get_context

import pytest
import torch
from cut import ENDING, USUAL, Cut, Other, check_ended, check_equal, go, send, send_while_waiting
from small import BATCHES, small

from trainwright import SWA, Checkpoint, Epochs, Plateau, Updates
from trainwright.core.errors import Stopped

AT = [
    ("training_step", 5),  # in the middle of a window
    ("training_step", 14),
    ("step", 1),
    ("step", 3),  # where a validation is due
    ("after_update", 2),
    ("on_update", 4),  # the last of the epoch
    ("on_update", 6),  # where a validation is due
    ("on_update", 8),  # the last of the run
    ("begin_epoch", 2),
    ("end_epoch", 1),
    ("end_epoch", 2),
    ("probe", 1),
    ("probe", 2),
    ("row", 1),  # the first fetch of an epoch, after a begin_epoch that has drawn
    ("row", 12),
    ("row", 21),
    ("validation_step", 3),
    ("validation_step", 7),  # the last validation of the run
    ("val row", 6),
    ("val row", 25),
    ("on_validate", 1),
    ("on_epoch", 1),
    ("on_save", 1),
]
"""Where a signal comes, and the how-many-th time that the training comes by there."""
EVERY = [(number, *at) for number in ENDING for at in (AT if number == signal.SIGTERM else AT[2::4])]


def at_once(directory):
    return Checkpoint(directory, best="val_loss", async_save=False)


OTHERS = {
    "at once": Other(average=None, early_stopping=None, schedule=Plateau("val_loss"), checkpoint=at_once),
    "swa": Other(average=SWA(Updates(2), Updates(1))),
    "generator": Other(kind="generator", ends=dict(epochs=None, max_updates=7)),
    "stream": Other(kind="iterable", accumulate=1, ends=dict(epochs=3, epoch_updates=3)),
    "epochs": Other(accumulate=1, ends=dict(validate=Epochs(1))),
}


# Every place.


@pytest.mark.sample(12)
@pytest.mark.parametrize(("number", "place", "n"), EVERY, ids=lambda one: getattr(one, "name", one))
def test_a_signal_at_any_place_ends_the_run_and_a_resume_makes_it_whole(number, place, n, directory):
    cut = Cut(place, n, send(number))
    ended = USUAL.ended_and_resumed(directory, cut)
    assert cut.left <= 0
    check_ended(ended, number)
    whole = USUAL.whole()[0].result
    if (place, n) == ("row", 1):
        assert ended[0].result.updates == 0 and "saved at update 0" not in str(ended[0].result.notes)
    elif ended[0].result.history != whole.history:
        (note,) = ended[0].result.notes
        assert note == f'saved at update {ended[0].result.updates}: fit(..., resume="auto") continues from there'


@pytest.mark.sample(8)
@pytest.mark.parametrize("which", OTHERS)
@pytest.mark.parametrize(("place", "n"), [("step", 3), ("row", 4), ("val row", 7), ("on_update", 7), ("end_epoch", 1)])
def test_a_signal_ends_runs_of_other_settings_as_exactly(which, place, n, directory):
    cut = Cut(place, n, send(signal.SIGTERM))
    check_ended(OTHERS[which].ended_and_resumed(directory, cut), signal.SIGTERM)


def test_signals_again_and_again_lose_nothing(directory):
    reported, resume = [], None
    for place, n in (("row", 4), ("row", 1), ("on_update", 3), ("val row", 6), ("val row", 6), ("training_step", 1)):
        _, seen, error = go(directory, Cut(place, n, send(signal.SIGTERM)), resume=resume)
        assert type(error) is Stopped
        reported, resume = reported + seen.reported, "auto"
    resumed = go(directory, resume="auto")
    check_equal(USUAL.whole(), resumed, reported=reported + resumed[1].reported)


@pytest.mark.parametrize("number", ENDING, ids=lambda one: one.name)
@pytest.mark.parametrize(
    ("which", "place", "n"), [("usual", "row", 9), ("usual", "val row", 7), ("generator", "row", 9)]
)
def test_a_signal_ends_a_wait_for_data_at_once(number, which, place, n, directory):
    began = time.monotonic()
    cut = Cut(place, n, send_while_waiting(number))
    check_ended(OTHERS.get(which, USUAL).ended_and_resumed(directory, cut), number)
    assert time.monotonic() - began < 40  # the data would have come after 60 s


def test_a_signal_in_a_save_waits_for_it(directory, monkeypatch):
    fsync, calls = os.fsync, []

    def signalled(file):
        fsync(file)
        calls.append(file)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    other = OTHERS["at once"]
    other.whole()
    monkeypatch.setattr(os, "fsync", signalled)
    check_ended(other.ended_and_resumed(directory, Cut()), signal.SIGTERM)
    assert len(calls) > 4


@pytest.mark.parametrize("number", ENDING, ids=lambda one: one.name)
def test_a_signal_after_the_last_update_keeps_all_and_ends_all_the_same(number, directory):
    cut = Cut("row", 41, send(number))  # in the pass that the averaged statistics need at the end
    ended = OTHERS["swa"].ended_and_resumed(directory, cut)
    check_ended(ended, number)


def test_without_a_checkpoint_slot_the_update_is_finished(directory):
    for number in ENDING:
        trainer, seen, error = go(None, Cut("training_step", 5, send(number)))
        check_ended((trainer, seen, error), number)
        assert trainer.result.updates == trainer.state["steps"] // 2 == 3
        assert trainer.result.notes == ()


# Handlers.


def handlers():
    return [signal.getsignal(number) for number in (*ENDING, signal.SIGCHLD)]


@pytest.mark.parametrize("ends", ["whole", "signal", "error", "second"])
def test_handlers_are_those_from_before_whichever_way_it_ends(ends, directory):
    before = handlers()
    inside = []

    def interrupt():
        inside.extend(handlers())
        if ends == "error":
            raise ZeroDivisionError
        if ends != "whole":
            os.kill(os.getpid(), signal.SIGINT)
        if ends == "second":
            time.sleep(0.15)
            os.kill(os.getpid(), signal.SIGINT)

    _, _, error = go(directory, Cut("training_step", 5, interrupt))
    assert type(error) is {"whole": type(None), "error": ZeroDivisionError}.get(ends, KeyboardInterrupt)
    assert inside[:3] != before[:3]
    assert handlers() == before


@pytest.mark.parametrize("number", ENDING, ids=lambda one: one.name)
def test_a_handler_of_the_users_own_stays_and_is_called(number, directory):
    received = []
    before = signal.signal(number, lambda *_: received.append(number))
    try:
        _, _, error = go(directory, Cut("training_step", 5, send(number)))
        assert signal.getsignal(number).__name__ == "<lambda>"
    finally:
        signal.signal(number, before)
    assert error is None and received == [number]


@pytest.mark.parametrize("number", ENDING, ids=lambda one: one.name)
def test_an_ignored_signal_stays_ignored(number, directory):
    before = signal.signal(number, signal.SIG_IGN)
    try:
        _, _, error = go(directory, Cut("row", 5, send(number)))
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)
    assert error is None


def test_a_fit_in_another_thread_installs_nothing_and_works(directory):
    before, found, ended = handlers(), [], []
    cut = Cut("training_step", 5, lambda: found.extend(handlers()))
    thread = threading.Thread(target=lambda: ended.append(go(directory, cut)))
    thread.start()
    thread.join()
    check_equal(USUAL.whole(), ended[0], reported=ended[0][1].reported)
    assert found == before


def nap():
    time.sleep(60)


def test_processes_that_were_forked_inside_a_run_die_of_signals_as_usual(directory):
    gc.collect()  # loaders of other tests, whose dead workers torch would report at any child's death
    codes = []

    def fork():
        with get_context("fork").Pool(1) as pool:
            pool.apply_async(nap)
            time.sleep(0.05)
        for number in (signal.SIGTERM, signal.SIGUSR1):
            child = get_context("fork").Process(target=nap)
            child.start()
            time.sleep(0.05)
            os.kill(child.pid, number)
            child.join(5)
            codes.append(child.exitcode)

    began = time.monotonic()
    _, _, error = go(directory, Cut("training_step", 5, fork))
    assert error is None
    assert codes == [-signal.SIGTERM, -signal.SIGUSR1]
    assert time.monotonic() - began < 40  # the children sleep for 60 s


def test_a_run_inside_a_hook_of_another_leaves_the_outer_ones_signals(directory):
    inner = []

    def train_another():
        state = torch.get_rng_state()
        other = small()
        os.kill(os.getpid(), signal.SIGTERM)
        inner.append(other.fit(BATCHES, epochs=3).stopped)
        torch.set_rng_state(state)

    check_ended(USUAL.ended_and_resumed(directory, Cut("after_update", 2, train_another)), signal.SIGTERM)
    assert inner == ["epochs=3 reached"]
