"""A schedule as one table for each parameter group: the rate of every update, grown on demand by torch's own scheduler.

The table of a group is filled by torch's scheduler on a `BareOptimizer` that has this group alone, so each rate has
the bits that torch gives it. `TableRates.apply(updates)` looks up the row of the clock of applied updates. Nothing
depends on how long the run is: rows are added as they are needed. Another plan of the run is another table.
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

from trainwright.core.checks import FormError, check_form, is_amount, is_count, is_none_or, is_text
from trainwright.core.errors import CheckpointError, SettingError
from trainwright.core.plan import Plan
from trainwright.schedules.rates import Rates

if TYPE_CHECKING:
    from trainwright.protocols import Tree

BLOCK = 256
"""Rows that are added at a time, over all tables together."""

_UNKNOWN = object()
Base = dict[str, Any]
"""The settings of a parameter group before the schedule: plain numbers, flags and tuples of them."""
_READ_BY_TABLES = ("lr", "initial_lr", "momentum", "betas")
_NUMBERS = ("lr", "initial_lr", "momentum")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSpec:
    """What a schedule is in one plan: enough to make the table of any parameter group."""

    build: Callable[[Optimizer, int], LRScheduler]
    """Makes torch's scheduler, without the warm-up, for an optimizer with one group, which has this index."""
    warmup: int = 0
    """Updates of `LinearLR` before the schedule itself."""
    ends: bool = True
    """Whether the schedule spans the run: from the end of the run on its last rate holds."""
    per_group: bool = False
    """Whether `build` reads the index; else groups with the same settings share a table."""
    steps: Callable[[], Iterator[int]] | None = None
    """Makes the updates before which torch's scheduler is stepped after the warm-up; None: before each."""


class ScheduledGroup:
    """A parameter group that a schedule writes to. A value that anybody else has written since is an error."""

    __slots__ = ("base", "group", "index", "keys", "written")

    def __init__(self, index: int, group: dict[str, Any]) -> None:
        self.index, self.group = index, group
        self.base = _settings_of(group)
        self.keys = {"lr"}
        """What the schedule writes."""
        self.written: dict[str, Any] = {key: _mark(group[key]) for key in ("lr", "momentum", "betas") if key in group}
        """The values as they were last seen, `_UNKNOWN` after loading: any other was set by hand."""

    def write(self, group: dict[str, Any], key: str, value: Any) -> None:
        """Set a value, a tensor in place; SettingError where another was set by hand since."""
        if group is not self.group:  # Optimizer.load_state_dict replaces the dicts of groups: their values were loaded
            self.group = group
            self.forget()
        held, known = group[key], self.written.get(key, _UNKNOWN)
        if known is not _UNKNOWN and _mark(held) != known:
            raise self._set_by_hand(key, held)
        if isinstance(held, Tensor):
            held.fill_(value)
        else:
            group[key] = value
        self.written[key] = _mark(group[key])

    def restore(self, group: dict[str, Any]) -> None:
        """Set the values that the group had before the schedule, but for those that were set by hand since."""
        for key in self.keys:
            known = self.written.get(key, _UNKNOWN)
            if group is not self.group or known is _UNKNOWN or _mark(group[key]) == known:
                self.write(group, key, self.base[key])

    def forget(self) -> None:
        """Accept whatever the group holds when it is next written: its values were loaded."""
        self.written.update(dict.fromkeys(self.written, _UNKNOWN))

    def load(self, base: Base) -> None:
        """Take over saved settings; the values that the group holds now were loaded too."""
        self.base = dict(base)
        self.forget()

    def _set_by_hand(self, key: str, held: Any) -> SettingError:
        tensor = isinstance(held, Tensor)
        return SettingError(
            f"{key} of {group_name(self.index, self.group)} was set by hand, but a schedule sets it",
            have="a tensor that was written to, or replaced" if tensor else f"{key}={held!r}",
            want="the value that the schedule set" + ("" if tensor else f", {self.written[key]!r}"),
            fix="leave schedule= out, or write the change into it: schedule=lambda update, total: factor",
        )


