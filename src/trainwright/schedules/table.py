"""The rates of the coming updates: tables filled by torch's own schedulers, looked up by the clock."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LinearLR, LRScheduler, OneCycleLR, SequentialLR

from trainwright.core.checks import FormError, check_form, is_amount, is_count, is_none_or, is_text
from trainwright.core.errors import CheckpointError, SettingError, message
from trainwright.core.plan import Plan
from trainwright.protocols import Tree

BLOCK = 256
"""Rows that are filled at a time, over all groups together."""

_UNSEEN = object()
"""The mark of a value that nobody can have set by hand yet."""

Base = dict[str, Any]
"""What a schedule starts from in one group: lr, and initial_lr, momentum, betas where the group has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a schedule is in one plan: enough to fill the table of any group."""

    text: str
    """The settings as they were written."""
    total: int | None
    """Updates of the run; None where they are not known."""
    build: Callable[[Optimizer, int], LRScheduler]
    """Torch's scheduler for a stand-in with one group, and that group's index; without the warm-up."""
    warmup: int = 0
    ends: bool = True
    """Whether the schedule is over with the run: from `total` on its last rate holds."""
    each_group: bool = False
    """Whether `build` reads the index: else groups that start alike share a table."""
    steps: Callable[[], Iterator[int]] | None = None
    """Makes the updates at which torch's scheduler steps after the warm-up; None: at each."""
    layout: tuple[int, ...] = ()
    """What `build` has taken from the plan where there are `steps`: with another one its rates are others."""


