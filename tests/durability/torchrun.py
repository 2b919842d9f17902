"""Runs a training under `torchrun --max-restarts`, killed as planned; its end is held against an undisturbed run's.

torchrun starts its processes again after each kill; `resume="auto"` goes on from the newest complete checkpoint.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .judging import Verdict

SCRIPT = Path(__file__).resolve().parents[1] / "distributed" / "launched" / "scripts" / "killed_training.py"
LIMIT = 240.0
"""Seconds after which a job hangs."""
Plan = list[dict[str, Any]]


@dataclass
class Job:
    """How a job has ended, and what its processes have reported."""

    code: int
    seconds: float
    output: str = field(repr=False)
    reported: list[list[dict[str, Any]]] = field(repr=False)
    """The lines of each process, of all attempts."""
    outcome: list[Any] = field(repr=False)
    """What each has ended with; None where it has not."""
    hung: bool = False

    @property
    def kills(self) -> list[str]:
        """Where it was killed, in order."""
        lines = sorted((one for each in self.reported for one in each), key=lambda one: one["time"])
        return [one["at"] for one in lines if one["what"] == "planned"]


def run(directory: Path, plan: Plan, *, processes: int = 2, restarts: int = 3, limit: float = LIMIT) -> Job:
    """Run the training in `directory` under torchrun to the end of the job, doing what is planned."""
    directory.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command += ["--max-restarts", str(restarts), str(SCRIPT), str(directory), json.dumps(plan)]
    begin, hung = time.monotonic(), False
    with started(command, directory / "log") as process:
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            hung = True
    return Job(
        process.returncode,
        time.monotonic() - begin,
        (directory / "log").read_text(errors="replace"),
        [_lines(directory / f"reported-{rank}.jsonl") for rank in range(processes)],
        [_outcome(directory / f"outcome-{rank}.json") for rank in range(processes)],
        hung,
    )


@contextmanager
def started(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command in a session of its own; nothing of it is left afterwards, whatever state it is in."""
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    env = {**clean, "OMP_NUM_THREADS": "1"}
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=env, start_new_session=True)
    try:
        yield process
    finally:
        for pid in [*children_of(process.pid), process.pid]:  # torchrun's are in sessions of their own
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def children_of(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have, deepest first."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [*children_of(child), child]
    return found


def judged(whole: Job, job: Job) -> Verdict:
    """What to say of a job: it must end, as the undisturbed one did, and go on from what was acknowledged."""
    if job.hung or job.code:
        last = [line for line in job.output.splitlines() if line.strip()][-1:]
        return Verdict("error", why="it hangs" if job.hung else f"exit code {job.code}: {''.join(last)[:200]}")
    first = job.reported[0]
    acknowledged = behind = 0
    for line in first:
        if line["what"] == "begins":
            if line["update"] - 1 < acknowledged:
                return Verdict("lost", why=f"went on at {line['update'] - 1}, acknowledged {acknowledged}")
        elif line["what"] == "saved":
            acknowledged = line["update"]
    if job.outcome != whole.outcome:
        return Verdict("drift", behind, "weights, history or random states are not those of the undisturbed run")
    return Verdict("ok", behind)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _outcome(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None
