"""Learning-rate schedules: steps, curves, functions `(update, total) -> factor`, and cycles with momentum.

Each one runs torch's scheduler of the same name, so its rates are bitwise those of torch. Rates depend on the number of
applied updates; accumulation, the number of processes and skipped updates do not change it. Lengths are durations
(`Updates(500)`, `Epochs(1)`) or fractions of the run (`0.1`); an integer raises an error. `warmup=` puts w updates of
`LinearLR(start_factor=1/(w+1), total_iters=w)` before the schedule, by torch's `SequentialLR`; the schedule starts with
its own first rate at the end of the warm-up. A schedule over the complete run keeps its last rate after the end.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from difflib import get_close_matches
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, Literal, cast

from torch.optim import Optimizer
from torch.optim import lr_scheduler as torchs
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR

from trainwright.core.checks import check_number, settings_text
from trainwright.core.durations import Epochs, Updates
from trainwright.core.errors import SettingError
from trainwright.core.plan import NEVER, Plan
from trainwright.core.suggestions import suggests
from trainwright.schedules.bound import BoundSchedule, group_name
from trainwright.schedules.lengths import (
    Length,
    check_length,
    constant,
    end_of,
    end_of_epochs,
    ends_with_epoch,
    every,
    rest_after,
    start_of,
    warmup_updates,
)
from trainwright.schedules.settings import BuiltinSchedule, values_of
from trainwright.schedules.table import Build, TableSpec

if TYPE_CHECKING:
    from trainwright.protocols import Schedule


_EXAMPLES = {
    "Cosine": "Cosine(warmup=0.1)",
    "Cyclic": "Cyclic(1e-4, 1e-2)",
    "Exponential": "Exponential(0.95)",
    "Linear": "Linear()",
    "MultiStep": "MultiStep([0.5, 0.75])",
    "OneCycle": "OneCycle(max_lr=1e-2)",
    "Plateau": 'Plateau("val_loss")',
    "StepLR": "StepLR(Epochs(30), gamma=0.1)",
    "WarmupStableDecay": "WarmupStableDecay(warmup=0.1, decay=0.2)",
}
_OTHER_NAMES = {"cosineannealing": "Cosine", "reduceonplateau": "Plateau", "step": "StepLR", "wsd": "WarmupStableDecay"}


def as_schedule(value: object) -> Schedule | None:
    """Return the schedule of `schedule=`: None, an object with `bind`, or a function `(update, total) -> factor`.

    SettingError for anything else; for a torch scheduler, the error states the code to write instead.
    """
    if value is None:
        return None
    if isinstance(value, LRScheduler):
        name = type(value).__name__
        raise SettingError(
            f"schedule={name}(...): a built torch scheduler does not say when it steps",
            want="a schedule, or a function (update, total) -> factor",
            fix=f'write TorchSchedule(lambda optimizer: {name}(optimizer, ...), unit="update")',
        )
    if isinstance(value, type):
        name = value.__name__
        torchs = issubclass(value, LRScheduler)
        fix = f"TorchSchedule(lambda optimizer: {name}(optimizer, ...), ...)" if torchs else f"{name}()"
        raise SettingError(f"schedule={name} is a class", want="a schedule", fix=f"write {fix}")
    if callable(getattr(value, "bind", None)):
        return cast("Schedule", value)
    if callable(value):
        return FunctionSchedule(cast("Callable[[int, int], float]", value))
    meant = _named(value) if isinstance(value, str) else None
    hint = "" if meant is None else f" Did you mean {_EXAMPLES[meant]}?"
    raise SettingError(
        f"schedule={value!r} is no schedule.{hint}",
        want=f"{', '.join(f'{name}(...)' for name in _EXAMPLES)}, TorchSchedule(...), "
        "or a function (update, total) -> factor",
        fix=f"schedule={_EXAMPLES[meant or 'Cosine']}",
    )


@suggests
@dataclass(frozen=True, slots=True)
class StepLR(BuiltinSchedule):
    """torch's `StepLR`: multiplies the learning rate by `gamma` after every `step`.

    Steps are counted from the end of the warm-up. With `step` in epochs, the rate changes at ends of epochs, even if
    `accumulate` changes.

    Args:
        step: The interval, a duration or a fraction of the run.
        gamma: The factor.
        warmup: The length of the warm-up, a duration or a fraction of the run.
    """

    step: Length
    gamma: float = 0.1
    _: KW_ONLY
    warmup: Length | None = None

    def __post_init__(self) -> None:
        self._check_length("step")
        self._check_number("gamma", above=0)
        self._check_length("warmup", least=0, optional=True)

    def spec(self, plan: Plan) -> TableSpec:
        """Return torch's scheduler with a step size of 1, stepped at the changes of the rate."""

        def build(optimizer: Optimizer, _: int) -> LRScheduler:
            return torchs.StepLR(optimizer, 1, gamma=self.gamma)

        return _stepped_every(self.step, self, plan, build=build)


