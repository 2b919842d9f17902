"""The attributes of a Trainer that a run reads, as a Protocol, and the hooks that the user overrides."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.core.errors import message
from trainwright.core.host_reads import as_count
from trainwright.core.progress import Counters
from trainwright.core.records import Count, Result
from trainwright.distributed.mesh import Parallel
from trainwright.distributed.world import World
from trainwright.precision.base import Precision
from trainwright.protocols import Observer, Stateful
from trainwright.update import batches
from trainwright.update.losses import KnownLoss, known_loss
from trainwright.update.window import find_rows, rows_of

if TYPE_CHECKING:
    from trainwright.acceleration.fast import Fast
    from trainwright.checkpointing.checkpoint import Checkpoint
    from trainwright.fit.early_stopping import EarlyStopping
    from trainwright.fit.record import StageRecord
    from trainwright.optim.averaging import WeightAveraging
    from trainwright.update.loss_tracker import LossTracker
    from trainwright.update.nonfinite_policy import Policy


class TrainerLike(Protocol):
    """The attributes and hooks of a Trainer that other packages read; they do not import `Trainer` itself."""

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
        """Run forward and backward of every micro-batch; return the loss of the window."""
        ...

    def apply_gradients(self, name: str | None = None, closure: Callable[[], Any] | None = None) -> bool:
        """Unscale the gradients, clip, check and step; return whether the update was applied."""
        ...

    def parts(self) -> dict[str, Stateful]:
        """Return the parts of a checkpoint, by name."""
        ...

    def _bind_run(self, run: Any, boundary: Any) -> None:
        """Set the current run and its boundary."""

    def evaluate(self, data: Any, name: str = "val") -> dict[str, float]:
        """Return exact means over all rows of `data`; `name`: the prefix of their names."""
        ...

    def training_step(self, batch: Any) -> Any:
        """Run the training step of a batch; return its loss."""

    def validation_step(self, batch: Any) -> Any:
        """Run the evaluation step of a batch; return its loss, output and target."""

    def predict_step(self, batch: Any) -> Any:
        """Run the prediction step of a batch; return its output."""


def active_observers(trainer: TrainerLike) -> Sequence[Observer]:
    """Return the observers that receive records: those of rank 0."""
    return trainer.observers if trainer.is_main else ()


def trained_modules(trainer: TrainerLike) -> list[nn.Module]:
    """Return the model, and the loss if it is a module."""
    return [one for one in (trainer.model, trainer.loss) if isinstance(one, nn.Module)]


def networks_of(trainer: TrainerLike) -> list[nn.Module]:
    """Return the model, the loss if it is a module, and the frozen modules."""
    return trained_modules(trainer) + list(trainer.frozen.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """The functions that the loop calls, and which of them user code overrides."""

    known_loss: KnownLoss | None
    """The loss, if it is a torch loss whose count is known."""
    split: Callable[[Any], tuple[Any, Any]]
    move: Callable[[Any], Any] | None
    """`to_device`, or an asynchronous transfer to a CUDA device; None if batches are already on the device."""
    free: Callable[[], None]
    """Frees the memory of transfers."""
    count: Callable[[Any], Count] | None
    """`count`; None if the count is unknown before the step, which then finds it or uses the rows."""
    rows: Callable[[Any], int]
    """Returns the rows of a host batch; by the user's `count` if no tensor has rows."""
    begin_epoch: Callable[[int], None] | None
    """`begin_epoch`, or None if it is not overridden."""
    end_epoch: Callable[[dict[str, float]], None] | None
    """`end_epoch`, or None if it is not overridden."""
    after_update: Callable[[], None] | None
    """`after_update`, or None if it is not overridden."""
    training_loss: Callable[[Any, Any], Any]
    """Returns the loss of output and target in the default training step."""
    evaluated_loss: Callable[[Any, Any], Any]
    """Returns the loss of output and target in the default evaluation step."""
    standard_error_of: str | None
    """The number whose standard error early stopping needs, without `val_` and the name of a set."""
    overrides_any: bool
    """Whether any hook is overridden, which may change layers between two updates."""
    overrides_count: bool
    """Whether `count` is overridden."""
    overrides_training_step: bool
    """Whether `training_step` is overridden; the default one, if called from it, then returns a plain mean."""
    overrides_validation_step: bool
    """Whether `validation_step` is overridden."""
    overrides_evaluate: bool
    """Whether `evaluate` is overridden, and may return numbers of any name."""
    may_log_any_name: bool
    """Whether code that runs in training steps is overridden, and may log any name."""
    overrides_compute_gradients: bool
    """Whether `compute_gradients` is overridden."""
    has_custom_update: bool
    """Whether `update` or `apply_gradients` is overridden. User code may then read gradients, so they are complete when
    `compute_gradients` returns."""