class GroupRates(Rates):
    """Rates that write to the parameter groups of an optimizer: what both kinds of them share."""

    def __init__(self, text: str, optimizer: Optimizer) -> None:
        self._text, self._optimizer = text, optimizer
        self._total: int | None = None
        """Updates, or other steps, that the schedule was planned for; None where it depends on no total."""
        self._groups: list[ScheduledGroup] = []
        self._add_groups()

    def restore_groups(self) -> None:
        """Give each group the values that it had before the schedule; a value set by hand since stays."""
        for scheduled, group in zip(self._groups, self._optimizer.param_groups, strict=False):
            scheduled.restore(group)

    def state_dict(self) -> Tree:
        """The settings as text, the total, and what the groups were set to before the schedule."""
        return {"schedule": self._text, "total": self._total, "base": [dict(one.base) for one in self._groups]}

    def _load(self, tree: Tree, **forms: Callable[[object], bool]) -> str | None:
        """Check a state and take over the groups' settings; return a sentence where schedule or total are others."""
        self._check_kind(tree, {"schedule", "total", "base", *forms})
        check_form(tree, schedule=is_text, total=is_none_or(is_count), base=are_settings, **forms)
        self._add_groups()
        self._check_groups(tree["base"])
        for scheduled, base in zip(self._groups, tree["base"], strict=True):
            scheduled.load(base)
        news = []
        if tree["schedule"] != self._text:
            news.append(f"schedule changed: {tree['schedule']} -> {self._text}")
        if tree["total"] != self._total:
            news.append(f"schedule re-planned: {_count(tree['total'])} -> {_count(self._total)} updates")
        return "; ".join(news) or None

    def _add_groups(self) -> list[ScheduledGroup]:
        """Take over the groups that were added to the optimizer; SettingError where some were removed."""
        groups, known = self._optimizer.param_groups, len(self._groups)
        if len(groups) < known:
            raise SettingError(
                "parameter groups were removed from the optimizer while a schedule was using them",
                have=f"{len(groups)} groups",
                want=f"{known}",
                fix="set requires_grad=False on their parameters instead",
            )
        added = [ScheduledGroup(index, group) for index, group in enumerate(groups[known:], start=known)]
        self._groups += added
        return added

    def _check_kind(self, tree: Tree, keys: set[str]) -> None:
        found = tuple(tree) if isinstance(tree, Mapping) else ()
        if set(found) != keys:
            saved = tree.get("schedule", "") if isinstance(tree, Mapping) else ""
            raise CheckpointError(
                f"the saved state of the schedule does not fit {self._text}",
                have=f"{saved or type(tree).__name__} with {', '.join(map(str, found)) or 'nothing'}",
                want=", ".join(sorted(keys)),
                fix='fit(..., resume_fresh=("schedule",)), or give the schedule that was saved',
            )

    def _check_groups(self, base: list[Base]) -> None:
        if len(base) != len(self._groups):
            raise CheckpointError(
                "the saved schedule is of an optimizer with other groups",
                have=f"{len(self._groups)} parameter groups",
                want=f"{len(base)}, as when it was saved",
            )
        for saved, scheduled in zip(base, self._groups, strict=True):
            if "betas" in saved and len(saved["betas"]) != len(scheduled.base.get("betas", ())):
                raise FormError(f"'betas' has {len(saved['betas'])} numbers")


class _Column(NamedTuple):
    """What `apply` needs of a group, looked up once."""

    written: dict[str, Any]
    rates: array[float]
    momenta: array[float] | None
    later_betas: tuple[float, ...] | None
    """The betas that are not cycled, where the first one is."""


