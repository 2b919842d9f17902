"""The immediate check: loss, gradients and norms are read before the step, and the policy decides."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from trainwright.core.records import Count
from trainwright.core.torch_private import buffer_dict
from trainwright.core.trees import inside
from trainwright.modules.modes import running_statistics
from trainwright.optim.fused import why_not_masked
from trainwright.optim.named import ONLY
from trainwright.precision.base import LossScale
from trainwright.precision.mixed_precision import LossScaler
from trainwright.schedules.bound import BoundSchedule
from trainwright.schedules.table import TableSchedule
from trainwright.update import nonfinite_policy
from trainwright.update.optimizer_steps import SelectedOptimizers
from trainwright.update.strategy import UpdateStrategy
from trainwright.update.window import Window

if TYPE_CHECKING:
    from trainwright.fit.run import Run
    from trainwright.update.trainer_like import TrainerLike


ASYNC_DEVICES = {"cuda", "meta"}
"""The kinds of devices where a read waits for the kernels before it."""


class ImmediateCheck(UpdateStrategy):
    """Reads loss, gradients and norms before each step, in one read, and applies the policy to them."""

    def __init__(self, run: Run, update: Callable[[Window], Any]) -> None:
        super().__init__(run, update)
        self.reports = self.reporter.is_needed

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
            applied = apply_policy(self._run, chosen, overflowed=overflowed, loss=loss)
            status.applied = applied or status.applied is True  # one step that was applied makes it an update
            return applied
        status.applied = True
        status.overflowed = status.overflowed is True
        return True

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
        self.status.applied = applied = apply_policy(run, chosen, overflowed=True, loss=loss)
        return applied

    def report(self, window: Window) -> None:
        """Report the update of a window to the observers."""
        self.reporter.report(window, skipped=self.status.is_refused)


def apply_policy(run: Run, chosen: SelectedOptimizers, *, overflowed: bool, loss: float) -> bool:
    """Return whether an update whose loss or gradient is not finite is applied; raise where the policy says so."""
    trainer, tracker, scaler, status = run.trainer, run.tracker, run.scaler, run.strategy.status
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
        norm, counted = chosen.steps[0].norm, run.strategy.counted
        if counted is None and tracker.has_loss:
            counted = tracker.counted
        raise nonfinite_policy.error(
            update=run.counters.earlier_updates + run.counters.updates + 1,
            loss=loss,
            lr=chosen.steps[0].lrs[0],
            norm=norm if isinstance(norm, float) else None,
            counted=None if counted is None else float(counted),
            unchanged=not trainer._hooks.overrides_update,
            find_origin=run.find_origin,
        )
    return verdict == "apply"


def why_immediate(
    trainer: TrainerLike, *, checks: bool, scaler: LossScale | None, schedules: Mapping[str, BoundSchedule] | None
) -> tuple[str, ...]:
    """Say why the numbers of each update must be read before its step; empty where the check may be deferred.

    `checks`: whether anything is checked. `scaler`: the loss scale. `schedules`: the bound schedules by name, if
    any is bound.
    """
    if trainer.device.type not in ASYNC_DEVICES:
        return ("a read waits for nothing here",)
    return tuple(_why_not_deferred(trainer, checks=checks, scaler=scaler, schedules=schedules))


def _why_not_deferred(
    trainer: TrainerLike, *, checks: bool, scaler: LossScale | None, schedules: Mapping[str, BoundSchedule] | None
) -> list[str]:
    """Return the settings for which a device that works asynchronously must be read before each step."""
    hooks, why = trainer._hooks, list[str]()
    if trainer.world.size > 1:
        why.append("the ranks check an update together")
    if trainer.on_error == "save":
        why.append('on_error="save" saves the update before an error')
    if hooks.overrides_update or hooks.overrides_compute_gradients:
        why.append("an `update` of your own reads what it has done")
    follows = trainer.precision is not None and trainer.precision.follows_updates
    if checks and (follows or hooks.after_update is not None):
        why.append("`after_update` runs after applied updates alone")
    if checks:
        why += [reason for one in trainer.optimizers.values() if (reason := why_not_masked(one))]
    if scaler is not None or trainer.on_nonfinite == "skip":
        why += _why_skips_are_not_deferred(trainer, scaler, schedules)
    return why


def _why_skips_are_not_deferred(
    trainer: TrainerLike, scaler: LossScale | None, schedules: Mapping[str, BoundSchedule] | None
) -> Iterator[str]:
    """Yield why the host must know at once that an update is skipped, by the loss scale or by "skip"."""
    hooks, skips = trainer._hooks, trainer.on_nonfinite == "skip"
    if scaler is not None and type(scaler) is not LossScaler:
        yield "a loss scale of your own"
    if trainer.average is not None:
        yield "an average is taken of applied updates alone"
    if running_statistics(trainer.model):
        yield "BatchNorm statistics are restored with an update that is skipped"
    elif skips and has_buffers(trainer):
        yield "buffers are restored with an update that is skipped"
    if skips and (hooks.overrides_training_step or trainer.state):
        yield '"skip" restores `self.state`'
    plain = all(
        name == ONLY and type(one) is TableSchedule and not one.cycles for name, one in (schedules or {}).items()
    )
    if not plain:
        yield "the schedule sets more than rates, or has a state of its own"


def has_buffers(trainer: TrainerLike) -> bool:
    """Whether the model or the loss has any buffer."""
    roots = [one for one in (trainer.model, trainer.loss) if isinstance(one, nn.Module)]
    modules = (module for root in roots for module in inside(root))
    return any(tensor is not None for module in modules for tensor in buffer_dict(module).values())
