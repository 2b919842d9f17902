"""`Rates`: a schedule bound to an optimizer and a plan; it writes to the parameter groups before each update."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from trainwright.core.checks import FormError, check_form, is_amount, is_count, is_none_or, is_text
from trainwright.core.errors import CheckpointError, SettingError
from trainwright.core.plan import Plan
from trainwright.core.torch_private import version_of

if TYPE_CHECKING:
    from trainwright.protocols import Tree

Base = dict[str, Any]
"""The settings of a parameter group before the schedule: plain numbers, flags and tuples of them."""
_NUMBERS = ("lr", "initial_lr", "momentum")
_UNKNOWN = object()
"""A value that was loaded: nobody can have set it by hand since."""


class Rates:
    """A schedule bound to one optimizer and one plan. Base class: every method but `apply` is a no-op by default."""

    monitor: str | None = None
    """The number of a validation that `observe` reads; None where it reads none."""
    follows_epochs = False
    """Whether rates change where an epoch ends: `replan` is then called where an epoch has another length."""

    def apply(self, updates: int) -> None:
        """Set the rates of the update that follows `updates` applied ones."""
        raise NotImplementedError

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Called after each validation, or after each epoch without one. No-op here."""

    def epoch_ended(self) -> None:
        """Called after each epoch. No-op here."""

    def replan(self, plan: Plan) -> None:
        """Follow another plan of the same run: epochs had other lengths. No-op here."""

    def restore_groups(self) -> None:
        """Give the parameter groups the values that they had before the schedule. No-op here."""

    @property
    def monitors(self) -> tuple[str, ...]:
        """The numbers of a validation that the run must measure."""
        return () if self.monitor is None else (self.monitor,)

    def each(self) -> tuple[Rates, ...]:
        """Each schedule alone."""
        return (self,)

    def state_dict(self) -> Tree:
        """The state as plain data: nothing here."""
        return {}

    def load_state_dict(self, tree: Tree, /) -> str | None:
        """Take over a state; return a sentence for the user where settings differ from those saved. No-op here."""


class NamedRates(Rates):
    """The schedules of several optimizers, by name."""

    def __init__(self, rates: Mapping[str, Rates]) -> None:
        self.rates = dict(rates)
        self.follows_epochs = any(one.follows_epochs for one in self.each())

    def apply(self, updates: int) -> None:
        """Set the rates of every optimizer for the update that follows `updates` applied ones."""
        for rates in self.rates.values():
            rates.apply(updates)

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Pass the numbers of a validation to every schedule."""
        for rates in self.rates.values():
            rates.observe(metrics)

    def epoch_ended(self) -> None:
        """Pass the end of an epoch to every schedule."""
        for rates in self.rates.values():
            rates.epoch_ended()

    def restore_groups(self) -> None:
        """Give the groups of every optimizer the values that they had before."""
        for rates in self.rates.values():
            rates.restore_groups()

    @property
    def monitors(self) -> tuple[str, ...]:
        """The numbers of a validation that the run must measure."""
        return tuple(monitor for rates in self.rates.values() for monitor in rates.monitors)

    def each(self) -> tuple[Rates, ...]:
        """Each schedule alone."""
        return tuple(self.rates.values())

    def state_dict(self) -> Tree:
        """The state of each schedule by name."""
        return {name: rates.state_dict() for name, rates in self.rates.items()}

    def load_state_dict(self, tree: Tree, /) -> str | None:
        """Give each schedule its state; return their sentences with their names."""
        news = [(name, rates.load_state_dict(tree[name])) for name, rates in self.rates.items()]
        return "; ".join(f"{name}: {sentence}" for name, sentence in news if isinstance(sentence, str)) or None


def bind_rates(schedule: Any, optimizers: Mapping[str, Optimizer], plan: Plan) -> Rates | None:
    """Bind a schedule, or one for each of several optimizers by name; None where there is none."""
    if schedule is None:
        return None
    if isinstance(schedule, Mapping):
        return NamedRates({name: _bound(one, optimizers[name], plan) for name, one in schedule.items()})
    return _bound(schedule, next(iter(optimizers.values())), plan)


def _bound(schedule: Any, optimizer: Optimizer, plan: Plan) -> Rates:
    rates = schedule.bind(optimizer, plan)
    if not isinstance(rates, Rates):
        raise SettingError(
            f"{type(schedule).__name__}.bind(optimizer, plan) returned {type(rates).__name__}",
            want="an object of a subclass of trainwright.schedules.Rates",
            fix="class MyRates(Rates), with apply(self, updates)",
        )
    return rates


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
    return (id(value), version_of(value)) if isinstance(value, Tensor) else value


def _count(total: int | None) -> str:
    return "an unknown number of" if total is None else str(total)
