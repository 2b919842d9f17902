"""Epochs of unequal length: schedules that count epochs follow; a total that was computed from others is refused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import chain, groupby, islice, pairwise
from math import ceil
from typing import Any

from trainwright.core.errors import DataError
from trainwright.core.plan import NEVER, LengthDependency, Plan
from trainwright.core.progress import Counters
from trainwright.data.source import Source
from trainwright.schedules.rates import Rates
from trainwright.update.window import Window


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan(Plan):
    """The plan of a run in progress: finished epochs with their real lengths, those to come as planned."""

    past: tuple[tuple[int, int], ...] = ()
    """For each finished epoch, the windows of all epochs up to its end, and the clock of applied updates there."""
    now: int | None = None
    """Windows of the current epoch, where they are known to differ from the plan; NEVER: more than planned."""
    dependencies: list[LengthDependency] | None = None
    """Where settings that are computed from the lengths of epochs are recorded; None: nowhere."""

    def updates_in(self, epoch: int) -> int | None:
        """Windows of one epoch: its updates, where none is skipped."""
        done = len(self.past)
        if epoch < done:
            return self.past[epoch][0] - (self.past[epoch - 1][0] if epoch else 0)
        return self.now if epoch == done and self.now is not None else self._planned_in(epoch)

    def updates_until(self, epoch: int) -> int | None:
        """Windows of all epochs before `epoch`."""
        done = len(self.past)
        if epoch <= done:
            return self.past[epoch - 1][0] if epoch else 0
        begun = self.past[-1][0] if done else 0
        if self.now is not None:
            begun, done = begun + self.now, done + 1
        first, last = self._planned_until(done), self._planned_until(epoch)
        return None if first is None or last is None else begun + last - first

    def clock_after(self, epoch: int) -> int | None:
        """The clock of applied updates at the end of `epoch` epochs; skipped updates do not move it."""
        if epoch <= len(self.past):
            return self.past[epoch - 1][1] if epoch else 0
        windows, clock = self.past[-1] if self.past else (0, 0)
        until = self.updates_until(epoch)
        return None if until is None else clock + until - windows

    def add_dependency(self, dependency: LengthDependency) -> None:
        """Record a setting that was computed from the lengths of epochs."""
        if self.dependencies is not None:
            self.dependencies.append(dependency)

    @property
    def untracked(self) -> Plan:
        """The same plan, without a record of dependencies."""
        return replace(self, dependencies=None)

    @property
    def planned(self) -> Plan:
        """The plan before the first epoch."""
        return replace(self, past=(), now=None, dependencies=None)

    @property
    def updates(self) -> int | None:
        """Updates of the stage. A schedule of the user's own that reads it in `bind` depends on it."""
        self.add_dependency(LengthDependency("the schedule", lambda plan: plan.updates, is_total=True))
        return self._total()


