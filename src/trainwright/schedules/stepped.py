"""Schedules with state: torch schedulers that are stepped, by the clock, by epochs or by what validation says."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainwright.core.checks import (
    check_choice,
    check_form,
    check_number,
    check_whole,
    is_amount,
    is_count,
    is_dict,
    is_text,
)
from trainwright.core.durations import Epochs
from trainwright.core.errors import CheckpointError, SettingError, message
from trainwright.core.plan import Need, Plan
from trainwright.core.suggestions import did_you_mean, suggests
from trainwright.protocols import Tree
from trainwright.schedules.lengths import epoch_at, settings_text
from trainwright.schedules.plot import Drawn
from trainwright.schedules.table import (
    FORMS,
    Base,
    Owned,
    StandIn,
    base_of,
    check_groups,
    check_keys,
    check_none_removed,
    said,
)

Unit = Literal["update", "epoch", "validation"]

_KEYS = ("schedule", "total", "base", "monitor", "steps", "keys", "groups", "torch")


@suggests
@dataclass(frozen=True, slots=True)
class Plateau(Drawn):
    """torch's `ReduceLROnPlateau`: the rate times `factor` after `patience` validations without improvement.

    `mode` may be left out for a monitor whose name ends in "loss". A NaN is no improvement. Patience and cooldown
    count validations; the other arguments have torch's names and defaults. There is no warm-up: torch has none to
    put before a schedule that reads validations.
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
    warmup: None = None

    def __post_init__(self) -> None:
        if not isinstance(self.monitor, str) or not self.monitor:
            raise SettingError(message(f"Plateau({self.monitor!r})", want="the name of a number", fix='"val_loss"'))
        check_choice(self.mode, "Plateau", "mode", choices=("auto", "min", "max"))
        check_choice(self.threshold_mode, "Plateau", "threshold_mode", choices=("rel", "abs"))
        if self.mode == "auto" and not self.monitor.endswith("loss"):
            what, want = f"Plateau({self.monitor!r}) does not say", "mode, for a name that does not end in loss"
            fix = f'Plateau({self.monitor!r}, mode="max"), or mode="min"'
            raise SettingError(message(f"{what} whether more is better", want=want, fix=fix))
        check_number(self.factor, f"Plateau(factor={self.factor!r})", above=0, below=1)
        for name in ("patience", "cooldown"):
            value = getattr(self, name)
            check_whole(value, f"Plateau({name}={value!r})", least=0, what="a whole number of validations")
        for name in ("threshold", "min_lr", "eps"):
            check_number(getattr(self, name), f"Plateau({name}={getattr(self, name)!r})", least=0)
        _refuse_warmup(self.warmup, "Plateau", 'schedule=Plateau(...) without it, or TorchSchedule(..., unit="update")')

    def bind(self, optimizer: Optimizer, plan: Plan) -> SteppedRates:
        """The rates of this optimizer, lowered by the validations of the run."""
        mode: Literal["min", "max"] = "min" if self.mode == "auto" else self.mode

        def build(stand_in: Optimizer) -> LRScheduler:
            return ReduceLROnPlateau(
                stand_in,
                mode=mode,
                factor=self.factor,
                patience=self.patience,
                threshold=self.threshold,
                threshold_mode=self.threshold_mode,
                cooldown=self.cooldown,
                min_lr=self.min_lr,
                eps=self.eps,
            )

        # What is set stays what the script says; only what was seen is taken from a checkpoint.
        seen = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch", "_last_lr")
        text = settings_text(self)
        setup = _Setup(text=text, build=build, unit="validation", monitor=self.monitor, loads=seen)
        return SteppedRates(setup, optimizer)


