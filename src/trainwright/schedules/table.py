"""Schedules as tables: the rate of every update, one table per parameter group, grown on demand by torch's scheduler.

Torch's scheduler fills the table of a group on a `BareOptimizer` with this group only, so each rate is bitwise that of
torch. `TableSchedule.apply(updates)` looks up the entry for the number of applied updates. Entries are added as needed,
independent of the length of the run. Another plan of the run makes new tables.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, count
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LinearLR, LRScheduler, OneCycleLR, SequentialLR

from trainwright.core.errors import SettingError
from trainwright.core.plan import Plan
from trainwright.core.torch_private import step_scheduler
from trainwright.schedules.bound import Base, GroupSchedule, ScheduledGroup

if TYPE_CHECKING:
    from trainwright.protocols import Tree

BLOCK = 256
"""The number of entries that are added at a time, over all tables together."""

_READ = ("lr", "initial_lr", "momentum", "betas")
"""The settings of a parameter group that torch's schedulers read."""


class BareOptimizer(Optimizer):
    """An optimizer with parameter groups but without real parameters, on which torch's schedulers run."""

    def __init__(self, groups: Iterable[Mapping[str, Any]], defaults: Mapping[str, Any] | None = None) -> None:
        listed = [{**group, "params": [self.stub()]} for group in groups]
        super().__init__(listed, dict(listed[0] if defaults is None else defaults))

    @staticmethod
    def stub() -> Tensor:
        """Return a placeholder parameter for a group."""
        return torch.zeros((), device="cpu")

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """No-op. Called once, since torch's schedulers warn if they are stepped before their optimizer."""

    def _patch_step_function(self) -> None:
        """No-op, so that global optimizer hooks of the user do not run for this optimizer."""


Build = Callable[[Optimizer, int], LRScheduler]
"""Makes torch's scheduler, without the warm-up, for an optimizer with one group; the int is the index of the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSpec:
    """A schedule for one plan, from which the table of any parameter group is made."""

    build: Build
    warmup: int = 0
    """Updates of `LinearLR` before the schedule itself."""
    ends: bool = True
    """Whether the schedule spans the complete run, and keeps its last rate after the end."""
    lists: frozenset[int] = frozenset()
    """The lengths of settings with one value per group; `build` then uses the index of the group."""
    steps: Callable[[], Iterator[int]] | None = None
    """Returns the updates before which torch's scheduler is stepped after the warm-up. None: before each update."""


