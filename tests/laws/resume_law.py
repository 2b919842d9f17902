"""The law Resume: interrupted at any update and resumed in a new process is never interrupted, bit for bit."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from laws.resume_cells import Cell, drawn, name, uninterrupted
from laws.resume_data import BATCHES
from laws.resume_run import ERROR, SIGNALS, Interrupt, flattened, train
from trainwright import latest_checkpoint
from trainwright.checkpointing.format import load_tree
from trainwright.observers import read_journal

LIMIT = 120
"""Seconds after which a phase hangs."""
MEASURED = ("seconds", "waiting", "rows")
"""What a session measures of itself: seconds, and the rows in them."""
WITHOUT_EFFECT = tuple(f"checkpoint.data.workers.{name}" for name in ("given", "start"))
"""What a checkpoint at the end of a run tells of the last epoch's resume, and no later epoch reads."""
Fault = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Found:
    """What came of a cell: no difference is the law. Times are in seconds."""

    cell: Cell
    differences: list[str]
    seconds: float
    at: str = ""
    """The checkpoint that the run went on from."""


def check(*cells: Cell, fault: Fault | None = None, interpreter: bool = False) -> list[Found]:
    """Run the cells never interrupted, interrupted and resumed, each in a process of its own, and compare.

    Cells that differ in nothing but their interrupt are compared with one run. `fault` is planted in each process;
    with `interpreter` the resumed one is a new interpreter.
    """
    root = Path(mkdtemp(prefix="resume-", dir=memory()))
    found, begun = [], time.perf_counter()
    try:
        whole = ""
        for number, cell in enumerate(cells):
            if name(uninterrupted(cell)) != whole:
                whole = name(uninterrupted(cell))
                shutil.rmtree(root / "whole", ignore_errors=True)
                run(cell, root / "whole", fault=fault, interrupt=Interrupt("none"))
            at, differing = compared(cell, root / "whole", root / f"cut {number}", fault, interpreter)
            found.append(Found(cell, differing, time.perf_counter() - begun, at))
            begun = time.perf_counter()
    except WrongError as error:
        found += [Found(cell, [str(error)], time.perf_counter() - begun) for cell in cells[len(found) :]]
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return found


def compared(cell: Cell, whole: Path, cut: Path, fault: Fault | None, interpreter: bool) -> tuple[str, list[str]]:
    """The checkpoint that the run went on from, as `reported`, and what differs."""
    try:
        interrupt, place = planned(cell, whole)
        expected = {"kill": -signal.SIGKILL, "error": ERROR}.get(cell["interrupt"], 128 + interrupt.signal)
        run(cell, cut, fault=fault, interrupt=interrupt, expected=expected)
        if (last := last_reported(cut / "checkpoints")) != place:
            raise WrongError(f"the last checkpoint should be {place}, and is {last}: {interrupt}")
        killed = Trace(cut)
        run(cell, cut, fault=fault, resume="auto", interpreter=interpreter)
    except WrongError as error:
        return "", [str(error)]
    return place, differences(whole, [killed, Trace(cut)], cut)


class WrongError(Exception):
    """A run that did not even end as it was meant to."""


def planned(cell: Cell, whole: Path) -> tuple[Interrupt, str]:
    """Where to interrupt the cell so that it goes on from its `place`, and what `reported` says of that checkpoint."""
    saves = [json.loads(line) for line in (whole / "saves.jsonl").read_text().splitlines()]
    fitting = [one for one in saves[:-1] if one["place"] == cell["place"]]
    if not fitting:
        raise WrongError(f"no checkpoint {cell['place']} among {saves}")
    at = fitting[drawn(cell, "at", len(fitting))]
    tries, following = at["tries"], saves[saves.index(at) + 1]["tries"]
    micro = drawn(cell, "micro", min(cell["accumulate"], BATCHES - at["batch"]))
    if cell["interrupt"] == "kill":
        tries += (later := drawn(cell, "later", max(1, following - tries)))
        return Interrupt("kill", tries, 0 if later else micro, saved=at["name"], skipped=at["skipped"]), reported(at)
    number = SIGNALS[drawn(cell, "signal", len(SIGNALS))]
    if cell["interrupt"] == "signal in an update":
        return Interrupt("signal in an update", tries - 1, 0, signal=number), reported(at)
    batch = at["epoch"] * BATCHES + at["batch"] + micro
    return Interrupt(cell["interrupt"], tries, micro, batch=batch, signal=number), reported(at)


