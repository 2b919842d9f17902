"""The helpers of an `update` of the user's own: one loss for one optimizer, and a step that calls a closure."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainwright.core import host_reads
from trainwright.core.errors import SettingError, message
from trainwright.core.records import Count
from trainwright.modules.dtensors import is_sharded
from trainwright.update import nonfinite_policy

if TYPE_CHECKING:
    from trainwright.fit.run import Run
    from trainwright.update.optimizer_steps import Chosen


def backward_of(run: Run, loss: Any, name: str | None) -> tuple[Tensor, Count, bool]:
    """Zero the gradients of one optimizer, and run `loss` backward.

    Returns it in the user's own scale, what it counts, and whether it is a plain sum over that.
    """
    chosen = run.steppers.one(name, "minimize(loss)")
    chosen.gradients.zero()
    ledger = run.ledger
    step_loss = ledger.record_minimized(loss)
    weight = run.strategy.weight_of_minimized(step_loss)
    torch.autograd.backward((step_loss.loss,), (ledger.root_gradient(step_loss.loss, weight),))
    if all(parameter.grad is None for parameter in chosen.gradients.parameters):
        raise nonfinite_policy.reaches_nothing(chosen.steppers[0].name if run.steppers.named else "")
    missing = run.strategy.reduce_minimized(chosen.gradients.parameters)
    run.strategy.factor = missing if run.scaler is None else missing * run.scaler.factor()
    if step_loss.count is None:  # a plain sum is reported per row
        assert ledger.window is not None
        return step_loss.mean, sum(ledger.window.rows), True
    return step_loss.mean, step_loss.count, False


class _HeldBack(Exception):
    """Leaves an optimizer's step before it has changed anything."""


def step_by_closure(run: Run, closure: Callable[[], Any], name: str | None) -> bool:
    """One step of an optimizer that evaluates loss and gradient itself, as often as it likes (LBFGS).

    Each evaluation is clipped. The first is judged like that of any update, before anything has changed. Later ones
    are trials that a line search may give up, so that what is judged after the step is whether the weights are finite;
    where they are not, those from before are put back, and the optimizer forgets what it had gathered.
    """
    chosen = run.steppers.one(name, "apply_gradients(closure=...)")
    (stepper,) = chosen.steppers
    _refuse_shards(chosen)
    optimizer: Any = stepper.optimizer
    weights = chosen.gradients.parameters
    before = [p.detach().clone() for p in weights] if run.checks else []
    norms: list[Any] = []

    def evaluate() -> Any:
        with torch.enable_grad():
            loss = closure()
        loss = run.strategy.reduce_closure_loss(loss, chosen.gradients)
        found_inf = run.strategy.scale_gradients(chosen.gradients)
        stepper.limit()
        if not norms:
            if not run.strategy.check(found_inf, chosen):
                raise _HeldBack
            norms.append(stepper.norm)
        stepper.norm = norms[0]  # what is told is the norm of the window's gradient, not that of a trial
        chosen.gradients.lower_flags()
        return loss

    if not _has_stepped(run, optimizer, evaluate):
        return False
    if not run.checks or _all_finite(weights):
        return True
    with torch.no_grad():
        torch._foreach_copy_(weights, before)
    optimizer.state.clear()
    return run.strategy.refuse(chosen)


def _has_stepped(run: Run, optimizer: Any, evaluate: Callable[[], Any]) -> bool:
    """Have an optimizer step by a closure of ours; whether it did, or its first gradient was held back."""
    run.strategy.in_closure = True
    try:
        optimizer.step(evaluate)
    except _HeldBack:
        return False
    finally:
        run.strategy.in_closure = False
    return True


def _refuse_shards(chosen: Chosen) -> None:
    if is_sharded(*chosen.gradients.parameters):
        name = type(chosen.steppers[0].optimizer).__name__
        what = f"{name} looks along all weights at once, and FSDP holds them in shards"
        raise SettingError(message(what, fix='parallel="auto", which holds whole weights on every process'))


def _all_finite(weights: list[Tensor]) -> bool:
    return all(host_reads.read([torch.isfinite(weight).all() for weight in weights]))


def note_minimized(run: Run, returned: Any) -> None:
    """Report the losses that were minimized, where `update` itself returned no number of that name."""
    given = returned if isinstance(returned, dict) else {}
    minimized = run.outcome.minimized
    for name, told in minimized.items():
        if run.steppers.named and f"loss_{name}" not in given:
            run.ledger.note_told(f"loss_{name}", told)
    run.ledger.note_sum(list(minimized.values()))
