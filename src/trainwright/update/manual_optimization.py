"""Custom updates: `minimize` for one loss and one optimizer, steps with a closure, and the recording of losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainwright.core import host_reads
from trainwright.core.errors import SettingError
from trainwright.core.records import Count
from trainwright.modules.dtensors import is_sharded
from trainwright.update import nonfinite_policy

if TYPE_CHECKING:
    from trainwright.fit.run import Run
    from trainwright.update.optimizer_steps import SelectedOptimizers
    from trainwright.update.window import Window


class ManualUpdate:
    """Wraps a custom `update`; records its losses and returned numbers when it ends."""

    def __init__(self, run: Run, update: Callable[[Window], Any]) -> None:
        self._run, self._update = run, update

    def __call__(self, window: Window) -> Any:
        """Make the update of a window; return the result of the user's method."""
        run = self._run
        returned = self._update(window)
        if returned is not None and (not run.tracker.has_loss or isinstance(returned, dict)):
            run.tracker.record_returned(returned)
        if run.strategy.status.minimized:
            _record_minimized(run, returned)
        run.tracker.read()
        run.optimizer_steps.lower_flags()  # raised, perhaps, by gradients that were computed but not applied
        status = run.strategy.status
        if status.restores and (status.applied or status.stepped) and run.snapshot is not None:
            run.snapshot.restore()  # the step of one optimizer was applied, that of another skipped
        return returned


def backward_of(run: Run, loss: Any, name: str | None) -> tuple[Tensor, Count, bool]:
    """Zero the gradients of one optimizer, and run the backward of `loss`.

    Returns the unscaled loss, its count, and whether the loss is a sum.
    """
    chosen = run.optimizer_steps.one(name, "minimize(loss)")
    chosen.gradients.zero()
    tracker = run.tracker
    step_loss = tracker.record_minimized(loss)
    weight = run.strategy.weight_of_minimized(step_loss)
    torch.autograd.backward((step_loss.loss,), (tracker.grad_tensor(step_loss.loss, weight),))
    if all(parameter.grad is None for parameter in chosen.gradients.parameters):
        raise nonfinite_policy.reaches_nothing(chosen.steps[0].name if run.optimizer_steps.named else "")
    missing = run.strategy.all_reduce_minimized(chosen.gradients.parameters)
    run.strategy.pending_factor = missing if run.scaler is None else missing * run.scaler.inv_scale()
    if step_loss.count is None:  # a plain sum is reported per row
        assert tracker.window is not None
        return step_loss.mean, sum(tracker.window.rows), True
    return step_loss.mean, step_loss.count, False


class _Refused(Exception):
    """Raised in a closure to leave the optimizer's step before it has changed anything."""


def step_by_closure(run: Run, closure: Callable[[], Any], name: str | None) -> bool:
    """Make one step of an optimizer that evaluates loss and gradient repeatedly, such as LBFGS; return if it was made.

    Gradients of each evaluation are clipped. The first evaluation is checked as in any update, before anything is
    changed; later ones are trials of a line search. After the step, the weights are checked. If they are not finite,
    the earlier weights are restored, and the state of the optimizer is cleared.
    """
    chosen = run.optimizer_steps.one(name, "apply_gradients(closure=...)")
    (step,) = chosen.steps
    _refuse_shards(chosen)
    optimizer: Any = step.optimizer
    weights = chosen.gradients.parameters
    before = [p.detach().clone() for p in weights] if run.checks else []
    norms: list[Any] = []

    def evaluate() -> Any:
        with torch.enable_grad():
            loss = closure()
        loss = run.strategy.all_reduce_closure_loss(loss, chosen.gradients)
        found_inf = run.strategy.unscale_and_check(chosen.gradients)
        step.measure_and_clip()
        if not norms:
            if not run.strategy.check(found_inf, chosen):
                raise _Refused
            norms.append(step.norm)
        step.norm = norms[0]  # report the norm of the window's gradient, not that of a trial
        chosen.gradients.lower_flags()
        return loss.detach() if isinstance(loss, Tensor) else loss  # LBFGS of torch 2.8 warns of a loss with a graph

    if not _has_stepped(run, optimizer, evaluate):
        return False
    if not run.checks or _all_finite(weights):
        return True
    with torch.no_grad():
        torch._foreach_copy_(weights, before)
    optimizer.state.clear()
    return run.strategy.refuse(chosen)


def _has_stepped(run: Run, optimizer: Any, evaluate: Callable[[], Any]) -> bool:
    """Make the step; return False if its first gradient was refused."""
    run.strategy.in_closure = True
    try:
        optimizer.step(evaluate)
    except _Refused:
        return False
    finally:
        run.strategy.in_closure = False
    return True


def _refuse_shards(chosen: SelectedOptimizers) -> None:
    if is_sharded(*chosen.gradients.parameters):
        name = type(chosen.steps[0].optimizer).__name__
        what = f"{name} needs all weights at once, and FSDP shards them"
        raise SettingError(what, fix='parallel="auto", which replicates the weights on every rank')


def _all_finite(weights: list[Tensor]) -> bool:
    return all(host_reads.read([torch.isfinite(weight).all() for weight in weights]))


def _record_minimized(run: Run, returned: Any) -> None:
    """Record the losses given to `minimize`, except names that the custom `update` has returned."""
    given = returned if isinstance(returned, dict) else {}
    minimized = run.strategy.status.minimized
    for name, losses in minimized.items():
        if run.optimizer_steps.named and f"loss_{name}" not in given:
            run.tracker.record_losses(f"loss_{name}", losses)
    run.tracker.record_sum(list(minimized.values()))