def overridden(cls: type, base: type, hooks: Collection[str]) -> set[str]:
    """Return the hooks that a subclass overrides."""
    return {name for name in hooks if getattr(cls, name) is not getattr(base, name)}


def read_hooks(
    trainer: Any, own: set[str], *, move: Callable[[Any], Any] | None, free: Callable[[], None] = lambda: None
) -> Hooks:
    """Bind the hooks of a trainer; TypeError for one with wrong arguments.

    `own`: the overridden hooks. `move`: moves batches to the device. `free`: frees the memory that `move` uses.
    """
    for name in sorted(own):
        check_arguments(trainer, name)
    known = known_loss(trainer.loss)
    steps, counts, early = "training_step" in own, "count" in own, trainer.early_stopping
    split = trainer.split if "split" in own else batches.split
    exact = known is not None and known.reduction == "mean" and not steps and not counts
    # An overridden `split` may draw random numbers or change the batch: it is called once per batch, in the step.
    counts_before = counts or (known is not None and "split" not in own)
    return Hooks(
        known_loss=known,
        split=split,
        move=move,
        free=free,
        count=partial(_count_on_host, trainer) if counts else trainer.count if counts_before else None,
        rows=partial(_rows_or_count, trainer) if counts else rows_of,
        # An overridden step may call the default one and add to its loss, so it gets a plain mean.
        training_loss=partial(batches.counted_loss_of if exact else batches.loss_of, trainer),
        evaluated_loss=known.evaluated if known is not None and exact else partial(batches.exact_loss_of, trainer),
        standard_error_of=_number(early.monitor, trainer.metrics)
        if early is not None and early.min_delta == "1se"
        else None,
        overrides_any=bool(own),
        overrides_count=counts,
        overrides_training_step=steps,
        overrides_validation_step="validation_step" in own,
        overrides_evaluate="evaluate" in own,
        may_log_any_name=not own.isdisjoint({"training_step", "update", "compute_gradients"}),
        overrides_compute_gradients="compute_gradients" in own,
        has_custom_update=not own.isdisjoint({"update", "apply_gradients"}),
        begin_epoch=trainer.begin_epoch if "begin_epoch" in own else None,
        end_epoch=trainer.end_epoch if "end_epoch" in own else None,
        after_update=trainer.after_update if "after_update" in own else None,
    )


def free_transfer_memory(hooks: Hooks) -> None:
    """Free the memory of transfers, after the last pass."""
    hooks.free()


def _number(monitor: str, metrics: Collection[str]) -> str:
    """Return a monitored number without `val_` and without the name of a validation set."""
    name = monitor.removeprefix("val_")
    known = ["loss", *metrics]
    return name if name in known else next((one for one in known if name.endswith(f"_{one}")), name)


_NAMED = {"evaluate": ("name",)}
"""Arguments with a default that the loop passes to a hook by keyword."""


_INSTEAD_OF_INDEX = {
    "training_step": "   # self.progress.batch: the batches of the epoch before this window",
    "validation_step": "   # self.evaluating: the name of the set; batches are not counted here: count calls yourself",
    "predict_step": "   # batches are not counted here: count calls yourself",
}
"""Substitutes for the argument `batch_idx` of other libraries; `progress` does not change outside of training."""


def check_arguments(given: Any, name: str) -> None:
    """Raise TypeError for a hook with a wrong signature, such as `training_step(self, batch, batch_idx)`."""
    original = next(one for one in reversed(type(given).__mro__) if name in vars(one))
    wanted = list(inspect.signature(vars(original)[name]).parameters.values())[1:]
    needed = [one.name for one in wanted if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    named = _NAMED.get(name, ())
    try:
        takes = inspect.signature(getattr(given, name))
    except ValueError:  # a C function without a signature
        return
    try:
        takes.bind(*needed, **dict.fromkeys(named))
    except TypeError as error:
        written = [*needed, *(f'{one.name}="{one.default}"' for one in wanted if one.name in named)]
        raise TypeError(
            message(
                f"{type(given).__name__}.{name} cannot be called as the loop calls it: {error}",
                have=f"{name}{takes}",
                want=f"{name}({', '.join([*needed, *(f'{one}=...' for one in named)])})",
                fix=f"def {name}({', '.join(['self', *written])}):"
                + (_INSTEAD_OF_INDEX.get(name, "") if "idx" in str(takes) else ""),
            )
        ) from None


def _count_on_host(trainer: Any, batch: Any) -> Count:
    """Return the result of the user's `count`; a CPU tensor as a number."""
    return as_count(trainer.count(batch))


def _rows_or_count(trainer: Any, batch: Any) -> int:
    rows = find_rows(batch)
    return int(trainer.count(batch)) if rows is None else rows