class EpochLengths:
    """The plan of a run, in which finished epochs have their real lengths.

    An epoch may have more or fewer windows than planned: data may be a function of the epoch, a `__len__` may be wrong,
    and the length of a batch sampler may change. Schedules that count the ends of epochs follow. A setting that was
    computed from the planned length (a total, a warm-up in epochs) cannot: DataError, before another update uses it.
    """

    def __init__(self, plan: Plan, source: Source, counters: Counters) -> None:
        self.plan = RunPlan(**{field.name: getattr(plan, field.name) for field in fields(Plan)})
        self._source, self._counters = source, counters
        self._dependencies: list[LengthDependency] = []
        """Settings that slots have computed from the planned lengths."""
        self._rates: list[Rates] = []
        self._matters = False
        """Whether any rate or setting depends on the lengths."""

    @property
    def tracked(self) -> RunPlan:
        """The plan to bind slots with: settings that they compute from lengths are recorded."""
        return replace(self.plan, dependencies=self._dependencies)

    def follow(self, rates: Iterable[Rates]) -> None:
        """Plan these rates anew where epochs have other lengths. Called when all slots are bound."""
        self._rates = list(rates)
        self._matters = bool(self._dependencies) or any(one.follows_epochs for one in self._rates)

    def check_announced(self) -> None:
        """Compare the length that the data give for the current epoch with the planned one."""
        plan, batches = self.plan, self._source.length
        if not self._matters or plan.epoch_updates is not None or batches is None:
            return
        windows = ceil(batches / self._accumulated)
        if windows != plan.updates_in(self._counters.epoch):
            self._compare(windows, f"{batches} batches", known=True)

    def checked(self, windows: Iterator[Window]) -> Iterator[Window]:
        """The remaining windows of the epoch; DataError where a schedule was planned for more or fewer."""
        expected = self.plan.updates_in(self._counters.epoch) if self._matters else None
        if expected is None:
            return windows
        return chain(islice(windows, max(0, expected - self.made)), self._beyond(windows, expected))

    def epoch_ended(self) -> None:
        """Record the length of a finished epoch, in windows and on the clock."""
        plan, clock = self.plan, self._counters.updates
        planned = plan.clock_after(len(plan.past) + 1)
        begun = plan.past[-1][0] if plan.past else 0
        self.plan = replace(plan, past=(*plan.past, (begun + self.made, clock)), now=None)
        if self._matters and planned != clock:
            self._replan()

    def state_dict(self) -> list[list[int]]:
        """The finished epochs as runs of equal ones: [how many, windows of each, applied updates of each]."""
        each = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise([(0, 0), *self.plan.past])]
        return [[len(list(group)), *alike] for alike, group in groupby(each)]

    def load_state_dict(self, tree: list[list[int]]) -> None:
        """Take over the finished epochs; schedules are planned anew where these were not as planned."""
        past = [(0, 0)]
        for number, windows, updates in tree:
            past += [(past[-1][0] + (k + 1) * windows, past[-1][1] + (k + 1) * updates) for k in range(number)]
        planned = self.plan.planned
        self.plan = replace(self.plan, past=tuple(past[1:]))
        if any({windows, clock} != {planned.clock_after(epoch)} for epoch, (windows, clock) in enumerate(past)):
            self._replan(loaded=True)

    def _beyond(self, windows: Iterator[Window], expected: int) -> Iterator[Window]:
        """The windows after the planned number of them, once their existence has been compared with the plan."""
        made = self.made
        if made < expected:
            self._compare(made, f"{self._counters.batch} batches", known=True)
            return
        window = next(windows, None)
        if window is not None:
            self._compare(NEVER, f"more than {self._counters.batch} batches", known=False)
            yield window
            yield from windows

    def _compare(self, windows: int, found: str, *, known: bool) -> None:
        """Set the length of the current epoch; DataError where a setting was computed from another one."""
        plan = self.plan
        real = replace(plan, now=windows if known else plan.updates_in(self._counters.epoch) + 1)  # type: ignore[operator]
        wrong = [one for one in self._dependencies if one.value is None or one.value(real) != one.value(plan)]
        if wrong:
            raise self._refused(wrong, found, real=real, known=known)
        self.plan = replace(plan, now=windows)
        self._replan()

    def _replan(self, *, loaded: bool = False) -> None:
        """Plan the schedules that count the ends of epochs anew; all of them after a checkpoint was loaded."""
        for rates in self._rates:
            if loaded or rates.follows_epochs:
                rates.replan(self.plan)

    @property
    def _accumulated(self) -> int:
        return self.plan.accumulated(self._counters.epoch)

    @property
    def made(self) -> int:
        """Windows of the current epoch that were trained on."""
        return ceil(self._counters.batch / self._accumulated)

    def _refused(self, wrong: list[LengthDependency], found: str, *, real: RunPlan, known: bool) -> DataError:
        plan, counters = self.plan, self._counters
        number = counters.earlier_epochs + counters.epoch + 1
        settings = ", ".join(dict.fromkeys(one.asked_by for one in wrong))
        planned = f"{plan.updates_in(counters.epoch)} updates"
        if plan.epoch_updates is None:
            planned = f"{plan.batches} batches ({planned})"
        return DataError(
            f"epoch {number} of the training data is not as long as planned: {settings} was computed from its length",
            have=f"{found} in epoch {number}",
            want=f"{planned}, as {'epoch_updates says' if plan.epoch_updates else 'the data said at the start'}",
            fix=_cure(wrong, plan, epoch=counters.epoch, length=real.updates_in(counters.epoch) if known else None),
        )


def _cure(wrong: list[LengthDependency], plan: RunPlan, *, epoch: int, length: int | None) -> str:
    """Return what to write: the total in updates; lengths of schedules in updates; or the length of epochs."""
    cures = []
    if any(one.is_total for one in wrong) and plan.epochs is not None:
        # Epochs to come are taken to be as long as this one.
        total: Any = "n" if length is None else (plan.updates_until(epoch) or 0) + length * (plan.epochs - epoch)
        beside = "" if plan.max_updates is None else f" and max_updates={plan.max_updates}"
        cures.append(f"fit(..., max_updates={total}) in the place of epochs={plan.epochs}{beside}")
    if plan.epoch_updates is not None:
        cures.append("epoch_updates=n, as many as each epoch has")
    if any(not one.is_total for one in wrong):
        lengths = ", ".join(dict.fromkeys(one.asked_by for one in wrong if not one.is_total))
        cures.append(f"Updates(n) in the place of epochs in {lengths}")
    return "; ".join(cures)
