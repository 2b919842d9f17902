"""The thread of background saving: one job at a time, nothing lost, no reference left, Ctrl-C interrupts every wait."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import weakref

import pytest
import torch

from trainwright.checkpointing.tensorfile import Contents
from trainwright.checkpointing.writer import Writer


@pytest.fixture
def writer():
    made = Writer("test", async_save=True)
    yield made
    made.close(lambda: None)


class Gate:
    """A job that has begun when `begun` is set, and ends when `opened` is."""

    def __init__(self, result=None):
        self.begun, self.opened, self.result = threading.Event(), threading.Event(), result

    def __call__(self):
        self.begun.set()
        assert self.opened.wait(10)
        return self.result


def results(writer):
    return [done.error or done.result for done in writer.outcomes()]


def test_the_thread_begins_with_the_first_job_and_ends_with_the_last():
    before = set(threading.enumerate())  # of other tests too, whose threads may end meanwhile
    writer = Writer("test", async_save=True)
    assert set(threading.enumerate()) <= before
    writer.start(lambda: None)
    (thread,) = set(threading.enumerate()) - before
    assert thread.daemon and thread.name == "test"
    writer.close(lambda: None)
    thread.join(60)
    assert not thread.is_alive() and set(threading.enumerate()) <= before
    writer.close(lambda: None)


def test_a_system_exit_of_a_job_is_an_outcome(writer):
    writer.start(lambda: sys.exit(3))
    writer.wait()
    assert isinstance(results(writer)[0], SystemExit)


def test_a_reservation_waits_for_the_job_in_flight_and_has_no_outcome(writer):
    gate = Gate()
    writer.start(gate)
    assert gate.begun.wait(10)
    writer.reserve({"state": Contents({"x": torch.ones(1000)}, {})})
    assert writer.memory.size == 0
    gate.opened.set()
    writer.wait()
    assert writer.memory.size == 4000
    assert results(writer) == [None]


def test_an_error_of_a_reservation_is_an_outcome(writer, monkeypatch):
    monkeypatch.setattr(writer.memory, "reserve", lambda *_: 1 / 0)
    writer.reserve({})
    writer.wait()
    assert isinstance(results(writer)[0], ZeroDivisionError)


@pytest.mark.parametrize("fails", [False, True])
def test_no_reference_to_a_finished_job_is_left(writer, fails):
    class Job:
        def __call__(self):
            held = [self]
            if fails:
                try:
                    raise OSError(28, "full")
                except OSError as error:
                    raise RuntimeError(f"of {len(held)}") from error

    writer.start(job := Job())
    seen = weakref.ref(job)
    del job
    writer.wait()
    gc.collect()
    assert seen() is None
    (done,) = writer.outcomes()
    assert (done.error is not None) == fails
    if fails:
        assert done.error.__traceback__ is not None and isinstance(done.error.__cause__, OSError)


def test_a_job_in_the_training_thread_has_an_outcome_and_ctrl_c_propagates(writer):
    def interrupted(_):
        raise KeyboardInterrupt

    writer = Writer("test", async_save=False)
    writer.submit({}, lambda _: threading.get_ident())
    writer.submit({}, lambda _: 1 / 0)
    ident, error = results(writer)
    assert ident == threading.get_ident() and isinstance(error, ZeroDivisionError)
    with pytest.raises(KeyboardInterrupt):
        writer.submit({}, interrupted)
    assert results(writer) == []


@pytest.mark.parametrize("waits", ["wait", "start", "close"])
def test_ctrl_c_interrupts_every_wait_at_once_and_the_job_continues(waits):
    writer, gate, ended = Writer("test", async_save=True), Gate("whole"), threading.Event()
    writer.start(gate)
    assert gate.begun.wait(10)
    threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        {"wait": writer.wait, "start": lambda: writer.start(gate), "close": lambda: writer.close(ended.set)}[waits]()
    assert not ended.is_set()
    gate.opened.set()
    if waits != "close":
        writer.close(ended.set)
    assert ended.wait(10)
    assert results(writer) == ["whole"]


@pytest.mark.slow
def test_a_process_ends_though_a_job_hangs():
    code = """
import threading
from trainwright.checkpointing.writer import Writer
writer, begun = Writer("test", async_save=True), threading.Event()
writer.start(lambda: (begun.set(), threading.Event().wait()))
begun.wait()
"""
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=30).returncode == 0


def test_a_forked_child_does_not_wait_for_the_thread_of_its_parent():
    go_on = threading.Event()
    writer = Writer("test", async_save=True)
    writer.start(go_on.wait)
    child = os.fork()
    if not child:
        signal.alarm(20)
        writer.wait()
        writer.close(lambda: None)
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    go_on.set()
    writer.close(lambda: None)
