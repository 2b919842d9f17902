"""How the updates of a run are made: the base class of the immediate and of the deferred check."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from trainwright.core.records import Count
from trainwright.precision.base import LossScale
from trainwright.update.reporter import UpdateReporter
from trainwright.update.running_means import Term
from trainwright.update.window import Move, Window, windows

if TYPE_CHECKING:
    from trainwright.fit.run import Run
    from trainwright.optim.gradients import Gradients
    from trainwright.update.loss_tracker import BackwardArgs
    from trainwright.update.losses import StepLoss
    from trainwright.update.optimizer_steps import SelectedOptimizers


@dataclass(slots=True)
class UpdateStatus:
    """The status of the update in progress; each window begins with a new one."""

    applied: bool | None = None
    """Whether `apply_gradients` has applied gradients; None where it was not called."""
    stepped: bool = False
    """Whether an optimizer has made a step; only steps of a custom `update` are seen here."""
    stepping: bool = False
    """Whether such a step has begun."""
    overflowed: bool | None = None
    """Whether a gradient was not finite; None where none was checked."""
    is_scaled: bool = False
    """Whether `compute_gradients` has made gradients with the loss scale."""
    restores: bool = False
    """Whether a step was skipped by `on_nonfinite="skip"`, so that buffers and `state` are restored at the end."""
    minimizing: tuple[Tensor, Count, bool] | None = None
    """The loss that `minimize` was given, until it is checked; its count; whether it is a sum."""
    minimized: dict[str, list[Term]] = field(default_factory=dict)
    """The losses of each name given to `minimize`, with their counts."""

    @property
    def is_refused(self) -> bool:
        """Whether a policy or the loss scale has refused every step."""
        return self.applied is False and not self.stepped


class UpdateStrategy:
    """How the updates of a run are made. A run has one, chosen before its first update.

    `update`: makes the update of a window; the trainer's own method, or one around it that splits windows after an
    out-of-memory error.
    """

    reports = False
    """Whether `report` does anything."""
    updates_ahead = 0
    """Updates that may have been made since the one whose numbers were read last."""
    counted: Count | None = None
    """The count of the loss of all ranks; None for one process, and for a plain sum."""
    in_closure = False
    """Whether an optimizer is making a step that calls a closure of ours."""

    def __init__(self, run: Run, update: Callable[[Window], Any]) -> None:
        self.update = update
        self.step: Callable[[Any], Any] = run.trainer.training_step
        """Runs a micro-batch."""
        self.backward_args: Callable[[Any], BackwardArgs] = run.tracker.backward_args
        """Returns the arguments of `torch.autograd.backward`; records the loss, unless `step` has (several ranks)."""
        self.pending_factor: Count = 1.0
        """The factor that `unscale_and_check` applies: estimate / total of the counts, over the loss scale."""
        self.scaler: LossScale | None = run.scaler
        """The loss scale; None without one."""
        self.reporter = UpdateReporter(run.trainer, run.optimizer_steps)
        self.status = UpdateStatus()
        """The status of the update in progress."""
        self._run = run

    def windows(self, batches: Iterable[Any], accumulate: int, *, move: Move | None) -> Iterator[Window]:
        """Group batches into windows of `accumulate`."""
        hooks = self._run.trainer._hooks
        count = hooks.count if accumulate > 1 or hooks.overrides_count else None  # a single mean needs no count
        return windows(batches, accumulate, rows=hooks.rows, count=count, move=move)

    def begin(self, window: Window) -> None:
        """Begin the update of a window: its numbers, its status, and a copy of what a skipped one restores."""
        run = self._run
        run.tracker.begin(window)
        self.status = UpdateStatus()
        for one in run.optimizer_steps.all.steps:
            one.norm = one.used_lrs = None
            if len(one.optimizer.param_groups) != one.groups:
                run.take_groups()
        if run.snapshot is not None:
            run.snapshot.capture()

    def finish_backward(self, window: Window) -> Any:
        """Complete the gradients after the last `backward` of a window; return its loss if user code reads it.

        The factor that they lack is found here, and applied by `unscale_and_check`: at once where user code reads them.
        """
        run = self._run
        loss = run.tracker.window_loss
        self.all_reduce_gradients(window)
        missing = self.pending_factor = window.missing_factor
        if self.scaler is not None:
            self.pending_factor = missing * self.scaler.inv_scale()
            self.status.is_scaled = True
        if run.trainer._hooks.overrides_update:
            self.unscale_and_check(run.gradients)
        return None if loss is None else self.complete_loss(loss, missing)

    def all_reduce_gradients(self, window: Window) -> None:
        """Average the gradients over the ranks, where `backward` has not; no-op for one process."""

    def complete_loss(self, loss: Tensor, factor: Count) -> Tensor:
        """Return the loss of the window: `loss` was weighted without `factor`, which was not known yet."""
        return loss * factor if isinstance(factor, Tensor) or factor != 1.0 else loss

    def unscale_and_check(self, gradients: Gradients) -> Tensor | None:
        """Unscale the gradients and check them, in one pass: they are multiplied by `pending_factor`.

        Returns the flag of values that are not finite, a 0-dim tensor; None where nothing is checked.
        """
        factor, self.pending_factor = self.pending_factor, 1.0
        if self._run.checks:
            return gradients.multiply_and_check(factor)
        if isinstance(factor, Tensor) or factor != 1.0:
            gradients.multiply(factor)
        return None

    def check(self, found_inf: Tensor | None, chosen: SelectedOptimizers) -> bool:
        """Return whether the chosen optimizers may step; raise where the policy says so."""
        raise NotImplementedError

    def refuse(self, chosen: SelectedOptimizers) -> bool:
        """Return whether a step that was made and undone counts as applied; raise where the policy says so."""
        raise NotImplementedError

    def adapt_scale(self, scaler: LossScale) -> None:
        """Adapt the loss scale at the end of an update. No-op here."""

    def weight_of_minimized(self, loss: StepLoss) -> Count:
        """Return the weight of a loss that `minimize` was given."""
        return loss.weight

    def all_reduce_minimized(self, parameters: Sequence[Tensor]) -> Count:
        """Return the factor that is missing from the gradients of a loss that `minimize` was given."""
        return 1.0

    def all_reduce_closure_loss(self, loss: Any, gradients: Gradients) -> Any:
        """Return the loss of a closure, over all ranks."""
        return loss

    def before_step(self, optimizer: Optimizer, *, closure: bool) -> None:
        """Prepare a step of an optimizer, which the user may make by hand. No-op for one process."""

    def synchronize(self) -> None:
        """Do the work of all ranks together between updates. No-op for one process."""

    def report(self, window: Window) -> None:
        """Report the update of a window to the observers; a deferred check may raise for an earlier one."""

    def discard(self) -> None:
        """Drop the results of the current window, which is run again."""
        run = self._run
        run.gradients.zero()
        self.status, self.pending_factor = UpdateStatus(), 1.0
        for one in run.optimizer_steps.all.steps:
            one.norm, one.factor, one.scale = None, 1.0, None
        if not self.updates_ahead:  # else an earlier update may have raised the flag, which is not read yet
            run.optimizer_steps.lower_flags()

    def flush(self) -> None:
        """Wait for the numbers of all updates; raise if one is not finite. No-op where they are read at once."""

    def close(self) -> None:
        """Release the memory that only updates need, at the end of the run."""
        self.update = self._run.trainer.update

    def regroup(self) -> None:
        """Take over the optimizers' parameters as they are grouped now. No-op here."""