@suggests
@dataclass(frozen=True, slots=True)
class Exponential(BuiltinSchedule):
    """torch's `ExponentialLR`: multiplies the learning rate by `gamma` after every `every`, after the warm-up.

    Args:
        gamma: The factor.
        every: The interval: `Epochs(1)` as in torch's examples, `Updates(1)` for a change with each update.
        warmup: The length of the warm-up, a duration or a fraction of the run.
    """

    gamma: float
    _: KW_ONLY
    every: Length = Epochs(1)  # noqa: RUF009 - it is frozen
    warmup: Length | None = None

    def __post_init__(self) -> None:
        self._check_number("gamma", above=0)
        self._check_length("every")
        self._check_length("warmup", least=0, optional=True)

    def spec(self, plan: Plan) -> TableSpec:
        """Return torch's scheduler, stepped after every `every`."""

        def build(optimizer: Optimizer, _: int) -> LRScheduler:
            return torchs.ExponentialLR(optimizer, self.gamma)

        return _stepped_every(self.every, self, plan, build=build)


def _stepped_every(length: Length, schedule: StepLR | Exponential, plan: Plan, *, build: Build) -> TableSpec:
    """Return a scheduler that is stepped after every `length`, counted from the end of the warm-up."""
    name = type(schedule).__name__
    warmup = warmup_updates(schedule.warmup, plan, name)
    steps = every(length, plan, warmup=schedule.warmup, start=warmup, asked_by=name)
    return TableSpec(build=build, warmup=warmup, ends=False, steps=steps)


@suggests
@dataclass(frozen=True, slots=True)
class MultiStep(BuiltinSchedule):
    """torch's `MultiStepLR`: multiplies the learning rate by `gamma` at each milestone.

    Milestones are counted from the start of the run, including the warm-up: torch's scheduler, which starts after w
    updates of warm-up, gets them minus w.

    Args:
        milestones: Points of the run in rising order: `Epochs(30)` is the end of the 30th epoch, 0.5 half of the run.
        gamma: The factor.
        warmup: The length of the warm-up, a duration or a fraction of the run.
    """

    milestones: Sequence[Length]
    gamma: float = 0.1
    _: KW_ONLY
    warmup: Length | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.milestones, Sequence) or isinstance(self.milestones, str) or not self.milestones:
            fix = "MultiStep([Epochs(30), Epochs(60)])"
            raise SettingError(f"MultiStep({self.milestones!r})", want="a list of milestones", fix=fix)
        for milestone in self.milestones:
            check_length(milestone, "MultiStep([..., {}])")
        object.__setattr__(self, "milestones", tuple(self.milestones))
        self._check_number("gamma", above=0)
        self._check_length("warmup", least=0, optional=True)

    def bind(self, optimizer: Optimizer, plan: Plan) -> BoundSchedule:
        """Return the schedule of an optimizer for a plan; SettingError unless milestones are in rising order."""
        points = self._points(plan.untracked)
        if points != sorted(points):
            raise self._refused(points, warmup_updates(self.warmup, plan.untracked, "MultiStep"))
        return BuiltinSchedule.bind(self, optimizer, plan)

    def spec(self, plan: Plan) -> TableSpec:
        """Return torch's scheduler, stepped at the milestones only."""
        warmup = warmup_updates(self.warmup, plan, "MultiStep")
        points = sorted(self._points(plan))
        if points[0] < warmup:
            raise self._refused(points, warmup)
        after = sorted({point for point in points if point > warmup})
        # One step for equal milestones: torch multiplies once by gamma ** 2, not twice by gamma.
        at_steps = [0 if point == warmup else 1 + after.index(point) for point in points]
        return TableSpec(
            build=lambda optimizer, _: torchs.MultiStepLR(optimizer, at_steps, gamma=self.gamma),
            warmup=warmup,
            ends=False,
            steps=lambda: chain(after, repeat(NEVER)),
        )

    def _points(self, plan: Plan) -> list[int]:
        """Return the milestones in updates; integer numbers of epochs end with the epochs of the run."""
        points = []
        for milestone in self.milestones:
            if isinstance(milestone, Epochs) and ends_with_epoch(milestone):
                plan.untracked.in_updates(milestone, "MultiStep")  # raises if epochs have no length
                points.append(end_of_epochs(int(milestone.n), plan))
            else:
                points.append(plan.in_updates(milestone, "MultiStep"))
        return points

    def _refused(self, points: list[int], warmup: int) -> SettingError:
        return SettingError(
            f"{settings_text(self)}: the milestones are updates {points}, and the warm-up ends at {warmup}",
            want="milestones that rise, none of them inside the warm-up",
        )


