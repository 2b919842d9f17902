"""Schedules that go up and down, with the momentum the other way round: torch's `OneCycleLR` and `CyclicLR`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR

from trainwright.core.checks import check_number
from trainwright.core.durations import Updates
from trainwright.core.errors import SettingError
from trainwright.core.plan import Plan
from trainwright.core.suggestions import suggests
from trainwright.schedules.bound import group_name
from trainwright.schedules.lengths import Length, constant, warmup_updates
from trainwright.schedules.settings import BuiltinSchedule, values_of
from trainwright.schedules.table import TableSpec

CycleMomentum = Literal["auto"] | bool
PerGroup = float | Sequence[float]
"""One number for all parameter groups, or one for each."""


@suggests
@dataclass(frozen=True, slots=True)
class OneCycle(BuiltinSchedule):
    """torch's `OneCycleLR` over the run: up to `max_lr`, then down, with the momentum the other way round.

    Like every schedule it also works in a loop of your own:

    >>> import torch
    >>> from trainwright import OneCycle, Plan
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    >>> schedule = OneCycle(max_lr=0.5).bind(optimizer, Plan(max_updates=100))
    >>> for update in range(100):
    ...     schedule.apply(update)  # then forward, backward, optimizer.step()
    >>> optimizer.param_groups[0]["lr"]
    2e-06

    Args:
        max_lr: The highest rate, or one per parameter group.
        warmup: The part of the run in which the rate rises (torch's `pct_start`), or a duration.
        anneal_strategy: "cos" or "linear".
        cycle_momentum: "auto" cycles the momentum of groups that have one (or a first beta) above 0. True refuses
            groups without.
        base_momentum: The momentum at the highest rate.
        max_momentum: The momentum at the lowest rate.
        div_factor: The first rate is `max_lr / div_factor`.
        final_div_factor: The last rate is the first one divided by it.
        three_phase: Whether the rate falls to the first one before it falls to the last one.
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
        self._check_length("warmup", least=0)
        self._check_choice("anneal_strategy", "cos", "linear")
        self._check_choice("cycle_momentum", "auto", True, False)
        _check_per_group(self, "max_lr", above=0)
        _check_per_group(self, "base_momentum", "max_momentum", least=0, below=1)
        self._check_number("div_factor", "final_div_factor", above=0)

    def spec(self, plan: Plan) -> TableSpec:
        """Torch's scheduler over the run."""
        total = plan.horizon("OneCycle")
        rise = self.warmup if isinstance(self.warmup, float) else plan.in_updates(self.warmup, "OneCycle") / total
        if self.three_phase and rise > 0.5:
            raise SettingError("OneCycle(three_phase=True) falls as long as it rises", want="warmup <= 0.5")
        if rise > 1 or rise * total == 1:
            raise SettingError(
                f"OneCycle(warmup={self.warmup}) is {rise * total:g} of the {total} updates of this run",
                want="a rise within the run and not of exactly one update, where torch's formula divides by zero",
                fix="warmup=0.0, or a longer run",
            )
        alike = ("anneal_strategy", "div_factor", "final_div_factor", "three_phase")

        def build(optimizer: Optimizer, index: int) -> LRScheduler:
            arguments = _arguments_of(self, optimizer, index, "max_lr", *alike)
            return OneCycleLR(optimizer, total_steps=total, pct_start=float(rise), **arguments)

        return TableSpec(build=build, lists=_lists_of(self))


@suggests
@dataclass(frozen=True, slots=True)
class Cyclic(BuiltinSchedule):
    """torch's `CyclicLR`: up from `base_lr` to `max_lr` and down again, until the run ends.

    Args:
        base_lr: The lowest rate, or one per parameter group.
        max_lr: The highest rate, or one per parameter group.
        step_size_up: The length of a rise.
        step_size_down: The length of a fall. None: as the rise.
        mode: "triangular", "triangular2" (half the height in each cycle) or "exp_range" (times `gamma` per update).
        gamma: The factor of "exp_range".
        scale_fn: A function of your own that scales the height, in place of `mode`.
        scale_mode: Whether `scale_fn` gets the number of the "cycle" or of the update ("iterations").
        cycle_momentum: "auto" cycles the momentum of groups that have one (or a first beta) above 0.
        base_momentum: The momentum at the highest rate.
        max_momentum: The momentum at the lowest rate.
        warmup: A warm-up to `base_lr`, as a duration or a fraction of the run.
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
        self._check_length("step_size_up")
        self._check_length("step_size_down", optional=True)
        self._check_choice("mode", "triangular", "triangular2", "exp_range")
        self._check_choice("scale_mode", "cycle", "iterations")
        self._check_choice("cycle_momentum", "auto", True, False)
        self._check_number("gamma", above=0)
        self._check_length("warmup", least=0, optional=True)

    def spec(self, plan: Plan) -> TableSpec:
        """Torch's scheduler, after the warm-up."""
        up = constant(self.step_size_up, plan, "Cyclic(step_size_up=)")
        down = up if self.step_size_down is None else constant(self.step_size_down, plan, "Cyclic(step_size_down=)")
        alike = ("mode", "gamma", "scale_fn", "scale_mode")

        def build(optimizer: Optimizer, index: int) -> LRScheduler:
            arguments = _arguments_of(self, optimizer, index, "base_lr", "max_lr", *alike)
            return CyclicLR(optimizer, step_size_up=up, step_size_down=down, **arguments)

        warmup = warmup_updates(self.warmup, plan, "Cyclic")
        return TableSpec(build=build, warmup=warmup, ends=False, lists=_lists_of(self))


def _arguments_of(settings: OneCycle | Cyclic, optimizer: Optimizer, index: int, *names: str) -> dict[str, Any]:
    """Torch's arguments of these names for one group, and those of its momentum."""
    given = {name: getattr(settings, name) for name in (*names, "base_momentum", "max_momentum")}
    arguments = {name: value[index] if isinstance(value, tuple) else value for name, value in given.items()}
    group = optimizer.param_groups[0]
    has_momentum = bool(group["betas"][0]) if "betas" in group else bool(group.get("momentum"))
    if settings.cycle_momentum is True and not has_momentum:
        raise SettingError(
            f"cycle_momentum=True, but {group_name(index, group)} has no momentum to cycle",
            want="a momentum (or a first beta) above 0 in every group",
            fix='cycle_momentum="auto", or momentum=0.9 in the optimizer',
        )
    # Without a momentum torch would set one silently, on plain SGD 0.95.
    return arguments | {"cycle_momentum": has_momentum and settings.cycle_momentum is not False}


def _lists_of(settings: OneCycle | Cyclic) -> frozenset[int]:
    """The lengths of the settings that have one value for each group."""
    return frozenset(len(value) for value in values_of(settings) if isinstance(value, tuple))


def _check_per_group(
    settings: OneCycle | Cyclic,
    *names: str,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
) -> None:
    for name in names:
        values = getattr(settings, name)
        if isinstance(values, list):
            object.__setattr__(settings, name, tuple(values))
        written = f"{type(settings).__name__}({name}={values!r})"
        for value in values if isinstance(values, list | tuple) else (values,):
            check_number(value, written, above=above, least=least, below=below)
