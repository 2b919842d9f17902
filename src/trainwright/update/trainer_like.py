"""What a run reads of its Trainer: a Protocol, since no package imports it, and the methods that are overridden."""

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

    def apply_gradients(self, name: str | None = None, closure: Callable[[], Any] | None = None) -> bool:
        """Unscale the gradients, clip, check and step; return whether the update was applied."""
        ...

    def parts(self) -> dict[str, Stateful]:
        """Return everything that belongs in a checkpoint, by name."""
        ...

    def _bind_run(self, run: Any, boundary: Any) -> None:
        """Refer to the run while it lasts."""

    def evaluate(self, data: Any, name: str = "val") -> dict[str, float]:
        """Return exact means over all rows of `data`, named by `name`."""
        ...

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """The functions that the loop calls for each batch, and whether the user has written them."""

    known_loss: KnownLoss | None
    """The loss, where it is one of torch's own whose count is known."""
    split: Callable[[Any], tuple[Any, Any]]
    move: Callable[[Any], Any] | None
    """`to_device`, or a transfer ahead of a CUDA device; None where batches are on the device already."""
    free: Callable[[], None]
    """Frees the memory of transfers; a no-op where they have none."""
    count: Callable[[Any], Count] | None
    """`count`, or None where no count is known before the step: then rows are counted, or the step finds the count."""
    rows: Callable[[Any], int]
    """The rows of a host batch; the user's `count` where no tensor has rows."""
    begin_epoch: Callable[[int], None] | None
    """`begin_epoch`, or None where nothing is done there."""
    end_epoch: Callable[[dict[str, float]], None] | None
    """`end_epoch`, or None."""
    after_update: Callable[[], None] | None
    """`after_update`, or None."""
    training_loss: Callable[[Any, Any], Any]
    """The loss of output and target in training by the default step."""
    evaluated_loss: Callable[[Any, Any], Any]
    """The loss of output and target in an evaluation by the default step."""
    standard_error_of: str | None
    """The number whose standard error early stopping asks for, without `val_` and the name of a set."""
    overrides_any: bool
    """Whether any hook is the user's own, and may change layers between two updates."""
    overrides_count: bool
    """Whether `count` is the user's own."""
    overrides_training_step: bool
    """Whether `training_step` is the user's own; the default one, called from it, then returns a plain mean."""
    overrides_validation_step: bool
    """Whether `validation_step` is the user's own."""
    overrides_evaluate: bool
    """Whether `evaluate` is the user's own, and may give numbers of any name."""
    may_log_any_name: bool
    """Whether training steps are the user's own, and may log any name."""
    overrides_compute_gradients: bool
    """Whether `compute_gradients` is the user's own."""
    has_custom_update: bool
    """Whether `update` or `apply_gradients` is overridden. User code may then read gradients, so they are complete when
    `compute_gradients` returns."""


def overridden(cls: type, base: type, hooks: Collection[str]) -> set[str]:
    """Return the hooks that a subclass defines itself."""
    return {name for name in hooks if getattr(cls, name) is not getattr(base, name)}


def read_hooks(
    trainer: Any, own: set[str], *, move: Callable[[Any], Any] | None, free: Callable[[], None] = lambda: None
) -> Hooks:
    """Bind the hooks of a trainer whose class defines `own` of them; TypeError where one takes other arguments.

    `move`: moves batches to the device. `free`: frees the memory that it uses.
    """
    for name in sorted(own):
        check_arguments(trainer, name)
    known = known_loss(trainer.loss)
    steps, counts, early = "training_step" in own, "count" in own, trainer.early_stopping
    split = trainer.split if "split" in own else batches.split
    exact = known is not None and known.reduction == "mean" and not steps and not counts
    # A `split` of the user's own may draw, change or take out: it is called once per batch, in the step.
    counts_before = counts or (known is not None and "split" not in own)
    return Hooks(
        known_loss=known,
        split=split,
        move=move,
        free=free,
        count=partial(_count_on_host, trainer) if counts else trainer.count if counts_before else None,
        rows=partial(_rows_or_count, trainer) if counts else rows_of,
        # A custom step that calls the default one may add to the loss: it gets a plain mean.
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
    """Return the number of a monitor, without `val_` and without the name of one of several validation sets."""
    name = monitor.removeprefix("val_")
    known = ["loss", *metrics]
    return name if name in known else next((one for one in known if name.endswith(f"_{one}")), name)


_NAMED = {"evaluate": ("name",)}
"""Arguments that the loop gives to a hook by name, although they have a default."""


_INSTEAD_OF_INDEX = {
    "training_step": "   # self.progress.batch: the batches of the epoch before this window",
    "validation_step": "   # self.evaluating: the name of the set; batches are not counted here: count calls yourself",
    "predict_step": "   # batches are not counted here: count calls yourself",
}
"""The substitute for the argument `batch_idx` of other libraries: `progress` does not change outside of training."""


def check_arguments(given: Any, name: str) -> None:
    """Refuse a method that cannot be called as the loop calls it, such as `training_step(self, batch, batch_idx)`."""
    original = next(one for one in reversed(type(given).__mro__) if name in vars(one))
    wanted = list(inspect.signature(vars(original)[name]).parameters.values())[1:]
    needed = [one.name for one in wanted if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    named = _NAMED.get(name, ())
    try:
        takes = inspect.signature(getattr(given, name))
    except ValueError:  # a function in C without a signature
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
    """Return the user's `count`; a tensor on the CPU as a number."""
    return as_count(trainer.count(batch))


def _rows_or_count(trainer: Any, batch: Any) -> int:
    rows = find_rows(batch)
    return int(trainer.count(batch)) if rows is None else rows
