"""Schedules that go up and down, with the momentum the other way round: torch's OneCycleLR and CyclicLR."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR

from trainwright.core.checks import check_choice, check_number
from trainwright.core.durations import Updates
from trainwright.core.errors import SettingError, message
from trainwright.core.plan import Plan
from trainwright.core.suggestions import suggests
from trainwright.schedules.lengths import Length, check_length, check_warmup, constant, settings_text, warmup_updates
from trainwright.schedules.plot import Drawn
from trainwright.schedules.table import Recipe, TableRates, group_name

CycleMomentum = Literal["auto"] | bool
PerGroup = float | Sequence[float]
"""One number for all parameter groups, or one for each."""


@suggests
@dataclass(frozen=True, slots=True)
class OneCycle(Drawn):
    """torch's `OneCycleLR` over the whole run: up to `max_lr`, then down, with the momentum the other way round.

    `warmup` is torch's `pct_start`, the part of the run in which the rate rises; a span is turned into that part.
    `cycle_momentum="auto"` is as in torch for a group that has a momentum (or a first beta) above 0, and off for
    one that has none; True is then refused. The other arguments have torch's names and defaults.

    Like every schedule it also works in a loop of your own:

    >>> import torch
    >>> from trainwright.core.plan import Plan
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    >>> rates = OneCycle(max_lr=0.5).bind(optimizer, Plan(max_updates=100))
    >>> for update in range(100):
    ...     rates.apply(update)  # then forward, backward, optimizer.step()
    >>> optimizer.param_groups[0]["lr"]
    2e-06
    """

    max_lr: PerGroup
    _: KW_ONLY
    warmup: Length = 0.3
    anneal_strategy: Literal["cos", "linear"] = "cos"
    cycle_momentum: CycleMomentum = "auto"
    base_momentum: PerGroup = 0.85
    max_momentum: PerGroup = 0.95
    div_factor: float = 25.0
    final_div_factor: float = 1e4
    three_phase: bool = False

    def __post_init__(self) -> None:
        check_length(self.warmup, "OneCycle(max_lr, warmup={})", least=0)
        check_choice(self.anneal_strategy, "OneCycle", "anneal_strategy", choices=("cos", "linear"))
        check_choice(self.cycle_momentum, "OneCycle", "cycle_momentum", choices=("auto", True, False))
        _check_per_group(self, "max_lr", above=0)
        _check_per_group(self, "base_momentum", "max_momentum", least=0, below=1)
        _check_per_group(self, "div_factor", "final_div_factor", above=0)

    def bind(self, optimizer: Optimizer, plan: Plan) -> TableRates:
        """The rates of this optimizer over this plan, whose number of updates must be known."""
        _check_lists(self, optimizer, ("max_lr", "base_momentum", "max_momentum"))
        return TableRates(self._recipe, optimizer, plan)

    def _recipe(self, plan: Plan) -> Recipe:
        total = plan.horizon("OneCycle")
        rise = self.warmup if isinstance(self.warmup, float) else plan.in_updates(self.warmup, "OneCycle") / total
        if self.three_phase and rise > 0.5:
            raise SettingError(message("OneCycle(three_phase=True) falls as long as it rises", want="warmup <= 0.5"))
        if rise > 1 or rise * total == 1:
            raise SettingError(
                message(
                    f"OneCycle(warmup={self.warmup}) is {rise * total:g} of the {total} updates of this run",
                    want="a rise within the run and not of exactly one update, where torch's formula divides by zero",
                    fix="warmup=0.0, or a longer run",
                )
            )

        def build(stand_in: Optimizer, index: int) -> LRScheduler:
            return OneCycleLR(
                stand_in,
                _pick(self.max_lr, index, "OneCycle(max_lr)"),
                total_steps=total,
                pct_start=float(rise),
                anneal_strategy=self.anneal_strategy,
                cycle_momentum=_cycles(self.cycle_momentum, stand_in, index),
                base_momentum=_pick(self.base_momentum, index, "OneCycle(base_momentum)"),
                max_momentum=_pick(self.max_momentum, index, "OneCycle(max_momentum)"),
                div_factor=self.div_factor,
                final_div_factor=self.final_div_factor,
                three_phase=self.three_phase,
            )

        return Recipe(text=settings_text(self), total=total, build=build, each_group=True)


@suggests
@dataclass(frozen=True, slots=True)
class Cyclic(Drawn):
    """torch's `CyclicLR`: up from `base_lr` to `max_lr` and down again, for as long as the run goes.

    A warm-up rises to `base_lr`. `cycle_momentum="auto"` is as in torch for a group that has a momentum (or a first
    beta) above 0, and off for one that has none. The other arguments have torch's names and defaults.
    """

    base_lr: PerGroup
    max_lr: PerGroup
    _: KW_ONLY
    step_size_up: Length = Updates(2000)  # noqa: RUF009 - it is frozen
    step_size_down: Length | None = None
    mode: Literal["triangular", "triangular2", "exp_range"] = "triangular"
    gamma: float = 1.0
    scale_fn: Callable[[float], float] | None = None
    scale_mode: Literal["cycle", "iterations"] = "cycle"
    cycle_momentum: CycleMomentum = "auto"
    base_momentum: PerGroup = 0.8
    max_momentum: PerGroup = 0.9
    warmup: Length | None = None

    def __post_init__(self) -> None:
        _check_per_group(self, "base_lr", "max_lr", above=0)
        _check_per_group(self, "base_momentum", "max_momentum", least=0, below=1)
        check_length(self.step_size_up, "Cyclic(base_lr, max_lr, step_size_up={})")
        if self.step_size_down is not None:
            check_length(self.step_size_down, "Cyclic(base_lr, max_lr, step_size_down={})")
        check_choice(self.mode, "Cyclic", "mode", choices=("triangular", "triangular2", "exp_range"))
        check_choice(self.scale_mode, "Cyclic", "scale_mode", choices=("cycle", "iterations"))
        check_choice(self.cycle_momentum, "Cyclic", "cycle_momentum", choices=("auto", True, False))
        check_number(self.gamma, f"Cyclic(gamma={self.gamma!r})", above=0)
        check_warmup(self.warmup, "Cyclic")

    def bind(self, optimizer: Optimizer, plan: Plan) -> TableRates:
        """The rates of this optimizer over this plan."""
        _check_lists(self, optimizer, ("base_lr", "max_lr", "base_momentum", "max_momentum"))
        return TableRates(self._recipe, optimizer, plan)

    def _recipe(self, plan: Plan) -> Recipe:
        up = constant(self.step_size_up, plan, "Cyclic(step_size_up=)")
        down = up if self.step_size_down is None else constant(self.step_size_down, plan, "Cyclic(step_size_down=)")

        def build(stand_in: Optimizer, index: int) -> LRScheduler:
            return CyclicLR(
                stand_in,
                _pick(self.base_lr, index, "Cyclic(base_lr)"),
                _pick(self.max_lr, index, "Cyclic(max_lr)"),
                step_size_up=up,
                step_size_down=down,
                mode=self.mode,
                gamma=self.gamma,
                scale_fn=self.scale_fn,
                scale_mode=self.scale_mode,
                cycle_momentum=_cycles(self.cycle_momentum, stand_in, index),
                base_momentum=_pick(self.base_momentum, index, "Cyclic(base_momentum)"),
                max_momentum=_pick(self.max_momentum, index, "Cyclic(max_momentum)"),
            )

        warmup = warmup_updates(self.warmup, plan, "Cyclic")
        return Recipe(
            text=settings_text(self),
            total=plan.planned.updates,
            build=build,
            warmup=warmup,
            ends=False,
            each_group=True,
        )


def _cycles(setting: CycleMomentum, stand_in: Optimizer, index: int) -> bool:
    """Whether torch cycles this group's momentum: it would set one, silently, where there was none."""
    group = stand_in.param_groups[0]
    has = bool(group["betas"][0]) if "betas" in group else bool(group.get("momentum"))
    if setting is True and not has:
        raise SettingError(
            message(
                f"cycle_momentum=True, but {group_name(index, group)} has no momentum to cycle",
                want="a momentum (or a first beta) above 0 in every group",
                fix='cycle_momentum="auto", or momentum=0.9 in the optimizer',
            )
        )
    return has and setting is not False


def _pick(values: PerGroup, index: int, written: str) -> float:
    if not isinstance(values, Sequence):
        return values
    if index >= len(values):
        raise SettingError(message(f"{written} has {len(values)} values", want="one for each parameter group"))
    return values[index]


def _check_lists(settings: Any, optimizer: Optimizer, names: tuple[str, ...]) -> None:
    groups = len(optimizer.param_groups)
    for name in names:
        values = getattr(settings, name)
        if isinstance(values, Sequence) and len(values) != groups:
            raise SettingError(
                message(
                    f"{type(settings).__name__}({name}={values!r})",
                    have=f"{len(values)} values for {groups} parameter groups",
                    want="one for each group, or one number for all",
                )
            )


def _check_per_group(
    settings: Any, *names: str, above: float | None = None, least: float | None = None, below: float | None = None
) -> None:
    for name in names:
        values = getattr(settings, name)
        if isinstance(values, list):
            object.__setattr__(settings, name, tuple(values))
        for value in values if isinstance(values, list | tuple) else (values,):
            written = f"{type(settings).__name__}({name}={values!r})"
            check_number(value, written, above=above, least=least, below=below)
