"""Schedules with a history: torch schedulers that are stepped by updates, epochs or validations.

The scheduler runs on a `BareOptimizer` with the groups of the real one, and `apply` copies its values. A checkpoint
holds the steps so far: the epochs, or the numbers of the validations. A resume builds a new scheduler and repeats these
steps, so the state of a scheduler must depend on its steps only.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainwright.core.checks import FormError, check_whole, is_none_or, is_number, is_text, settings_text
from trainwright.core.errors import SettingError
from trainwright.core.monitor import Mode, resolve_mode
from trainwright.core.plan import LengthDependency, Plan
from trainwright.core.suggestions import did_you_mean, suggests
from trainwright.core.torch_private import step_scheduler
from trainwright.schedules.bound import GroupSchedule, are_settings
from trainwright.schedules.settings import BuiltinSchedule
from trainwright.schedules.table import BareOptimizer

if TYPE_CHECKING:
    from trainwright.protocols import Tree

Unit = Literal["update", "epoch", "validation"]


@suggests
@dataclass(frozen=True, slots=True)
class Plateau(BuiltinSchedule):
    """torch's `ReduceLROnPlateau`: multiplies the rate by `factor` after `patience` validations without improvement.

    NaN is no improvement. There is no warm-up, since torch cannot combine one with a schedule that reads validations.

    Args:
        monitor: The name of the monitored number, such as "val_loss".
        mode: "min" or "max". "auto": "min" for a name that ends in "loss", otherwise an error.
        factor: The factor of the learning rate.
        patience: The number of validations without improvement before the rate is reduced.
        threshold: The smallest change that counts as an improvement.
        threshold_mode: Whether `threshold` is relative ("rel") or absolute ("abs").
        cooldown: The number of validations after a reduction that are not counted.
        min_lr: The minimum learning rate.
        eps: The smallest change of a rate; smaller changes are not made.
    """

    monitor: str
    _: KW_ONLY
    mode: Literal["auto", "min", "max"] = "auto"
    factor: float = 0.1
    patience: int = 10
    threshold: float = 1e-4
    threshold_mode: Literal["rel", "abs"] = "rel"
    cooldown: int = 0
    min_lr: float = 0.0
    eps: float = 1e-8

    def __post_init__(self) -> None:
        self._mode()
        self._check_choice("threshold_mode", "rel", "abs")
        self._check_number("factor", above=0, below=1)
        for name in ("patience", "cooldown"):
            value = getattr(self, name)
            check_whole(value, f"Plateau({name}={value!r})", least=0, what="a whole number of validations")
        self._check_number("threshold", "min_lr", "eps", least=0)

    def _mode(self) -> Mode:
        return resolve_mode(self.monitor, None if self.mode == "auto" else self.mode, "Plateau({!r}, mode={!r})")

    def bind(self, optimizer: Optimizer, plan: Plan) -> SteppedSchedule:
        """Return the schedule of an optimizer; `plan` is not used."""
        mode = self._mode()
        of_torch = {field.name for field in fields(self)} - {"monitor", "mode"}
        settings = {name: getattr(self, name) for name in of_torch}
        build = partial(ReduceLROnPlateau, mode=mode, **settings)
        return SteppedSchedule(
            build, optimizer, unit="validation", monitor=self.monitor, mode=mode, text=settings_text(self)
        )


@suggests
@dataclass(frozen=True, slots=True)
class TorchSchedule(BuiltinSchedule):
    """Any `LRScheduler` of torch, stepped by the trainer.

    The optimizer that the factory gets has the settings of the real parameter groups, but not their parameters. A
    resume builds the scheduler again and repeats its steps. With fp16, the unit "update" costs one read from the device
    per update; other schedules cost none.

    Args:
        factory: A function `factory(optimizer)` or `factory(optimizer, total)` that builds the scheduler. `total` is
            the number of its steps in the run.
        unit: What the scheduler is stepped after: each applied "update", each "epoch" or each "validation".
        monitor: The name of the number that is passed to `step` after each validation.
    """

    factory: Callable[..., LRScheduler]
    _: KW_ONLY
    unit: Unit = "update"
    monitor: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.factory, LRScheduler) or not callable(self.factory):
            raise SettingError(
                f"TorchSchedule({type(self.factory).__name__})",
                want="a function that builds the scheduler",
                fix='TorchSchedule(lambda optimizer: StepLR(optimizer, 30), unit="epoch")',
            )
        self._check_choice("unit", "update", "epoch", "validation")
        if self.monitor is not None and self.unit != "validation":
            want = 'unit="validation", for only validations have numbers'
            raise SettingError(f"TorchSchedule(monitor={self.monitor!r}, unit={self.unit!r})", want=want)
        _takes_total(self.factory)

    def bind(self, optimizer: Optimizer, plan: Plan) -> SteppedSchedule:
        """Return the schedule of an optimizer for a plan; SettingError if the factory builds an invalid scheduler."""
        total = _steps_in(plan, self.unit) if _takes_total(self.factory) else None

        def build(bare: Optimizer) -> LRScheduler:
            scheduler = self.factory(bare) if total is None else self.factory(bare, total)
            _check_built(scheduler, bare, self)
            return scheduler

        text = settings_text(self)
        return SteppedSchedule(build, optimizer, unit=self.unit, monitor=self.monitor, total=total, text=text)


class SteppedSchedule(GroupSchedule):
    """A torch scheduler on a `BareOptimizer`; `apply` copies its rates to the real optimizer."""

    def __init__(
        self,
        build: Callable[[Optimizer], LRScheduler],
        optimizer: Optimizer,
        *,
        text: str,
        unit: Unit,
        monitor: str | None = None,
        mode: Mode | None = None,
        total: int | None = None,
    ) -> None:
        super().__init__(text, optimizer, total=total)
        self._build, self._unit, self.monitor = build, unit, monitor
        self._mode = mode
        """Which values of the monitored number are better, if that is a setting. A change discards the history."""
        self._start()

    def apply(self, updates: int) -> None:
        """Set the rates of the next update, after `updates` applied ones; SettingError for a value set by hand."""
        if self._unit == "update":
            if updates < self._updates:
                self._start()
            while self._updates < updates:
                self._updates += 1
                self._step()
        self._follow_groups()
        groups = zip(self._groups, self._optimizer.param_groups, self._bare.param_groups, strict=True)
        for scheduled, group, bare in groups:
            for key in scheduled.keys:
                scheduled.write(group, key, bare[key])

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Step by a validation, if that is the unit; SettingError if it lacks the monitored number."""
        if self._unit != "validation":
            return
        if self.monitor is not None and self.monitor not in metrics:
            raise SettingError(
                f"the schedule reads {self.monitor!r}, which is not measured."
                + did_you_mean(self.monitor, list(metrics)),
                want=f"one of {', '.join(metrics) or 'no numbers at all'}",
            )
        self._take(None if self.monitor is None else float(metrics[self.monitor]))

    def epoch_ended(self) -> None:
        """Step, if the unit is an epoch."""
        if self._unit == "epoch":
            self._take(None)

    def state_dict(self) -> Tree:
        """Return the epochs or validations of all steps so far, and the current settings of each group."""
        return {
            **super().state_dict(),
            "monitor": self.monitor,
            "mode": self._mode,
            "seen": list(self._seen),
            "scheduler": type(self._scheduler).__name__,
            "groups": [
                {key: group[key] for key in sorted(scheduled.keys)}
                for scheduled, group in zip(self._groups, self._bare.param_groups, strict=True)
            ],
        }

    def load_state_dict(self, tree: Tree, /) -> str | None:
        """Repeat the saved steps with a new scheduler; return a line of text if settings or total have changed.

        A schedule by validations continues from the saved rates, even if its settings have changed. If monitor or mode
        have changed, the earlier numbers are discarded.
        """
        words, name = is_none_or(is_text), type(self._scheduler).__name__
        news = self._load(tree, monitor=words, mode=words, seen=_are_seen, scheduler=is_text, groups=are_settings)
        if any((number is None) != (tree["monitor"] is None) for number in tree["seen"]):
            raise FormError(f"'seen' does not fit the monitor {tree['monitor']!r}")
        if tree["scheduler"] != name:
            news = f"schedule changed: {tree['scheduler']} -> {name}"
        self._start()
        if (tree["monitor"], tree["mode"]) == (self.monitor, self._mode):
            for number in tree["seen"] if self._unit != "update" else ():  # for updates, `apply` makes the steps
                self._take(number)
        for scheduled, bare, saved in zip(self._groups, self._bare.param_groups, tree["groups"], strict=True):
            known = {key: value for key, value in saved.items() if key in scheduled.base}
            scheduled.keys.update(known)
            if self._unit == "validation":
                bare.update(known)
        return news

    def _start(self) -> None:
        """Build torch's scheduler for the settings of the groups from before the schedule."""
        self._bare = BareOptimizer([scheduled.base for scheduled in self._groups], self._optimizer.defaults)
        self._scheduler: Any = self._build(self._bare)
        self._bare.step()
        self._updates = 0
        """The number of steps so far, if the unit is an update."""
        self._seen: list[float | None] = []
        """The monitored number of each validation; None for an epoch, or without a monitor. A resume repeats them."""
        self._add_keys()

    def _take(self, number: float | None) -> None:
        """Step by an epoch or a validation."""
        self._seen.append(number)
        self._step(*([] if number is None else [number]))

    def _step(self, *number: float) -> None:
        step_scheduler(self._scheduler, *number)
        self._add_keys()

    def _add_keys(self) -> None:
        """Add the settings that torch's scheduler has changed to the keys that this schedule writes."""
        for scheduled, group in zip(self._groups, self._bare.param_groups, strict=True):
            scheduled.keys.update(key for key, value in scheduled.base.items() if group[key] != value)

    def _follow_groups(self) -> None:
        self._add_groups()
        for scheduled in self._groups[len(self._bare.param_groups) :]:
            if not isinstance(self._scheduler, ReduceLROnPlateau):
                raise SettingError(
                    f"a parameter group was added to the optimizer, which {self._text} was not built for",
                    fix="add the group before fit, or use a schedule of this library",
                )
            self._bare.add_param_group({**scheduled.base, "params": [self._bare.stub()]})


