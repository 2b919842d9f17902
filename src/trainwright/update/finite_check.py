"""Reads the numbers of an update before its step, and deals with those that are not finite."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn

from trainwright.core import host_reads
from trainwright.core.errors import first_line
from trainwright.core.trees import inside
from trainwright.modules.modes import running_statistics
from trainwright.optim.fused import why_not_masked
from trainwright.precision.mixed_precision import LossScaler
from trainwright.protocols import Rates, Scaler
from trainwright.schedules.table import TableRates
from trainwright.update import nonfinite_policy
from trainwright.update.optimizer_steps import Chosen
from trainwright.update.reporter import Teller

if TYPE_CHECKING:
    from trainwright.fit.run import Run
    from trainwright.update.owner import Owner


LATE = {"cuda", "meta"}
"""The kinds of devices where a read would wait for what is under way."""


def why_judged_at_once(
    owner: Owner, *, checks: bool, scaler: Scaler | None, rates: Rates | None = None
) -> tuple[str, ...]:
    """Say why the numbers of each update must be read before its step; empty where they may come later.

    `checks`: whether anything is judged. `scaler`: the loss scale. `rates`: the schedule, where it is bound.
    """
    hooks, why = owner.hooks, list[str]()
    if owner.device.type not in LATE:
        why.append("a read waits for nothing here")
    if owner.world.size > 1:
        why.append("several processes judge an update together")
    if owner.on_error == "save":
        why.append('on_error="save" keeps the update before an error')
    if hooks.updates_itself or hooks.computes_itself:
        why.append("an `update` of your own reads what it has done")
    if checks and hooks.after_update is not None:
        why.append("`after_update` runs after applied updates alone")
    if checks:
        why += [reason for one in owner.optimizers.values() if (reason := why_not_masked(one))]
    if scaler is not None or owner.on_nonfinite == "skip":
        why += _why_not_held_back(owner, scaler, rates)
    return tuple(why)


def _why_not_held_back(owner: Owner, scaler: Scaler | None, rates: Rates | None) -> Iterator[str]:
    """Why the host must know at once which updates a loss scale, or "skip", holds back."""
    hooks, skips = owner.hooks, owner.on_nonfinite == "skip"
    if scaler is not None and type(scaler) is not LossScaler:
        yield "a loss scale of your own"
    if owner.average is not None:
        yield "an average is taken of applied updates alone"
    if running_statistics(owner.model):
        yield "BatchNorm statistics are put back with an update that is held back"
    elif skips and has_buffers(owner):
        yield "buffers are put back with an update that is held back"
    if skips and (hooks.steps_itself or owner.state):
        yield '"skip" puts `self.state` back'
    if rates is not None and (type(rates) is not TableRates or rates.cycles):
        yield "the schedule sets more than rates, or keeps a state of its own"


def has_buffers(owner: Owner) -> bool:
    """Whether the model or the loss has any buffer."""
    roots = [one for one in (owner.model, owner.loss) if isinstance(one, nn.Module)]
    return any(tensor is not None for root in roots for module in inside(root) for tensor in module._buffers.values())


def bind_late(run: Run) -> None:
    """Choose how a run makes its updates, when it judges them, and who watches them."""
    owner = run.owner
    why = why_judged_at_once(owner, checks=run.checks, scaler=run.scaler, rates=run.rates)
    owner.between.judged_at_once = why
    if not why:
        from trainwright.update.deferred_check import Behind

        run.behind = Behind(run)
    run.teller = run.behind or Teller(owner, run.steppers) or None
    owner.between.splits = None
    if owner.on_oom is not None:
        from trainwright.acceleration.oom import Splitting

        owner.between.splits = Splitting(run)
        run.update = owner.between.splits.update


def read_numbers(run: Run, flag: Tensor | None, chosen: Chosen) -> tuple[bool, float]:
    """Read loss, flag and norms in one go; returns whether a gradient is not finite, and the loss to judge by."""
    ledger, outcome, spread = run.ledger, run.outcome, run.spread
    loss, outcome.losing = outcome.losing, None
    if run.scaler is not None and not outcome.scaled and loss is None:
        raise nonfinite_policy.not_scaled()
    wanted: list[Tensor | float] = [] if flag is None else [flag]
    wanted += () if loss is None else loss[:2]
    wanted += [stepper.norm for stepper in chosen.steppers if stepper.norm is not None]
    wanted += () if spread is None else [spread.reported]
    read = iter(ledger.close(*wanted))  # in the order in which they were asked for
    bad = flag is not None and next(read) != 0.0
    value = ledger.loss if ledger.noted else 0.0
    if loss is not None:
        value = next(read)
        outcome.minimized.setdefault(chosen.steppers[0].name, []).append((value, next(read), loss[2]))
    for stepper in chosen.steppers:
        if stepper.norm is not None:
            stepper.norm = norm = next(read)
            # Finite elements can have a norm that overflows: clipping by it would apply a gradient of zeros.
            bad = bad or (flag is not None and not host_reads.finite(norm))
    if spread is not None:  # all processes judge by the same number
        value = next(read)
        ledger.loss = value if spread.is_default else ledger.loss
    return bad, value


def trace(run: Run) -> nonfinite_policy.Trace:
    """Say where the update in hand stopped being finite: the batch, the weights, or a module's forward or backward."""
    from trainwright.diagnostics import not_finite

    try:
        return not_finite.trace(run)
    except Exception as error:  # a batch may hold any object; nothing that it does may replace the error of the update
        return nonfinite_policy.Trace((f"where it began cannot be shown: {first_line(error, 200)}",))


def applies_anyway(run: Run, chosen: Chosen, *, bad: bool, loss: float) -> bool:
    """Deal with a loss or gradient that is not finite, as the policy says."""
    owner, ledger, scaler, outcome, spread = run.owner, run.ledger, run.scaler, run.outcome, run.spread
    verdict = nonfinite_policy.judge(
        owner.on_nonfinite,
        loss_is_finite=host_reads.finite(loss),
        gradient_is_finite=not bad,
        scaled=scaler is not None,
        at_floor=scaler is not None and scaler.at_floor,
    )
    outcome.overflowed = bad or outcome.overflowed is True
    run.gradients.lower_flags()
    chosen.gradients.lower_flags()
    outcome.left_out = outcome.left_out or verdict == "skip"
    if verdict == "raise":
        run.statistics.put_back()
        norm = chosen.steppers[0].norm
        own = ledger.counted if ledger.noted else None
        counted = own if spread is None or spread.counted is None else float(spread.counted)
        raise nonfinite_policy.error(
            update=run.counters.earlier_updates + run.counters.updates + 1,
            loss=loss,
            lr=chosen.steppers[0].rates[0],
            norm=norm if isinstance(norm, float) else None,
            counted=counted,
            whole=not owner.hooks.updates_itself,
            trace=partial(trace, run),
        )
    return verdict == "apply"
