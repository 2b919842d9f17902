"""Kills processes of a training under `torchrun --max-restarts`, and holds its end against an undisturbed run's.

A job is killed one to three times: in a backward pass, in a validation, while it saves, between two updates, or at any
moment. torchrun starts its processes again, `resume="auto"` goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .judging import Table, Verdict, show

SCRIPT = Path(__file__).resolve().parents[1] / "world" / "scripts" / "killed_training.py"
LIMIT = 240.0
"""Seconds after which a job hangs."""
UPDATES = 55
"""Updates of the training; it saves after every second, and validates after every third."""
NUMBERS = {"backward": UPDATES, "update": UPDATES, "validation": 28, "save": 250}
"""About how often each occurs in an undisturbed run, in one process."""
Plan = list[dict[str, Any]]


@dataclass
class Job:
    """How a job has ended, and what its processes have told."""

    code: int
    seconds: float
    output: str = field(repr=False)
    told: list[list[dict[str, Any]]] = field(repr=False)
    """The lines of each process, of all attempts."""
    outcome: list[Any] = field(repr=False)
    """What each has ended with; None where it has not."""
    hung: bool = False

    @property
    def kills(self) -> list[str]:
        """Where it was killed, in order."""
        lines = sorted((one for each in self.told for one in each), key=lambda one: one["time"])
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
        [_lines(directory / f"told-{rank}.jsonl") for rank in range(processes)],
        [_outcome(directory / f"outcome-{rank}.json") for rank in range(processes)],
        hung,
    )


@contextmanager
def started(
    command: Sequence[str], log: Path, environment: Mapping[str, str] = MappingProxyType({})
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command in a session of its own; nothing of it is left afterwards, whatever state it is in."""
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    env = {**clean, "OMP_NUM_THREADS": "1", **environment}
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


def torchrun_many(base: Path, *, runs: int, seed: int, note: Callable[[str], None]) -> Table:
    """Run jobs that are killed; their verdicts."""
    whole = run(base / "undisturbed", [])
    if whole.code or None in whole.outcome:
        raise SystemExit(f"it does not even train undisturbed (exit code {whole.code}):\n{whole.output}")
    note(f"undisturbed: {whole.seconds:.1f} s")
    table, kinds, taken = Table("trainwright, 2 processes"), Counter[str](), []
    for number in range(runs):
        directory = base / f"job-{seed + number}"
        job = run(directory, planned(random.Random(seed + number)))
        verdict = judged(whole, job)
        kinds.update(job.kills)
        taken.append(job.seconds)
        note(f"seed {seed + number}: {verdict.word} {verdict.why} killed {job.kills}, {job.seconds:.1f} s")
        again = f"python -m tests.durability torchrun --runs 1 --seed {seed + number} --keep"
        table.add(verdict, again)
        if verdict.word == "ok":
            shutil.rmtree(directory)
        else:
            note(f"{table.repeat[-1]}\n    left in {directory}")
    told = ", ".join(f"{kinds[kind]} {kind}" for kind in sorted(kinds))
    note(f"{sum(kinds.values())} kills: {told}; a job took {min(taken):.0f} to {max(taken):.0f} s")
    return table


def planned(rng: random.Random) -> Plan:
    """One to three kills, each of one process in one attempt."""
    plan: Plan = []
    for attempt in range(rng.choice((1, 2, 3))):
        at = rng.choice(("backward", "update", "validation", "save", "time"))
        rank = 0 if at == "save" else rng.randrange(2)  # it is the first process that writes
        number = rng.randrange(max(1, NUMBERS.get(at, 1) // (attempt + 1)))
        plan.append({"attempt": attempt, "rank": rank, "do": "kill", "at": at, "number": number})
        plan[-1]["delay"] = rng.uniform(0, 2.0)
    return plan


def judged(whole: Job, job: Job) -> Verdict:
    """What to say of a job: it must end, as the undisturbed one did, and go on from what was acknowledged."""
    if job.hung or job.code:
        last = [line for line in job.output.splitlines() if line.strip()][-1:]
        return Verdict("error", why="it hangs" if job.hung else f"exit code {job.code}: {''.join(last)[:200]}")
    first = job.told[0]
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


def add_command(kinds: Any) -> None:
    """Add `torchrun` to the commands of the harness."""
    parser: argparse.ArgumentParser = kinds.add_parser("torchrun", help="kill processes of a job under torchrun")
    parser.add_argument("--runs", type=int, default=20, help="jobs, each killed one to three times")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at", help="directory to work in (default: that for temporary files)")
    parser.add_argument("--keep", action="store_true", help="keep the directories of jobs that went wrong")
    parser.set_defaults(what="torchrun")


def command(asked: argparse.Namespace) -> None:
    """Run the command; the exit code says whether all is well."""
    base = Path(tempfile.mkdtemp(prefix="durability-torchrun-", dir=asked.at))
    try:
        table = torchrun_many(base, runs=asked.runs, seed=asked.seed, note=_note)
    finally:
        if not asked.keep:
            shutil.rmtree(base, ignore_errors=True)
    show([table], unit="jobs")
    sys.exit(int(set(table.counts) != {"ok"}))


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _outcome(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None
