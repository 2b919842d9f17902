"""What the debugging tools cost an update: modes around `fit`, observers in it, in turn, on a CNN of the digits.

python tests/benchmarks/debugging.py [--runs 7]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from contestants import tasks
from torch import nn

from trainwright import TensorBoardLogger, Trainer, Updates, batches
from trainwright.observers import Profile, Statistics
from trainwright.tools import anomaly, deterministic

EPOCHS = 3
Way = tuple[Callable[[], AbstractContextManager[Any]], Callable[[], list[Any]]]


def digits() -> Any:
    """1,400 rows in 44 batches of 32."""
    inputs, targets = tasks.images()
    return batches((inputs[:1400], targets[:1400]), 32, shuffle=True, seed=0)


def made(observers: list[Any]) -> Trainer[Any]:
    """Two convolutions and a layer on top, 9.9k parameters, with AdamW."""
    torch.manual_seed(0)
    model = tasks.cnn()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return Trainer(model, optimizer, nn.CrossEntropyLoss(), console=False, observers=observers)


def ways(directory: Path) -> dict[str, Way]:
    """Each by its name: the mode around `fit`, and the observers in it."""
    profile = partial(Profile, directory, rows=0)
    return {
        "plain": (nullcontext, list),
        "anomaly()": (anomaly, list),
        "anomaly(check_nan=False)": (partial(anomaly, check_nan=False), list),
        "deterministic()": (deterministic, list),
        "Statistics, each update": (nullcontext, lambda: [Statistics(every=Updates(1))]),
        "Statistics, each 100th": (nullcontext, lambda: [Statistics(every=Updates(100))]),
        "TensorBoard, each update": (nullcontext, lambda: [TensorBoardLogger(directory, every=Updates(1))]),
        "TensorBoard, each 10th": (nullcontext, lambda: [TensorBoardLogger(directory)]),
        "Profile, not yet": (nullcontext, lambda: [profile(after=10**6)]),
        "Profile, recording and writing": (nullcontext, lambda: [profile(after=1, updates=44 * EPOCHS - 1)]),
    }


def cost(way: Way, data: Any) -> float:
    """Milliseconds per update, after an epoch to warm up."""
    mode, observers = way
    trainer = made(observers())
    with mode(), contextlib.redirect_stdout(io.StringIO()):
        trainer.fit(data, epochs=1)
        begun = time.perf_counter()
        result = trainer.fit(data, epochs=EPOCHS)
        return (time.perf_counter() - begun) / result.updates * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7)
    runs = parser.parse_args().runs
    torch.set_num_threads(1)
    data, found = digits(), dict[str, list[float]]()
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(runs):
            for name, way in ways(Path(directory)).items():
                found.setdefault(name, []).append(cost(way, data))
    plain = statistics.median(found["plain"])
    for name, each in found.items():
        middle = statistics.median(each)
        print(f"{name:32} {middle:7.2f} ms/update  x{middle / plain:5.2f}   ({min(each):.2f} to {max(each):.2f})")


if __name__ == "__main__":
    main()
