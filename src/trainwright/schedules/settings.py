"""`BuiltinSchedule`: the base class of schedule settings, with checks, `bind` and `plot`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from trainwright.core.checks import check_choice, check_number, check_whole, settings_text
from trainwright.core.durations import Epochs
from trainwright.core.errors import SettingError
from trainwright.core.plan import Plan
from trainwright.schedules.bound import BoundSchedule
from trainwright.schedules.lengths import check_length
from trainwright.schedules.table import BareOptimizer, TableSchedule, TableSpec


class BuiltinSchedule:
    """Base class of schedule settings: subclasses are frozen dataclasses that implement `spec` or override `bind`."""

    __slots__ = ()

    def bind(self, optimizer: Optimizer, plan: Plan) -> BoundSchedule:
        """Return the schedule of an optimizer for a plan; SettingError if the plan contradicts the settings."""
        return TableSchedule(self.spec, optimizer, plan, text=settings_text(self))

    def spec(self, plan: Plan) -> TableSpec:
        """Return how to build torch's scheduler for this plan, and the updates before which to step it."""
        raise NotImplementedError

    def plot(
        self,
        *,
        updates: int,
        lr: float | Sequence[float] = 1.0,
        updates_per_epoch: int | None = None,
        path: str | Path | None = None,
    ) -> Any:
        """Plot the learning rate of each update; return a matplotlib Figure, and save it to `path` if given.

        Args:
            updates: The number of updates of the run.
            lr: The learning rate of the optimizer, or one per parameter group. 1.0 shows the factors of it.
            updates_per_epoch: The updates of an epoch; required for lengths in epochs.
            path: The file to write.

        Raises:
            SettingError: For a schedule that depends on the validations of a run.
        """
        from trainwright.core.figures import schedule_figure

        rows = _rates_by_update(self, updates=updates, lr=lr, updates_per_epoch=updates_per_epoch)
        return schedule_figure(rows, title=settings_text(self), updates_per_epoch=updates_per_epoch, path=path)

    def _check_number(self, *names: str, **bounds: Any) -> None:
        """Check fields by the bounds of `check_number`."""
        for name in names:
            value = getattr(self, name)
            written = f"{type(self).__name__}({name}={value!r})"
            check_number(value, written, **bounds)

    def _check_choice(self, name: str, *choices: object) -> None:
        check_choice(getattr(self, name), type(self).__name__, name, choices=choices)

    def _check_length(self, name: str, *, least: float | None = None, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is not None or not optional:
            check_length(value, f"{type(self).__name__}({name}={{}})", least=least)


def values_of(settings: Any) -> list[Any]:
    """Return the values of the fields of a dataclass."""
    return [getattr(settings, field.name) for field in fields(settings)]


def _rates_by_update(
    schedule: Any, *, updates: int, lr: float | Sequence[float], updates_per_epoch: int | None
) -> list[list[float]]:
    """Return the rates of all groups for each update of a run, on a `BareOptimizer`."""
    own = tuple(lr) if isinstance(lr, Sequence) else (lr,)
    for value in own:
        check_number(value, f"plot(lr={lr!r})", least=0)
    check_whole(updates, f"plot(updates={updates!r})")
    given = [rate for value in values_of(schedule) for rate in (value if isinstance(value, tuple) else [value])]
    if updates_per_epoch is not None:
        check_whole(updates_per_epoch, f"plot(updates_per_epoch={updates_per_epoch!r})")
    elif any(isinstance(value, Epochs) or value == "epoch" for value in given):
        raise SettingError(
            f"{settings_text(schedule)} counts epochs, whose length is unknown",
            fix=f"plot(updates={updates}, updates_per_epoch=100)",
        )
    optimizer = BareOptimizer([{"lr": float(value)} for value in own])
    bound = schedule.bind(optimizer, Plan(max_updates=updates, epoch_updates=updates_per_epoch))
    if bound.monitor is not None or "validation" in given:
        raise SettingError(
            f"{settings_text(schedule)} cannot be drawn: its rates depend on the validations of a run",
            fix="result = trainer.fit(...); result.plot()   # draws the rates that were used",
        )
    rows = []
    for update in range(updates):
        bound.apply(update)
        rows.append([float(group["lr"]) for group in optimizer.param_groups])
        if updates_per_epoch is not None and not (update + 1) % updates_per_epoch:
            bound.epoch_ended()
    return rows
