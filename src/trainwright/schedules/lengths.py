"""Lengths of schedules: `Updates(500)`, `Epochs(1)` or a fraction of the run, converted to updates by a plan.

Values computed from the lengths of epochs are recorded in the plan (`plan.add_dependency`), so that they can be
recomputed if an epoch has another length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count

from trainwright.core.durations import Epochs, Seconds, Updates
from trainwright.core.errors import SettingError
from trainwright.core.plan import NEVER, LengthDependency, Plan

Length = Updates | Epochs | float
"""A duration, or a fraction of the run as a float below 1."""


def check_length(value: object, written: str, *, least: float | None = None) -> None:
    """Raise SettingError for a value that is no length. `written`: the setting as code, with `{}` for the value.

    A fraction must be above 0; with `least=0` it may also be 0.
    """
    if isinstance(value, Updates | Epochs):
        return
    if isinstance(value, Seconds):
        fix = f"{written.format('Epochs(1)')} or {written.format('Updates(500)')}"
        raise SettingError(f"{written.format(value)}: seconds cannot be planned in updates", fix=fix)
    if isinstance(value, float) and 0 <= value < 1 and (value > 0 or least == 0):
        return
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
    like = value if number and isinstance(value, int | float) else 10
    raise SettingError(
        f"{written.format(repr(value))} {'has no unit' if number else 'is no length'}",
        want="a duration, or a fraction of the run as a float below 1",
        fix=f"{written.format(f'Epochs({like})')} or {written.format(f'Updates({max(1, round(like))})')}",
    )


def warmup_updates(warmup: Length | None, plan: Plan, owner: str) -> int:
    """Return the number of updates of the warm-up in this plan; 0 without a warm-up."""
    return 0 if warmup is None else plan.in_updates(warmup, f"{owner}(warmup=)")


def rest_after(plan: Plan, warmup: int, owner: str) -> int:
    """Return the number of updates after the warm-up; SettingError if there are none."""
    total = plan.horizon(owner)
    if warmup >= total:
        raise SettingError(
            f"{owner}(warmup=): the warm-up leaves nothing of the run",
            have=f"{warmup} updates of warm-up, {total} updates in all",
            want="a warm-up that is shorter than the run",
            fix="warmup=0.1",
        )
    return total - warmup


def end_of(length: Length, plan: Plan, *, start: int, asked_by: str) -> int:
    """Return the update at which a length ends that starts at update `start`.

    Epochs are those of the plan, whose numbers of updates differ if `accumulate` changes.
    """
    if not isinstance(length, Epochs):
        return start + plan.in_updates(length, asked_by)

    def end(plan: Plan) -> int:
        return plan.in_updates(Epochs(plan.epoch_at(start, asked_by) + length.n), asked_by)

    plan.add_dependency(LengthDependency(asked_by, end))
    return end(plan.untracked)


def start_of(length: Length, plan: Plan, *, end: int, asked_by: str) -> int:
    """Return the update at which a length starts that ends at update `end`; below 0 if the length is too long."""
    if not isinstance(length, Epochs):
        return end - plan.in_updates(length, asked_by)

    def start(plan: Plan) -> int:
        first = plan.epoch_at(end, asked_by) - length.n
        return plan.in_updates(Epochs(first), asked_by) if first > 0 else (0 if first == 0 else -1)

    plan.add_dependency(LengthDependency(asked_by, start))
    return start(plan.untracked)


def every(
    length: Length, plan: Plan, *, warmup: Length | None, start: int, asked_by: str
) -> Callable[[], Iterator[int]]:
    """Return a function that yields the updates at the ends of a repeated length after the warm-up, without end.

    `start`: the update at which the warm-up ends. An integer number of epochs that starts at the end of an epoch ends
    with the epochs of the run, whatever their lengths. Other numbers are computed from the planned lengths.
    """
    if not isinstance(length, Epochs):
        updates = plan.in_updates(length, asked_by)
        return partial(count, start + updates, updates)
    known = plan.untracked
    first = known.epoch_at(start, asked_by)  # raises if epochs have no length
    if length.n * (plan.planned.updates_in(0) or 0) < 1:
        raise SettingError(f"{asked_by}: {length} is shorter than one update", fix="use Updates(1)")
    if ends_with_epoch(length) and (start == 0 or ends_with_epoch(warmup)):
        begun, n = int(warmup.n) if start and isinstance(warmup, Epochs) else 0, int(length.n)
        return lambda: (end_of_epochs(begun + k * n, known) for k in count(1))
    plan.add_dependency(LengthDependency(asked_by, None))
    return lambda: (known.in_updates(Epochs(first + k * length.n), asked_by) for k in count(1))


def ends_with_epoch(length: Length | None) -> bool:
    """Return whether a length is an integer number of epochs."""
    return isinstance(length, Epochs) and length.n == int(length.n)


def end_of_epochs(epochs: int, plan: Plan) -> int:
    """Return the number of applied updates after `epochs` epochs; NEVER if it is unknown."""
    clock = plan.clock_after(epochs)
    return NEVER if clock is None else clock


def constant(length: Length, plan: Plan, asked_by: str) -> int:
    """Return a length in updates that does not depend on its start; SettingError for epochs of different lengths."""
    if not isinstance(length, Epochs):
        return plan.in_updates(length, asked_by)
    updates = plan.untracked.in_updates(length, asked_by)
    plan.add_dependency(LengthDependency(asked_by, None))
    if len({plan.planned.updates_in(first) for first, _ in plan.accumulate}) > 1:
        raise SettingError(
            f"{asked_by}: {length} is no fixed number of updates, for accumulate changes during the run",
            want="a length that is the same in every cycle",
            fix=f"Updates({updates})",
        )
    return updates