@suggests
@dataclass(frozen=True, slots=True)
class TorchSchedule(Drawn):
    """Any scheduler of torch's kind: `factory(optimizer)` or `factory(optimizer, total)` builds it.

    It is stepped once per applied update, per epoch or per validation, and `total` is how often that is in the run.
    With `monitor`, each validation gives it the number of that name. The optimizer that the factory gets is a
    stand-in with the groups of the real one (their settings, not their parameters). Under fp16 the unit "update"
    costs one read from the device per update; a schedule of this library's own does not.
    """

    factory: Callable[..., LRScheduler]
    _: KW_ONLY
    unit: Unit = "update"
    monitor: str | None = None
    warmup: None = None

    def __post_init__(self) -> None:
        if isinstance(self.factory, LRScheduler) or not callable(self.factory):
            raise SettingError(
                message(
                    f"TorchSchedule({type(self.factory).__name__})",
                    want="a function that builds the scheduler",
                    fix='TorchSchedule(lambda optimizer: StepLR(optimizer, 30), unit="epoch")',
                )
            )
        check_choice(self.unit, "TorchSchedule", "unit", choices=("update", "epoch", "validation"))
        if self.monitor is not None and self.unit != "validation":
            want = 'unit="validation", for only validations have numbers'
            raise SettingError(message(f"TorchSchedule(monitor={self.monitor!r}, unit={self.unit!r})", want=want))
        _refuse_warmup(self.warmup, "TorchSchedule", "SequentialLR([LinearLR(...), ...]) in the factory")
        _takes_total(self.factory)

    def bind(self, optimizer: Optimizer, plan: Plan) -> SteppedRates:
        """The rates of this optimizer over this plan; the scheduler is built, and refused, here."""
        total = _steps_in(plan, self.unit) if _takes_total(self.factory) else None

        def build(stand_in: Optimizer) -> LRScheduler:
            scheduler = self.factory(stand_in) if total is None else self.factory(stand_in, total)
            _check_built(scheduler, stand_in, self)
            return scheduler

        setup = _Setup(text=settings_text(self), build=build, unit=self.unit, monitor=self.monitor, total=total)
        return SteppedRates(setup, optimizer)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setup:
    """What a stepped schedule is in one plan."""

    text: str
    build: Callable[[Optimizer], LRScheduler]
    unit: Unit
    monitor: str | None = None
    total: int | None = None
    """Steps in the run, where the factory asked for them."""
    loads: tuple[str, ...] | None = None
    """What of torch's state is taken from a checkpoint; None: all of it."""


