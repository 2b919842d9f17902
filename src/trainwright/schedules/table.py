"""A schedule as one table for each parameter group: the rate of every update, grown on demand by torch's own scheduler.

The table of a group is filled by torch's scheduler on a `BareOptimizer` that has this group alone, so each rate has
the bits that torch gives it. `TableSchedule.apply(updates)` looks up the entry of the clock of applied updates. Nothing
depends on how long the run is: entries are added as they are needed. Another plan of the run is another table.
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
"""Entries that are added at a time, over all tables together."""

_READ = ("lr", "initial_lr", "momentum", "betas")
"""The settings of a group that torch's schedulers read."""


class BareOptimizer(Optimizer):
    """An optimizer with parameter groups and nothing to train: torch's schedulers run on it, never on the real one."""

    def __init__(self, groups: Iterable[Mapping[str, Any]], defaults: Mapping[str, Any] | None = None) -> None:
        listed = [{**group, "params": [self.stub()]} for group in groups]
        super().__init__(listed, dict(listed[0] if defaults is None else defaults))

    @staticmethod
    def stub() -> Tensor:
        """Make a parameter for a group."""
        return torch.zeros((), device="cpu")

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """No-op. Called once: torch's schedulers warn where they are stepped before their optimizer."""

    def _patch_step_function(self) -> None:
        """No-op: hooks that the user registers for all optimizers of the process must not run for this one."""


Build = Callable[[Optimizer, int], LRScheduler]
"""Makes torch's scheduler, without the warm-up, for an optimizer with one group, which has this index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSpec:
    """A schedule in one plan: enough to make the table of any parameter group."""

    build: Build
    warmup: int = 0
    """Updates of `LinearLR` before the schedule itself."""
    ends: bool = True
    """Whether the schedule spans the run: from the end of the run on its last rate holds."""
    lists: frozenset[int] = frozenset()
    """How many values the settings have that are lists, one value for each group; `build` then reads the index."""
    steps: Callable[[], Iterator[int]] | None = None
    """Makes the updates before which torch's scheduler is stepped after the warm-up; None: before each."""


class TableSchedule(GroupSchedule):
    """A schedule that is a function of the clock alone: each rate is looked up in the table of its group.

    From the end of the run on the rate of the last update holds. Groups that are added to the optimizer later follow
    the schedule from their own rate.
    """

    _tables: list[LRTable]
    """The table of each group; groups with the same settings share one."""
    _columns: list[_Column]
    _length: int
    """How many updates all tables hold the rates of."""

    def __init__(self, spec_in: Callable[[Plan], TableSpec], optimizer: Optimizer, plan: Plan, *, text: str) -> None:
        super().__init__(text, optimizer)
        self._spec_in = spec_in
        self.version = 0
        """How often the run was planned: rates that were looked up under another version may be others now."""
        self.replan(plan)

    def apply(self, updates: int) -> None:
        """Set the rates of the update that follows `updates` applied ones; SettingError for a value set by hand."""
        groups = self._optimizer.param_groups
        index = updates
        if not 0 <= updates < self._length or len(groups) != len(self._tables):
            index = self._reach(updates)
        for scheduled, key, values, later_betas in self._columns:
            group, written = groups[scheduled.index], scheduled.written
            value = values[index] if later_betas is None else (values[index], *later_betas)
            # The object that was written last is still there: nobody else has written since. `write` decides on any
            # other, and on tensors, which stay the same object when they are written to.
            if group[key] is written.get(key):
                group[key] = written[key] = value
            else:
                scheduled.write(group, key, value)

    def at(self, updates: int) -> list[float]:
        """The rate of each group in the update that follows `updates` applied ones; nothing is set."""
        index = self._reach(updates)
        return [table.values["lr"][index] for table in self._tables]

    @property
    def cycles(self) -> bool:
        """Whether momenta or betas change with the rates."""
        return any(column.key != "lr" for column in self._columns)

    def replan(self, plan: Plan) -> None:
        """Make the tables of another plan."""
        self._spec = self._spec_in(plan)
        self._total = (plan.untracked if self._spec.ends else plan.planned).updates
        self.follows_epochs = self._spec.steps is not None
        self.version += 1
        self._make_tables()

    def load_state_dict(self, tree: Tree, /) -> str | None:
        """Load the groups' own rates; the tables are those of this run's settings and plan.

        Returns a sentence where settings or total are others than those that were saved.
        """
        news = self._load(tree)
        self._make_tables()
        return news

    def _make_tables(self) -> None:
        self._tables, self._columns, self._length = [], [], 0
        self._reach(0)

    def _reach(self, updates: int) -> int:
        """Return the index of an update, after adding the tables and the entries that are missing."""
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
    """The rates of one parameter group by update, and its momenta where the schedule cycles them."""

    def __init__(self, spec: TableSpec, base: Base, index: int, *, text: str) -> None:
        self.base, self._text, self._index = base, text, index
        optimizer = BareOptimizer([base])
        self._group = optimizer.param_groups[0]
        # Built before its warm-up: CyclicLR sets the rate that the warm-up rises to.
        scheduler = spec.build(optimizer, index)
        self.values = {"lr": array("d")}
        """By key of the group, its value in each update; of betas the first one."""
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
        """Step torch's scheduler until there are `length` entries."""
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
    """The values of one key of one group, looked up once for `apply`."""

    group: ScheduledGroup
    key: str
    values: array[float]
    later_betas: tuple[float, ...] | None
    """The betas that are not cycled, where the first one is."""
