"""Epochs of unequal length: schedules that count epochs follow; a total that was computed from others is refused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, groupby, islice, pairwise
from math import ceil
from typing import Any

from trainwright.core.errors import DataError
from trainwright.core.plan import NEVER, LengthDependency, Plan
from trainwright.core.progress import Counters
from trainwright.data.source import Source
from trainwright.schedules.bound import BoundSchedule
from trainwright.update.window import Window


class EpochLengths:
    """The plan of a run, in which finished epochs have their real lengths.

    An epoch may have more or fewer windows than planned: data may be a function of the epoch, a `__len__` may be wrong,
    and the length of a batch sampler may change. Schedules that count the ends of epochs follow. A setting that was
    computed from the planned length (a total, a warm-up in epochs) cannot: DataError, before another update uses it.
    """

    def __init__(self, plan: Plan, source: Source, counters: Counters) -> None:
        self.plan, self._source, self._counters = plan, source, counters
        self._dependencies: list[LengthDependency] = []
        """Settings that slots have computed from the planned lengths."""
        self._schedules: list[BoundSchedule] = []
        self._matters = False
        """Whether any rate or setting depends on the lengths."""

    @property
    def tracked(self) -> Plan:
        """The plan to bind slots with: settings that they compute from lengths are recorded."""
        return replace(self.plan, dependencies=self._dependencies)

    def follow(self, schedules: Iterable[BoundSchedule]) -> None:
        """Plan these schedules again where epochs have other lengths. Called when all slots are bound."""
        self._schedules = list(schedules)
        self._matters = bool(self._dependencies) or any(schedule.follows_epochs for schedule in self._schedules)

    @property
    def made(self) -> int:
        """Windows of the current epoch that were trained on."""
        return ceil(self._counters.batch / self.plan.accumulated(self._counters.epoch))

    def checked(self, windows: Iterator[Window]) -> Iterator[Window]:
        """The remaining windows of the epoch; DataError where a setting was computed from more or fewer."""
        if not self._matters:
            return windows
        if self.plan.epoch_updates is None and self._source.length not in (None, self.plan.batches):
            self._compare_announced(self._source.length)
        planned = self.plan.updates_in(self._counters.epoch)
        if planned is None:
            return windows
        return chain(islice(windows, max(0, planned - self.made)), self._beyond(windows, planned))

    def _compare_announced(self, batches: int) -> None:
        """Compare the length that the data give for the current epoch with the planned one."""
        windows = ceil(batches / self.plan.accumulated(self._counters.epoch))
        if windows != self.plan.updates_in(self._counters.epoch):
            self._compare(windows, f"{batches} batches", known=True)

    def _beyond(self, windows: Iterator[Window], planned: int) -> Iterator[Window]:
        """The windows after the planned number of them, after comparing their number with the plan."""
        if self.made < planned:
            self._compare(self.made, f"{self._counters.batch} batches", known=True)
            return
        window = next(windows, None)
        if window is not None:
            self._compare(NEVER, f"more than {self._counters.batch} batches", known=False)
            yield window
            yield from windows

    def epoch_ended(self) -> None:
        """Record the length of a finished epoch, in windows and on the clock."""
        plan, clock = self.plan, self._counters.updates
        planned = plan.clock_after(len(plan.past))
        self.plan = replace(plan, past=(*plan.past, (plan.past[-1][0] + self.made, clock)), now=None)
        if self._matters and planned != clock:
            self._replan()

    def state_dict(self) -> list[list[int]]:
        """The finished epochs as runs of equal ones: [how many, windows of each, applied updates of each]."""
        each = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(self.plan.past)]
        return [[len(list(group)), *alike] for alike, group in groupby(each)]

    def load_state_dict(self, tree: list[list[int]]) -> None:
        """Take over the finished epochs; schedules are planned again where these were not as planned."""
        past = [(0, 0)]
        for number, windows, updates in tree:
            past += [(past[-1][0] + (k + 1) * windows, past[-1][1] + (k + 1) * updates) for k in range(number)]
        planned = self.plan.planned
        self.plan = replace(self.plan, past=tuple(past))
        if any({windows, clock} != {planned.clock_after(epoch)} for epoch, (windows, clock) in enumerate(past)):
            self._replan(loaded=True)

    def _compare(self, windows: int, measured: str, *, known: bool) -> None:
        """Set the length of the current epoch; DataError where a setting was computed from another one."""
        plan = self.plan
        real = replace(plan, now=windows if known else plan.updates_in(self._counters.epoch) + 1)  # type: ignore[operator]
        wrong = [each for each in self._dependencies if each.value is None or each.value(real) != each.value(plan)]
        if wrong:
            raise self._refused(wrong, measured, real=real, known=known)
        self.plan = replace(plan, now=windows)
        self._replan()

    def _replan(self, *, loaded: bool = False) -> None:
        """Plan the schedules that count the ends of epochs again; all of them after a checkpoint was loaded."""
        for schedule in self._schedules:
            if loaded or schedule.follows_epochs:
                schedule.replan(self.plan)

    def _refused(self, wrong: list[LengthDependency], measured: str, *, real: Plan, known: bool) -> DataError:
        plan, counters = self.plan, self._counters
        number = counters.earlier_epochs + counters.epoch + 1
        settings = ", ".join(dict.fromkeys(dependency.asked_by for dependency in wrong))
        planned = f"{plan.updates_in(counters.epoch)} updates"
        if plan.epoch_updates is None:
            planned = f"{plan.batches} batches ({planned})"
        return DataError(
            f"epoch {number} of the training data is not as long as planned: {settings} was computed from its length",
            have=f"{measured} in epoch {number}",
            want=f"{planned}, as {'epoch_updates says' if plan.epoch_updates else 'the data said at the start'}",
            fix=_cure(wrong, plan, epoch=counters.epoch, length=real.updates_in(counters.epoch) if known else None),
        )


def _cure(wrong: list[LengthDependency], plan: Plan, *, epoch: int, length: int | None) -> str:
    """Return what to write: the total in updates; lengths of schedules in updates; or the length of epochs."""
    cures = []
    if any(dependency.is_total for dependency in wrong) and plan.epochs is not None:
        # Epochs to come are taken to be as long as this one.
        total: Any = "n" if length is None else (plan.updates_until(epoch) or 0) + length * (plan.epochs - epoch)
        beside = "" if plan.max_updates is None else f" and max_updates={plan.max_updates}"
        cures.append(f"fit(..., max_updates={total}) in the place of epochs={plan.epochs}{beside}")
    if plan.epoch_updates is not None:
        cures.append("epoch_updates=n, as many as each epoch has")
    if any(not dependency.is_total for dependency in wrong):
        lengths = ", ".join(dict.fromkeys(dependency.asked_by for dependency in wrong if not dependency.is_total))
        cures.append(f"Updates(n) in the place of epochs in {lengths}")
    return "; ".join(cures)
