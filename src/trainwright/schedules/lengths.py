"""Lengths in schedules: what may be written, and which updates it means in a plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from difflib import get_close_matches
from functools import partial
from itertools import count
from typing import Any

from trainwright.core.durations import Epochs, Seconds, Updates
from trainwright.core.errors import SettingError, message
from trainwright.core.plan import FAR, Need, Plan

Length = Updates | Epochs | float
"""A span, or a fraction of the run as a float below 1."""


_EXAMPLES = {
    "Cosine": "Cosine(warmup=0.1)",
    "Cyclic": "Cyclic(1e-4, 1e-2)",
    "Exponential": "Exponential(0.95)",
    "Linear": "Linear()",
    "MultiStep": "MultiStep([0.5, 0.75])",
    "OneCycle": "OneCycle(max_lr=1e-2)",
    "Plateau": 'Plateau("val_loss")',
    "StepLR": "StepLR(Epochs(30), gamma=0.1)",
    "WarmupStableDecay": "WarmupStableDecay(warmup=0.1, decay=0.2)",
}
_OTHER_NAMES = {"cosineannealing": "Cosine", "reduceonplateau": "Plateau", "step": "StepLR", "wsd": "WarmupStableDecay"}


def no_schedule(value: object) -> SettingError:
    """Build the error for what is no schedule; where it is the name of one, with the line to write."""
    meant = _schedule_named(value) if isinstance(value, str) else None
    hint = "" if meant is None else f" Did you mean {_EXAMPLES[meant]}?"
    return SettingError(
        message(
            f"schedule={value!r} is no schedule.{hint}",
            want=f"{', '.join(f'{name}(...)' for name in _EXAMPLES)}, TorchSchedule(...), "
            "or a function (update, total) -> factor",
            fix=f"schedule={_EXAMPLES[meant or 'Cosine']}",
        )
    )


def _schedule_named(name: str) -> str | None:
    plain = "".join(letter for letter in name.lower() if letter.isalnum())
    known = {one.lower(): one for one in _EXAMPLES} | _OTHER_NAMES
    near = get_close_matches(plain, known, n=1) or get_close_matches(plain.removesuffix("lr"), known, n=1)
    return known[near[0]] if near else None


def check_length(value: object, written: str, *, least: float | None = None) -> None:
    """Refuse what is no length; `written` is how the setting reads, with `{}` at the value's place.

    A fraction must lie above 0; with `least=0` it may be 0 as well.
    """
    if isinstance(value, Updates | Epochs):
        return
    if isinstance(value, Seconds):
        fix = f"{written.format('Epochs(1)')} or {written.format('Updates(500)')}"
        raise SettingError(message(f"{written.format(value)}: seconds cannot be planned in updates", fix=fix))
    if isinstance(value, float) and 0 <= value < 1 and (value > 0 or least == 0):
        return
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
    like = value if number and isinstance(value, int | float) else 10
    raise SettingError(
        message(
            f"{written.format(repr(value))} has no unit" if number else f"{written.format(repr(value))} is no length",
            want="a span, or a fraction of the run as a float below 1",
            fix=f"{written.format(f'Epochs({like})')} or {written.format(f'Updates({max(1, round(like))})')}",
        )
    )


def check_warmup(value: object, owner: str) -> None:
    """Refuse a warm-up that is no length; None and 0.0 are none at all."""
    if value is not None:
        check_length(value, f"{owner}(warmup={{}})", least=0)


def warmup_updates(warmup: Length | None, plan: Plan, owner: str) -> int:
    """Updates of the warm-up in this plan; 0 without one."""
    return 0 if warmup is None else plan.in_updates(warmup, f"{owner}(warmup=)")


def end_of(length: Length, plan: Plan, *, start: int, asked_by: str) -> int:
    """The update at which a length that begins at update `start` is over.

    Epochs are those of the plan: where `accumulate` changes, they have different numbers of updates.
    """
    if not isinstance(length, Epochs):
        return start + plan.in_updates(length, asked_by)

    def end(plan: Plan) -> int:
        plan.in_updates(length, asked_by)
        return plan.in_updates(Epochs(epoch_at(plan, start) + length.n), asked_by)

    plan.note(Need(asked_by, end))
    return end(plan.quiet)


def start_of(length: Length, plan: Plan, *, end: int, asked_by: str) -> int:
    """The update at which a length that is over at update `end` begins; below 0 where it is longer than that."""
    if not isinstance(length, Epochs):
        return end - plan.in_updates(length, asked_by)

    def start(plan: Plan) -> int:
        plan.in_updates(length, asked_by)
        first = epoch_at(plan, end) - length.n
        return plan.in_updates(Epochs(first), asked_by) if first > 0 else (0 if first == 0 else -1)

    plan.note(Need(asked_by, start))
    return start(plan.quiet)


def every(
    length: Length, plan: Plan, *, warmup: Length | None, start: int, asked_by: str
) -> Callable[[], Iterator[int]]:
    """Makes the endless, rising updates at which a length is over that is repeated from the end of the warm-up.

    `start`: the update at which the warm-up is over. Whole epochs that are counted from the end of an epoch end with
    the epochs of the run, whatever their lengths; others are computed from the planned lengths.
    """
    if not isinstance(length, Epochs):
        updates = plan.in_updates(length, asked_by)
        return partial(count, start + updates, updates)
    quiet = plan.quiet
    quiet.in_updates(length, asked_by)  # raises where epochs have no length
    if length.n * (plan.planned.updates_in(0) or 0) < 1:
        raise SettingError(message(f"{asked_by}: {length} is shorter than one update", fix="use Updates(1)"))
    if is_whole(length) and (start == 0 or is_whole(warmup)):
        begun, n = int(warmup.n) if start and isinstance(warmup, Epochs) else 0, int(length.n)
        return lambda: (clock_after(begun + k * n, quiet) for k in count(1))
    plan.note(Need(asked_by, None))
    first = epoch_at(quiet, start)
    return lambda: (quiet.in_updates(Epochs(first + k * length.n), asked_by) for k in count(1))


def is_whole(length: Length | None) -> bool:
    """Whether a length is a whole number of epochs, whose end is the end of an epoch."""
    return isinstance(length, Epochs) and length.n == int(length.n)


def clock_after(epochs: int, plan: Plan) -> int:
    """The clock of applied updates when so many epochs are over."""
    clock = plan.ends_until(epochs)
    return FAR if clock is None else clock


def constant(length: Length, plan: Plan, asked_by: str) -> int:
    """A length in updates that is the same wherever it begins; Epochs of different lengths are refused."""
    updates = plan.quiet.in_updates(length, asked_by)
    if isinstance(length, Epochs):
        plan.note(Need(asked_by, None))
    elif isinstance(length, float):
        plan.in_updates(length, asked_by)
    if isinstance(length, Epochs) and len({plan.planned.updates_in(first) for first, _ in plan.accumulate}) > 1:
        raise SettingError(
            message(
                f"{asked_by}: {length} is no fixed number of updates, for accumulate changes during the run",
                want="a length that is the same in every cycle",
                fix=f"Updates({updates})",
            )
        )
    return updates


def epoch_at(plan: Plan, update: int) -> float:
    """Where update `update` lies, in epochs."""
    epoch = 0
    while (plan.updates_until(epoch + 1) or 0) <= update:
        epoch += 1
    return epoch + (update - (plan.updates_until(epoch) or 0)) / (plan.updates_in(epoch) or 1)


def settings_text(schedule: Any) -> str:
    """The settings as they are written, the same in every process: functions by name, never by address."""
    shown = [
        f"{field.name}={_shown(getattr(schedule, field.name))}"
        for field in fields(schedule)
        if field.default is MISSING or getattr(schedule, field.name) != field.default
    ]
    return f"{type(schedule).__name__}({', '.join(shown)})"


def _shown(value: Any) -> str:
    if isinstance(value, partial):
        keywords = [f"{name}={_shown(given)}" for name, given in value.keywords.items()]
        return f"partial({', '.join([_shown(value.func), *map(_shown, value.args), *keywords])})"
    if callable(value):
        return str(getattr(value, "__qualname__", type(value).__qualname__))
    return repr(value)
