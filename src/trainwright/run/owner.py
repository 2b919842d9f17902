"""What the run needs of the trainer that owns it: a Protocol, since this layer never imports the trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from trainwright.base.contracts import Clip, Observer, Part, Precision, Schedule
from trainwright.base.progress import Counters
from trainwright.base.records import Count, Result
from trainwright.run.ledger import Ledger
from trainwright.slots.losses import KnownLoss
from trainwright.slots.nonfinite import Policy


class Owner(Protocol):
    """The attributes and hooks of a Trainer that planning, running and evaluating read."""

    model: Any
    loss: Any
    metrics: Any
    optimizer: Any
    device: torch.device
    precision: Precision | None
    accumulate: tuple[tuple[int, int], ...]
    clip: Clip | None
    schedule: Schedule | None
    early_stopping: Any
    checkpoint: Any
    nonfinite: Policy
    observers: Sequence[Observer]

    known: KnownLoss | None
    ledger: Ledger
    counters: Counters
    history: list[dict[str, float]]
    mover: Callable[[Any], Any] | None
    """`to_device`, or None where batches already lie right."""
    counter: Callable[[Any], Count] | None
    """`count`, or None where the loss counts rows."""
    rows_of: Callable[[Any], int]
    """The rows of a host batch."""
    trusts_counter: bool
    """Whether `count` is the user's own."""
    logs_freely: bool
    """Whether training steps are the user's own and may log any name."""
    steps_itself: bool
    """Whether `training_step` is the user's own; the default one, called from it, then returns a plain mean."""
    pays_at_once: bool
    """Whether `update` is the user's own, so that gradients must be whole when `compute_gradients` returns."""

    spread: str | None
    """The number whose standard error early stopping asks for, without `val_`."""
    errors: Mapping[str, float]
    """Standard errors of the last evaluation."""
    run_id: str
    """Marks this run's checkpoints; empty before the first."""
    result: Result | None
    spent_rates: Any
    """The schedule of the stage before, bound; None before the first."""

    def parts(self) -> dict[str, Part]:
        """Everything with state, by name."""
        ...

    def bind(self, run: Any, pauses: Any) -> None:
        """Hold the run while it lasts."""

    def unbind(self) -> None:
        """Let go of it."""

    def validation_step(self, batch: Any) -> Any:
        """The step of an evaluation."""

    def predict_step(self, batch: Any) -> Any:
        """The step of a prediction."""
