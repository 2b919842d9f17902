"""A run ends when one of its ranks fails, is killed, stopped or stuck, and names that rank."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import pytest

from distributed.launched import programs
from distributed.launched.programs_run import free_port
from distributed.pool import Pool
from trainwright.core.errors import DistributedError
from trainwright.distributed import launch as launching
from trainwright.distributed import peer_watch
from trainwright.distributed.launch import launch
from trainwright.distributed.world import ProcessGroupWorld

SECONDS = 120
PROMPT = 50
"""Seconds that a loaded machine has; who waits for a time-out of the group takes 60 and more."""


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run `main(*args)` of the programs in forked processes; return the error of each, and the seconds that it took.

    The launcher's own error, with the first line of it, comes last.
    """

    monkeypatch.setattr(peer_watch, "GUARD_GRACE", 1.0)
    monkeypatch.setattr(launching, "FAILURE_GRACE", 3.5)

    def run(*args: Any, store_by_rank_0: bool = False, in_group: bool = False, **settings: float):
        port = free_port()

        def main() -> None:
            rank = os.environ["RANK"]
            (tmp_path / f"pid{rank}").write_text(str(os.getpid()))
            if store_by_rank_0:
                os.environ.update(TORCHELASTIC_USE_AGENT_STORE="False", MASTER_PORT=str(port))
            report = peer_watch.report_exit
            assert report is not None
            peer_watch.report_exit = lambda text: (tmp_path / rank).write_text(f"last words: {text}") and report(text)
            try:
                (programs.in_group if in_group else programs.main)(*args, **settings)
            except BaseException:
                (tmp_path / rank).write_text(traceback.format_exc())
                raise

        begin = time.monotonic()
        with pytest.raises(DistributedError) as raised:
            launch(main, processes=2, timeout=SECONDS)
        texts = {r: (tmp_path / str(r)).read_text() if (tmp_path / str(r)).exists() else "" for r in range(2)}
        for rank in range(2):
            with pytest.raises(ProcessLookupError):
                os.kill(int((tmp_path / f"pid{rank}").read_text()), 0)
        return texts, str(raised.value), time.monotonic() - begin

    return run


def test_an_error_on_one_rank_ends_all_and_the_others_name_it(ended) -> None:
    texts, error, seconds = ended("fail")
    assert "in fail\n" in texts[1] and "DistributedError" not in texts[1]
    assert "rank 1 has failed: ValueError: bad row 17\n" in texts[0]
    assert "at update 3, programs.py:" in texts[0]
    assert "Connection closed" not in texts[0], "the error that only follows is not shown"
    assert error == "rank 1 of 2 has failed: ValueError: bad row 17"
    assert seconds < PROMPT


def test_a_killed_rank_is_named_by_the_others(ended) -> None:
    texts, error, seconds = ended("kill")
    assert "rank 1 does not answer, and its connections are closed\n" in texts[0]
    assert "at update 3, programs.py:" in texts[0]
    assert "a heartbeat of every process" not in texts[0], "nobody has waited for the time-out"
    assert error == "rank 1 of 2 has failed: it was ended by SIGKILL (no memory?)"
    assert seconds < PROMPT


@pytest.mark.parametrize("in_group", [False, True], ids=["group of ours", "group with a long time-out of its own"])
@pytest.mark.parametrize("on", [0, 1], ids=["with the store", "without the store"])
def test_a_stopped_rank_ends_the_run_after_the_timeout(ended, on: int, in_group: bool) -> None:
    texts, error, seconds = ended("stop", on=on, timeout=3, store_by_rank_0=True, in_group=in_group)
    assert texts[on] == ""
    assert f"rank {on} does not answer" in texts[1 - on] and "at update 3, programs.py:" in texts[1 - on]
    assert "a heartbeat of every process within 3 s" in texts[1 - on]
    assert texts[1 - on].startswith("last words") == in_group  # nothing wakes a wait in a group whose time-out is long
    assert f"rank {on} does not answer\n" in error
    assert seconds < PROMPT


def test_a_rank_that_is_stuck_in_its_own_code_is_named_with_its_line(ended) -> None:
    texts, error, seconds = ended("sleep", timeout=8)
    assert "rank 1 has not reached the call in which rank 0 waits" in texts[0]
    line = next(n for n, text in enumerate(Path(programs.__file__).read_text().splitlines(), 1) if "sleep(100)" in text)
    assert f"at update 3, programs.py:{line}" in texts[0]
    assert "rank 1 has not reached the call in which rank 0 waits" in error
    assert seconds < PROMPT


def test_a_frame_is_read_without_a_garbage_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Python 3.11.7 a collection inside `sys._current_frames` may block every start of a thread."""
    frames, during = sys._current_frames, []
    monkeypatch.setattr(sys, "_current_frames", lambda: during.append(gc.isenabled()) or frames())
    frame = peer_watch.frame_of(threading.get_ident())
    assert frame is not None and during == [False] and gc.isenabled()
    gc.disable()
    try:
        peer_watch.frame_of(threading.get_ident())
        assert during == [False, False] and not gc.isenabled()
    finally:
        gc.enable()


def watching() -> int:
    return sum(thread.name == "trainwright-watch" for thread in threading.enumerate())


def watched_well() -> list[str]:
    group = ProcessGroupWorld(timeout=60)
    texts = []
    for run in range(3):
        with group.watch(lambda run=run: f"run {run}"):
            with group.watch(lambda: "inside"):
                assert watching() == 1
                group.sum_numbers(0)
            assert watching() == 1
            group.sum_numbers(0)
        assert watching() == 0
        texts.append(f"{run} {group.cause_of(KeyError('x'))!r}")
    return texts


def own_errors(kind: type[Exception]) -> str:
    group = ProcessGroupWorld(timeout=60)
    try:
        with group.watch(lambda: "here"):
            raise kind("the same on all")
    except Exception as error:
        return repr(error)


def test_a_watched_run_without_errors_leaves_no_threads(ranks2: Pool) -> None:
    assert ranks2.run(watched_well) == [[f"{run} KeyError('x')" for run in range(3)]] * 2


def test_an_error_on_all_ranks_is_raised_unchanged_on_each(ranks2: Pool) -> None:
    """User code that catches it continues alike on all of them."""
    assert ranks2.run(own_errors, KeyError) == ["KeyError('the same on all')"] * 2
    assert ranks2.run(own_errors, RuntimeError) == ["RuntimeError('the same on all')"] * 2
    assert ranks2.run(watched_well)[0][0] == "0 KeyError('x')"