def _are_seen(value: object) -> bool:
    return isinstance(value, list) and all(map(is_none_or(is_number), value))


def _takes_total(factory: Callable[..., Any]) -> bool:
    """Return whether the factory takes (optimizer, total); SettingError if it takes neither that nor (optimizer)."""
    signature = inspect.signature(factory)
    by_name = list(signature.parameters)[1:2] == ["total"]
    if not by_name and _accepts(signature, "optimizer"):
        return False
    if _accepts(signature, "optimizer", "total") and not (isinstance(factory, type) and not by_name):
        return True
    raise SettingError(
        f"TorchSchedule({settings_text(factory)}{signature})",
        want="a function of (optimizer), or of (optimizer, total)",
        fix="TorchSchedule(lambda optimizer, total: OneCycleLR(optimizer, 0.1, total_steps=total))",
    )


def _accepts(signature: inspect.Signature, *arguments: str) -> bool:
    try:
        signature.bind(*arguments)
    except TypeError:
        return False
    return True


def _steps_in(plan: Plan, unit: Unit) -> int:
    """Return the number of steps of a scheduler of this unit in the run."""
    if unit == "validation":
        what = 'TorchSchedule(unit="validation"): the number of validations is not known'
        raise SettingError(what, want="a function of (optimizer)")
    if unit == "update":
        return plan.horizon("TorchSchedule")
    if plan.max_updates is None and plan.epochs is not None:
        return plan.epochs

    def epochs(plan: Plan) -> int:
        return math.ceil(plan.epoch_at(plan.horizon("TorchSchedule"), "TorchSchedule"))

    plan.add_dependency(LengthDependency("TorchSchedule", epochs))
    return epochs(plan.untracked)


def _check_built(scheduler: object, bare: Optimizer, schedule: TorchSchedule) -> None:
    if not isinstance(scheduler, LRScheduler):
        want = "a torch.optim.lr_scheduler.LRScheduler"
        raise SettingError(f"the factory of TorchSchedule returned {type(scheduler).__name__}", want=want)
    name = type(scheduler).__name__
    if scheduler.optimizer is not bare:
        raise SettingError(
            f"the factory of TorchSchedule built {name} on another optimizer than the one it was given",
            fix=f"lambda optimizer: {name}(optimizer, ...)",
        )
    reads = next(iter(inspect.signature(scheduler.step).parameters), "epoch") != "epoch"
    if reads and schedule.monitor is None:
        fix = 'TorchSchedule(..., unit="validation", monitor="val_loss")'
        raise SettingError(f"{name} steps by a number of the validation", want="its name", fix=fix)
    if not reads and schedule.monitor is not None:
        fix = 'TorchSchedule(..., unit="validation") without monitor'
        raise SettingError(f"{name} reads no number, but monitor={schedule.monitor!r} was given", fix=fix)
