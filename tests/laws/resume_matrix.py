"""Checks every cell of the law Resume: `python tests/laws/resume_matrix.py --all --jobs 2 --out FILE`."""

from __future__ import annotations

import argparse
import os
import platform
import signal
import subprocess
import sys
import time
from collections import Counter
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from laws.resume_cells import SETTINGS, Cell, alike, all_cells, name, pairwise
from laws.resume_law import Found, check, workers

OTHERS = SETTINGS["interrupt"][1:]


def main() -> int:
    """Check what was asked for, print what differs, and return how many cells do, up to 1."""
    given = arguments()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell has started it in the background
    cells, given.commit = chosen(given), commit()
    print(f"{len(cells)} cells", flush=True)
    begun, found = time.perf_counter(), []
    with workers(given.jobs) as pool:
        for results in pool.map(_checked, alike(cells)):
            found += results
            for one in results:
                if one.differences:
                    print(f"DIFFERS {name(one.cell)} ({one.at}):\n  {one.differences[0]}", flush=True)
            if len(found) % 200 < len(results):
                print(f"{len(found)} cells, {time.perf_counter() - begun:.0f} s", flush=True)
    text = summary(found, seconds=time.perf_counter() - begun, given=given)
    print(text)
    if given.out is not None:
        given.out.write_text(text)
    return min(1, sum(bool(one.differences) for one in found))


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="all cells; without it, a cover of all pairs")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, help="where the result is written, as Markdown")
    return parser.parse_args()


def chosen(given: argparse.Namespace) -> list[Cell]:
    """The cells that were asked for: all of them twice, killed and interrupted in one of the other ways, in turn."""
    if not given.all:
        return pairwise(all_cells())
    return list(chain(*(_two_ways(group, number) for number, group in enumerate(alike(all_cells())))))


def _two_ways(group: list[Cell], number: int) -> list[Cell]:
    """The cell that is killed, and one of the others, scattered so that each way meets all pairs of settings."""
    other = OTHERS[(number * 2654435761 >> 16) % len(OTHERS)]
    return [cell for cell in group if cell["interrupt"] in ("kill", other)]


def commit() -> str:
    """The commit that the library was last changed in, now that it is imported."""
    command = ["git", "-C", str(Path(__file__).parent), "log", "-1", "--format=%h", "--", "../../src"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _checked(cells: list[Cell]) -> list[Found]:
    return check(*cells)


def summary(found: list[Found], *, seconds: float, given: argparse.Namespace) -> str:
    """The result as Markdown: counts by setting, the time, and every cell that differs."""
    bad = [one for one in found if one.differences]
    groups = {id(group[0]): group for group in alike(one.cell for one in found)}
    lines = [
        "# Resume, cell by cell",
        "",
        f"{len(found)} cells ({len(groups)} settings of a run, each interrupted in one or several ways), "
        f"**{len(bad)} differ**.",
        "",
        "A cell trains 3 epochs of 7 batches three times: uninterrupted, interrupted, and resumed in a new process.",
        "The uninterrupted and the resumed run must be equal bit for bit. After each update this covers the rows, the",
        "record for the observers, the model and the random states of Python, NumPy and torch. At the end it covers",
        "the model, the optimizer, every part of the last checkpoint, the history, the journal, the result and the",
        "random states.",
        "",
        f"Command: `python tests/laws/resume_matrix.py {' '.join(sys.argv[1:])}` with src at {given.commit}, "
        f"{seconds:.0f} s with {given.jobs} jobs on {os.cpu_count()} cores ({platform.machine()}, {platform.system()}, "
        f"Python {platform.python_version()}, torch {torch.__version__}); "
        f"median {sorted(one.seconds for one in found)[len(found) // 2]:.2f} s per cell.",
        "",
        "| setting | value | cells | differ |",
        "|---|---|---:|---:|",
    ]
    counts, wrong = (Counter(chain(*(one.cell.items() for one in some))) for some in (found, bad))
    for setting, values in SETTINGS.items():
        lines += [f"| {setting} | {one} | {counts[setting, one]} | {wrong[setting, one]} |" for one in values]
    if bad:
        lines += ["", "## Cells that differ", ""]
        lines += [f"- {name(one.cell)} ({one.at}): {one.differences[0].splitlines()[-1][:200]}" for one in bad]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
