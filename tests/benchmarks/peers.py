"""Training and evaluation beside loops written by hand and other training libraries, on the CPU.

    pip install -e . --group peers
    python tests/benchmarks/peers.py [--parts train] [--workloads W1,W1f] [--contestants plain,tuned,trainwright]
        [--rounds 7] [--epochs N] [--optimizer adamw|torch] [--loss torch|own] [--json FILE] [--list]

One process, one thread. All contestants have the same model, batches in a known order, the same fused AdamW and no
output but to the null device (where this package's console prints its table, and others what they print by default).
They take turns in rounds, in drawn orders, there and back. A training run is timed from the end of its first epoch to
its end, an evaluation after its first pass, in CPU time of the thread. Ratios are taken within a round; medians and
quartiles over the rounds. Each must end with the weights of the plain loop over the same rows, else the command fails.
Peers that are not installed are listed as such. Parts: train, evaluate, long (evaluations of ten times the data),
memory (peak and retained memory, in child processes).
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from contestants import tables
from contestants.entry import Contestant
from contestants.every import BY_NAME
from contestants.measuring import Times, child, evaluation_times, memory, timed, train_times
from contestants.tasks import NAMES, Task, task

PARTS = ("train", "evaluate", "long", "memory")


def main(arguments: list[str] | None = None) -> int:
    """Run the chosen parts; return 1 where a contestant failed or has other weights than it should."""
    args = parsed(arguments)
    torch.set_num_threads(1)
    if args.child:
        print(json.dumps(child(args.child, args.workloads[0], args.contestants[0], args.epochs)))
        return 0
    print(tables.header(args.rounds))
    print(tables.field(args.contestants), flush=True)
    if args.list:
        return 0
    taking_part = [one for one in args.contestants if one.version() is not None]
    found: dict[str, Any] = {}
    sound = True
    for part in args.parts:
        begun = time.perf_counter()
        print(f"\n## {part}\n", flush=True)
        found[part], well = run(part, args, taking_part)
        sound = sound and well
        print(f"\n{part} took {timed(begun)}", flush=True)
    if args.json is not None:
        facts = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
        versions = {one.name: one.version() for one in args.contestants}
        args.json.write_text(json.dumps({"facts": facts, "versions": versions, **found}, indent=1))
    return 0 if sound else 1


def run(part: str, args: argparse.Namespace, contestants: list[Contestant]) -> tuple[dict[str, Any], bool]:
    """Run one part, and print its tables; return what was found, and whether nobody failed and all agree."""
    tasks = [task(name, epochs=args.epochs, optimizers=args.optimizer, losses=args.loss) for name in args.workloads]
    if part == "memory":
        return measured_memory(tasks, contestants, rounds=args.rounds)
    found: dict[str, dict[str, Times]] = {}
    for of in tasks:
        if part != "train" and (of.full or (part == "long" and of.workload.times == 1)):
            continue  # an evaluation has one form
        found[of.name] = times_of(part, of, contestants, args)
        print(tables.times(of, found[of.name], contestants), flush=True)
    print(tables.summary(found, contestants))
    if part == "train":
        print(tables.over_tuned(found, contestants))
    print(tables.judged(part, found), flush=True)
    plain = {name: {one: asdict(times) for one, times in of.items()} for name, of in found.items()}
    return plain, tables.sound(found)


def times_of(part: str, of: Task, contestants: list[Contestant], args: argparse.Namespace) -> dict[str, Times]:
    """Time everyone at one task."""
    if part == "train":
        return train_times(of, contestants, args.rounds)
    passes = args.epochs or of.workload.passes
    if part == "long":
        of, passes = of.longer(), max(1, passes // of.workload.times)
    return evaluation_times(of, contestants, args.rounds, passes=passes)


def measured_memory(tasks: list[Task], contestants: list[Contestant], *, rounds: int) -> tuple[dict[str, Any], bool]:
    """Measure peaks of short runs for all, and what the loops by hand and this package retain of W1."""
    peaks: dict[str, dict[str, list[Any]]] = {}
    for of in tasks:
        if not of.full:
            short = of.shortest()
            peaks[of.name] = {one.name: [] for one in contestants if one.train is not None}
            for _ in range(min(rounds, 3)):
                for one in contestants:
                    peaks[of.name][one.name].append(memory(short, one, what="peak"))
            print(tables.peaks(of, peaks[of.name]), flush=True)
    own = [one for one in contestants if one.package is None]
    small = task("W1", epochs=1)
    retained = {one.name: memory(small, one, what="retained") for one in own}
    print(tables.retained(small, retained), flush=True)
    runs = [*retained.values(), *(run for of in peaks.values() for runs in of.values() for run in runs)]
    return {"peak": peaks, "retained": retained}, not any("failed" in run for run in runs)


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=among(PARTS), default=list(PARTS))
    parser.add_argument("--workloads", type=among(NAMES), default=NAMES)
    parser.add_argument("--contestants", type=among(BY_NAME), default=list(BY_NAME))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--epochs", type=int, help="timed epochs, and passes of an evaluation")
    parser.add_argument("--optimizer", choices=("adamw", "torch"), default="adamw", help="how AdamW is built")
    parser.add_argument("--loss", choices=("torch", "own"), default="torch", help="or a module around it")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--list", action="store_true", help="say who takes part, and stop")
    parser.add_argument("--child", choices=("peak", "retained"), help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    args.contestants = [BY_NAME[name] for name in args.contestants]
    return args


def among(names: Any) -> Any:
    """Return the type of an argument that is a list of these."""

    def read(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := [name for name in chosen if name not in names]:
            raise argparse.ArgumentTypeError(f"no {unknown[0]!r}; there are: {', '.join(names)}")
        return chosen

    return read


if __name__ == "__main__":
    sys.exit(main())
