"""`Plan`: the planned numbers of micro-batches, updates and epochs of a run, and durations in updates."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from math import ceil
from typing import Any, NamedTuple

from trainwright.core.durations import Epochs, Seconds, Updates
from trainwright.core.errors import SettingError

NEVER = 1 << 62
"""The end of an epoch of unknown length: a number of updates that no run reaches."""


class LengthDependency(NamedTuple):
    """A value that was computed from the planned lengths of epochs, and may change if an epoch has another length."""

    asked_by: str
    value: Callable[[Plan], object] | None
    """Computes the value from a plan. None: any other epoch length makes it wrong."""
    is_total: bool = False
    """Whether the value is the number of updates of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plan of a `fit`, computed before its first update. The console prints it as the header."""

    model: str = ""
    parameters: int = 0
    frozen: int = 0
    """The number of parameters that do not require a gradient."""
    device: str = "cpu"
    precision: str = "as it is"
    train: str = ""
    val: str = ""
    batches: int | None = None
    """Micro-batches per epoch; None if the data have no length."""
    rows: int | None = None
    batch_size: int | None = None
    accumulate: tuple[tuple[int, int], ...] = ((0, 1),)
    """Pairs of a first epoch and the micro-batches per update from there on."""
    epochs: int | None = None
    max_updates: int | None = None
    max_seconds: float | None = None
    epoch_updates: int | None = None
    finished: str = ""
    """The directory of a finished run, whose result is loaded without training; else empty."""
    settings: tuple[str, ...] = ()
    """Schedule, clip, average and frozen modules, as short texts such as `clip 1.0`."""
    watched: tuple[str, ...] = ()
    """The numbers that early stopping, the checkpoint and schedules monitor."""
    notes: tuple[str, ...] = ()
    """Further lines of the header: switches of the process, automatic choices and their reasons."""
    hyperparameters: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """For observers: the trainer's settings as text, as in a checkpoint, and the numbers of its optimizers."""
    run: str = field(default="", compare=False)
    """The id of the run, which later stages and resumed runs share; empty before `fit`."""

    # For a run in progress: finished epochs have their real lengths, later ones the planned lengths.

    past: tuple[tuple[int, int], ...] = field(default=((0, 0),), repr=False)
    """For 0, 1, 2, ... finished epochs: the number of windows and of applied updates so far."""
    now: int | None = field(default=None, repr=False)
    """Windows of the current epoch, if they are known to differ from the plan. NEVER: more than planned."""
    dependencies: list[LengthDependency] | None = field(default=None, repr=False, compare=False)
    """Records the values that are computed from the lengths of epochs. None: no record."""

    def _repr_html_(self) -> str:
        """Return the plan as an HTML table, for a notebook."""
        from trainwright.core.figures import html_pairs

        known = {one.name: getattr(self, one.name) for one in fields(self) if one.repr and one.compare}
        accumulate = (
            "" if self.accumulate == ((0, 1),) else ", ".join(f"{k} from epoch {n}" for n, k in self.accumulate)
        )
        return html_pairs({**known, "accumulate": accumulate, "updates": self.untracked.updates})

    def accumulated(self, epoch: int) -> int:
        """Return the micro-batches per update in `epoch`."""
        return [k for first, k in self.accumulate if first <= epoch][-1]

    def updates_in(self, epoch: int) -> int | None:
        """Return the number of windows of one epoch, which are its updates unless some are skipped; None: unknown."""
        done = len(self.past) - 1
        if epoch < done:
            return self.past[epoch + 1][0] - self.past[epoch][0]
        if epoch == done and self.now is not None:
            return self.now
        if self.epoch_updates is not None:
            return self.epoch_updates
        return None if self.batches is None else ceil(self.batches / self.accumulated(epoch))

    def updates_until(self, epoch: int) -> int | None:
        """Return the number of windows of all epochs before `epoch`; None if it is unknown."""
        done = len(self.past) - 1
        if epoch <= done:
            return self.past[epoch][0]
        # Epochs of equal length are multiplied, not iterated: there may be a billion of them.
        firsts = sorted({done, done + 1, *(first for first, _ in self.accumulate if done < first < epoch), epoch})
        lengths = [(last - first, self.updates_in(first)) for first, last in pairwise(firsts)]
        known = [number * length for number, length in lengths if length is not None]
        return self.past[-1][0] + sum(known) if len(known) == len(lengths) else None

    def clock_after(self, epoch: int) -> int | None:
        """Return the applied updates after `epoch` epochs, without skipped ones; None if they are unknown."""
        if epoch < len(self.past):
            return self.past[epoch][1]
        windows, clock = self.past[-1]
        until = self.updates_until(epoch)
        return None if until is None else clock + until - windows

    def add_dependency(self, dependency: LengthDependency) -> None:
        """Record a value that is computed from the lengths of epochs."""
        if self.dependencies is not None:
            self.dependencies.append(dependency)

    @property
    def untracked(self) -> Plan:
        """The same plan without a record of dependencies."""
        return replace(self, dependencies=None)

    @property
    def planned(self) -> Plan:
        """The plan as it was before the first epoch, without a record of dependencies."""
        return replace(self, past=((0, 0),), now=None, dependencies=None)

    @property
    def updates(self) -> int | None:
        """The updates of the stage, the total of schedules; None if it is unknown."""
        # A custom schedule that reads this in `bind` depends on it.
        self.add_dependency(LengthDependency("the schedule", lambda plan: plan.updates, is_total=True))
        by_epochs = None if self.epochs is None else self.updates_until(self.epochs)
        known = [n for n in (by_epochs, self.max_updates) if n is not None]
        return min(known) if known and (self.epochs is None or by_epochs is not None) else self.max_updates

    def horizon(self, asked_by: str) -> int:
        """Return `updates`; SettingError if it is unknown. `asked_by`: the setting that needs it."""
        total = self.untracked.updates
        if total is None:
            raise SettingError(
                f"{asked_by} needs the total number of updates, and {self.train or 'the training data'} has no length",
                want="data with a length, or the number of updates",
                fix="fit(..., max_updates=10_000)",
            )
        self.add_dependency(LengthDependency(asked_by, lambda plan: plan.updates, is_total=True))
        return total

    def in_updates(self, duration: Updates | Epochs | Seconds | float, asked_by: str) -> int:
        """Return a duration, or a fraction of the run below 1, as a number of updates, rounded and at least 1."""
        if isinstance(duration, Updates):
            return duration.n
        if isinstance(duration, Seconds):
            raise SettingError(
                f"{asked_by}: {duration} cannot be planned in updates", fix="use Updates(n) or Epochs(n)"
            )
        if isinstance(duration, Epochs):
            self.add_dependency(LengthDependency(asked_by, lambda plan: plan.in_updates(duration, asked_by)))
            return max(1, self._epochs_in_updates(duration, asked_by))
        if isinstance(duration, bool) or not isinstance(duration, float) or not 0 <= duration < 1:
            raise SettingError(
                f"{asked_by}: {duration!r} is no length",
                want="Updates(n), Epochs(n), or a fraction of the run as a float below 1",
                fix=f"Updates({duration})" if isinstance(duration, int) and duration > 0 else "Updates(500)",
            )
        return max(1, round(duration * self.horizon(asked_by))) if duration else 0

    def epoch_at(self, update: int, asked_by: str) -> float:
        """Return the position of an update in epochs; SettingError if epochs have no length."""

        def end(epoch: int) -> int:
            return self._epochs_in_updates(Epochs(epoch + 1), asked_by)

        most = 1
        while end(most) <= update:
            most *= 2
        epoch = bisect_right(range(most), update, key=end)
        begin = end(epoch - 1) if epoch else 0
        return epoch + (update - begin) / (end(epoch) - begin)

    def _epochs_in_updates(self, duration: Epochs, asked_by: str) -> int:
        full = int(duration.n)
        before, inside = self.updates_until(full), self.updates_in(full)
        if before is None or inside is None:
            raise SettingError(
                f"{asked_by}: {duration} cannot be counted in updates, for {self.train or 'the training data'} "
                "has no length",
                fix="use Updates(n), or fit(..., epoch_updates=n)",
            )
        return before + round((duration.n - full) * inside)