@suggests
@dataclass(frozen=True, slots=True)
class Linear(BuiltinSchedule):
    """torch's `LinearLR`: a linear change of each group's learning rate, from the factor `start` to `final`.

    `final` is reached after the last update, so that no update has a rate of 0.

    Args:
        final: The factor at the end.
        start: The factor at the start.
        over: The length. None: the rest of the run after the warm-up.
        warmup: The length of the warm-up, a duration or a fraction of the run.
    """

    final: float = 0.0
    _: KW_ONLY
    start: float = 1.0
    over: Length | None = None
    warmup: Length | None = None

    def __post_init__(self) -> None:
        self._check_number("final", least=0, most=1)
        self._check_number("start", above=0, most=1)
        self._check_length("over", optional=True)
        self._check_length("warmup", least=0, optional=True)

    def spec(self, plan: Plan) -> TableSpec:
        """Return torch's scheduler over `over`, or over the rest of the run after the warm-up."""
        warmup = warmup_updates(self.warmup, plan, "Linear")
        if self.over is None:
            length = rest_after(plan, warmup, "Linear")
        else:
            length = end_of(self.over, plan, start=warmup, asked_by="Linear(over=)") - warmup

        def build(optimizer: Optimizer, _: int) -> LRScheduler:
            return torchs.LinearLR(optimizer, self.start, end_factor=self.final, total_iters=length)

        return TableSpec(build=build, warmup=warmup, ends=self.over is None)


@suggests
@dataclass(frozen=True, slots=True, kw_only=True)
class Cosine(BuiltinSchedule):
    """torch's `SequentialLR(LinearLR, CosineAnnealingLR)`: a warm-up, then cosine annealing over the rest of the run.

    `final` is reached after the last update (`T_max` is the rest of the run), so that no update has a rate of 0.

    Args:
        warmup: The length of the warm-up, a duration or a fraction of the run.
        final: The final factor of each group's learning rate (`eta_min = final * lr`).
    """

    warmup: Length | None = None
    final: float = 0.0

    def __post_init__(self) -> None:
        self._check_number("final", least=0, most=1)
        self._check_length("warmup", least=0, optional=True)

    def spec(self, plan: Plan) -> TableSpec:
        """Return torch's scheduler over the rest of the run after the warm-up."""
        warmup = warmup_updates(self.warmup, plan, "Cosine")
        rest = rest_after(plan, warmup, "Cosine")

        def build(optimizer: Optimizer, _: int) -> LRScheduler:
            group = optimizer.param_groups[0]
            lowest = self.final * group.get("initial_lr", group["lr"])
            return torchs.CosineAnnealingLR(optimizer, rest, eta_min=lowest)

        return TableSpec(build=build, warmup=warmup)


