"""How the updates of a run are made: gradients are completed, unscaled and checked; what is not finite is refused."""

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

    This one reads loss, gradients and norms before each step, in one read, and applies the policy to them.
    `DeferredCheck` leaves the check to the device, and `DistributedCheck` averages over the ranks first.

    `update`: makes the update of a window; the trainer's own method, or one around it that splits windows after an
    out-of-memory error.
    """

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
        self.scaler: LossScale | None = run.host_scaler
        """The loss scale; None without one."""
        self.reporter = UpdateReporter(run.trainer, run.optimizer_steps)
        self.reports = self.reporter.is_needed
        """Whether `report` does anything."""
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
        missing = self.pending_factor = window.missing_factor
        if self.scaler is not None:
            self.pending_factor = missing * self.scaler.inv_scale()
            self.status.is_scaled = True
        if run.trainer._hooks.has_custom_update:
            self.unscale_and_check(run.gradients)
        return None if loss is None else self.complete_loss(loss, missing)

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
        """Return whether the chosen optimizers may step: all is finite, or the policy says so; else it raises."""
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
        """Read the recorded numbers, the norms and `more` at once; return whether a gradient overflowed, and `more`."""
        flags = () if found_inf is None else (found_inf,)
        norms = {one: one.norm for one in chosen.steps if one.norm is not None}
        numbers = iter(self._run.tracker.read(*flags, *norms.values(), *more))
        overflowed = found_inf is not None and next(numbers) != 0.0
        for one in norms:
            one.norm = norm = next(numbers)
            # Finite elements can have a norm that overflows: clipping by it would apply a gradient of zeros.
            overflowed = overflowed or (found_inf is not None and not math.isfinite(norm))
        return overflowed, list(numbers)

    def may_step(self, chosen: SelectedOptimizers, loss: float, *, overflowed: bool) -> bool:
        """Return whether the chosen optimizers step by gradients of this loss; raise where the policy says so."""
        status = self.status
        if overflowed or (self._run.checks and not math.isfinite(loss)):
            applied = self.apply_policy(chosen, overflowed=overflowed, loss=loss)
            status.applied = applied or status.applied is True  # one step that was applied makes it an update
            return applied
        status.applied = True
        status.overflowed = status.overflowed is True
        return True

    def apply_policy(self, chosen: SelectedOptimizers, *, overflowed: bool, loss: float) -> bool:
        """Return whether an update whose loss or gradient is not finite is applied; raise where the policy says so."""
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
        """Check as `check` does, by the loss that `minimize` was given."""
        loss, count, is_sum = minimizing
        status = self.status
        status.minimizing = None
        overflowed, (value, counted) = self.read(found_inf, chosen, loss, count)
        status.minimized.setdefault(chosen.steps[0].name, []).append((value, counted, is_sum))
        return self.may_step(chosen, value, overflowed=overflowed)

    def adapt_scale(self, scaler: LossScale) -> None:
        """Adapt the loss scale once, by all that the update has seen."""
        status, self.reporter.loss_scale = self.status, scaler.scale
        if status.overflowed is not None:
            scaler.adapt(status.overflowed)
        elif status.stepped:
            raise nonfinite_policy.not_checked() if status.is_scaled else nonfinite_policy.not_scaled()

    def refuse(self, chosen: SelectedOptimizers) -> bool:
        """Apply the policy to a step that was made and undone; returns whether it counts as applied."""
        run = self._run
        self.status.stepped = False
        loss = run.tracker.loss if run.tracker.has_loss else 0.0
        self.status.applied = applied = self.apply_policy(chosen, overflowed=True, loss=loss)
        return applied

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
        """Report the update of a window to the observers."""
        self.reporter.report(window, skipped=self.status.is_refused)

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
