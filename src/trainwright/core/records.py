"""The records of a run: return values of steps, records for observers, and the result of `fit`."""

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
    """Return value of a step: a mean loss with its count.

    Args:
        loss: The mean, a tensor with one element.
        count: The denominator of the mean: the number of rows, valid tokens or elements.
    """

    loss: Tensor
    count: Count


@dataclass(slots=True, eq=False)
class SumLoss:
    """Return value of a step: a summed loss. The loss of a window is total / count, or the total without a `count`.

    Args:
        total: The sum, a tensor with one element.
        count: The number of rows, valid tokens or elements in the sum.
    """

    total: Tensor
    count: Count | None = None


@dataclass(slots=True, eq=False)
class StepOutput:
    """Return value of a step: the loss, and the output and target for metrics.

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
    """Record of one optimizer update, in plain floats, for observers."""

    update: int
    """Updates applied so far over all stages, including this one."""
    epoch: int
    loss: float
    """The loss of the window, without loss scaling."""
    lr: float
    """The learning rate of the first group in this update."""
    lrs: tuple[float, ...]
    grad_norm: float | None
    """The norm of the unscaled gradient before clipping; None if nothing requests it."""
    rows: int
    skipped: bool
    values: Mapping[str, float] = field(default_factory=dict)
    """Named losses, logged and probed numbers, and `lr_<name>` and `grad_norm_<name>` of named optimizers."""
    loss_scale: float | None = None
    """The loss scale of this update's backward passes (fp16); None without one, or if a custom scale is a tensor."""


@dataclass(frozen=True, slots=True)
class Validation:
    """Record of one validation (`on_validate`) or one finished epoch (`on_epoch`)."""

    epoch: int
    """Finished epochs over all stages; during an epoch, those before it."""
    update: int
    metrics: Mapping[str, float]
    """`loss`, `val_loss`, ... and `lr`, as in a row of `history`."""
    best: bool
    """Whether the monitored number is the best so far."""
    waited: int
    """Validations since the best one of early stopping; 0 if this is the best, or without early stopping."""
    patience: int
    """Early stopping's patience; 0 without early stopping."""
    seconds: float
    """Time since the last `Validation` record."""
    rows: int
    """Rows trained since the last `Validation` record."""
    waiting: float
    """The fraction of that time spent waiting for data, 0 to 1."""
    skipped: int
    """Updates skipped so far."""
    notes: tuple[str, ...] = ()
    """Lines on changes since the last record, such as a split of batches."""
    final: bool = False
    """Whether it was measured only because the run ends early: it is no row of `history`, and a resume drops it."""


@dataclass(frozen=True, slots=True)
class Saved:
    """Record of a checkpoint that is complete on disk."""

    path: Path
    update: int
    best: bool
    seconds: float = 0.0
    """Seconds from the start of the copy until the checkpoint was durable."""
    blocked: float = 0.0
    """Seconds that training waited for the copy, or for the complete write without a background writer."""
    size: int = 0
    """Size of its tensors and texts in bytes."""


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
    """The best value of the monitored number; None if no number is monitored."""
    updates: int
    epochs: int
    """Finished epochs of this stage."""
    stopped: str
    """The reason for the end of the run."""
    seconds: float
    skipped: int = 0
    weights: str = "last"
    """The weights that the model holds now: "last", "averaged", "best of epoch n" or "averaged, best of epoch n".

    If these are the best by another number than that of `best`, its name follows: "best of epoch n by val_loss".
    """
    notes: tuple[str, ...] = ()
    """Further lines, such as on a schedule cut short by skipped updates, or a save after an error."""
    blocked: float = field(default=0.0, compare=False)
    """Seconds that this `fit` has waited for saves."""
    final_validation: dict[str, float] | None = None
    """The numbers of an additional validation at an early end (`stop()`, `max_seconds`), in the form of a history row.

    They are neither in `history` nor monitored, so that a run resumed from there equals an uninterrupted run. None if
    the end was planned (`epochs`, `max_updates`), or a validation was due there anyway.
    """

    def _repr_html_(self) -> str:
        """Return the end of the run and the last rows of its history as HTML, for a notebook."""
        from trainwright.core.figures import html_history, html_pairs

        best = self.best and f"{self.best.name} {self.best.value:.4g} at epoch {self.best.epoch}"
        ended = {"end": self.stopped, "updates": self.updates, "epochs": self.epochs, "seconds": self.seconds}
        facts = {**ended, "skipped": self.skipped or "", "best": best, "weights": self.weights, "notes": self.notes}
        return html_pairs(facts) + html_history(self.history)

    def plot(self, path: str | Path | None = None) -> Any:
        """Plot the history: losses, other numbers, learning rates, and a mark at the best value.

        Returns a matplotlib Figure, and saves it to `path` if given. SettingError without matplotlib.
        """
        from trainwright.core.figures import history_figure

        return history_figure(self.history, best=self.best, path=path)
