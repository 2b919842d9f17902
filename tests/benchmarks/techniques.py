"""What guides to efficient training claim, measured on this machine: one table, claim by claim.

    python tests/benchmarks/techniques.py [--only workers,fused] [--rounds 9] [--tiny] [--json FILE]

One process and one thread. The ways of a claim take turns, in an order that turns round each time, after a turn that is
not timed; each ratio is taken within a round, and the table has the median and the quartiles over the rounds. Times
are CPU times of the thread; those of loader workers are by the wall clock, those of other processes their own. A claim
holds where even the lower quartile has half of what is claimed to be won, and partly where it has any of it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import technique_cases
import technique_kernels
import torch
from technique_measuring import Bench, Claim, Found, where

CLAIMS: list[Claim] = [*technique_cases.CLAIMS, *technique_kernels.CLAIMS]
NAMES = [claim.name for claim in CLAIMS]
HEAD = "| technique | claimed | by | measured here | where | holds |\n|---|---|---|---|---|---|"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the chosen claims, and print them as a table."""
    args = parsed(arguments)
    torch.set_num_threads(1)
    bench = Bench(args.rounds, args.tiny)
    machine = where()
    print(f"{machine}, {args.rounds} rounds\n\n{HEAD}", flush=True)
    rows: list[dict[str, Any]] = []
    for claim in CLAIMS:
        if claim.name in args.only:
            begun = time.perf_counter()
            found = claim.measure(bench)
            print(row(claim, found), flush=True)
            named = {"name": claim.name, "claimed": claim.claimed, "source": claim.source, "where": machine}
            rows.append({**named, **asdict(found), "seconds": time.perf_counter() - begun})
    if args.json is not None:
        args.json.write_text(
            json.dumps({"where": machine, "tiny": args.tiny, "rounds": args.rounds, "rows": rows}, indent=1)
        )
    return 0


def row(claim: Claim, found: Found) -> str:
    """One line of the table."""
    cells = (claim.name, claim.claimed, claim.source, found.measured, claim.where, found.holds)
    return f"| {' | '.join(cells)} |"


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=names, default=NAMES, help=f"some of {','.join(NAMES)}")
    parser.add_argument("--rounds", type=int, default=9, help="timed ones, after one that is not")
    parser.add_argument(
        "--tiny", action="store_true", help="sizes that show that it runs, and no figure worth anything"
    )
    parser.add_argument("--json", type=Path, help="where to write all that was found")
    args = parser.parse_args(arguments)
    if args.rounds < 1:
        parser.error("--rounds wants 1 or more")
    return args


def names(text: str) -> list[str]:
    """Read a list of names of claims."""
    chosen = text.split(",")
    if unknown := [name for name in chosen if name not in NAMES]:
        raise argparse.ArgumentTypeError(f"no {unknown[0]!r}; there are: {', '.join(NAMES)}")
    return chosen


if __name__ == "__main__":
    sys.exit(main())
