"""A signal to one process, or to all, ends all of them after the same update, saved; so does `stop()` on one."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.launched.resume_runs import Case, Watching, train
from distributed.launched.test_resume_ranks import differences
from distributed.pool import Pool
from trainwright import Updates

SECONDS = 300
CASE = Case(saves=Updates(99))
AT = 4
"""The update after which it comes. The processes hear of each other after the first, then about once a second, and at
most four times as many updates later as the time before."""
ENDS = {signal.SIGTERM: "Stopped(143)", signal.SIGUSR1: "Stopped(138)", signal.SIGINT: "KeyboardInterrupt()"}
NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGUSR1: "SIGUSR1", signal.SIGINT: "Ctrl-C"}


def given(number: int, ranks: list[int]) -> Any:
    """What sends a signal to these processes, to each from itself."""

    def act(trainer: Watching) -> None:
        if trainer.progress.updates == AT and trainer.world.rank in ranks:
            os.kill(os.getpid(), number)

    return act


def signalled(case: Case, root: Path, number: int, ranks: list[int]) -> dict[str, Any]:
    """A run that was never signalled, one that was, and what that one comes to when it is resumed."""
    whole = train(case, root / f"whole {number}")
    before = {one: signal.getsignal(one) for one in ENDS}
    ended = train(case, root / "cut", act=given(number, ranks))
    assert {one: signal.getsignal(one) for one in ENDS} == before, "handlers are put back"
    saved = sorted(path.name for path in (root / "cut").glob("update-*"))
    torch.distributed.barrier()
    again = train(case, root / "cut", resume="auto")
    return {"whole": whole, "ended": ended, "saved": saved, "again": again}


@pytest.mark.parametrize("ranks", [[0], [1], [0, 1]], ids=["to the first", "to the second", "to both"])
@pytest.mark.parametrize("number", ENDS, ids=NAMES.values())
def test_all_ranks_stop_after_the_same_update_and_resume(
    ranks2: Pool, tmp_path: Path, number: int, ranks: list[int]
) -> None:
    each = ranks2.run(signalled, CASE, tmp_path, number, ranks, seconds=SECONDS)
    updates = {ran["ended"]["updates"] for ran in each}
    assert len(updates) == 1 and AT <= updates.pop() < 14
    for ran in each:
        ended = ran["ended"]
        assert (ended["ended"], ended["stopped"]) == (ENDS[signal.Signals(number)], NAMES[signal.Signals(number)])
        assert ran["saved"][-1] == f"update-{ended['updates']:010}"
        assert not differences(ran["whole"], ran["again"], ended["updates"])


def test_two_signals_to_two_ranks_stop_all_by_one_of_them(ranks2: Pool, tmp_path: Path) -> None:
    each = ranks2.run(two_signals, CASE, tmp_path, seconds=SECONDS)
    assert each == [each[0]] * 2
    assert each[0][0] in ENDS.values()


def two_signals(case: Case, root: Path) -> tuple[str, int]:
    def act(trainer: Watching) -> None:
        if trainer.progress.updates == AT:
            os.kill(os.getpid(), signal.SIGTERM if trainer.is_main else signal.SIGUSR1)

    ran = train(case, root / "cut", act=act)
    return ran["ended"], ran["updates"]


def stopped(case: Case, root: Path, rank: int) -> tuple[str, str, int, list[str]]:
    """What `stop()` on one process comes to."""

    def act(trainer: Watching) -> None:
        if trainer.progress.updates == AT and trainer.world.rank == rank:
            trainer.stop(f"enough for {rank}")

    ran = train(case, root / "cut", act=act)
    torch.distributed.barrier()
    return ran["ended"], ran["stopped"], ran["updates"], sorted(path.name for path in (root / "cut").glob("update-*"))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stop_on_one_rank_stops_all(ranks2: Pool, tmp_path: Path, rank: int) -> None:
    each = ranks2.run(stopped, CASE, tmp_path, rank, seconds=SECONDS)
    assert each == [each[0]] * 2
    ended, why, updates, saved = each[0]
    assert (ended, why) == ("", f"enough for {rank}")
    assert AT <= updates < 14 and saved[-1] == f"update-{updates:010}"


def slow(case: Case, root: Path) -> tuple[str, int, float]:
    """A signal while one process waits long for its data: nothing is cut off, and all end together."""
    begin = time.monotonic()

    def act(trainer: Watching) -> None:
        if trainer.progress.updates == AT and trainer.is_main:
            os.kill(os.getpid(), signal.SIGTERM)
        if trainer.progress.updates == AT + 1 and not trainer.is_main:
            time.sleep(1.0)

    ran = train(case, root / "cut", act=act)
    return ran["ended"], ran["updates"], time.monotonic() - begin


def test_a_signal_waits_for_the_slowest_rank(ranks2: Pool, tmp_path: Path) -> None:
    (one, updates, seconds), (other, its_updates, _) = ranks2.run(slow, CASE, tmp_path, seconds=SECONDS)
    assert one == other == "Stopped(143)"
    assert updates == its_updates and 1.0 < seconds < 150
