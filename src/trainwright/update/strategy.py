"""How the updates of a run are made: the base class of the immediate and of the deferred check."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from trainwright.core.records import Count
from trainwright.precision.base import LossScale
from trainwright.update.nonfinite_policy import Trace
from trainwright.update.reporter import UpdateReporter
from trainwright.update.status import UpdateStatus
from trainwright.update.window import Move, Window, windows

if TYPE_CHECKING:
    from trainwright.fit.run import Run
    from trainwright.optim.gradients import Gradients
    from trainwright.update.loss_tracker import Roots
    from trainwright.update.losses import StepLoss
    from trainwright.update.optimizer_steps import SelectedOptimizers


class UpdateStrategy:
    """How the updates of a run are made. A run has one, chosen before its first update.

    `update`: makes the update of a window; the trainer's own method, or one around it that splits windows after an
    out-of-memory error. `trace`: finds where the update in progress stopped being finite, for the error.
    """

    reports = False
    """Whether `report` does anything."""
    updates_ahead = 0
    """Updates that may have been made since the one whose numbers were read last."""
    counted: Count | None = None
    """The count of the loss of all ranks; None for one process, and for a plain sum."""
    in_closure = False
    """Whether an optimizer is making a step that calls a closure of ours."""

    def __init__(self, run: Run, *, update: Callable[[Window], Any], trace: Callable[[], Trace]) -> None:
        self.update, self.trace = update, trace
        self.step: Callable[[Any], Any] = run.owner.training_step
        """Runs a micro-batch."""
        self.weigh: Callable[[Any], Roots] = run.tracker.weigh
        """Turns the return of `step` into the arguments of `backward`."""
        self.factor: Count = 1.0
        """The factor that is missing from the gradients: one over the loss scale, and estimate / total of counts."""
        self.scaler: LossScale | None = run.scaler
        """The loss scale; None without one."""
        self.reporter = UpdateReporter(run.owner, run.optimizer_steps)
        self.status = UpdateStatus()
        """The status of the update in progress."""
        self._run = run

    def windows(self, batches: Iterable[Any], accumulate: int, *, move: Move | None) -> Iterator[Window]:
        """Group batches into windows of `accumulate`."""
        hooks = self._run.owner._hooks
        count = hooks.count if accumulate > 1 or hooks.counts_itself else None  # a lone mean needs no count
        return windows(batches, accumulate, rows=hooks.rows, count=count, move=move)

    def begin(self, window: Window) -> None:
        """Begin the update of a window: its numbers, its status, and a copy of what a skipped one restores."""
        run = self._run
        run.tracker.begin(window)
        self.status = UpdateStatus()
        for one in run.optimizer_steps.all.steps:
            one.norm = one.used_rates = None
            if len(one.optimizer.param_groups) != one.groups:
                run.take_groups()
        if run.snapshot is not None:
            run.snapshot.capture()

    def close_window(self, window: Window) -> Any:
        """Set the factor that the gradients lack, after the last backward; return the loss if user code reads it.

        Where code of the user reads the gradients, they are multiplied by it at once.
        """
        run = self._run
        loss = run.tracker.window_loss
        missing = self.factor = self.reduce(window)
        if self.scaler is not None:
            self.factor = missing * self.scaler.factor()
            self.status.is_scaled = True
        if run.owner._hooks.updates_itself:
            self.scale_gradients(run.gradients)
        return None if loss is None else self.window_loss(loss, missing)

    def reduce(self, window: Window) -> Count:
        """Return the factor that is missing from the gradients of the window, where counts were found late."""
        return window.missing_factor

    def window_loss(self, loss: Tensor, factor: Count) -> Tensor:
        """Return the loss of the window, of which `loss` was computed before `factor` was known."""
        return loss * factor if isinstance(factor, Tensor) or factor != 1.0 else loss

    def scale_gradients(self, gradients: Gradients) -> Tensor | None:
        """Multiply gradients by the factor that is missing, and check them, in one pass.

        Returns the flag of values that are not finite, a 0-dim tensor; None where nothing is checked.
        """
        factor, self.factor = self.factor, 1.0
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

    def reduce_minimized(self, parameters: Sequence[Tensor]) -> Count:
        """Return the factor that is missing from the gradients of a loss that `minimize` was given."""
        return 1.0

    def reduce_closure_loss(self, loss: Any, gradients: Gradients) -> Any:
        """Return the loss of a closure, over all ranks."""
        return loss

    def before_step(self, optimizer: Optimizer, *, closure: bool) -> None:
        """Prepare a step of an optimizer, which the user may make by hand. No-op for one process."""

    def synchronize(self) -> None:
        """Do the work of all ranks together between updates. No-op for one process."""

    def report(self, window: Window) -> None:
        """Report the update of a window to the observers."""

    def discard(self) -> None:
        """Drop the results of the current window, which is run again."""
        run = self._run
        run.gradients.zero()
        self.status, self.factor = UpdateStatus(), 1.0
        for one in run.optimizer_steps.all.steps:
            one.norm, one.factor, one.scale = None, 1.0, None
        if not self.updates_ahead:  # else an earlier update may have raised the flag, which is not read yet
            run.optimizer_steps.lower_flags()

    def flush(self) -> None:
        """Wait for the numbers of all updates; raise if one is not finite. No-op where they are read at once."""

    def close(self) -> None:
        """Release the memory that only updates need, at the end of the run."""
        self.update = self._run.owner.update

    def regroup(self) -> None:
        """Take over the optimizers' parameters as they are grouped now. No-op here."""