class TableRates(GroupRates):
    """A schedule that is a function of the clock alone: each rate is looked up in the table of its group.

    From the end of the run on the rate of the last update holds. Groups that are added to the optimizer later follow
    the schedule from their own rate.
    """

    def __init__(self, spec_in: Callable[[Plan], TableSpec], optimizer: Optimizer, plan: Plan, *, text: str) -> None:
        super().__init__(text, optimizer)
        self._spec_in = spec_in
        self.version = 0
        """How often the run was planned: rates that were looked up under another version may be others now."""
        self.replan(plan)

    def apply(self, updates: int) -> None:
        """Set the rates of the update that follows `updates` applied ones; SettingError for a value set by hand."""
        groups = self._optimizer.param_groups
        row = updates
        if not 0 <= updates < self._rows or len(groups) != len(self._columns):
            row = self._reach(updates)
        for index, (written, rates, momenta, later_betas) in enumerate(self._columns):
            group, rate = groups[index], rates[row]
            # The object that was written last is still there: nobody else has written since. `write` decides on any
            # other, and on tensors, which stay the same object when they are written to.
            if group["lr"] is written["lr"]:
                group["lr"] = written["lr"] = rate
            else:
                self._groups[index].write(group, "lr", rate)
            if momenta is not None:
                key = "momentum" if later_betas is None else "betas"
                value = momenta[row] if later_betas is None else (momenta[row], *later_betas)
                if group[key] is written[key]:
                    group[key] = written[key] = value
                else:
                    self._groups[index].write(group, key, value)

    def at(self, updates: int) -> list[float]:
        """The rate of each group in the update that follows `updates` applied ones; nothing is set."""
        row = self._reach(updates)
        return [column.rates[row] for column in self._columns]

    @property
    def cycles(self) -> bool:
        """Whether momenta or betas change with the rates."""
        return any(column.momenta is not None for column in self._columns)

    def replan(self, plan: Plan) -> None:
        """Make the tables of another plan."""
        self._spec = self._spec_in(plan)
        self._total = (plan.untracked if self._spec.ends else plan.planned).updates
        self.follows_epochs = self._spec.steps is not None
        self.version += 1
        self._make_tables()

    def load_state_dict(self, tree: Tree, /) -> str | None:
        """Take over the groups' own rates; the tables are those of this run's settings and plan.

        Returns a sentence where settings or total are others than those that were saved.
        """
        news = self._load(tree)
        self._make_tables()
        return news

    def _make_tables(self) -> None:
        self._tables: dict[tuple[Any, ...], RateTable] = {}
        self._rows = 0
        self._columns: list[_Column] = []
        for scheduled in self._groups:
            self._add_table(scheduled)
        self._grow(1)

    def _add_table(self, scheduled: ScheduledGroup) -> None:
        base = {key: scheduled.base[key] for key in _READ_BY_TABLES if key in scheduled.base}
        start = (scheduled.index if self._spec.per_group else None, *base.items())
        if start not in self._tables:
            self._tables[start] = RateTable(self._spec, base, scheduled.index, text=self._text)
            self._tables[start].grow(self._rows)
        table = self._tables[start]
        if table.key is not None:
            scheduled.keys.add(table.key)
        self._columns.append(_Column(scheduled.written, table.rates, table.momenta, table.later_betas))

    def _grow(self, rows: int) -> None:
        for table in self._tables.values():
            table.grow(rows)
        self._rows = rows

    def _reach(self, updates: int) -> int:
        """Return the row of an update, after adding the tables and the rows that are missing."""
        if updates < 0:
            raise SettingError(f"apply({updates})", want="the number of updates applied so far")
        for scheduled in self._add_groups():
            self._add_table(scheduled)
        last = self._total - 1 if self._spec.ends and self._total is not None else math.inf
        row = int(min(updates, last))
        if row >= self._rows:
            self._grow(int(min(row + max(8, BLOCK // len(self._tables)), last)) + 1)
        return row


class RateTable:
    """The rates of one parameter group by update, and its momenta where the schedule cycles them."""

    def __init__(self, spec: TableSpec, base: Base, index: int, *, text: str) -> None:
        self._text, self._index = text, index
        optimizer = BareOptimizer([base])
        self._group = optimizer.param_groups[0]
        # Built before its warm-up: CyclicLR sets the rate that the warm-up rises to.
        scheduler = spec.build(optimizer, index)
        cycled = isinstance(scheduler, OneCycleLR | CyclicLR) and scheduler.cycle_momentum
        self.key = ("betas" if "betas" in base else "momentum") if cycled else None
        """What of the group is cycled besides the rate; None: nothing."""
        self.later_betas = base["betas"][1:] if self.key == "betas" else None
        if spec.warmup:
            rise = LinearLR(optimizer, start_factor=1 / (spec.warmup + 1), total_iters=spec.warmup)
            scheduler = SequentialLR(optimizer, [rise, scheduler], milestones=[spec.warmup])
        optimizer.step()
        self._scheduler = scheduler
        self._steps = count(1) if spec.steps is None else chain(range(1, spec.warmup + 1), spec.steps())
        self._next_step = next(self._steps)
        self.rates = array("d")
        self.momenta = None if self.key is None else array("d")

    def grow(self, rows: int) -> None:
        """Step torch's scheduler until there are `rows` rows."""
        while len(self.rates) < rows:
            row = len(self.rates)
            while self._next_step <= row:  # two epochs end at one update where all updates of the second were skipped
                self._scheduler.step()
                self._next_step = next(self._steps)
            rate = float(self._group["lr"])
            if not math.isfinite(rate):
                raise SettingError(f"{self._text}: the rate of group {self._index} at update={row} is {rate}")
            held = min(self._next_step, rows) - row
            self.rates.extend(array("d", [rate]) * held)
            if self.key is not None and self.momenta is not None:
                momentum = self._group[self.key]
                self.momenta.extend(array("d", [momentum if self.key == "momentum" else momentum[0]]) * held)


def group_name(index: int, group: Mapping[str, Any]) -> str:
    """`group 1`, with its name where it has one."""
    return f"group {index} ({group['name']!r})" if "name" in group else f"group {index}"


def are_settings(value: object) -> bool:
    """Whether a value is a list of settings of groups, with the numbers that schedules read in order."""
    return isinstance(value, list) and all(
        isinstance(base, Mapping)
        and "lr" in base
        and all(is_amount(base[key]) for key in _NUMBERS if key in base)
        and isinstance(base.get("betas", ()), tuple)
        and all(is_amount(beta) and beta <= 1 for beta in base.get("betas", ()))
        for base in value
    )


def _settings_of(group: Mapping[str, Any]) -> Base:
    """The plain settings of a group; those that schedules read are numbers, never tensors."""
    base = {key: value for key, value in group.items() if isinstance(value, bool | int | float | str | None | tuple)}
    base |= {key: float(group[key]) for key in _NUMBERS if key in group}
    return base | {"betas": tuple(map(float, group["betas"]))} if "betas" in group else base


def _mark(value: Any) -> Any:
    """A number is its own mark; a tensor's is its version, since its value may lie on a device."""
    return (id(value), value._version) if isinstance(value, Tensor) else value


def _count(total: int | None) -> str:
    return "an unknown number of" if total is None else str(total)