def differences(whole: Path, phases: Sequence[Trace], cut: Path) -> list[str]:
    """Everything in which the phases of an interrupted run differ from the run that was never interrupted."""
    reference = Trace(whole)
    phases = [phase for phase in phases if phase.lines]
    begins = [_start(reference, phase) for phase in phases]
    found = []
    for number, (phase, begin) in enumerate(zip(phases, begins, strict=True)):
        expected = reference.lines[begin : begin + len(phase.lines)]
        found += _unlike(f"run {number + 1}", expected, phase.lines)
        if number and begin > begins[number - 1] + len(phases[number - 1].lines):
            found.append(f"run {number + 1} begins after {begin} events, the one before ended earlier")
    if begins[-1] + len(phases[-1].lines) != len(reference.lines):
        found.append(f"the last run has {len(phases[-1].lines)} events from {begins[-1]}, of {len(reference.lines)}")
    found += _unlike("journal", _numbers(whole), _numbers(cut, anew=begins[1:].count(0)))
    one, other = map(_outcome, (whole, cut))
    return found + _unlike("outcome", [one], [other])


def check_kills(cell: Cell, whole: Path, moments: Sequence[float]) -> list[str]:
    """Kill the cell at several moments, each a share of what happens in a run, and go on every time; what differs.

    What happens: a micro-batch, a record for observers, and every opening, renaming and removing of files of the run.
    """
    if not (whole / "outcome.json").exists():
        run(cell, whole, interrupt=Interrupt("none", event=1 << 60))
    events, phases = json.loads((whole / "outcome.json").read_text())["events"], []
    cut = Path(mkdtemp(prefix="cut-", dir=whole.parent))
    try:
        for moment in moments:
            interrupt = Interrupt("kill", event=int(moment * events))
            if run(cell, cut, interrupt=interrupt, resume="auto", expected=(-signal.SIGKILL, 0)) == 0:
                break
            phases.append(Trace(cut))
        else:
            run(cell, cut, resume="auto")
        return differences(whole, [*phases, Trace(cut)], cut)
    except WrongError as error:
        return [str(error)]
    finally:
        shutil.rmtree(cut)


class Trace:
    """What one run wrote down; reading it takes it away, so that the next begins a new one."""

    def __init__(self, directory: Path) -> None:
        path = directory / "trace.jsonl"
        text = path.read_text() if path.exists() else ""
        self.lines: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]
        if directory.name != "whole":
            path.unlink(missing_ok=True)


def run(
    cell: Cell,
    directory: Path,
    *,
    fault: Fault | None = None,
    interrupt: Interrupt | None = None,
    resume: str | None = None,
    expected: int | tuple[int, ...] = 0,
    interpreter: bool = False,
) -> int:
    """Run the cell in a new process; WrongError, with what it printed, where its exit code is not one expected."""
    directory.mkdir(exist_ok=True, parents=True)
    log = directory / "log.txt"
    if interpreter:
        given = json.dumps({"cell": cell, "directory": str(directory), "resume": resume})
        script = [sys.executable, str(Path(__file__).with_name("resume_run.py")), given]
        with log.open("w") as file:
            code = subprocess.run(script, stdout=file, stderr=file, timeout=LIMIT, check=False).returncode
    else:
        code = forked(lambda: _phase(cell, directory, fault, interrupt, resume), log)
    if code not in (expected if isinstance(expected, tuple) else (expected,)):
        tail = log.read_text(errors="replace")[-1500:]
        raise WrongError(f"a run ended with {code}, not with {expected}: {interrupt}, resume={resume}\n{tail}")
    return code


