"""Runs ways of doing the same by turns, and says how their times compare."""

from __future__ import annotations

import gc
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

Batches = list[tuple[Tensor, Tensor]]
TRAINED = 1437
"""Rows of digits that are trained on; the other 360 are held out."""


@dataclass(frozen=True, slots=True)
class Bench:
    """How much is measured."""

    rounds: int = 9
    tiny: bool = False
    """Sizes that show that it runs, and no figure worth anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a claim came to here."""

    measured: str
    """In a sentence, with the figures."""
    holds: str
    """"yes", "partly", "no", or "not here" where this machine cannot tell."""
    ratio: float | None = None
    """How many times as fast, or as small."""
    spread: tuple[float, float] | None = None
    """The quartiles of the ratios."""

    def __post_init__(self) -> None:
        assert self.holds in ("yes", "partly", "no", "not here"), self.holds


@dataclass(frozen=True, slots=True)
class Claim:
    """What a guide says, and what measures it."""

    name: str
    claimed: str
    source: str
    measure: Callable[[Bench], Found]
    where: str = "CPU, one thread"
    """What it is measured on, of the machine that is reported above the table."""


def by_turns(
    ways: Mapping[str, Callable[[], Any]],
    bench: Bench,
    *,
    clock: Callable[[], float] = time.thread_time,
) -> dict[str, list[float]]:
    """Seconds of each way, round by round, after a round that is not timed; the order turns round each time."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(bench.rounds + 1):
        for name in list(ways)[:: 1 if number % 2 else -1]:
            gc.collect()
            begun = clock()
            ways[name]()
            if number:
                times[name].append(clock() - begun)
    return times


def compare(times: Mapping[str, Sequence[float]], plain: str, other: str) -> tuple[float, tuple[float, float]]:
    """How many times as fast the other way is: the median of the rounds' ratios, and their quartiles."""
    ratios = [a / b for a, b in zip(times[plain], times[other], strict=True)]
    if len(ratios) < 2:
        return ratios[0], (ratios[0], ratios[0])
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return statistics.median(ratios), (low, high)


def times_as_fast(ratio: float, spread: tuple[float, float]) -> str:
    return f"x{ratio:.2f} ({spread[0]:.2f} to {spread[1]:.2f})"


def verdict(spread: tuple[float, float], *, claimed: float) -> str:
    """Yes where even the lower quartile is over half of what is claimed to be won, no where it is not over 1."""
    if spread[0] >= 1 + (claimed - 1) / 2:
        return "yes"
    return "partly" if spread[0] > 1.0 else "no"


def digits(batch_size: int, *, image: bool = False) -> tuple[Batches, tuple[Tensor, Tensor]]:
    """Training batches of scikit-learn's digits in a fixed mixed order, and the rows that are held out."""
    data = load_digits()
    order = torch.randperm(len(data.data), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(data.data / 16, dtype=torch.float32)[order], torch.tensor(data.target)[order]
    x = x.view(-1, 1, 8, 8) if image else x
    split = list(zip(x[:TRAINED].split(batch_size), y[:TRAINED].split(batch_size), strict=True))
    return split, (x[TRAINED:], y[TRAINED:])


def mlp(*, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def cnn(channels: int = 32, *, bias: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1, bias=bias),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 3, padding=1, bias=bias),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.LazyLinear(10),
    )


class Block(nn.Module):
    """A residual block of two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.wide, self.back = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.back(nn.functional.gelu(self.wide(self.norm(x))))
        return out


def blocks(number: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(width) for _ in range(number)], nn.Linear(width, 10))


def train(model: nn.Module, data: Batches, optimizer: torch.optim.Optimizer, *, set_to_none: bool = True) -> None:
    """The plain loop, once over the data."""
    for x, y in data:
        optimizer.zero_grad(set_to_none=set_to_none)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, rows: tuple[Tensor, Tensor]) -> float:
    """The share of right answers on the rows that are held out."""
    model.eval()
    right = float((model(rows[0]).argmax(1) == rows[1]).float().mean())
    model.train()
    return right


def where() -> str:
    """The machine, in words."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    threads = torch.get_num_threads()
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    return f"{versions}, {platform.machine()}, {cores} core{'s' if cores > 1 else ''}, {threads} thread(s), {device}"
