"""What a fresh process pays before training runs at its pace: the import, the first update, the first epoch.

    python tests/benchmarks/cold.py [--rounds 9] [--contestants plain,tuned,trainwright] [--json FILE]

Each measurement is a child process with one thread; CPU-seconds of the process, medians over the rounds. The first
round writes compiled files and is dropped. Torch and the data (workload W1 of peers.py) are loaded before the clock
starts; each contestant then imports what it needs, makes model and optimizer, and trains two epochs. The first update
is over when the model is called for the second one. Torch's AdamW imports torch's compiler the first time that it is
made, in every contestant.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from cold_import import measured
from contestants.every import BY_NAME
from contestants.measuring import quiet
from contestants.tables import spread
from contestants.tasks import Clock, task
from torch import Tensor, nn

DEFAULT = ["plain", "tuned", "trainwright", "trainwright-loader", "trainwright-other"]
FIGURES = ("first update", "first epoch", "second epoch")


class Noting(Clock):
    """Reads the CPU time of the process at the second update's begin and at each epoch's end."""

    def __init__(self) -> None:
        super().__init__()
        self.begun_at, self.updated, self.ends = time.process_time(), 0.0, list[float]()

    def epoch_ended(self, *_: object) -> None:
        self.ends.append(time.process_time())


class Noted(nn.Module):
    """A model that tells the clock when it is called for the second update."""

    def __init__(self, model: nn.Module, clock: Noting) -> None:
        super().__init__()
        self.model, self.clock, self.calls = model, clock, 0

    def forward(self, inputs: Tensor) -> Tensor:
        if self.calls < 2 and self.training and torch.is_grad_enabled():
            self.calls += 1
            if self.calls == 2:
                self.clock.updated = time.process_time()
        return self.model(inputs)


def child(name: str) -> dict[str, float]:
    """Return the figures of one contestant in this process, in CPU-seconds."""
    torch.set_num_threads(1)
    of, one = task("W1", epochs=1, optimizers="torch"), BY_NAME[name]
    assert one.train is not None
    with quiet():
        clock = Noting()
        make = of.workload.make
        one.train(replace(of, workload=replace(of.workload, make=lambda: Noted(make(), clock))), clock)
    first, second = clock.ends
    figures = (clock.updated - clock.begun_at, first - clock.begun_at, second - first)
    return dict(zip(FIGURES, figures, strict=True))


def measure(name: str, environment: dict[str, str]) -> dict[str, float]:
    """Return the figures of one contestant in a fresh process; RuntimeError where it fails."""
    order = [sys.executable, str(Path(__file__)), "--child", name]
    done = subprocess.run(order, capture_output=True, check=False, text=True, env=environment, timeout=300)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1][:200])
    return json.loads(done.stdout.splitlines()[-1])


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; return 1 where a contestant failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--contestants", default=",".join(DEFAULT))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", choices=list(BY_NAME), help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.child:
        print(json.dumps(child(args.child)))
        return 0
    names = args.contestants.split(",")
    if unknown := [name for name in names if name not in BY_NAME]:
        parser.error(f"no contestant {unknown[0]!r}; there are: {', '.join(BY_NAME)}")
    found, failed = collected(names, args.rounds)
    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, {args.rounds} rounds\n"
    )
    print(table(names, found, failed))
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1))
    return 1 if failed else 0


def collected(names: list[str], rounds: int) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the figures of all rounds, and what is missing or went wrong by contestant."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment = {**kept, "OMP_NUM_THREADS": "1"}
    imports: list[float] = []
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    failed: dict[str, str] = {}
    for number in range(rounds + 1):
        imports += [measured(environment)] if number else []
        for name in names if number % 2 else names[::-1]:
            if name in failed or BY_NAME[name].version() is None:
                continue
            try:
                figures[name] += [measure(name, environment)][: number > 0]
            except RuntimeError as error:
                failed[name] = str(error)
    return {"import": imports, "contestants": figures}, failed


def table(names: list[str], found: dict[str, Any], failed: dict[str, str]) -> str:
    """Tell all in Markdown: CPU-seconds, and how many more than the plain loop's."""
    median, quartiles = spread(found["import"])
    lines = [f"import trainwright over import torch: {median} CPU-s, quartiles {quartiles}", ""]
    lines += [
        f"| contestant | {' | '.join(f'{figure} | over plain' for figure in FIGURES)} |",
        "|---|" + "--:|--:|" * len(FIGURES),
    ]
    for name in names:
        rounds = found["contestants"][name]
        if not rounds or name in failed:
            lines.append(f"| {name} | {'failed: ' + failed[name] if name in failed else 'not installed'} |" + " |" * 5)
            continue
        cells = []
        for figure in FIGURES:
            cells.append(f"{statistics.median(one[figure] for one in rounds):.3f}")
            plain = found["contestants"].get("plain", [])
            pairs = [own[figure] - base[figure] for own, base in zip(rounds, plain, strict=False)]
            cells.append(f"{statistics.median(pairs):+.3f}" if pairs else "")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
