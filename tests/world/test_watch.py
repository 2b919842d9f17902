"""What becomes of a run whose processes fail, are killed, stopped or stuck: it ends, and says which one it was."""

from __future__ import annotations

import os
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import pytest

from trainwright.core.errors import DistributedError
from trainwright.distributed import launcher as launching
from trainwright.distributed import peer_watch
from trainwright.distributed.launcher import launch
from trainwright.distributed.world import Group
from world import programs
from world.pool import Pool
from world.programs_run import free_port

SECONDS = 120
PROMPT = 50
"""Seconds that a loaded machine has; who waits for a time-out of the group takes 60 and more."""


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run `main(*args)` of the programs in forked processes; return what each said when it ended, and how long it took.

    The launcher's own error, with the first line of it, comes last.
    """

    monkeypatch.setattr(peer_watch, "GRACE", 1.0)
    monkeypatch.setattr(launching, "GRACE", 3.5)

    def run(*args: Any, store_by_rank_0: bool = False, in_group: bool = False, **settings: float):
        port = free_port()

        def main() -> None:
            rank = os.environ["RANK"]
            (tmp_path / f"pid{rank}").write_text(str(os.getpid()))
            if store_by_rank_0:
                os.environ.update(TORCHELASTIC_USE_AGENT_STORE="False", MASTER_PORT=str(port))
            told = peer_watch.last_words
            assert told is not None
            peer_watch.last_words = lambda text: (tmp_path / rank).write_text(f"last words: {text}") and told(text)
            try:
                (programs.in_group if in_group else programs.main)(*args, **settings)
            except BaseException:
                (tmp_path / rank).write_text(traceback.format_exc())
                raise

        begin = time.monotonic()
        with pytest.raises(DistributedError) as raised:
            launch(main, processes=2, timeout=SECONDS)
        said = {r: (tmp_path / str(r)).read_text() if (tmp_path / str(r)).exists() else "" for r in range(2)}
        for rank in range(2):
            with pytest.raises(ProcessLookupError):
                os.kill(int((tmp_path / f"pid{rank}").read_text()), 0)
        return said, str(raised.value), time.monotonic() - begin

    return run


def test_an_error_of_one_process_ends_all_and_the_others_name_it(ended) -> None:
    said, error, seconds = ended("fail")
    assert "in fail\n" in said[1] and "DistributedError" not in said[1]
    assert "rank 1 has failed: ValueError: bad row 17\n" in said[0]
    assert "at update 3, programs.py:" in said[0]
    assert "Connection closed" not in said[0], "the error that only follows is not shown"
    assert error == "rank 1 of 2 has failed: ValueError: bad row 17"
    assert seconds < PROMPT


def test_a_killed_process_is_named_by_the_others(ended) -> None:
    said, error, seconds = ended("kill")
    assert "rank 1 does not answer, and its connections are closed\n" in said[0]
    assert "at update 3, programs.py:" in said[0]
    assert "a word from every process" not in said[0], "nobody has waited for the time-out"
    assert error == "rank 1 of 2 has failed: it was ended by SIGKILL (no memory?)"
    assert seconds < PROMPT


@pytest.mark.parametrize("in_group", [False, True], ids=["group of ours", "group with a long time-out of its own"])
@pytest.mark.parametrize("on", [0, 1], ids=["with the store", "without the store"])
def test_a_stopped_process_ends_the_run_after_the_time_out(ended, on: int, in_group: bool) -> None:
    said, error, seconds = ended("stop", on=on, timeout=1.5, store_by_rank_0=True, in_group=in_group)
    assert said[on] == ""
    assert f"rank {on} does not answer" in said[1 - on] and "at update 3, programs.py:" in said[1 - on]
    assert "a word from every process within 1.5 s" in said[1 - on]
    assert said[1 - on].startswith("last words") == in_group  # nothing wakes a wait in a group whose time-out is long
    assert f"rank {on} does not answer\n" in error
    assert seconds < PROMPT


def test_a_process_that_is_stuck_in_its_own_code_is_named_with_its_line(ended) -> None:
    said, error, seconds = ended("sleep", timeout=1.5)
    assert "rank 1 has not come to where rank 0 waits for it" in said[0]
    line = next(n for n, text in enumerate(Path(programs.__file__).read_text().splitlines(), 1) if "sleep(100)" in text)
    assert f"at update 3, programs.py:{line}" in said[0]
    assert "rank 1 has not come to where rank 0 waits for it" in error
    assert seconds < PROMPT


def watching() -> int:
    return sum(thread.name == "trainwright-watch" for thread in threading.enumerate())


def watched_well() -> list[str]:
    group = Group(timeout=60)
    said = []
    for run in range(3):
        with group.watched(lambda run=run: f"run {run}"):
            with group.watched(lambda: "inside"):
                assert watching() == 1
                group.wait()
            assert watching() == 1
            group.wait()
        assert watching() == 0
        said.append(f"{run} {group.blame(KeyError('x'))!r}")
    return said


def own_errors(kind: type[Exception]) -> str:
    group = Group(timeout=60)
    try:
        with group.watched(lambda: "here"):
            raise kind("the same on all")
    except Exception as error:
        return repr(error)


def test_what_goes_well_leaves_no_trace(ranks2: Pool) -> None:
    assert ranks2.run(watched_well) == [[f"{run} KeyError('x')" for run in range(3)]] * 2


def test_an_error_that_all_processes_raise_stays_what_it_is_on_each(ranks2: Pool) -> None:
    """User code that catches it goes on alike on all of them."""
    assert ranks2.run(own_errors, KeyError) == ["KeyError('the same on all')"] * 2
    assert ranks2.run(own_errors, RuntimeError) == ["RuntimeError('the same on all')"] * 2
    assert ranks2.run(watched_well)[0][0] == "0 KeyError('x')"
