"""`UpdateStrategy`: completes, unscales and checks the gradients of each update, and applies the non-finite policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from trainwright.core.records import Count
from trainwright.precision.base import LossScale
from trainwright.update import nonfinite_policy
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
    """The status of the current update; each window starts with a new one."""

    applied: bool | None = None
    """Whether `apply_gradients` has applied gradients; None if it was not called."""
    stepped: bool = False
    """Whether an optimizer has made a step; observed in a custom `update` only."""
    stepping: bool = False
    """Whether such a step has begun."""
    overflowed: bool | None = None
    """Whether a gradient was non-finite; None if none was checked."""
    is_scaled: bool = False
    """Whether `compute_gradients` has computed gradients with the loss scale."""
    restores: bool = False
    """Whether `on_nonfinite="skip"` has skipped a step, so that buffers and `state` are restored at the end."""
    minimizing: tuple[Tensor, Count, bool] | None = None
    """The loss given to `minimize` until it is checked, its count, and whether it is a sum."""
    minimized: dict[str, list[Term]] = field(default_factory=dict)
    """The losses given to `minimize` by optimizer name, with their counts."""

    @property
    def is_refused(self) -> bool:
        """Whether the policy or the loss scale has refused every step."""
        return self.applied is False and not self.stepped


class UpdateStrategy:
    """The stages of an update that a run calls. A run has one strategy, chosen before its first update.

    This class reads loss, flag and norms before each step, in one read, and applies the policy. `DeferredCheck` checks
    on the device instead; `DistributedCheck` averages over the ranks first.

    `update`: makes the update of a window: the method of the trainer, or a wrapper that splits windows after an
    out-of-memory error.
    """

    updates_ahead = 0
    """The most updates between the current one and the last one whose numbers were read."""
    counted: Count | None = None
    """The count of the loss over all ranks; None for one process, and for a plain sum."""
    in_closure = False
    """Whether an optimizer step runs that calls the closure of `step_by_closure`."""

    def __init__(self, run: Run, update: Callable[[Window], Any]) -> None:
        self.update = update
        self.step: Callable[[Any], Any] = run.trainer.training_step
        """Runs the step of a micro-batch."""
        self.backward_args: Callable[[Any], BackwardArgs] = run.tracker.backward_args
        """Returns the arguments of `torch.autograd.backward`; records the loss, unless `step` does (several ranks)."""
        self.pending_factor: Count = 1.0
        """The factor for `unscale_and_check` to apply: the missing factor of the window / the loss scale."""
        self.scaler: LossScale | None = run.host_scaler
        """The loss scale; None without one."""
        self.reporter = UpdateReporter(run.trainer, run.optimizer_steps)
        self.reports = self.reporter.is_needed
        """Whether `report` does anything."""
        self.status = UpdateStatus()
        """The status of the current update."""
        self._run = run

    def windows(self, batches: Iterable[Any], accumulate: int, *, move: Move | None) -> Iterator[Window]:
        """Group batches into windows of `accumulate`."""
        hooks = self._run.trainer._hooks
        count = hooks.count if accumulate > 1 or hooks.overrides_count else None  # a single mean needs no count
        return windows(batches, accumulate, rows=hooks.rows, count=count, move=move)

    def begin(self, window: Window) -> None:
        """Begin the update of a window: reset its numbers and status, and capture the snapshot."""
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

        Sets `pending_factor`. If user code may read the gradients, `unscale_and_check` applies it at once.
        """
        run = self._run
        loss = run.tracker.window_loss
        missing = self.pending_factor = window.missing_factor
        if self.scaler is not None:
            self.pending_factor = missing * self.scaler.inv_scale()
            self.status.is_scaled = True
        if run.trainer._hooks.has_custom_update:
            self.unscale_and_check(run.gradients)
        return None if loss is None else self.complete_loss(loss, missing)

    def complete_loss(self, loss: Tensor, factor: Count) -> Tensor:
        """Return the loss of the window: `loss`, which was weighted before `factor` was known, times `factor`."""
        return loss * factor if isinstance(factor, Tensor) or factor != 1.0 else loss

    def unscale_and_check(self, gradients: Gradients) -> Tensor | None:
        """Multiply the gradients by `pending_factor` and check them, in one pass.

        Returns the flag for non-finite values, a 0-dim tensor; None if nothing is checked.
        """
        factor, self.pending_factor = self.pending_factor, 1.0
        if self._run.checks:
            return gradients.multiply_and_check(factor)
        if isinstance(factor, Tensor) or factor != 1.0:
            gradients.multiply(factor)
        return None

    def check(self, found_inf: Tensor | None, chosen: SelectedOptimizers) -> bool:
        """Return whether the chosen optimizers may step; NonFiniteError for a non-finite update under "raise"."""
        tracker, status = self._run.tracker, self.status
        if status.minimizing is not None:
            return self._check_minimized(status.minimizing, found_inf, chosen)
        if self.scaler is not None and not status.is_scaled:
            raise nonfinite_policy.not_scaled()
        overflowed, _ = self.read(found_inf, chosen)
        return self.may_step(chosen, tracker.loss if tracker.has_loss else 0.0, overflowed=overflowed)

    def read(
        self, found_inf: Tensor | None, chosen: SelectedOptimizers, *more: float | Tensor
    ) -> tuple[bool, list[float]]:
        """Read recorded numbers, norms and `more` at once; return whether a gradient overflowed, and `more`."""
        flags = () if found_inf is None else (found_inf,)
        norms = {one: one.norm for one in chosen.steps if one.norm is not None}
        numbers = iter(self._run.tracker.read(*flags, *norms.values(), *more))
        overflowed = found_inf is not None and next(numbers) != 0.0
        for one in norms:
            one.norm = norm = next(numbers)
            # The norm of finite elements can overflow; clipping would then set the gradient to zero.
            overflowed = overflowed or (found_inf is not None and not math.isfinite(norm))
        return overflowed, list(numbers)

    def may_step(self, chosen: SelectedOptimizers, loss: float, *, overflowed: bool) -> bool:
        """Return whether the chosen optimizers may step, given the loss; NonFiniteError under the policy "raise"."""
        status = self.status
        if overflowed or (self._run.checks and not math.isfinite(loss)):
            applied = self.apply_policy(chosen, overflowed=overflowed, loss=loss)
            status.applied = applied or status.applied is True  # one applied step makes it an applied update
            return applied
        status.applied = True
        status.overflowed = status.overflowed is True
        return True

    def apply_policy(self, chosen: SelectedOptimizers, *, overflowed: bool, loss: float) -> bool:
        """Return whether a non-finite update is applied; NonFiniteError under the policy "raise"."""
        run, scaler, status = self._run, self.scaler, self.status
        trainer, tracker = run.trainer, run.tracker
        verdict = nonfinite_policy.verdict_of(
            trainer.on_nonfinite,
            loss_is_finite=math.isfinite(loss),
            gradient_is_finite=not overflowed,
            scaled=scaler is not None,
            at_floor=scaler is not None and scaler.at_floor,
        )
        status.overflowed = overflowed or status.overflowed is True
        run.gradients.lower_flags()
        chosen.gradients.lower_flags()
        status.restores = status.restores or verdict == "skip"
        if verdict == "raise":
            if run.snapshot is not None:
                run.snapshot.restore()
            norm, counted = chosen.steps[0].norm, self.counted
            if counted is None and tracker.has_loss:
                counted = tracker.counted
            raise nonfinite_policy.error(
                update=run.counters.earlier_updates + run.counters.updates + 1,
                loss=loss,
                lr=chosen.steps[0].lrs[0],
                norm=norm if isinstance(norm, float) else None,
                counted=None if counted is None else float(counted),
                unchanged=not trainer._hooks.has_custom_update,
                find_origin=run.find_origin,
            )
        return verdict == "apply"

    def _check_minimized(
        self, minimizing: tuple[Tensor, Count, bool], found_inf: Tensor | None, chosen: SelectedOptimizers
    ) -> bool:
        """Check as `check` does, with the loss given to `minimize`."""
        loss, count, is_sum = minimizing
        status = self.status
        status.minimizing = None
        overflowed, (value, counted) = self.read(found_inf, chosen, loss, count)
        status.minimized.setdefault(chosen.steps[0].name, []).append((value, counted, is_sum))
        return self.may_step(chosen, value, overflowed=overflowed)

    def adapt_scale(self, scaler: LossScale) -> None:
        """Adapt the loss scale once per update; StepError for a step whose gradients were not checked or not scaled."""
        status, self.reporter.loss_scale = self.status, scaler.scale
        if status.overflowed is not None:
            scaler.adapt(status.overflowed)
        elif status.stepped:
            raise nonfinite_policy.not_checked() if status.is_scaled else nonfinite_policy.not_scaled()

    def refuse(self, chosen: SelectedOptimizers) -> bool:
        """Apply the policy to a step that was made and undone; return whether it counts as applied."""
        run = self._run
        self.status.stepped = False
        loss = run.tracker.loss if run.tracker.has_loss else 0.0
        self.status.applied = applied = self.apply_policy(chosen, overflowed=True, loss=loss)
        return applied

    def weight_of_minimized(self, loss: StepLoss) -> Count:
        """Return the weight of a loss given to `minimize`."""
        return loss.weight

    def all_reduce_minimized(self, parameters: Sequence[Tensor]) -> Count:
        """Average the gradients of a loss given to `minimize` over the ranks; return their missing factor."""
        return 1.0

    def all_reduce_closure_loss(self, loss: Any, gradients: Gradients) -> Any:
        """Return the loss of a closure over all ranks."""
        return loss

    def before_step(self, optimizer: Optimizer, *, closure: bool) -> None:
        """Called before each optimizer step, also a manual one of the user. No-op for one process."""

    def synchronize(self) -> None:
        """Called between updates by all ranks, about once a second. No-op for one process."""

    def report(self, window: Window) -> None:
        """Report the update of a window to the observers."""
        self.reporter.report(window, skipped=self.status.is_refused)

    def discard(self) -> None:
        """Drop the results of the current window, before it is run again."""
        run = self._run
        run.gradients.zero()
        self.status, self.pending_factor = UpdateStatus(), 1.0
        for one in run.optimizer_steps.all.steps:
            one.norm, one.factor, one.scale = None, 1.0, None
        if not self.updates_ahead:  # otherwise an earlier update may have raised a flag that is not read yet
            run.optimizer_steps.lower_flags()

    def flush(self) -> None:
        """Wait for the numbers of all updates, and check them. No-op if they are read at each update."""

    def close(self) -> None:
        """Release the memory that only updates need, at the end of the run."""
        self.update = self._run.trainer.update

    def regroup(self) -> None:
        """Called after changes of the optimizers' parameter groups, and at the start of epochs. No-op here."""
