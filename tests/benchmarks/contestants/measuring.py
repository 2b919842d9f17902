"""Measures contestants in rounds: times, whether they agree, and memory in child processes."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from contestants.entry import Contestant
from contestants.loops import evaluation_plain, loop
from contestants.tasks import Clock, Task, task

RETAINED = (1_000, 11_000)
"""Updates between which memory must not grow."""


@dataclass
class Times:
    """What one contestant needed, round by round, in seconds per batch."""

    thread: list[float] = field(default_factory=list)
    process: list[float] = field(default_factory=list)
    differs: float = 0.0
    """The greatest difference of a weight, or of a mean loss, from the plain loop's."""
    grows: float = 1.0
    """By how much more than elsewhere it may differ, in this workload."""
    failed: str = ""

    def add(self, spent: tuple[float, float], batches: int) -> None:
        self.thread.append(spent[0] / batches)
        self.process.append(spent[1] / batches)


def train_times(of: Task, contestants: Sequence[Contestant], rounds: int) -> dict[str, Times]:
    """Train all in turn, a first round of one epoch apart; compare their weights in every round."""
    wanted: dict[tuple[str, int], Tensor] = {}

    def once(one: Contestant, times: Times, timed: bool) -> None:
        current = of if timed else of.shortest()
        clock = Clock()
        assert one.train is not None
        with quiet():
            model = one.train(current, clock)
            spent = clock.spent()
        key = repr(one.order), current.epochs
        if key not in wanted:
            with quiet():
                wanted[key] = weights(loop(current, Clock(), one.order(current)))
        times.differs = max(times.differs, float((weights(model) - wanted[key]).abs().max()))
        times.grows = of.workload.grows
        if timed:
            times.add(spent, of.epochs * of.length)

    return _rounds([one for one in contestants if one.train is not None], rounds, once)


def evaluation_times(of: Task, contestants: Sequence[Contestant], rounds: int, *, passes: int) -> dict[str, Times]:
    """Evaluate with all in turn, after a pass that warms up; compare their mean losses."""
    with quiet():
        wanted = evaluation_plain(of)()

    def once(one: Contestant, times: Times, timed: bool) -> None:
        assert one.evaluation is not None
        clock = Clock()
        with quiet():
            evaluate = one.evaluation(of)
            evaluate()
            clock.epoch_ended()
            for _ in range(passes if timed else 1):
                loss = evaluate()
            spent = clock.spent()
        times.differs = max(times.differs, abs(loss - wanted))
        if timed:
            times.add(spent, passes * of.length)

    return _rounds([one for one in contestants if one.evaluation is not None], rounds, once)


def _rounds(contestants: list[Contestant], rounds: int, once: Any) -> dict[str, Times]:
    """Run everyone once untimed and then `rounds` times; who fails is left out from then on."""
    found = {one.name: Times() for one in contestants}
    for number in range(rounds + 1):
        if number == 1:
            gc.collect()
            gc.freeze()  # nobody pays for the modules of all others
        for one in _order(contestants, number):
            times = found[one.name]
            if times.failed:
                continue
            if number:
                gc.collect()  # nor for what the one before left
            try:
                once(one, times, number > 0)
            except Exception as error:  # anything that another library may raise: it is reported in the table
                times.failed = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    gc.unfreeze()
    return found


def _order(contestants: list[Contestant], number: int) -> list[Contestant]:
    """Return an order drawn for each two rounds, there and back: a drift cancels, and neighbors change."""
    drawn = random.Random(number // 2).sample(contestants, len(contestants))
    return drawn[::-1] if number % 2 else drawn


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Send standard output and standard error, of Python and of the process, to the null device."""
    kept = {number: os.dup(number) for number in (1, 2)}
    _flush()
    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null), contextlib.redirect_stderr(null):
        try:
            for number in kept:
                os.dup2(null.fileno(), number)
            yield
        finally:
            _flush()
            for number, old in kept.items():
                os.dup2(old, number)
                os.close(old)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def memory(of: Task, one: Contestant, *, what: str, seconds: float = 300) -> dict[str, Any]:
    """Measure memory in a child process: "peak" of a run, or "retained" over 10,000 updates."""
    script = Path(__file__).parents[1] / "peers.py"
    order = [sys.executable, str(script), "--child", what, "--workloads", of.name, "--contestants", one.name]
    order += ["--epochs", str(of.epochs)]
    try:
        done = subprocess.run(order, capture_output=True, check=False, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"failed": f"took more than {seconds:.0f} s"}
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return {"failed": lines[-1][:200]}
    return json.loads(done.stdout.splitlines()[-1])


def child(what: str, name: str, one: Contestant, epochs: int | None) -> dict[str, float]:
    """Run in the child: torch's own AdamW, so that the loops by hand import nothing of this package."""
    assert one.train is not None
    if what == "peak":
        of = task(name, epochs=epochs, optimizers="torch")
        with quiet():
            one.train(of, Clock())
        return {"peak": resident("VmHWM")}
    of = task(name, epochs=1, optimizers="torch")
    per_epoch = of.length // of.accumulate
    of = task(name, epochs=RETAINED[1] // per_epoch, optimizers="torch")
    watch = Watch(first=RETAINED[0] // per_epoch, last=RETAINED[1] // per_epoch)
    with quiet():
        one.train(of, watch)
    (before, objects), (after, objects_after) = watch.seen
    return {"retained": after - before, "objects": objects_after - objects}


class Watch(Clock):
    """Reads resident memory and counts objects at the end of two epochs."""

    def __init__(self, *, first: int, last: int) -> None:
        super().__init__()
        self.at, self.epochs, self.seen = (first, last), 0, list[tuple[float, int]]()

    def epoch_ended(self, *_: object) -> None:
        self.epochs += 1
        if self.epochs in self.at:
            gc.collect()
            self.seen.append((resident("VmRSS"), len(gc.get_objects())))


def resident(what: str) -> float:
    """Return "VmRSS" (now) or "VmHWM" (the most so far) of this process in MB; Linux only."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) / 1000


def timed(begun: float) -> str:
    return f"{time.perf_counter() - begun:.0f} s"
