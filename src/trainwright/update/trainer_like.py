"""The part of a Trainer that a run uses: a Protocol, since no package imports the trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.core.progress import Counters
from trainwright.core.records import Result
from trainwright.distributed.mesh import Parallel
from trainwright.distributed.world import World
from trainwright.precision.base import Precision
from trainwright.protocols import Observer, Stateful
from trainwright.update.hooks import Hooks
from trainwright.update.loss_tracker import LossTracker

if TYPE_CHECKING:
    from trainwright.acceleration.fast import Fast
    from trainwright.checkpointing.checkpoint import Checkpoint
    from trainwright.fit.early_stopping import EarlyStopping
    from trainwright.fit.record import StageRecord
    from trainwright.optim.averaging import WeightAveraging
    from trainwright.update.nonfinite_policy import Policy


class TrainerLike(Protocol):
    """The attributes and hooks of a Trainer that planning, running and evaluating read."""

    model: Any
    loss: Any
    metrics: dict[str, Any]
    optimizers: dict[str, Optimizer]
    frozen: dict[str, nn.Module]
    state: dict[str, Any]
    average: WeightAveraging | None
    device: torch.device
    precision: Precision | None
    accumulate: tuple[tuple[int, int], ...]
    clip: Any
    schedule: Any
    early_stopping: EarlyStopping | None
    checkpoint: Checkpoint | None
    on_nonfinite: Policy
    on_error: str | None
    on_oom: str | None
    world: World
    is_main: bool
    parallel: Parallel
    fast: Fast
    observers: Sequence[Observer]

    _hooks: Hooks
    _record: StageRecord
    _tracker: LossTracker
    _counters: Counters
    history: list[dict[str, float]]
    result: Result | None

    def update(self, window: Any) -> Any:
        """Make one optimizer update of one window."""

    def compute_gradients(self, window: Any) -> Tensor:
        """Run every micro-batch forward and backward; return the loss of the window."""
        ...

    def apply_gradients(self) -> bool:
        """Unscale the gradients, clip, check and step; return whether the update was applied."""
        ...

    def parts(self) -> dict[str, Stateful]:
        """Return everything that belongs in a checkpoint, by name."""
        ...

    def _bind_run(self, run: Any, boundary: Any) -> None:
        """Refer to the run while it lasts."""

    def training_step(self, batch: Any) -> Any:
        """The step of training."""

    def validation_step(self, batch: Any) -> Any:
        """The step of an evaluation."""

    def predict_step(self, batch: Any) -> Any:
        """The step of a prediction."""


def active_observers(trainer: TrainerLike) -> Sequence[Observer]:
    """Return the observers that get the records of the run: those of rank 0."""
    return trainer.observers if trainer.is_main else ()


def trained_modules(trainer: TrainerLike) -> list[nn.Module]:
    """The model, and a loss that is a module."""
    return [one for one in (trainer.model, trainer.loss) if isinstance(one, nn.Module)]


def networks_of(trainer: TrainerLike) -> list[nn.Module]:
    """The model, a loss that is a module, and the frozen modules."""
    return trained_modules(trainer) + list(trainer.frozen.values())
