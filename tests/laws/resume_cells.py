"""The settings of the law Resume: every cell, those that are the same thing left out, and a cover of all pairs."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

Cell = dict[str, Any]

SETTINGS: dict[str, tuple[Any, ...]] = {
    "place": ("epoch boundary", "mid-epoch", "after validation"),
    "model": ("mlp", "cnn"),
    "data": ("batches", "shuffle", "generator", "sampler", "batch_sampler"),
    "workers": ("0", "2", "2 persistent"),
    "accumulate": (1, 3),
    "schedule": ("OneCycle", "StepLR", "Plateau"),
    "precision": ("fp32", "bf16", "fp16"),
    "average": ("no average", "EMA"),
    "interrupt": ("kill", "signal in an update", "signal while waiting", "error"),
}
"""`place`: what the boundary is that the run goes on from. `data`: `batches(...)`, and kinds of `DataLoader`."""


def is_cell(cell: Cell) -> bool:
    """Whether there is such a thing: `batches(...)` reads in the process itself."""
    return cell["data"] != "batches" or cell["workers"] == "0"


def all_cells() -> list[Cell]:
    """Every cell."""
    cells = (dict(zip(SETTINGS, values, strict=True)) for values in product(*SETTINGS.values()))
    return [cell for cell in cells if is_cell(cell)]


def pairwise(cells: list[Cell]) -> list[Cell]:
    """A few of the cells in which every pair of settings occurs that occurs in any: greedy, always the same ones."""
    numbers: dict[Any, int] = {}
    masks = [sum(1 << numbers.setdefault(pair, len(numbers)) for pair in pairs(cell)) for cell in cells]
    left, chosen = (1 << len(numbers)) - 1, []
    while left:
        best = max(range(len(cells)), key=lambda index: (masks[index] & left).bit_count())  # the first of equals
        chosen.append(cells[best])
        left &= ~masks[best]
    return chosen


def pairs(cell: Cell) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    """Every two settings of a cell."""
    return set(combinations(cell.items(), 2))


def alike(cells: Iterable[Cell]) -> list[list[Cell]]:
    """The cells in groups that differ in nothing but how they are interrupted."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(name(uninterrupted(cell)), []).append(cell)
    return list(groups.values())


def uninterrupted(cell: Cell) -> Cell:
    """The settings of a cell but for its interrupt."""
    return {key: value for key, value in cell.items() if key != "interrupt"}


def name(cell: Cell) -> str:
    """The settings in a line."""
    return ", ".join(
        f"{key} {value}" if key in ("accumulate", "workers") else str(value) for key, value in cell.items()
    )


def drawn(cell: Cell, what: str, among: int) -> int:
    """A number below `among` that is the cell's own: it spreads what is no setting over the cells."""
    return zlib.crc32(f"{what} of {name(cell)}".encode()) % among
