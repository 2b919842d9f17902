"""The two tiers of tests: which test is quick, and which runs with `--full` alone.

A test is quick unless it is marked `slow`, lies in a folder of FULL_FOLDERS, is a case that the pairwise cover of its
grid does not need, or is left out by a marker `sample(n)`: n cases of a long list, evenly spread.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent
FULL_FOLDERS = {"benchmarks", "distributed/launched", "durability", "emulated_device", "scripts"}
"""Benchmarks, launched processes, kills and power cuts, the emulated device, programs of users."""
LARGE_GRID = 8
"""A grid of at most this many cases is quick as a whole."""


def is_full_folder(path: Path) -> bool:
    """Whether a file or folder belongs to the full tier by its place."""
    return any(path.is_relative_to(TESTS / folder) for folder in FULL_FOLDERS)


def slow(items: Iterable[Any]) -> dict[Any, None]:
    """Return the collected tests that are not in the quick tier, in order."""
    grids: dict[str, list[Any]] = {}
    found: dict[Any, None] = {}
    for item in items:
        if is_full_folder(item.path) or item.get_closest_marker("slow") is not None:
            found[item] = None
        elif hasattr(item, "callspec"):
            grids.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in grids.values():
        quick = quick_cases(cases)
        found |= dict.fromkeys(case for place, case in enumerate(cases) if place not in quick)
    return found


def quick_cases(cases: Sequence[Any]) -> set[int]:
    """Return the positions of the quick cases of one test: all, the pairwise cover of a grid, or a sample of these."""
    chosen = list(range(len(cases)))
    if len(cases) > LARGE_GRID:
        # A value is known by its identity: the cases of a grid share the objects that the decorators list.
        cover = pairwise([tuple((axis, id(one)) for axis, one in item.callspec.params.items()) for item in cases])
        chosen = sorted(cover)
    sample = cases[0].get_closest_marker("sample")
    if sample is None or sample.args[0] >= len(chosen):
        return set(chosen)
    (number,) = sample.args
    return {chosen[place * len(chosen) // number] for place in range(number)}


def pairwise(cases: Sequence[tuple[Hashable, ...]]) -> set[int]:
    """Return the positions of cases that hold every pair of values that any case holds.

    Greedy: the case with most pairs that no chosen case has comes next. Cases with one value each are all needed.
    """
    wanted = [{case} if len(case) < 2 else set(combinations(case, 2)) for case in cases]
    missing, chosen = set().union(*wanted), set[int]()
    while missing:
        best = max(range(len(cases)), key=lambda place: len(wanted[place] & missing))
        chosen.add(best)
        missing -= wanted[best]
    return chosen
