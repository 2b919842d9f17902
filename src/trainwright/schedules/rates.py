"""`Rates`: a schedule bound to the optimizer and the plan of one run; `NamedRates`: those of several optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from trainwright.core.errors import SettingError
from trainwright.core.plan import Plan

if TYPE_CHECKING:
    from trainwright.protocols import Tree


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
