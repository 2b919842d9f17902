"""The records of a run: the return of a step, the records of observers, the result of `fit`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

Count = int | float | Tensor

TARGETS = ("target", "targets", "labels", "label", "y")
"""Keys of the target in a batch that is a mapping, by precedence."""


@dataclass(slots=True, eq=False)
class MeanLoss:
    """A loss that is a mean, returned by a step.

    Args:
        loss: The mean, a tensor with one element.
        count: What it is a mean over: the number of rows, valid tokens or elements.
    """

    loss: Tensor
    count: Count


@dataclass(slots=True, eq=False)
class SumLoss:
    """A loss that is a sum, returned by a step. The window's loss is total / count with a `count`, and the sum without.

    Args:
        total: The sum, a tensor with one element.
        count: The number of rows, valid tokens or elements in the sum.
    """

    total: Tensor
    count: Count | None = None


@dataclass(slots=True, eq=False)
class StepOutput:
    """The return of a step: the loss, and the output and target that metrics read.

    Args:
        loss: The loss: a tensor, `MeanLoss`, `SumLoss`, or a dict of losses.
        output: The model's output, for metrics.
        target: The target, for metrics.
    """

    loss: Any
    output: Any = None
    target: Any = None


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer update, in plain floats, as observers see it."""

    update: int
    """Updates applied so far over all stages, this one included."""
    epoch: int
    loss: float
    """The loss of the window, without loss scaling."""
    lr: float
    """The learning rate of the first group in this update."""
    lrs: tuple[float, ...]
    grad_norm: float | None
    """The norm of the unscaled gradient before clipping; None where nothing requests it."""
    rows: int
    skipped: bool
    values: Mapping[str, float] = field(default_factory=dict)
    """Named losses, logged and probed numbers, and `lr_<name>` and `grad_norm_<name>` of named optimizers."""
    loss_scale: float | None = None
    """The loss scale of this update's backward passes (fp16); None without one, and for your own on a device."""


@dataclass(frozen=True, slots=True)
class Validation:
    """Numbers of one validation (`on_validate`), or of one finished epoch (`on_epoch`)."""

    epoch: int
    """Finished epochs over all stages (during an epoch: those before it)."""
    update: int
    metrics: Mapping[str, float]
    """`loss`, `val_loss`, ... and `lr`, as in a row of `history`."""
    best: bool
    """Whether the monitored number is the best so far."""
    waited: int
    """Validations since early stopping's best; 0 where it is the best or nothing is watched."""
    patience: int
    """Early stopping's patience; 0 without early stopping."""
    seconds: float
    """Time since the last `Validation` record."""
    rows: int
    """Rows trained on since the last `Validation` record."""
    waiting: float
    """Share of that time spent waiting for data, 0 to 1."""
    skipped: int
    """Updates skipped so far."""
    notes: tuple[str, ...] = ()
    """What changed since the last record, such as a split of batches, in a line each."""
    final: bool = False
    """Whether it was measured only because the run ends early: it is no row of `history`, and a resume drops it."""


@dataclass(frozen=True, slots=True)
class Saved:
    """One checkpoint that is complete on disk."""

    path: Path
    update: int
    best: bool
    seconds: float = 0.0
    """Seconds from the start of its copy until it was durable."""
    blocked: float = 0.0
    """Seconds that training waited for its copy, or for its write where that is not in the background."""
    size: int = 0
    """Bytes of its tensors and texts."""


@dataclass(frozen=True, slots=True)
class Best:
    """The best value of the monitored number, and its epoch and update."""

    name: str
    value: float
    epoch: int
    update: int
    path: Path | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a `fit`."""

    history: list[dict[str, float]]
    """One row per validation or epoch end."""
    best: Best | None
    """The best of the monitored number, where one is monitored."""
    updates: int
    epochs: int
    """Finished epochs of this stage."""
    stopped: str
    """Why the run ended."""
    seconds: float
    skipped: int = 0
    weights: str = "last"
    """Which weights the model holds now: "last", "averaged", "best of epoch n" or "averaged, best of epoch n".

    If they are the best by another number than that of `best`, its name follows: "best of epoch n by val_loss".
    """
    notes: tuple[str, ...] = ()
    """Further lines: a schedule that did not reach its end for skipped updates, a save when an error ended the run."""
    blocked: float = field(default=0.0, compare=False)
    """Seconds that this `fit` has waited for saves."""
    final_validation: dict[str, float] | None = None
    """The numbers at an early end (`stop()`, `max_seconds`) without a validation that was due, in the form of a row.

    They are not in `history` and are not monitored, so that a run resumed from there equals the run that never ended.
    None where the end was planned (`epochs`, `max_updates`) or a validation was due there.
    """

    def _repr_html_(self) -> str:
        """Return how the run ended and the last rows of its history, for a notebook."""
        from trainwright.core.figures import html_history, html_pairs

        best = self.best and f"{self.best.name} {self.best.value:.4g} at epoch {self.best.epoch}"
        ended = {"end": self.stopped, "updates": self.updates, "epochs": self.epochs, "seconds": self.seconds}
        facts = {**ended, "skipped": self.skipped or "", "best": best, "weights": self.weights, "notes": self.notes}
        return html_pairs(facts) + html_history(self.history)

    def plot(self, path: str | Path | None = None) -> Any:
        """Draw the history: losses, other numbers, learning rates, the best marked; save it under `path` where given.

        Returns a matplotlib Figure. SettingError without matplotlib.
        """
        from trainwright.core.figures import history_figure

        return history_figure(self.history, best=self.best, path=path)
