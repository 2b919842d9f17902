"""Schedules as pictures, before anything is trained: the rates that an optimizer would be given, update by update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from trainwright.core.checks import check_number, check_whole
from trainwright.core.durations import Epochs
from trainwright.core.errors import SettingError, message
from trainwright.core.plan import Plan
from trainwright.protocols import Rates, Schedule
from trainwright.schedules.lengths import settings_text
from trainwright.schedules.table import StandIn


class Drawn:
    """What every schedule has besides `bind`: `plot`."""

    __slots__ = ()

    def plot(
        self: Schedule,
        *,
        updates: int,
        lr: float | Sequence[float] = 1.0,
        updates_per_epoch: int | None = None,
        path: str | Path | None = None,
    ) -> Any:
        """Draw the rate of each of `updates` updates; return a matplotlib Figure, saved under `path` where given.

        `lr` is the rate of the optimizer, or one for each parameter group; 1.0 shows factors of it. Lengths in epochs
        need `updates_per_epoch`. SettingError for a schedule that depends on what a run measures.
        """
        from trainwright.core.figures import schedule_figure

        rows = drawn_rates(self, updates=updates, lr=lr, updates_per_epoch=updates_per_epoch)
        return schedule_figure(rows, title=settings_text(self), updates_per_epoch=updates_per_epoch, path=path)


def drawn_rates(
    schedule: Schedule, *, updates: int, lr: float | Sequence[float], updates_per_epoch: int | None
) -> list[list[float]]:
    """Return the rates of the groups for each update: the schedule is bound to an optimizer without parameters."""
    own = tuple(lr) if isinstance(lr, Sequence) else (lr,)
    for value in own:
        check_number(value, f"plot(lr={lr!r})", least=0)
    check_whole(updates, f"plot(updates={updates!r})")
    if updates_per_epoch is not None:
        check_whole(updates_per_epoch, f"plot(updates_per_epoch={updates_per_epoch!r})")
    elif any(isinstance(value, Epochs) or value == "epoch" for value in _settings(schedule)):
        raise SettingError(
            message(
                f"{settings_text(schedule)} counts epochs, and nothing says how long they are",
                fix=f"plot(updates={updates}, updates_per_epoch=100)",
            )
        )
    groups = StandIn([{"lr": float(value)} for value in own])
    rates = schedule.bind(groups, Plan(max_updates=updates, epoch_updates=updates_per_epoch))
    _check_known(schedule, rates)
    rows = []
    for update in range(updates):
        rates.apply(update)
        rows.append([float(group["lr"]) for group in groups.param_groups])
        if updates_per_epoch is not None and not (update + 1) % updates_per_epoch:
            rates.epoch_ended()
    return rows


def _settings(schedule: Any) -> Iterator[Any]:
    for field in fields(schedule):
        value = getattr(schedule, field.name)
        yield from value if isinstance(value, tuple) else (value,)


def _check_known(schedule: Schedule, rates: Rates) -> None:
    if rates.monitor is not None or "validation" in _settings(schedule):
        raise SettingError(
            message(
                f"{settings_text(schedule)} cannot be drawn: its rates depend on the validations of a run",
                fix="result = trainer.fit(...); result.plot()   # draws the rates that were used",
            )
        )
