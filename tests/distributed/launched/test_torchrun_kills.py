"""What becomes of a job under torchrun whose processes are killed, fail or are asked to end."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from durability.torchrun import SCRIPT, Job, children_of, judged, run, started

LIMIT = 240.0


def kill(attempt: int, rank: int, at: str, number: int, delay: float = 0.0) -> dict[str, object]:
    return {"attempt": attempt, "rank": rank, "do": "kill", "at": at, "number": number, "delay": delay}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The training that nothing happens to."""
    job = run(tmp_path_factory.mktemp("undisturbed") / "job", [], limit=LIMIT)
    assert job.code == 0, job.output
    return job


def test_a_job_that_is_killed_three_times_ends_as_one_that_never_was(undisturbed: Job, tmp_path: Path) -> None:
    """In a backward pass, while it saves, and in a validation; torchrun starts it again each time."""
    plan = [kill(0, 1, "backward", 20), kill(1, 0, "save", 90), kill(2, 1, "validation", 4)]
    job = run(tmp_path / "job", plan, limit=LIMIT)
    assert job.kills == ["backward", "save", "validation"], job.output
    assert judged(undisturbed, job).word == "ok", (judged(undisturbed, job), job.output)
    begins = [line["update"] for line in job.reported[1] if line["what"] == "begins"]
    assert len(begins) == 4 and begins == sorted(begins) and begins[1] > 15, "each attempt resumes from a checkpoint"


def test_an_error_on_one_rank_ends_the_job_within_seconds_and_the_other_names_it(tmp_path: Path) -> None:
    plan = [{"attempt": 0, "rank": 1, "do": "raise", "at": "update", "number": 10}]
    job = run(tmp_path / "job", plan, restarts=0, limit=LIMIT)
    planned = next(line["time"] for line in job.reported[1] if line["what"] == "planned")
    own = [line for line in job.output.splitlines() if line.startswith("[rank1]:")]
    other = [line for line in job.output.splitlines() if line.startswith("[rank0]:")]
    assert job.code == 1
    assert own.count("[rank1]: ValueError: bad row 17") == 1, "its traceback, once"
    assert sum("Traceback" in line for line in own) == 1
    assert any("DistributedError: rank 1 has failed: ValueError: bad row 17" in line for line in other), job.output
    assert "onnection closed" not in job.output, "what only follows from it is not shown"
    ended = (tmp_path / "job" / "log").stat().st_mtime
    assert ended - planned < 20, "it ends within seconds"


def test_a_signal_to_torchrun_ends_all_processes_after_the_same_update_with_a_save(tmp_path: Path) -> None:
    directory = tmp_path / "job"
    directory.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    slow = [{"attempt": 0, "rank": rank, "do": "slow", "at": "update", "number": 7} for rank in range(2)]
    with started([*command, str(directory), json.dumps(slow)], directory / "log") as process:
        wait_for(directory / "reported-0.jsonl", "planned", process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT) != 0
    lines = [json.loads(line) for line in (directory / "reported-0.jsonl").read_text().splitlines()]
    stopped = lines[-1]
    assert stopped["what"] == "stopped" and stopped["code"] == 143, (lines[-3:], (directory / "log").read_text())
    other = json.loads((directory / "reported-1.jsonl").read_text().splitlines()[-1])
    assert (other["what"], other["update"]) == ("stopped", stopped["update"])
    assert (directory / "run" / f"update-{stopped['update']:010}").exists()


def wait_for(path: Path, what: str, pid: int) -> None:
    """Wait until a process has written a line of this kind."""
    end = time.monotonic() + LIMIT
    while not (path.exists() and f'"what": "{what}"' in path.read_text()):
        assert time.monotonic() < end and os.path.exists(f"/proc/{pid}"), children_of(pid)
        time.sleep(0.05)
