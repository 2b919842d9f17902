"""Training on a GPU beside loops tuned by hand and other libraries: the cases B0 to B9, each with its targets.

    python tests/benchmarks/gpu.py [--only B1,B5] [--rounds N] [--tiny] [--device cuda|cpu] [--without-peers]
        [--json FILE]

One process. All contestants of a case have the same model, the same batches and the same optimizer, and train in turn,
in rounds, there and back, after a round that is not timed. A run is timed from the end of its first epoch, in which it
warms up, compiles and captures, to the end of its last, by the wall clock, the device being waited for at both. Ratios
are taken within a round; medians and quartiles over the rounds. Final weights are compared. Peak memory is that of the
whole run, over what was taken before. The command fails where somebody fails or has other weights, not where a target
is missed. Data are random, and nothing is downloaded. With `--tiny --device cpu` everything is run and nothing judged.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from gpu_cases import report
from gpu_cases.cases import CASES, NAMES
from gpu_cases.ceilings import ceilings
from gpu_cases.ceilings import table as table_of_ceilings
from gpu_cases.entry import Bench, Case
from gpu_cases.measuring import Rounds

CUPTI = {"TEARDOWN_CUPTI": "0", "DISABLE_CUPTI_LAZY_REINIT": "1"}
"""The profiler must not be taken down and started anew beside recorded graphs."""


def main(arguments: list[str] | None = None) -> int:
    """Run the chosen cases; return 1 where a contestant failed or has other weights than it should."""
    args = parsed(arguments)
    device = torch.device(args.device, 0 if args.device == "cuda" else None)
    bench = Bench(device, args.tiny, args.rounds)
    if bench.on_cuda and not torch.cuda.is_available():
        print("no CUDA device is here; a dry run is: --tiny --device cpu", file=sys.stderr)
        return 2
    for name, value in CUPTI.items():
        os.environ.setdefault(name, value)
    about = report.facts(bench)
    print(report.header(bench, about), flush=True)
    found: dict[str, Any] = {"facts": about, "tiny": bench.tiny}
    timing, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, bench.on_cuda
    try:
        sound = all([run(name, bench, args, found) for name in args.only])
    finally:
        torch.backends.cudnn.benchmark = timing
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1))
    return 0 if sound else 1


def run(name: str, bench: Bench, args: argparse.Namespace, found: dict[str, Any]) -> bool:
    """Run the cases of one name, print their tables, and put what was found into `found`."""
    if name == "B0":
        begun = time.perf_counter()
        rows = ceilings(bench)
        print(f"\n## B0: what the device can do\n\n{table_of_ceilings(rows)}\n{took(begun)}", flush=True)
        found["B0"] = [dict(zip(("ceiling", "unit", "values", "seen"), row, strict=True)) for row in rows]
        return True
    sound = True
    for case in CASES:
        if case.name == name:
            one, well = run_case(without_peers(case) if args.without_peers else case, bench)
            found.setdefault(name, []).append(one)
            sound = sound and well
    return sound


def run_case(case: Case, bench: Bench) -> tuple[dict[str, Any], bool]:
    """Run one case; return what was found, and whether nobody failed and all weights agree."""
    begun = time.perf_counter()
    task = case.task(bench)
    print(f"\n## {case.name}: {task.title}\n\n{task.updates} updates are timed in each run.\n", flush=True)
    found = Rounds(case, task).run()
    rows = report.judged(task, found, list(case.targets(task)))
    for part in (report.table(case, task, found), report.weights(case, task, found), report.targets_table(rows)):
        print(part)
    print(f"{report.notes(case, found)}\n{took(begun)}", flush=True)
    whole = {"task": task.title, "updates": task.updates, "tolerance": task.tolerance, "flops": task.flops}
    runs = {one: asdict(runs) for one, runs in found.items()}
    return {**whole, "contestants": runs, "targets": rows}, report.sound(task, found)


def without_peers(case: Case) -> Case:
    return replace(case, contestants=[one for one in case.contestants if one.package is None])


def took(begun: float) -> str:
    return f"took {time.perf_counter() - begun:.0f} s"


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=cases, default=list(NAMES), help=f"some of {','.join(NAMES)}")
    parser.add_argument("--rounds", type=int, default=10, help="timed ones, after one that is not")
    parser.add_argument("--tiny", action="store_true", help="sizes that show that it runs, and no times worth anything")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--without-peers", action="store_true", help="leave other libraries out")
    parser.add_argument("--json", type=Path, help="where to write all that was found")
    args = parser.parse_args(arguments)
    if args.device == "cpu" and not args.tiny:
        parser.error("--device cpu is a dry run; write --tiny too")
    if args.rounds < 1:
        parser.error("--rounds wants 1 or more")
    return args


def cases(text: str) -> list[str]:
    """Read a list of names of cases."""
    chosen = text.split(",")
    if unknown := [name for name in chosen if name not in NAMES]:
        raise argparse.ArgumentTypeError(f"no {unknown[0]!r}; there are: {', '.join(NAMES)}")
    return chosen


if __name__ == "__main__":
    sys.exit(main())
