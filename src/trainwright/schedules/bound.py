"""`BoundSchedule`: a schedule bound to an optimizer and a plan, which sets rates in parameter groups before updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from trainwright.core.checks import check_form, is_amount, is_count, is_none_or, is_text
from trainwright.core.errors import CheckpointError, SettingError
from trainwright.core.plan import Plan
from trainwright.core.torch_private import version_of

if TYPE_CHECKING:
    from trainwright.protocols import Tree

Base = dict[str, Any]
"""The settings of a parameter group before the schedule: numbers, flags, strings, and tuples of them."""
_NUMBERS = ("lr", "initial_lr", "momentum")


class BoundSchedule:
    """A schedule bound to one optimizer and one plan.

    Subclasses implement `apply` and override other methods as needed. Examples: `TableSchedule` (torch's schedulers)
    and `SteppedSchedule` (Plateau, TorchSchedule).
    """

    monitor: str | None = None
    """The number that `observe` reads from validations; None if it reads none."""
    follows_epochs = False
    """Whether rates change at ends of epochs, so that `replan` is called if an epoch has another length."""

    def apply(self, updates: int) -> None:
        """Set the rates of the next update, after `updates` applied ones."""
        raise NotImplementedError

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Called after each validation, or after each epoch without one. No-op here."""

    def epoch_ended(self) -> None:
        """Called after each epoch. No-op here."""

    def replan(self, plan: Plan) -> None:
        """Use another plan of the same run, after epochs had other lengths. No-op here."""

    def restore_groups(self) -> None:
        """Restore the values of the parameter groups from before the schedule, for the next `fit`. No-op here."""

    def state_dict(self) -> Tree:
        """Return the state as plain data; empty here."""
        return {}

    def load_state_dict(self, tree: Tree, /) -> str | None:
        """Load a state; return a line of text for the user if settings differ from the saved ones. No-op here."""


def bind_schedules(schedule: Any, optimizers: Mapping[str, Optimizer], plan: Plan) -> dict[str, BoundSchedule]:
    """Bind a schedule to each optimizer, or a dict of schedules by optimizer name; return them by name."""
    schedules = schedule if isinstance(schedule, Mapping) else dict.fromkeys(optimizers, schedule)
    bound = {name: given.bind(optimizers[name], plan) for name, given in schedules.items() if given is not None}
    for name, made in bound.items():
        if not isinstance(made, BoundSchedule):
            raise SettingError(
                f"{type(schedules[name]).__name__}.bind(optimizer, plan) returned {type(made).__name__}",
                want="an object of a subclass of trainwright.schedules.BoundSchedule",
                fix="class MySchedule(BoundSchedule), with apply(self, updates)",
            )
    return bound


class GroupSchedule(BoundSchedule):
    """Base class of schedules that write to parameter groups: tables and stepped schedulers."""

    def __init__(self, text: str, optimizer: Optimizer, *, total: int | None = None) -> None:
        self._text, self._optimizer = text, optimizer
        self._total = total
        """The planned number of updates or other steps; None if the schedule does not depend on it."""
        self._groups: list[ScheduledGroup] = []
        self._add_groups()

    def restore_groups(self) -> None:
        """Restore the values of each group from before the schedule, except values set by hand since then."""
        for scheduled, group in zip(self._groups, self._optimizer.param_groups, strict=False):
            scheduled.restore(group)

    def state_dict(self) -> Tree:
        """Return the settings as text, the total, and the settings of the groups before the schedule."""
        return {"schedule": self._text, "total": self._total, "base": [dict(group.base) for group in self._groups]}

    def _load(self, tree: Tree, **forms: Callable[[object], bool]) -> str | None:
        """Check a state and load the settings of the groups; return a line if schedule or total have changed."""
        forms |= {"schedule": is_text, "total": is_none_or(is_count), "base": are_settings}
        if isinstance(tree, Mapping) and set(tree) != set(forms):
            raise CheckpointError(
                f"the saved state of the schedule does not fit {self._text}",
                have=f"{tree.get('schedule', '')} with {', '.join(map(str, tree)) or 'nothing'}".strip(),
                want=", ".join(sorted(forms)),
                fix='fit(..., resume_fresh=("schedule",)), or give the schedule that was saved',
            )
        check_form(tree, **forms)
        self._add_groups()
        betas = [len(group.base.get("betas", ())) for group in self._groups]
        if betas != [len(base.get("betas", ())) for base in tree["base"]]:
            raise CheckpointError(
                "the saved schedule is of an optimizer with other groups",
                have=f"{len(self._groups)} parameter groups",
                want=f"{len(tree['base'])}, as when it was saved, with as many betas",
            )
        for scheduled, base, group in zip(self._groups, tree["base"], self._optimizer.param_groups, strict=True):
            scheduled.begin(dict(base), group)
        news = []
        if tree["schedule"] != self._text:
            news.append(f"schedule changed: {tree['schedule']} -> {self._text}")
        if tree["total"] != self._total:
            news.append(f"schedule re-planned: {_count(tree['total'])} -> {_count(self._total)} updates")
        return "; ".join(news) or None

    def _add_groups(self) -> None:
        """Add groups that were added to the optimizer; SettingError if any was removed."""
        groups = self._optimizer.param_groups
        if len(groups) < len(self._groups):
            raise SettingError(
                "parameter groups were removed from the optimizer while a schedule was using them",
                have=f"{len(groups)} groups",
                want=f"{len(self._groups)}",
                fix="set requires_grad=False on their parameters instead",
            )
        for index in range(len(self._groups), len(groups)):
            self._groups.append(ScheduledGroup(index, groups[index]))


class ScheduledGroup:
    """A parameter group that a schedule writes to. A value that other code has written since then is an error."""

    __slots__ = ("base", "group", "index", "keys", "written")

    def __init__(self, index: int, group: dict[str, Any]) -> None:
        self.index = index
        self.keys = {"lr"}
        """The keys that the schedule writes."""
        self.begin(_settings_of(group), group)

    def begin(self, base: Base, group: dict[str, Any]) -> None:
        """Start from these settings; the current values of the group may differ, if both were loaded."""
        self.base, self.group = base, group
        self.written: dict[str, Any] = {key: _mark(group[key]) for key in ("lr", "momentum", "betas") if key in group}
        """The last known values; any other value was set by hand. Without a key, any value is accepted."""

    def write(self, group: dict[str, Any], key: str, value: Any) -> None:
        """Set a value, a tensor in place; SettingError if the current value was set by hand."""
        if group is not self.group:  # replaced by `Optimizer.load_state_dict`: its values were loaded
            self.group = group
            self.written.clear()
        if not self._is_own(group, key):
            raise self._set_by_hand(key, group[key])
        if isinstance(group[key], Tensor):
            group[key].fill_(value)
        else:
            group[key] = value
        self.written[key] = _mark(group[key])

    def restore(self, group: dict[str, Any]) -> None:
        """Restore the values from before the schedule, except values set by hand since then."""
        for key in self.keys:
            if group is not self.group or self._is_own(group, key):
                self.write(group, key, self.base[key])

    def _is_own(self, group: dict[str, Any], key: str) -> bool:
        """Return whether the value of a key is the last known one, or was loaded."""
        return key not in self.written or self.written[key] == _mark(group[key])

    def _set_by_hand(self, key: str, held: Any) -> SettingError:
        tensor = isinstance(held, Tensor)
        return SettingError(
            f"{key} of {group_name(self.index, self.group)} was set by hand, but a schedule sets it",
            have="a tensor that was written to, or replaced" if tensor else f"{key}={held!r}",
            want="the value that the schedule set" + ("" if tensor else f", {self.written[key]!r}"),
            fix="leave schedule= out, or write the change into it: schedule=lambda update, total: factor",
        )


def group_name(index: int, group: Mapping[str, Any]) -> str:
    """Return a text such as `group 1`, with the name of the group if it has one."""
    return f"group {index} ({group['name']!r})" if "name" in group else f"group {index}"


def are_settings(value: object) -> bool:
    """Return whether a value is a list of group settings with valid numbers for the keys that schedules read."""
    return isinstance(value, list) and all(isinstance(base, Mapping) and _are_amounts(base) for base in value)


def _are_amounts(base: Mapping[str, Any]) -> bool:
    betas = base.get("betas", ())
    numbers = [base[key] for key in _NUMBERS if key in base]
    are_betas = isinstance(betas, tuple) and all(is_amount(beta) and beta <= 1 for beta in betas)
    return "lr" in base and all(map(is_amount, numbers)) and are_betas


def _settings_of(group: Mapping[str, Any]) -> Base:
    """Return the plain settings of a group; those that schedules read are converted from tensors to numbers."""
    base = {key: value for key, value in group.items() if isinstance(value, bool | int | float | str | None | tuple)}
    base |= {key: float(group[key]) for key in _NUMBERS if key in group}
    return base | {"betas": tuple(map(float, group["betas"]))} if "betas" in group else base


def _mark(value: Any) -> Any:
    """Return a number itself; for a tensor, its identity and version, to avoid a read from the device."""
    return (id(value), version_of(value)) if isinstance(value, Tensor) else value


def _count(total: int | None) -> str:
    return "an unknown number of" if total is None else str(total)