@suggests
@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupStableDecay(BuiltinSchedule):
    """Warm-up, then a constant learning rate, then a decay to `final` times the rate at the end of the run.

    With T updates in the run, w of warm-up and d of decay, update u (from 0) has the rate lr times
    (u + 1) / (w + 1) for u < w; 1 for w <= u <= T - d; and then final + (1 - final) * f(p) with p = (u - (T - d)) / d,
    where f(p) is 1 - p ("linear"), 1 - sqrt(p) ("sqrt"), or (1 + cos(pi p)) / 2 ("cosine").
    Constant phase: Hu et al. 2024, arXiv:2404.06395. "sqrt": Hägele et al. 2024, arXiv:2405.18392.

    Args:
        warmup: The length of the warm-up, a duration or a fraction of the run.
        decay: The length of the decay, a duration or a fraction of the run.
        final: The final factor of each group's learning rate.
        shape: The shape of the decay: "linear", "sqrt" or "cosine".
    """

    warmup: Length
    decay: Length
    final: float = 0.0
    shape: Literal["linear", "sqrt", "cosine"] = "linear"

    def __post_init__(self) -> None:
        self._check_length("warmup", least=0)
        self._check_length("decay")
        self._check_number("final", least=0, most=1)
        self._check_choice("shape", *_SHAPES)

    def spec(self, plan: Plan) -> TableSpec:
        """Return torch's `LambdaLR` with the formula."""
        total = plan.horizon("WarmupStableDecay")
        warmup = warmup_updates(self.warmup, plan, "WarmupStableDecay")
        falls = start_of(self.decay, plan, end=total, asked_by="WarmupStableDecay(decay=)")
        if falls < warmup:
            raise SettingError(
                f"{settings_text(self)}: warm-up and decay together are longer than the run",
                have=f"{total} updates, {warmup} of them warm-up",
                want="warmup + decay within the run",
            )
        shape = _SHAPES[self.shape]

        def factor(after: int) -> float:
            progress = (after + warmup - falls) / (total - falls)
            return 1.0 if progress <= 0 else self.final + (1 - self.final) * shape(min(progress, 1.0))

        return TableSpec(build=lambda optimizer, _: torchs.LambdaLR(optimizer, factor), warmup=warmup)


_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda p: 1 - p,
    "sqrt": lambda p: 1 - math.sqrt(p),
    "cosine": lambda p: (1 + math.cos(math.pi * p)) / 2,
}


@dataclass(frozen=True, slots=True)
class FunctionSchedule(BuiltinSchedule):
    """torch's `LambdaLR` with any function `(update, total) -> factor` of each group's learning rate."""

    fn: Callable[[int, int], float]

    def __post_init__(self) -> None:
        try:
            inspect.signature(self.fn).bind(0, 1)
        except ValueError:
            return  # a built-in function without a signature
        except TypeError as error:
            name = settings_text(self.fn)
            raise SettingError(
                f"{name} is no schedule: {error}",
                want="a function of (update, total) that returns a factor of the rate",
                fix="schedule=lambda update, total: 1 - update / total",
            ) from None

    def spec(self, plan: Plan) -> TableSpec:
        """Return torch's `LambdaLR` with the function; SettingError during the run for an invalid factor."""
        total = plan.horizon("FunctionSchedule")

        def factor(update: int) -> float:
            given = self.fn(update, total)
            try:
                value = float(given)
            except (TypeError, ValueError):
                value = math.nan
            if not 0 <= value < math.inf:
                raise SettingError(
                    f"{settings_text(self)} gave {given} for {update=}, {total=}", want="a factor of at least 0"
                )
            return value

        return TableSpec(build=lambda optimizer, _: torchs.LambdaLR(optimizer, factor))


def _named(name: str) -> str | None:
    """Return the schedule whose name is nearest; None if none is near."""
    plain = "".join(letter for letter in name.lower() if letter.isalnum())
    known = {example.lower(): example for example in _EXAMPLES} | _OTHER_NAMES
    near = get_close_matches(plain, known, n=1) or get_close_matches(plain.removesuffix("lr"), known, n=1)
    return known[near[0]] if near else None


CycleMomentum = Literal["auto"] | bool
PerGroup = float | Sequence[float]
"""One number for all parameter groups, or one per group."""


