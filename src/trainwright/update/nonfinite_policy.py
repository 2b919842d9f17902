"""The policy for updates whose loss or gradient is NaN or infinite, and its errors.

| `on_nonfinite` | effect if the loss or a gradient is NaN or infinite                                           |
| "raise"        | no step; BatchNorm statistics are restored; `NonFiniteError` states where the NaN occurred    |
| "skip"         | no step; buffers and `state` are restored; counted in `skipped`, not by schedules             |
| "ignore"       | the step is made; without a loss scale nothing is checked                                     |

With a loss scale, an overflowed gradient with a finite loss is due to the scale, whatever the policy: no step is made,
buffers keep their new values if these are finite, and the scale is lowered. At the minimum scale the policy applies.
The loss of a skipped update is part of the mean of its epoch, which is then NaN. After `PATIENCE` consecutive updates
without a step, the run ends with an error.

All ranks decide the same: gradients are averaged before the check, so that a NaN of one rank reaches all; the flag of
sharded gradients is the maximum over ranks; the loss is that of all ranks (`DistributedCheck.may_step`). The deferred
check (`deferred_check.py`) reaches the same verdict on the device; the host reads it up to three updates later.

`strategy.UpdateStrategy` calls `verdict_of` before the step; `deferred_check.DeviceVerdict` computes it on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

from trainwright.core.errors import NonFiniteError, SettingError, StepError
from trainwright.core.suggestions import did_you_mean

Policy = Literal["raise", "skip", "ignore"]
Verdict = Literal["apply", "overflow", "skip"]
PATIENCE = 1000
"""The number of consecutive updates without an applied step after which a run ends with an error."""
POLICIES = ("raise", "skip", "ignore")


class NonFiniteOrigin(NamedTuple):
    """The place where numbers became NaN or infinite, as lines of text, and a fix."""

    lines: tuple[str, ...] = ()
    fix: str = ""
    by_loss: bool = False
    """Whether the loss is the first non-finite number."""


def as_policy(setting: str) -> Policy:
    """Return the policy of `on_nonfinite=`; SettingError for an unknown one."""
    for policy in POLICIES:
        if setting == policy:
            return policy  # type: ignore[return-value]
    what = f"on_nonfinite={setting!r}.{did_you_mean(str(setting), POLICIES)}"
    raise SettingError(what, want='"raise", "skip" or "ignore"')


def verdict_of(
    policy: Policy, *, loss_is_finite: bool, gradient_is_finite: bool, scaled: bool = False, at_floor: bool = False
) -> Verdict | Literal["raise"]:
    """Return the verdict on an update.

    An overflow of a scaled gradient with a finite loss is due to the loss scale, unless that is at its minimum. Both
    are checked, since a finite loss can have an infinite gradient.
    """
    if loss_is_finite and gradient_is_finite:
        return "apply"
    if scaled and not gradient_is_finite and loss_is_finite and not at_floor:
        return "overflow"
    return "apply" if policy == "ignore" else policy


def nothing_applied(span: str, *, skipped: bool) -> NonFiniteError | StepError:
    """Return the error for a run without applied updates; `skipped`: whether updates were skipped by the policy."""
    if skipped:
        return NonFiniteError(
            f"{span} without one update that was applied: every loss or gradient was not finite",
            want="an update now and then",
            fix="look at the data, the learning rate and the initial loss scale",
            where=False,
        )
    return StepError(
        f"{span} without one step of the optimizer",
        want="an update(self, window) that calls apply_gradients()",
        fix="self.apply_gradients()",
        where=False,
    )


def reaches_nothing(name: str) -> StepError:
    """Return the error for a loss given to `minimize` that depends on no weight of the optimizer."""
    whose = f"the optimizer {name!r}" if name else "the optimizer"
    return StepError(
        f"minimize: this loss reaches no weight of {whose}",
        want="a loss that was computed from weights which it trains",
        fix="name the optimizer that is meant, and leave out a .detach() that cuts the way" if name else "",
        where=False,
    )


def not_scaled() -> StepError:
    """Return the error for unscaled gradients of a custom `backward()` under a loss scale."""
    return StepError(
        "precision='fp16' and a backward() of your own: its gradients were not scaled",
        want="gradients whose loss was multiplied by the loss scale",
        fix="self.minimize(loss), or self.compute_gradients(window), in the place of loss.backward()",
        where=False,
    )


def not_checked() -> StepError:
    """Return the error for a step under a loss scale with unchecked gradients."""
    return StepError(
        "precision='fp16' and a step() of your own: an overflow would have gone into the weights",
        want="gradients that are checked before a step, and the loss scale adapted by them",
        fix="self.apply_gradients(), in the place of optimizer.step()",
        where=False,
    )


def error(
    *,
    update: int,
    loss: float,
    lr: float,
    norm: float | None,
    counted: float | None,
    unchanged: bool = True,
    find_origin: Callable[[], NonFiniteOrigin] | None = None,
) -> NonFiniteError:
    """Return the error for a non-finite update, with its loss, learning rate, gradient norm and origin.

    `counted`: the count of the loss. `unchanged`: whether no optimizer has made a step in this update. `find_origin`:
    finds the place where numbers became non-finite.
    """
    what = "gradient" if math.isfinite(loss) else "loss"
    norm_text = "" if norm is None else f", gradient norm {norm:g}"
    origin = NonFiniteOrigin() if find_origin is None or counted == 0 else find_origin()
    fix = origin.fix or "look at the batch and the rate; anomaly() names the line"
    fix += '; on_nonfinite="skip" leaves such updates out'
    if counted == 0:
        fix = "the batch counts nothing (every target is ignored, or every weight is 0): leave such batches out"
    elif what == "loss" and (origin.by_loss or not origin.lines):
        fix += "; if a mean over nothing is the cause, return SumLoss(total, count) from the step"
    effect = "no weight was changed" if unchanged else "it was not applied"
    return NonFiniteError(
        f"update {update}: the {what} is not finite; {effect}",
        have="\n        ".join([f"loss {loss:g}, learning rate {lr:g}{norm_text}", *origin.lines]),
        want="finite numbers",
        fix=fix,
        where=False,
    )
