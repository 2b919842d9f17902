"""The lengths of epochs as a run finds them: schedules follow, or the run is refused where it was planned by others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import chain, groupby, islice, pairwise
from math import ceil
from typing import Any

from trainwright.core.errors import DataError, message
from trainwright.core.plan import FAR, Need, Plan
from trainwright.core.progress import Counters
from trainwright.protocols import Source
from trainwright.schedules.rates import Rates
from trainwright.update.window import Window


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan(Plan):
    """The plan as a run knows it: the epochs that are over as they were, those to come as planned."""

    past: tuple[tuple[int, int], ...] = ()
    """For each finished epoch, the windows of all epochs up to its end, and the clock of applied updates there."""
    now: int | None = None
    """Windows of the epoch in hand, where they are known to be other than planned; FAR: more than planned."""
    needs: list[Need] | None = None
    """What was computed from the lengths of epochs, where that is noted."""

    def updates_in(self, epoch: int) -> int | None:
        """Windows of one epoch, which are its updates where none is held back."""
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

    def ends_until(self, epoch: int) -> int | None:
        """The clock of applied updates when `epoch` epochs are over; updates that are held back do not move it."""
        if epoch <= len(self.past):
            return self.past[epoch - 1][1] if epoch else 0
        windows, clock = self.past[-1] if self.past else (0, 0)
        until = self.updates_until(epoch)
        return None if until is None else clock + until - windows

    def note(self, need: Need) -> None:
        """Note what is computed from the lengths of epochs: it is compared when one has another length."""
        if self.needs is not None:
            self.needs.append(need)

    @property
    def quiet(self) -> Plan:
        """The same plan, which notes nothing."""
        return replace(self, needs=None)

    @property
    def planned(self) -> Plan:
        """The plan as it was before any epoch had run."""
        return replace(self, past=(), now=None, needs=None)

    @property
    def updates(self) -> int | None:
        """Updates of the whole stage; whoever reads it while a schedule is bound depends on it."""
        self.note(Need("the schedule", lambda plan: plan.updates, is_total=True))
        return self._total()


class Lengths:
    """The plan of a run with the epochs that are over as they really were.

    An epoch may have more or fewer windows than planned: data may be a function of the epoch, a `__len__` may be wrong,
    and the length of a batch sampler may change. Schedules that count the ends of epochs follow. What was computed
    from the planned length (a total, a warm-up in epochs) cannot: DataError, before another update is made by it.
    """

    def __init__(self, plan: Plan, source: Source, counters: Counters) -> None:
        self.plan = RunPlan(**{field.name: getattr(plan, field.name) for field in fields(Plan)})
        self._source, self._counters = source, counters
        self.needs: list[Need] = []
        """What slots have computed from the planned lengths."""
        self._rates: Rates | None = None
        self._matters = False
        """Whether any rate, or anything else, depends on the lengths."""

    @property
    def noting(self) -> RunPlan:
        """The plan for slots to be bound by: what they compute from lengths is noted."""
        return replace(self.plan, needs=self.needs)

    def bound(self, rates: Rates | None) -> None:
        """Take the schedules that were bound."""
        self._rates = rates
        self._matters = bool(self.needs) or (rates is not None and rates.follows_epochs)

    def opened(self) -> None:
        """Compare the length that the data of the epoch in hand tell with the planned one."""
        plan, batches = self.plan, self._source.length
        if not self._matters or plan.epoch_updates is not None or batches is None:
            return
        windows = ceil(batches / self._size)
        if windows != plan.updates_in(self._counters.epoch):
            self._found(windows, f"{batches} batches", known=True)

    def watched(self, windows: Iterator[Window]) -> Iterator[Window]:
        """What is left of the epoch's windows; DataError where they are more or fewer than a schedule has planned."""
        expected = self.plan.updates_in(self._counters.epoch) if self._matters else None
        if expected is None:
            return windows
        return chain(islice(windows, max(0, expected - self._made)), self._beyond(windows, expected))

    def ended(self) -> None:
        """Note an epoch that is over, at the clock that it ended at."""
        plan, clock = self.plan, self._counters.updates
        planned = plan.ends_until(len(plan.past) + 1)
        begun = plan.past[-1][0] if plan.past else 0
        self.plan = replace(plan, past=(*plan.past, (begun + self._made, clock)), now=None)
        if self._matters and planned != clock:
            self._replan()

    def state_dict(self) -> list[list[int]]:
        """The epochs that are over: [how many alike, windows, applied updates] of each."""
        each = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise([(0, 0), *self.plan.past])]
        return [[len(list(group)), *alike] for alike, group in groupby(each)]

    def load_state_dict(self, tree: list[list[int]]) -> None:
        """Take over the epochs that are over; schedules are planned anew where they were not as planned."""
        past = [(0, 0)]
        for number, windows, updates in tree:
            past += [(past[-1][0] + (k + 1) * windows, past[-1][1] + (k + 1) * updates) for k in range(number)]
        planned = self.plan.planned
        self.plan = replace(self.plan, past=tuple(past[1:]))
        if any({windows, clock} != {planned.ends_until(epoch)} for epoch, (windows, clock) in enumerate(past)):
            self._replan(loaded=True)

    def _beyond(self, windows: Iterator[Window], expected: int) -> Iterator[Window]:
        """What comes after as many windows as the epoch was to have."""
        made = self._made
        if made < expected:
            self._found(made, f"{self._counters.batch} batches", known=True)
            return
        window = next(windows, None)
        if window is not None:
            self._found(FAR, f"more than {self._counters.batch} batches", known=False)
            yield window
            yield from windows

    def _found(self, windows: int, found: str, *, known: bool) -> None:
        """Take the epoch in hand as having so many windows; DataError where something was computed from others."""
        plan = self.plan
        real = replace(plan, now=windows if known else plan.updates_in(self._counters.epoch) + 1)  # type: ignore[operator]
        wrong = [need for need in self.needs if need.value is None or need.value(real) != need.value(plan)]
        if wrong:
            raise self._refused(wrong, found, real=real, known=known)
        self.plan = replace(plan, now=windows)
        self._replan()

    def _replan(self, *, loaded: bool = False) -> None:
        """Plan the schedules that follow the ends of epochs anew; all of them where a checkpoint was loaded."""
        for rates in () if self._rates is None else self._rates.each():
            if loaded or rates.follows_epochs:
                rates.replan(self.plan)

    @property
    def _size(self) -> int:
        return self.plan.accumulated(self._counters.epoch)

    @property
    def _made(self) -> int:
        """Windows of the epoch in hand that were trained on."""
        return ceil(self._counters.batch / self._size)

    def _refused(self, wrong: list[Need], found: str, *, real: RunPlan, known: bool) -> DataError:
        plan, counters = self.plan, self._counters
        number = counters.earlier_epochs + counters.epoch + 1
        who = ", ".join(dict.fromkeys(need.asked_by for need in wrong))
        planned = f"{plan.updates_in(counters.epoch)} updates"
        if plan.epoch_updates is None:
            planned = f"{plan.batches} batches ({planned})"
        return DataError(
            message(
                f"epoch {number} of the training data is not as long as planned: {who} was computed from its length",
                have=f"{found} in epoch {number}",
                want=f"{planned}, as {'epoch_updates says' if plan.epoch_updates else 'the data said at the start'}",
                fix=_cure(wrong, plan, epoch=counters.epoch, length=real.updates_in(counters.epoch) if known else None),
            )
        )


def _cure(wrong: list[Need], plan: RunPlan, *, epoch: int, length: int | None) -> str:
    """Return what to write: the total in updates; lengths of schedules in updates; or how long epochs are."""
    cures = []
    if any(need.is_total for need in wrong) and plan.epochs is not None:
        # Epochs to come are taken to be as long as this one.
        total: Any = "n" if length is None else (plan.updates_until(epoch) or 0) + length * (plan.epochs - epoch)
        beside = "" if plan.max_updates is None else f" and max_updates={plan.max_updates}"
        cures.append(f"fit(..., max_updates={total}) in the place of epochs={plan.epochs}{beside}")
    if plan.epoch_updates is not None:
        cures.append("epoch_updates=n, as many as each epoch has")
    if any(not need.is_total for need in wrong):
        spans = ", ".join(dict.fromkeys(need.asked_by for need in wrong if not need.is_total))
        cures.append(f"Updates(n) in the place of epochs in {spans}")
    return "; ".join(cures)