@suggests
@dataclass(frozen=True, slots=True)
class OneCycle(BuiltinSchedule):
    """torch's `OneCycleLR` over the run: the rate rises to `max_lr`, then falls; the momentum does the opposite.

    Like every schedule, it also works in a custom loop:

    >>> import torch
    >>> from trainwright import OneCycle, Plan
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    >>> schedule = OneCycle(max_lr=0.5).bind(optimizer, Plan(max_updates=100))
    >>> for update in range(100):
    ...     schedule.apply(update)  # then forward, backward, optimizer.step()
    >>> optimizer.param_groups[0]["lr"]
    2e-06

    Args:
        max_lr: The maximum learning rate, or one per parameter group.
        warmup: The length of the rise: a fraction of the run (torch's `pct_start`), or a duration.
        anneal_strategy: "cos" or "linear".
        cycle_momentum: "auto" cycles the momentum (or the first beta) of groups where it is above 0. True raises
            SettingError for other groups. False cycles none.
        base_momentum: The momentum at the maximum rate.
        max_momentum: The momentum at the minimum rate.
        div_factor: The initial rate is `max_lr / div_factor`.
        final_div_factor: The final rate is the initial rate divided by this.
        three_phase: Whether to fall to the initial rate in one phase, and to the final rate in another.
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
        """Return torch's scheduler over the run."""
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
    """torch's `CyclicLR`: the rate rises from `base_lr` to `max_lr` and falls again, in cycles until the run ends.

    Args:
        base_lr: The minimum learning rate, or one per parameter group.
        max_lr: The maximum learning rate, or one per parameter group.
        step_size_up: The length of a rise.
        step_size_down: The length of a fall. None: that of a rise.
        mode: "triangular", "triangular2" (amplitude halved in each cycle) or "exp_range" (amplitude times
            `gamma` per update).
        gamma: The factor of "exp_range".
        scale_fn: A custom function that scales the amplitude, instead of `mode`.
        scale_mode: Whether `scale_fn` gets the number of the cycle ("cycle") or of the update ("iterations").
        cycle_momentum: "auto" cycles the momentum (or the first beta) of groups where it is above 0. True raises
            SettingError for other groups. False cycles none.
        base_momentum: The momentum at the maximum rate.
        max_momentum: The momentum at the minimum rate.
        warmup: The length of a warm-up to `base_lr`, a duration or a fraction of the run.
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
        """Return torch's scheduler, after the warm-up."""
        up = constant(self.step_size_up, plan, "Cyclic(step_size_up=)")
        down = up if self.step_size_down is None else constant(self.step_size_down, plan, "Cyclic(step_size_down=)")
        alike = ("mode", "gamma", "scale_fn", "scale_mode")

        def build(optimizer: Optimizer, index: int) -> LRScheduler:
            arguments = _arguments_of(self, optimizer, index, "base_lr", "max_lr", *alike)
            return CyclicLR(optimizer, step_size_up=up, step_size_down=down, **arguments)

        warmup = warmup_updates(self.warmup, plan, "Cyclic")
        return TableSpec(build=build, warmup=warmup, ends=False, lists=_lists_of(self))


def _arguments_of(settings: OneCycle | Cyclic, optimizer: Optimizer, index: int, *names: str) -> dict[str, Any]:
    """Return the arguments of torch's scheduler for one group: these names, and those of the momentum."""
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
    # For a group without momentum, torch would silently set one: 0.95 on plain SGD.
    return arguments | {"cycle_momentum": has_momentum and settings.cycle_momentum is not False}


def _lists_of(settings: OneCycle | Cyclic) -> frozenset[int]:
    """Return the lengths of the settings with one value per group."""
    return frozenset(len(value) for value in values_of(settings) if isinstance(value, tuple))


def _check_per_group(settings: OneCycle | Cyclic, *names: str, **bounds: Any) -> None:
    """Check numbers, or tuples of them, by the bounds of `check_number`."""
    for name in names:
        values = getattr(settings, name)
        if isinstance(values, list):
            object.__setattr__(settings, name, tuple(values))
        written = f"{type(settings).__name__}({name}={values!r})"
        for value in values if isinstance(values, list | tuple) else (values,):
            check_number(value, written, **bounds)