class SteppedRates:
    """A torch scheduler that is stepped on a stand-in; what it sets there is set in the optimizer by `apply`."""

    def __init__(self, setup: _Setup, optimizer: Optimizer) -> None:
        self.monitor: str | None = setup.monitor
        self._setup = setup
        self._optimizer = optimizer
        self._owned = Owned(optimizer)
        self._start([_options(group) for group in optimizer.param_groups])
        plain(self._scheduler.state_dict(), setup.text)

    def apply(self, updates: int) -> None:
        """Set the rates of the update that follows `updates` applied ones; SettingError for a value set by hand."""
        if self._setup.unit == "update":
            self._advance(updates)
        self._meet_new_groups()
        for index, group in enumerate(self._stand_in.param_groups):
            for key in self._keys:
                self._owned.put(index, key, group[key])

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Step by a validation; SettingError where it has no number of the monitor's name."""
        if self._setup.unit != "validation":
            return
        if self.monitor is None:
            self._step()
        elif self.monitor in metrics:
            self._step(float(metrics[self.monitor]))
        else:
            raise SettingError(
                message(
                    f"the schedule watches {self.monitor!r}, which is not measured."
                    + did_you_mean(self.monitor, list(metrics)),
                    want=f"one of {', '.join(metrics) or 'no numbers at all'}",
                )
            )

    def epoch_ended(self) -> None:
        """Step, where the unit is an epoch."""
        if self._setup.unit == "epoch":
            self._step()

    def put_back(self) -> None:
        """Give each group the values it had before the schedule, unless they were set by hand since."""
        for index, base in enumerate(self._base):
            for key in self._keys:
                self._owned.give_back(index, key, base[key])

    def state_dict(self) -> Tree:
        """Torch's own state as plain data, the stand-in's groups, and how often it was stepped."""
        return {
            "schedule": self._setup.text,
            "total": self._setup.total,
            "base": [dict(base) for base in self._base],
            "monitor": self.monitor,
            "steps": self._steps,
            "keys": sorted(self._keys),
            "groups": [plain(_settings(group), self._setup.text) for group in self._stand_in.param_groups],
            "torch": plain(self._scheduler.state_dict(), self._setup.text),
        }

    def load_state_dict(self, tree: Tree, /) -> str | None:
        """Take over a state; returns a sentence where settings or total are others than those that were saved.

        With another total torch's scheduler is built anew and stepped as often as before. With another monitor or
        mode the rates go on, and what was the best so far is forgotten: it says nothing about the new number.
        """
        check_keys(tree, self._setup.text, _KEYS)
        check_form(tree, **FORMS, steps=is_count, torch=is_dict)
        check_form(tree, keys=lambda keys: isinstance(keys, list) and all(map(is_text, keys)))
        for name in ("base", "groups"):
            check_form(tree, **{name: lambda groups: isinstance(groups, list)})
            for group in tree[name]:
                check_form(group, lr=is_amount)
        check_groups(tree["base"], self._optimizer)
        self._owned.adopt()
        self._start([dict(base) for base in tree["base"]])
        news = said(tree, self._setup.text, self._setup.total)
        if tree["total"] != self._setup.total:
            for _ in range(tree["steps"]):
                self._step()
            return news
        for group, saved in zip(self._stand_in.param_groups, tree["groups"], strict=True):
            group.update(saved)
        if tree["monitor"] == self.monitor:
            self._load(tree["torch"])
        self._steps, self._keys = tree["steps"], set(tree["keys"])
        return news

    def _load(self, saved: dict[str, Any]) -> None:
        fresh, names = self._scheduler.state_dict(), self._setup.loads
        if names is None:
            if set(fresh) - set(saved):
                raise CheckpointError(
                    message(
                        f"the saved state does not fit what {self._setup.text} builds",
                        have=", ".join(saved),
                        want=", ".join(fresh),
                    )
                )
            names = tuple(saved)
        elif fresh["mode"] != saved["mode"]:
            return
        self._scheduler.load_state_dict({**fresh, **{name: _like(fresh.get(name), saved[name]) for name in names}})

    def _start(self, base: list[Base]) -> None:
        self._base = base
        self._stand_in = StandIn(base, self._optimizer.defaults)
        self._scheduler: Any = self._setup.build(self._stand_in)
        self._stand_in.step()
        self._steps = 0
        self._keys = {"lr"}
        self._note_keys()

    def _advance(self, updates: int) -> None:
        if updates < self._steps:
            raise SettingError(
                message(
                    f"apply({updates}) after apply({self._steps}): {self._setup.text} cannot go back",
                    fix="load the state that was saved there, or bind the schedule again",
                )
            )
        while self._steps < updates:
            self._step()

    def _step(self, *metric: float) -> None:
        self._scheduler.step(*metric)
        self._steps += 1
        self._note_keys()

    def _note_keys(self) -> None:
        """A setting that torch's scheduler has changed belongs to it from then on."""
        for group, base in zip(self._stand_in.param_groups, self._base, strict=True):
            self._keys.update(key for key in base if key not in self._keys and group[key] != base[key])

    def _meet_new_groups(self) -> None:
        groups, known = self._optimizer.param_groups, len(self._base)
        if len(groups) == known:
            return
        check_none_removed(groups, known)
        if not isinstance(self._scheduler, ReduceLROnPlateau):
            raise SettingError(
                message(
                    f"a parameter group was added to the optimizer, which {self._setup.text} was not built for",
                    fix="add the group before fit, or use a schedule of this library",
                )
            )
        for group in groups[known:]:
            self._base.append(_options(group))
            self._stand_in.add_param_group({**self._base[-1], "params": [self._stand_in.stub()]})
        self._owned.extend()