class TableRates:
    """A schedule that is a function of the clock alone: a look-up in a table, filled as far as it is needed.

    `apply(updates)` sets the rates of the update that follows `updates` applied ones. From the end of the run on,
    the rate of its last update holds. Nobody else may write what the schedule sets: such a value is an error.
    Groups that are added to the optimizer later follow the schedule from their own rate. `make` gives the recipe in a
    plan, and again where epochs turn out to have other lengths.
    """

    monitor: str | None = None

    def __init__(self, make: Callable[[Plan], Recipe], optimizer: Optimizer, plan: Plan) -> None:
        self._make, self._recipe = make, make(plan)
        self._optimizer = optimizer
        self.version = 0
        """How often the plan was another one: rates that were looked up before may be others since."""
        self._owned = Owned(optimizer)
        self._fill([base_of(group) for group in optimizer.param_groups])

    def apply(self, updates: int) -> None:
        """Set the rates of the update that follows `updates` applied ones; SettingError for a value set by hand."""
        groups, last = self._optimizer.param_groups, self._last
        if 0 <= updates < self._fast and len(groups) == 1 and groups[0]["lr"] == last["lr"]:
            groups[0]["lr"] = last["lr"] = self._rates[updates]
        elif not self._apply_known(updates):
            self._apply_all(updates)

    def at(self, updates: int) -> list[float]:
        """The rate of each group in the update that follows `updates` applied ones; nothing is set."""
        self._meet_new_groups()
        self._reach(updates)
        return [column.rates[self._row(updates)] for column in self._columns]

    @property
    def cycles(self) -> bool:
        """Whether momenta or betas change with the rates."""
        return any(column.key is not None for column in self._columns)

    @property
    def follows_epochs(self) -> bool:
        """Whether rates may change where an epoch ends."""
        return self._recipe.steps is not None

    def replan(self, plan: Plan, *, since: int | None = None) -> None:
        """Take the rates of another plan; those of the first `since` updates stay as they were, None: all are new."""
        before, self._recipe = self._recipe, self._make(plan)
        self.version += 1
        same = (before.layout, before.warmup) == (self._recipe.layout, self._recipe.warmup)
        if since is None or self._recipe.steps is None or not same:
            self._fill(self._base)
            return
        for column in self._shared.values():
            column.cut(self._recipe, since)
        self._choose()

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Nothing: the rates depend on the clock alone."""

    def epoch_ended(self) -> None:
        """Nothing: the rates depend on the clock alone."""

    def put_back(self) -> None:
        """Give each group the values it had before the schedule, for a next stage to start from.

        A value that was set by hand since the last update stays.
        """
        for index, (column, base) in enumerate(zip(self._columns, self._base, strict=True)):
            self._owned.give_back(index, "lr", base["lr"])
            if column.key is not None:
                self._owned.give_back(index, column.key, base[column.key])

    def state_dict(self) -> Tree:
        """The settings as text, the total and the groups' own rates: all that a look-up needs."""
        recipe = self._recipe
        return {"schedule": recipe.text, "total": recipe.total, "base": [dict(base) for base in self._base]}

    def load_state_dict(self, tree: Tree, /) -> str | None:
        """Take over the groups' own rates; returns a sentence where settings or total are others than those saved.

        The table is that of this run's plan: with another total the schedule is re-planned.
        """
        check_keys(tree, self._recipe.text, ("schedule", "total", "base"))
        check_form(tree, **FORMS, base=_are_bases)
        check_groups(tree["base"], self._optimizer)
        self._owned.adopt()
        self._fill([dict(base) for base in tree["base"]])
        return said(tree, self._recipe.text, self._recipe.total)

    def _apply_known(self, updates: int) -> bool:
        """The same for more groups and for momenta; False where a row, a group or a value is not the one left."""
        groups = self._optimizer.param_groups
        if not 0 <= updates < self._rows or len(groups) != len(self._columns):
            return False
        for group, last, column in zip(groups, self._owned.marks, self._columns, strict=True):
            key = column.key
            if group["lr"] != last["lr"] or (key is not None and group[key] != last[key]):
                return False
            group["lr"] = last["lr"] = column.rates[updates]
            if key is not None:
                group[key] = last[key] = column.momentum(updates)
        return True

    def _apply_all(self, updates: int) -> None:
        if updates < 0:
            raise SettingError(message(f"apply({updates})", want="the number of updates applied so far"))
        self._meet_new_groups()
        self._reach(updates)
        row = self._row(updates)
        for index, column in enumerate(self._columns):
            self._owned.put(index, "lr", column.rates[row])
            if column.key is not None:
                self._owned.put(index, column.key, column.momentum(row))

    def _row(self, updates: int) -> int:
        total = self._recipe.total
        return min(updates, total - 1) if self._recipe.ends and total is not None else updates

    def _reach(self, updates: int) -> None:
        """Fill the tables up to the row of `updates`, by whole blocks."""
        row = self._row(updates)
        if row >= len(self._columns[0].rates):
            rows = row + max(8, BLOCK // len(self._shared))
            for column in self._shared.values():
                column.fill(self._row(rows) + 1)
        self._choose()

    def _fill(self, base: list[Base]) -> None:
        self._base = base
        self._columns: list[_Column] = []
        self._shared: dict[Any, _Column] = {}
        self._add(base)

    def _add(self, base: list[Base]) -> None:
        for index, values in enumerate(base, start=len(self._columns)):
            key = (index if self._recipe.each_group else None, *sorted(values.items()))
            if key not in self._shared:
                self._shared[key] = _Column(self._recipe, values, index)
            self._columns.append(self._shared[key])
        rows = max(1, *(len(column.rates) for column in self._columns))
        for column in self._columns:
            column.fill(rows)
        self._choose()

    def _choose(self) -> None:
        """The short ways are for rates that are numbers; the shortest is for one group whose momentum stays."""
        first = self._columns[0]
        self._rates, self._last = first.rates, self._owned.marks[0]
        self._rows = 0 if self._owned.any_tensor else len(first.rates)
        self._fast = self._rows if len(self._columns) == 1 and first.key is None else 0

    def _meet_new_groups(self) -> None:
        groups = self._optimizer.param_groups
        if len(groups) != len(self._columns):
            check_none_removed(groups, len(self._columns))
            added = [base_of(group) for group in groups[len(self._columns) :]]
            self._owned.extend()
            self._base.extend(added)
            self._add(added)


class Owned:
    """The groups of an optimizer, and what a schedule has set in them: a value set by hand is an error."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = list(optimizer.param_groups)
        self.marks: list[dict[str, Any]] = [_marks_of(group) for group in optimizer.param_groups]
        """For each group, what the values were when they were last seen."""

    @property
    def any_tensor(self) -> bool:
        """Whether a group's rate is a tensor, which is filled and never replaced."""
        return any(isinstance(group["lr"], Tensor) for group in self._optimizer.param_groups)

    def put(self, index: int, key: str, value: Any) -> None:
        """Set a group's value; SettingError where another was set since."""
        group, mark = self._optimizer.param_groups[index], self.marks[index]
        if group is not self._groups[index]:
            # Optimizer.load_state_dict puts new dicts in the place of the old ones: what they hold was loaded.
            self._groups[index] = group
            mark.update(dict.fromkeys(mark, _UNSEEN))
        now = group[key]
        if mark.get(key, _UNSEEN) is not _UNSEEN and _mark(now) != mark[key]:
            raise _by_hand(index, group, key=key, last=mark[key])
        if isinstance(now, Tensor):
            now.fill_(value)
        else:
            group[key] = value
        mark[key] = _mark(group[key])

    def give_back(self, index: int, key: str, value: Any) -> None:
        """Set a group's value, unless another was set by hand since."""
        mark = self.marks[index].get(key, _UNSEEN)
        if mark is _UNSEEN or _mark(self._optimizer.param_groups[index][key]) == mark:
            self.put(index, key, value)

    def adopt(self) -> None:
        """After loading: whatever the groups hold when they are next set is not held against the user."""
        self.extend()
        for mark in self.marks:
            mark.update(dict.fromkeys(mark, _UNSEEN))

    def extend(self) -> None:
        """Meet the groups that were added to the optimizer."""
        added = self._optimizer.param_groups[len(self._groups) :]
        self._groups.extend(added)
        self.marks.extend(_marks_of(group) for group in added)


class StandIn(Optimizer):
    """An optimizer with groups and nothing to train: torch's schedulers run on it, never on the real one."""

    def __init__(self, groups: Iterable[Mapping[str, Any]], defaults: Mapping[str, Any] | None = None) -> None:
        listed = [{**group, "params": [self.stub()]} for group in groups]
        super().__init__(listed, dict(listed[0] if defaults is None else defaults))

    @staticmethod
    def stub() -> Tensor:
        """What a group holds in the place of parameters."""
        return torch.zeros((), device="cpu")

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing; called once, for a scheduler warns where it is stepped before its optimizer."""

    def _patch_step_function(self) -> None:
        """Nothing: hooks on all optimizers of the process shall not hear of this one."""


def base_of(group: Mapping[str, Any]) -> Base:
    """What a schedule starts from in this group, as plain numbers."""
    base: Base = {key: float(group[key]) for key in ("lr", "initial_lr", "momentum") if key in group}
    return base | {"betas": tuple(map(float, group["betas"]))} if "betas" in group else base


def _are_bases(value: object) -> bool:
    """Whether a value is a list of what groups start from, as `base_of` gives it."""
    return isinstance(value, list) and all(
        isinstance(base, Mapping)
        and "lr" in base
        and all(
            isinstance(one, tuple) and all(is_amount(beta) and beta <= 1 for beta in one)
            if key == "betas"
            else is_amount(one)
            for key, one in base.items()
        )
        for base in value
    )


FORMS = {"schedule": is_text, "total": is_none_or(is_count)}
"""What the state of every schedule holds."""


def group_name(index: int, group: Mapping[str, Any]) -> str:
    """`group 1`, with its name where it has one."""
    return f"group {index} ({group['name']!r})" if "name" in group else f"group {index}"


def check_keys(tree: Tree, text: str, keys: tuple[str, ...]) -> None:
    """Raise CheckpointError where `tree` is no state of a schedule of this kind."""
    found = tuple(tree) if isinstance(tree, Mapping) else ()
    if set(found) != set(keys):
        saved = tree.get("schedule", "") if isinstance(tree, Mapping) else ""
        raise CheckpointError(
            message(
                f"the saved state of the schedule does not fit {text}",
                have=f"{saved or type(tree).__name__} with {', '.join(map(str, found)) or 'nothing'}",
                want=", ".join(keys),
                fix='fit(..., resume_fresh=("schedule",)), or give the schedule that was saved',
            )
        )


def check_groups(base: list[Base], optimizer: Optimizer) -> None:
    """Raise CheckpointError where the saved rates are of another number of groups."""
    if len(base) != len(optimizer.param_groups):
        raise CheckpointError(
            message(
                "the saved schedule is of an optimizer with other groups",
                have=f"{len(optimizer.param_groups)} parameter groups",
                want=f"{len(base)}, as when it was saved",
            )
        )
    for saved, group in zip(base, optimizer.param_groups, strict=True):
        if "betas" in saved and len(saved["betas"]) != len(group.get("betas", ())):
            raise FormError(f"'betas' has {len(saved['betas'])} numbers")


def check_none_removed(groups: list[Any], known: int) -> None:
    """Raise SettingError where groups have left the optimizer since the schedule was bound."""
    if len(groups) < known:
        raise SettingError(
            message(
                "parameter groups were removed from the optimizer while a schedule was using them",
                have=f"{len(groups)} groups",
                want=f"{known}",
                fix="set requires_grad=False on their parameters instead",
            )
        )


def said(tree: Tree, text: str, total: int | None) -> str | None:
    """What is new against a saved state: one sentence to report, or None."""
    news = []
    if tree["schedule"] != text:
        news.append(f"schedule changed: {tree['schedule']} -> {text}")
    if tree["total"] != total:
        news.append(f"schedule re-planned: {_count(tree['total'])} -> {_count(total)} updates")
    return "; ".join(news) or None


class _Column:
    """The rates of one group by update, and its momenta where they are cycled."""

    def __init__(self, recipe: Recipe, base: Base, index: int) -> None:
        self._index = index
        stand_in = StandIn([base])
        self._group = stand_in.param_groups[0]
        # The schedule is built before its warm-up: CyclicLR sets the rate from which warm-up takes its goal.
        inner = recipe.build(stand_in, index)
        cycled = isinstance(inner, OneCycleLR | CyclicLR) and inner.cycle_momentum
        self.key = ("betas" if "betas" in base else "momentum") if cycled else None
        self._scheduler = _with_warmup(inner, stand_in, recipe.warmup)
        stand_in.step()
        self.rates, self._momenta = array("d"), array("d")
        self._other_betas = base.get("betas", ())[1:]
        self._steps: Iterator[int] | None = None
        self._taken = self._due = 0
        self._stairs = array("d")
        """The rate after so many steps, where torch's scheduler does not step at each update."""
        self.cut(recipe, 0)

    def fill(self, rows: int) -> None:
        """Go on until there are `rows` rows."""
        for update in range(len(self.rates), rows):
            if self._steps is None:
                if update:
                    self._scheduler.step()
                self._record(update)
                continue
            while self._due <= update:
                self._taken, self._due = self._taken + 1, next(self._steps)
            self.rates.append(self._after(self._taken))

    def cut(self, recipe: Recipe, rows: int) -> None:
        """Forget all but the first `rows` rows, and go on by the steps of this recipe."""
        self._recipe = recipe
        del self.rates[rows:]
        self._steps = None
        if recipe.steps is not None:
            self._steps = chain(range(1, recipe.warmup + 1), recipe.steps())
            self._taken, self._due = 0, next(self._steps)

    def _after(self, steps: int) -> float:
        """The rate after so many steps of torch's scheduler."""
        while len(self._stairs) <= steps:
            if self._stairs:
                self._scheduler.step()
            self._stairs.append(self._finite(len(self.rates)))
        return self._stairs[steps]

    def momentum(self, row: int) -> Any:
        """What the group's `key` is in this row."""
        return self._momenta[row] if self.key == "momentum" else (self._momenta[row], *self._other_betas)

    def _finite(self, update: int) -> float:
        rate = float(self._group["lr"])
        if not math.isfinite(rate):
            raise SettingError(message(f"{self._recipe.text}: the rate of group {self._index} at {update=} is {rate}"))
        return rate

    def _record(self, update: int) -> None:
        self.rates.append(self._finite(update))
        if self.key == "momentum":
            self._momenta.append(self._group["momentum"])
        elif self.key == "betas":
            self._momenta.append(self._group["betas"][0])


def _with_warmup(inner: LRScheduler, stand_in: Optimizer, updates: int) -> LRScheduler:
    if not updates:
        return inner
    warmup = LinearLR(stand_in, start_factor=1 / (updates + 1), total_iters=updates)
    return SequentialLR(stand_in, [warmup, inner], milestones=[updates])


def _marks_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _mark(group[key]) for key in ("lr", "momentum", "betas") if key in group}


def _mark(value: Any) -> Any:
    """A number is its own mark; of a tensor the version, for its value may lie on a device."""
    return (id(value), value._version) if isinstance(value, Tensor) else value


def _by_hand(index: int, group: Mapping[str, Any], *, key: str, last: Any) -> SettingError:
    tensor = isinstance(group[key], Tensor)
    have = "a tensor that was written to, or replaced" if tensor else f"{key}={group[key]!r}"
    return SettingError(
        message(
            f"{key} of {group_name(index, group)} was set by hand, but a schedule owns it",
            have=have,
            want="the value that the schedule set" + ("" if tensor else f", {last!r}"),
            fix="leave schedule= out, or write the change into it: schedule=lambda update, total: factor",
        )
    )


def _count(total: int | None) -> str:
    return "an unknown number of" if total is None else str(total)
