"""How long a signal waits for an update and a save, what a second Ctrl-C does, and how a process ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from cut import USUAL, Cut, Other, check_ended, check_equal, go, send

from trainwright import Checkpoint, EarlyStopping
from trainwright.core import signals
from trainwright.core.errors import Stopped


@pytest.fixture(autouse=True)
def threads_end_with_their_test(directory):
    """A save in flight would go on in the next test, and call its `os.fsync`; it ends before its directory does."""
    before = threading.enumerate()
    yield
    for thread in threading.enumerate():
        if thread not in before:
            thread.join(60)


def saved_in(directory):
    return sorted(path.name for path in directory.glob("update-*"))


def test_an_update_that_takes_longer_than_its_grace_is_cut_off_and_not_saved(directory):
    def hang():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    began = time.monotonic()
    trainer, _, error = go(directory, Cut("training_step", 8, hang), grace=0.2)
    assert time.monotonic() - began < 40
    assert type(error) is Stopped and error.code == 143
    assert trainer.result.stopped == "SIGTERM, and the update did not end within grace=0.2 seconds"
    assert saved_in(directory) == ["update-0000000003"]
    assert trainer.result.notes == ('not saved at its end: fit(..., resume="auto") continues from update 3',)
    resumed = go(directory, resume="auto")
    check_equal(USUAL.whole(), resumed, reported=USUAL.whole()[1].reported[:4] + resumed[1].reported)


def test_what_is_cut_off_in_the_midst_of_a_pause_is_not_saved(directory):
    def hang():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    trainer, _, _ = go(directory, Cut("on_validate", 2, hang), grace=0.2)
    assert "within grace=0.2 seconds" in trainer.result.stopped
    assert saved_in(directory) == ["update-0000000003"]
    assert go(directory, resume="auto")[0].result.history == USUAL.whole()[0].result.history


@pytest.mark.parametrize("async_save", [True, False])
@pytest.mark.parametrize("place", ["training_step", "fsync"])
def test_a_save_that_takes_longer_than_the_grace_is_not_cut_off(place, async_save, directory, monkeypatch):
    fsync, calls = os.fsync, []

    def slow(file):
        calls.append(file)
        if place == "fsync" and len(calls) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if len(calls) < 3:
            time.sleep(0.25)
        fsync(file)

    monkeypatch.setattr(os, "fsync", slow)
    slot = Checkpoint(directory, async_save=async_save, grace=0.2)
    cut = Cut() if place == "fsync" else Cut("training_step", 5, send(signal.SIGTERM))
    ended = go(directory, cut, checkpoint=slot, early_stopping=EarlyStopping("val_loss", patience=9))
    check_ended(ended, signal.SIGTERM)
    assert saved_in(directory)[-1] == f"update-{ended[0].result.updates:010d}"
    assert len(calls) >= 4


def twice(between):
    def interrupt():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(between)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60 if between > 0.1 else 0)

    return interrupt


def test_a_second_ctrl_c_ends_an_update_at_once(directory):
    began = time.monotonic()
    trainer, _, error = go(directory, Cut("training_step", 10, twice(0.15)))
    assert time.monotonic() - began < 40
    assert type(error) is KeyboardInterrupt
    assert trainer.result.stopped == "KeyboardInterrupt"
    assert trainer.result.updates == 5 and "update-0000000005" not in saved_in(directory)
    resumed = go(directory, resume="auto")
    assert resumed[0].result.history == USUAL.whole()[0].result.history


@pytest.mark.parametrize("async_save", [True, False])
def test_a_second_ctrl_c_ends_the_last_save_at_once(async_save, directory, monkeypatch):
    fsync, hung, ended = os.fsync, [], threading.Event()

    def slow(file):
        if not hung:
            hung.append(time.monotonic())
            threading.Timer(0.15, send(signal.SIGINT)).start()
            ended.wait(60)
        fsync(file)

    monkeypatch.setattr(os, "fsync", slow)
    slot = Checkpoint(directory, async_save=async_save)
    trainer, _, error = go(directory, Cut("training_step", 3, send(signal.SIGINT)), checkpoint=slot)
    took = time.monotonic() - hung[0]
    ended.set()
    assert took < 40
    assert type(error) is KeyboardInterrupt
    assert trainer.result.stopped == "KeyboardInterrupt"


def test_a_second_ctrl_c_in_an_update_does_not_wait_for_a_save_in_flight(directory, monkeypatch):
    fsync, ended = os.fsync, threading.Event()

    def slow(file):
        ended.wait(60)
        fsync(file)

    monkeypatch.setattr(os, "fsync", slow)
    began = time.monotonic()
    _, _, error = go(directory, Cut("training_step", 8, twice(0.15)))
    took = time.monotonic() - began
    ended.set()
    assert type(error) is KeyboardInterrupt and took < 40


def test_two_ctrl_c_at_the_same_time_are_one(directory, monkeypatch):
    monkeypatch.setattr(signals, "ONE_CTRL_C", 60.0)  # a busy machine may take long between the two
    check_ended(USUAL.ended_and_resumed(directory, Cut("training_step", 10, twice(0.03))), signal.SIGINT)


def test_a_second_signal_while_the_last_save_is_made_changes_nothing(directory, monkeypatch):
    fsync, calls = os.fsync, []

    def signalled(file):
        calls.append(file)
        os.kill(os.getpid(), signal.SIGTERM)
        fsync(file)

    USUAL.whole()
    monkeypatch.setattr(os, "fsync", signalled)
    slot = Other(checkpoint=lambda where: Checkpoint(where, best="val_loss", async_save=False))
    with monkeypatch.context() as aside:
        aside.setattr(os, "fsync", fsync)
        slot.whole()
    ended = go(directory, Cut("training_step", 3, send(signal.SIGTERM)), **slot.given(directory))
    check_ended(ended, signal.SIGTERM)
    assert calls
    monkeypatch.setattr(os, "fsync", fsync)
    resumed = go(directory, resume="auto", **slot.given(directory))
    check_equal(slot.whole(), resumed, reported=ended[1].reported + resumed[1].reported)


# A process of its own.

SCRIPT = """
import os, signal, sys
sys.path.insert(0, {folder!r})
import torch
from cut import Cut, data, make
torch.set_num_threads(1)
for number, place, n in {runs}:
    child = os.fork()
    if child:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    for name, stream in (("out", 1), ("err", 2)):
        os.dup2(os.open({directory!r} + f"/{{number}}.{{name}}", os.O_CREAT | os.O_WRONLY), stream)
    cut = Cut(place, n, lambda: os.kill(os.getpid(), number))
    trainer, _ = make({directory!r} + f"/{{number}}", cut, console=True)
    train, val = data(cut)
    print("fit", trainer.fit(train, val, epochs=2).stopped)
"""


@pytest.mark.slow
def test_a_process_ends_with_the_usual_code_and_a_clear_line(directory):
    runs = [(int(signal.SIGTERM), "row", 25), (int(signal.SIGUSR1), "training_step", 10)]
    runs += [(int(signal.SIGINT), "training_step", 10)]
    text = SCRIPT.format(folder=str(Path(__file__).parent), runs=runs, directory=str(directory))
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120, check=False)
    assert (done.stderr, done.stdout.split()) == ("", ["143", "138", "-2"])
    for number, name in ((signal.SIGTERM, "SIGTERM"), (signal.SIGUSR1, "SIGUSR1"), (signal.SIGINT, "Ctrl-C")):
        out, err = ((directory / f"{number:d}.{one}").read_text() for one in ("out", "err"))
        last = " ".join(out.split()).rpartition("  ")[2]
        assert name in last and "continues from there" in last, out
        assert "fit " not in out.replace("fit(", "")
        if number == signal.SIGINT:
            assert err.rstrip().endswith("KeyboardInterrupt") and "Interrupted:" not in err
        else:
            assert err == ""