def plain(value: Any, text: str) -> Tree:
    """A copy of torch's state that a checkpoint can hold; SettingError names what it cannot."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if type(value) in (list, tuple):
        return type(value)(plain(item, text) for item in value)
    if type(value) in (dict, Counter) and all(isinstance(key, str | int) for key in value):
        return {key: plain(item, text) for key, item in value.items()}
    raise SettingError(
        message(
            f"{text} keeps a {type(value).__name__} in its state, which no checkpoint can hold",
            want="numbers, strings, tensors, lists, tuples and dicts",
            fix="give it a state_dict() of plain data",
        )
    )


def _like(fresh: Any, saved: Any) -> Any:
    """The saved data in the types that torch's scheduler has where it is built anew."""
    if isinstance(fresh, Counter):
        return Counter(saved)
    if isinstance(fresh, dict) and isinstance(saved, dict):
        return {key: _like(fresh.get(key), item) for key, item in saved.items()}
    if isinstance(fresh, list) and isinstance(saved, list) and len(fresh) == len(saved):
        return [_like(*pair) for pair in zip(fresh, saved, strict=True)]
    return saved


def _options(group: Mapping[str, Any]) -> Base:
    """The settings of a group that a scheduler may read or change: plain numbers, flags and tuples of them."""
    kept = {key: value for key, value in group.items() if isinstance(value, bool | int | float | str | None | tuple)}
    return {**kept, **base_of(group)}


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _takes_total(factory: Callable[..., Any]) -> bool:
    """Whether the factory is called with (optimizer, total); SettingError where it is neither that nor (optimizer)."""
    parameters = list(inspect.signature(factory).parameters.values())
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    placed = [parameter for parameter in parameters if parameter.kind in kinds]
    needed = [parameter for parameter in placed if parameter.default is parameter.empty]
    named = len(placed) > 1 and placed[1].name == "total"
    others = any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in parameters)
    most = 1 if isinstance(factory, type) else 2
    if not placed or len(needed) > most or others:
        raise SettingError(
            message(
                f"TorchSchedule({getattr(factory, '__name__', factory)!s}{inspect.signature(factory)})",
                want="a function of (optimizer), or of (optimizer, total)",
                fix="TorchSchedule(lambda optimizer, total: OneCycleLR(optimizer, 0.1, total_steps=total))",
            )
        )
    return named or len(needed) == 2


def _steps_in(plan: Plan, unit: Unit) -> int:
    """How often a scheduler of this unit steps in the run."""
    if unit == "validation":
        raise SettingError(
            message('TorchSchedule(unit="validation"): the number of validations is not known', want="(optimizer)")
        )
    if unit == "update":
        return plan.horizon("TorchSchedule")
    if plan.max_updates is None and plan.epochs is not None:
        return plan.epochs

    def epochs(plan: Plan) -> int:
        plan.in_updates(Epochs(1), "TorchSchedule")  # raises where epochs have no length
        return math.ceil(epoch_at(plan, plan.horizon("TorchSchedule")))

    plan.note(Need("TorchSchedule", epochs))
    return epochs(plan.quiet)


def _check_built(scheduler: object, stand_in: Optimizer, schedule: TorchSchedule) -> None:
    if not isinstance(scheduler, LRScheduler):
        want = "a torch.optim.lr_scheduler.LRScheduler"
        raise SettingError(message(f"the factory of TorchSchedule returned {type(scheduler).__name__}", want=want))
    name = type(scheduler).__name__
    if scheduler.optimizer is not stand_in:
        raise SettingError(
            message(
                f"the factory of TorchSchedule built {name} on another optimizer than the one it was given",
                fix=f"lambda optimizer: {name}(optimizer, ...)",
            )
        )
    first = next(iter(inspect.signature(scheduler.step).parameters), "epoch")
    reads = first != "epoch"
    if reads and schedule.monitor is None:
        fix = 'TorchSchedule(..., unit="validation", monitor="val_loss")'
        raise SettingError(message(f"{name} steps by a number of the validation", want="its name", fix=fix))
    if not reads and schedule.monitor is not None:
        fix = 'TorchSchedule(..., unit="validation") without monitor'
        raise SettingError(message(f"{name} reads no number, but monitor={schedule.monitor!r} was given", fix=fix))


def _refuse_warmup(warmup: object, owner: str, fix: str) -> None:
    if warmup is not None:
        raise SettingError(message(f"{owner} has no warm-up, and warmup={warmup!r} was given", fix=fix))
