"""What a contestant is: a name, how it trains and evaluates, whose order of rows it has, and what it needs."""

from __future__ import annotations

import atexit
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from torch import nn

from contestants.tasks import Clock, Task

Train = Callable[[Task, Clock], nn.Module]
Evaluation = Callable[[Task], Callable[[], float]]
"""From a task to a function that makes one pass and returns the mean loss."""


@dataclass(frozen=True)
class Contestant:
    """Trains a task for 1 + `task.epochs` epochs, tells the clock of each epoch's end, and returns the model."""

    name: str
    train: Train | None
    evaluation: Evaluation | None = None
    order: Callable[[Task], Iterable[Any]] = Task.loader
    """Its rows in their order: the plain loop over them must end with the same weights."""
    package: str | None = None
    base: str = "plain"
    """Whom it is compared with, besides the tuned loop."""
    tolerance: float | None = 1e-5
    """The greatest difference of a weight from the plain loop's; None: it cannot use the same optimizer."""
    note: str = ""

    def version(self) -> str | None:
        """The version of its package; None where that is not installed."""
        if self.package is None:
            return ""
        try:
            return version(self.package)
        except PackageNotFoundError:
            return None


@cache
def scratch() -> str:
    """Return a folder for libraries that want one; it goes with the process."""
    folder = tempfile.TemporaryDirectory(prefix="peers-")
    atexit.register(folder.cleanup)
    return folder.name