def forked(work: Callable[[], None], log: Path) -> int:
    """Do the work in a fork of this process, which has trained nothing; return how it ended, as `Popen` does."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setsid()  # its workers end with it
            out = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            os.dup2(out, 1)
            os.dup2(out, 2)
            work()
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)
    try:
        return _waited(child)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)


def memory() -> str | None:
    """A directory in memory, where there is one: the law is not about disks."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def workers(number: int = 2) -> ProcessPoolExecutor:
    """Processes that check cells: forks of one that has imported torch and trained nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo", "trainwright", "pytest"])
    return ProcessPoolExecutor(number, mp_context=context, initializer=_prepare, initargs=(sys.path,))


def _prepare(path: list[str]) -> None:
    sys.path[:] = path
    multiprocessing.set_start_method("fork", force=True)  # for loaders: the pool has left its own behind


def _phase(cell: Cell, directory: Path, fault: Fault | None, interrupt: Interrupt | None, resume: str | None) -> None:
    if fault is not None:
        fault(pytest.MonkeyPatch())
    train(cell, directory, interrupt=interrupt, resume=resume)


def _waited(child: int) -> int:
    deadline, pause = time.monotonic() + LIMIT, 0.001
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(pause)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise WrongError(f"a run was still not over after {LIMIT} seconds")


def reported(at: dict[str, Any]) -> str:
    """A checkpoint's name, and the place in the run that it holds: before or after the pause of an epoch's end."""
    epoch, batch = divmod(at["epoch"] * BATCHES + at["batch"], BATCHES)
    return f"{at['name']}, {at['skipped']} skipped, at batch {batch} of epoch {epoch}"


def last_reported(directory: Path) -> str:
    """What `reported` says of the last checkpoint of a run."""
    path = latest_checkpoint(directory)
    return "nothing" if path is None else reported({"name": path.name, **load_tree(path)["progress"]["counters"]})


def _start(reference: Trace, phase: Trace) -> int:
    """The number of the reference's event that the phase begins with."""
    if not phase.lines:
        return len(reference.lines)
    first = (phase.lines[0]["event"], phase.lines[0]["tries"])
    keys = [(line["event"], line["tries"]) for line in reference.lines]
    return keys.index(first) if first in keys else 0


def _unlike(what: str, expected: Sequence[dict[str, Any]], got: Sequence[dict[str, Any]]) -> list[str]:
    """The first record that differs, by the names of what differs in it."""
    for number, (one, other) in enumerate(zip(expected, got, strict=False)):
        names = [name for name in {**one, **other} if one.get(name, "nothing") != other.get(name, "nothing")]
        if names:
            event = f"{one.get('event', '')} {one.get('tries', one.get('update', ''))}".strip()
            values = "; ".join(
                f"{name}: {one.get(name, 'nothing')} -> {other.get(name, 'nothing')}" for name in names[:4]
            )
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            return [f"{what}, record {number} {event}: {values}{more}"]
    if len(expected) != len(got):
        return [f"{what}: {len(got)} records in place of {len(expected)}"]
    return []


def _outcome(directory: Path) -> dict[str, Any]:
    """What a run has come to, without what has no effect."""
    outcome = json.loads((directory / "outcome.json").read_text())
    return {name: one for name, one in outcome.items() if name != "events" and not name.startswith(WITHOUT_EFFECT)}


def _numbers(directory: Path, *, anew: int = 0) -> list[dict[str, Any]]:
    """The updates, validations and epochs of a journal, without what a session measures of itself.

    A run that was killed before it had saved anything begins anew, below what the one before reported: where that was
    so `anew` times, what stands above the last such beginning is left out.
    """
    numbers: list[dict[str, Any]] = []
    for record in read_journal(directory / "journal.jsonl"):
        if record["event"] == "start":
            starts = True
        elif record["event"] in ("update", "validate", "epoch"):
            dropped = MEASURED if record["event"] != "update" else ()
            one = flattened({name: value for name, value in record.items() if name not in dropped})
            if anew and starts and numbers and one == numbers[0]:
                numbers.clear()
            numbers.append(one)
            starts = False
    return numbers