class TableSchedule(GroupSchedule):
    """A schedule that depends on the number of applied updates only: each rate is looked up in a table of its group.

    After the end of the run, the rate of the last update is kept. Groups that are added to the optimizer later follow
    the schedule with their own base rate.
    """

    _tables: list[LRTable]
    """The table of each group; groups with the same settings share one."""
    _columns: list[_Column]
    _length: int
    """The number of entries of all tables."""

    def __init__(self, spec_in: Callable[[Plan], TableSpec], optimizer: Optimizer, plan: Plan, *, text: str) -> None:
        super().__init__(text, optimizer)
        self._spec_in = spec_in
        self.version = 0
        """The number of plans so far; rates that were looked up under an earlier version may have changed."""
        self.replan(plan)

    def apply(self, updates: int) -> None:
        """Set the rates of the next update, after `updates` applied ones; SettingError for a value set by hand."""
        groups = self._optimizer.param_groups
        index = updates
        if not 0 <= updates < self._length or len(groups) != len(self._tables):
            index = self._reach(updates)
        for scheduled, key, values, later_betas in self._columns:
            group, written = groups[scheduled.index], scheduled.written
            value = values[index] if later_betas is None else (values[index], *later_betas)
            # If the group still holds the object written last, no other code has written to it. `write` handles all
            # other cases, including tensors, which are the same object after an in-place write.
            if group[key] is written.get(key):
                group[key] = written[key] = value
            else:
                scheduled.write(group, key, value)

    def at(self, updates: int) -> list[float]:
        """Return the rate of each group for the update after `updates` applied ones, without setting it."""
        index = self._reach(updates)
        return [table.values["lr"][index] for table in self._tables]

    @property
    def cycles(self) -> bool:
        """Whether momenta or betas change with the rates."""
        return any(column.key != "lr" for column in self._columns)

    def replan(self, plan: Plan) -> None:
        """Make the tables for another plan."""
        self._spec = self._spec_in(plan)
        self._total = (plan.untracked if self._spec.ends else plan.planned).updates
        self.follows_epochs = self._spec.steps is not None
        self.version += 1
        self._make_tables()

    def load_state_dict(self, tree: Tree, /) -> str | None:
        """Load the base rates of the groups; the tables are made from the current settings and plan.

        Returns a line of text if settings or total differ from the saved ones.
        """
        news = self._load(tree)
        self._make_tables()
        return news

    def _make_tables(self) -> None:
        self._tables, self._columns, self._length = [], [], 0
        self._reach(0)

    def _reach(self, updates: int) -> int:
        """Return the index of an update in the tables; add missing tables and entries first."""
        if updates < 0:
            raise SettingError(f"apply({updates})", want="the number of updates applied so far")
        self._add_groups()
        for scheduled in self._groups[len(self._tables) :]:
            self._add_table(scheduled)
        last = self._total - 1 if self._spec.ends and self._total is not None else math.inf
        index = int(min(updates, last))
        if index >= self._length:
            length = int(min(index + max(8, BLOCK // len(self._tables)), last)) + 1
            for table in self._tables:
                table.grow(length)
            self._length = length
        return index

    def _add_table(self, scheduled: ScheduledGroup) -> None:
        if self._spec.lists and self._spec.lists != {len(self._groups)}:
            raise SettingError(
                self._text,
                have=f"{' and '.join(map(str, self._spec.lists))} values for {len(self._groups)} parameter groups",
                want="one for each group, or one number for all",
            )
        base = {key: scheduled.base[key] for key in _READ if key in scheduled.base}
        alike = [] if self._spec.lists else [table for table in self._tables if table.base == base]
        table = alike[0] if alike else LRTable(self._spec, base, scheduled.index, text=self._text)
        table.grow(self._length)
        self._tables.append(table)
        scheduled.keys.update(table.values)
        for key, values in table.values.items():
            later_betas = base["betas"][1:] if key == "betas" else None
            self._columns.append(_Column(scheduled, key, values, later_betas))


class LRTable:
    """The rates of one parameter group by update, and its momenta if the schedule cycles them."""

    def __init__(self, spec: TableSpec, base: Base, index: int, *, text: str) -> None:
        self.base, self._text, self._index = base, text, index
        optimizer = BareOptimizer([base])
        self._group = optimizer.param_groups[0]
        # Built before the warm-up, since CyclicLR sets the rate to which the warm-up rises.
        scheduler = spec.build(optimizer, index)
        self.values = {"lr": array("d")}
        """The values by update, for each key of the group; for betas, the first one."""
        if isinstance(scheduler, OneCycleLR | CyclicLR) and scheduler.cycle_momentum:
            self.values["betas" if "betas" in base else "momentum"] = array("d")
        if spec.warmup:
            rise = LinearLR(optimizer, start_factor=1 / (spec.warmup + 1), total_iters=spec.warmup)
            scheduler = SequentialLR(optimizer, [rise, scheduler], milestones=[spec.warmup])
        optimizer.step()
        self._scheduler = scheduler
        self._steps = count(1) if spec.steps is None else chain(range(1, spec.warmup + 1), spec.steps())
        self._next_step = next(self._steps)

    def grow(self, length: int) -> None:
        """Step torch's scheduler until the table has `length` entries."""
        rates = self.values["lr"]
        while len(rates) < length:
            update = len(rates)
            # Two epochs end at one update where all updates of the second were skipped.
            while self._next_step <= update:
                step_scheduler(self._scheduler)
                self._next_step = next(self._steps)
            if not math.isfinite(self._group["lr"]):
                rate = float(self._group["lr"])
                raise SettingError(f"{self._text}: the rate of group {self._index} at update={update} is {rate}")
            held = min(self._next_step, length) - update
            for key, values in self.values.items():
                value = self._group[key][0] if key == "betas" else self._group[key]
                values.extend(array("d", [value]) * held)


class _Column(NamedTuple):
    """The values of one key of one group, for `apply`."""

    group: ScheduledGroup
    key: str
    values: array[float]
    later_betas: tuple[float, ...] | None
    """The betas after the first one, which are not cycled; None for other keys."""
