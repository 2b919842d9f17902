"""Learning-rate schedules as users write them: settings that become a table of rates when a run is planned.

Each runs torch's own scheduler of that name on a stand-in for the optimizer, so its rates are torch's to the last bit.
A schedule reads the clock of applied updates: accumulation, processes and skipped steps do not move it.
Lengths are spans (`Updates(500)`, `Epochs(1)`) or a fraction of the run (`0.1`); a bare whole number is refused.
`warmup=` puts w updates of `LinearLR(start_factor=1/(w+1), total_iters=w)` before the schedule, joined by torch's
`SequentialLR`: the schedule itself then starts, at its own first rate, when the warm-up is over.
What ends with the run holds its last rate from then on.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import chain, repeat
from typing import Literal, cast

from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
)
from torch.optim.lr_scheduler import (
    StepLR as TorchStepLR,
)

from trainwright.core.checks import check_choice, check_number
from trainwright.core.durations import Epochs
from trainwright.core.errors import SettingError, message
from trainwright.core.plan import FAR, Plan
from trainwright.core.suggestions import suggests
from trainwright.protocols import Schedule
from trainwright.schedules.cycles import Cyclic, OneCycle
from trainwright.schedules.lengths import (
    Length,
    check_length,
    check_warmup,
    clock_after,
    end_of,
    every,
    is_whole,
    no_schedule,
    settings_text,
    start_of,
    warmup_updates,
)
from trainwright.schedules.plot import Drawn
from trainwright.schedules.stepped import Plateau, TorchSchedule
from trainwright.schedules.table import Recipe, TableRates

__all__ = [
    "Cosine",
    "Cyclic",
    "Exponential",
    "FunctionSchedule",
    "Linear",
    "MultiStep",
    "OneCycle",
    "Plateau",
    "StepLR",
    "TorchSchedule",
    "WarmupStableDecay",
    "as_schedule",
]


def as_schedule(value: object) -> Schedule | None:
    """The schedule that was given: None, a schedule, or a function `(update, total) -> factor`.

    SettingError for anything else; for a built torch scheduler with the line to write instead.
    """
    if value is None:
        return None
    if isinstance(value, LRScheduler):
        name = type(value).__name__
        raise SettingError(
            message(
                f"schedule={name}(...): a built torch scheduler does not say when it steps",
                want="a schedule, or a function (update, total) -> factor",
                fix=f'write TorchSchedule(lambda optimizer: {name}(optimizer, ...), unit="update")',
            )
        )
    if isinstance(value, type):
        torchs = issubclass(value, LRScheduler)
        fix = (
            f"TorchSchedule(lambda optimizer: {value.__name__}(optimizer, ...), ...)"
            if torchs
            else f"{value.__name__}()"
        )
        raise SettingError(message(f"schedule={value.__name__} is a class", want="a schedule", fix=f"write {fix}"))
    if callable(getattr(value, "bind", None)):
        return value  # type: ignore[return-value]
    if callable(value):
        return FunctionSchedule(cast("Callable[[int, int], float]", value))
    raise no_schedule(value)


@suggests
@dataclass(frozen=True, slots=True)
class StepLR(Drawn):
    """torch's `StepLR`: the rate times `gamma` whenever another `step` has passed, counted from the warm-up's end.

    Epochs are those of the plan: where `accumulate` changes, the rate still falls at the ends of epochs.
    """

    step: Length
    gamma: float = 0.1
    _: KW_ONLY
    warmup: Length | None = None

    def __post_init__(self) -> None:
        check_length(self.step, "StepLR({})")
        check_number(self.gamma, f"StepLR(gamma={self.gamma!r})", above=0)
        check_warmup(self.warmup, "StepLR")

    def bind(self, optimizer: Optimizer, plan: Plan) -> TableRates:
        """The rates of this optimizer over this plan."""
        return TableRates(self._recipe, optimizer, plan)

    def _recipe(self, plan: Plan) -> Recipe:
        warmup = warmup_updates(self.warmup, plan, "StepLR")
        # Between its steps torch's scheduler leaves the rate alone: stepping it only there gives the same bits.
        return Recipe(
            text=settings_text(self),
            total=plan.planned.updates,
            build=lambda stand_in, _: TorchStepLR(stand_in, 1, gamma=self.gamma),
            warmup=warmup,
            ends=False,
            steps=every(self.step, plan, warmup=self.warmup, start=warmup, asked_by="StepLR"),
        )


@suggests
@dataclass(frozen=True, slots=True)
class Exponential(Drawn):
    """torch's `ExponentialLR`, stepped each time `every` has passed: the rate times `gamma`, after the warm-up.

    `every=Epochs(1)` is what torch's examples do; `every=Updates(1)` falls with each update.
    """

    gamma: float
    _: KW_ONLY
    every: Length = Epochs(1)  # noqa: RUF009 - it is frozen
    warmup: Length | None = None

    def __post_init__(self) -> None:
        check_number(self.gamma, f"Exponential(gamma={self.gamma!r})", above=0)
        check_length(self.every, "Exponential(gamma, every={})")
        check_warmup(self.warmup, "Exponential")

    def bind(self, optimizer: Optimizer, plan: Plan) -> TableRates:
        """The rates of this optimizer over this plan."""
        return TableRates(self._recipe, optimizer, plan)

    def _recipe(self, plan: Plan) -> Recipe:
        warmup = warmup_updates(self.warmup, plan, "Exponential")
        return Recipe(
            text=settings_text(self),
            total=plan.planned.updates,
            build=lambda stand_in, _: ExponentialLR(stand_in, self.gamma),
            warmup=warmup,
            ends=False,
            steps=every(self.every, plan, warmup=self.warmup, start=warmup, asked_by="Exponential"),
        )


@suggests
@dataclass(frozen=True, slots=True)
class MultiStep(Drawn):
    """torch's `MultiStepLR`: the rate times `gamma` at each milestone.

    A milestone is a point of the run, warm-up included: `Epochs(30)` is the end of the 30th epoch, 0.5 half of the run.
    With w updates of warm-up torch's scheduler, which then starts late, gets the milestones less w.
    """

    milestones: Sequence[Length]
    gamma: float = 0.1
    _: KW_ONLY
    warmup: Length | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.milestones, Sequence) or isinstance(self.milestones, str) or not self.milestones:
            fix = "MultiStep([Epochs(30), Epochs(60)])"
            raise SettingError(message(f"MultiStep({self.milestones!r})", want="a list of milestones", fix=fix))
        for milestone in self.milestones:
            check_length(milestone, "MultiStep([..., {}])")
        object.__setattr__(self, "milestones", tuple(self.milestones))
        check_number(self.gamma, f"MultiStep(gamma={self.gamma!r})", above=0)
        check_warmup(self.warmup, "MultiStep")

    def bind(self, optimizer: Optimizer, plan: Plan) -> TableRates:
        """The rates of this optimizer over this plan; milestones must rise and lie behind the warm-up."""
        points = self._points(plan.quiet)
        if points != sorted(points):
            raise self._refused(points, warmup_updates(self.warmup, plan.quiet, "MultiStep"))
        return TableRates(self._recipe, optimizer, plan)

    def _points(self, plan: Plan) -> list[int]:
        """The milestones in updates; whole epochs end with the epochs of the run, whatever their lengths."""
        points = []
        for milestone in self.milestones:
            if isinstance(milestone, Epochs) and is_whole(milestone):
                plan.quiet.in_updates(milestone, "MultiStep")  # raises where epochs have no length
                points.append(clock_after(int(milestone.n), plan))
            else:
                points.append(plan.in_updates(milestone, "MultiStep"))
        return points

    def _recipe(self, plan: Plan) -> Recipe:
        warmup = warmup_updates(self.warmup, plan, "MultiStep")
        points = sorted(self._points(plan))
        if points[0] < warmup:
            raise self._refused(points, warmup)
        after = sorted({at for at in points if at > warmup})
        # Torch's scheduler is stepped at its milestones alone, as between them it leaves the rate as it is.
        at_steps = tuple(0 if at == warmup else 1 + after.index(at) for at in points)
        return Recipe(
            text=settings_text(self),
            total=plan.planned.updates,
            build=lambda stand_in, _: MultiStepLR(stand_in, at_steps, gamma=self.gamma),
            warmup=warmup,
            ends=False,
            steps=lambda: chain(after, repeat(FAR)),
            layout=at_steps,
        )

    def _refused(self, points: list[int], warmup: int) -> SettingError:
        return SettingError(
            message(
                f"{settings_text(self)}: the milestones are updates {points}, warm-up is over at {warmup}",
                want="milestones that rise, none of them inside the warm-up",
            )
        )


@suggests
@dataclass(frozen=True, slots=True)
class Linear(Drawn):
    """torch's `LinearLR`: from `start` to `final`, factors of each group's own rate, over a length (else: the rest).

    Without `over` it takes what the warm-up leaves of the run; `final` is the rate that an update after the last
    would have, so that no update is spent on a rate of 0.
    """

    final: float = 0.0
    _: KW_ONLY
    start: float = 1.0
    over: Length | None = None
    warmup: Length | None = None

    def __post_init__(self) -> None:
        check_number(self.final, f"Linear(final={self.final!r})", least=0, most=1)
        check_number(self.start, f"Linear(start={self.start!r})", above=0, most=1)
        if self.over is not None:
            check_length(self.over, "Linear(over={})")
        check_warmup(self.warmup, "Linear")

    def bind(self, optimizer: Optimizer, plan: Plan) -> TableRates:
        """The rates of this optimizer over this plan, whose number of updates must be known unless `over` is given."""
        return TableRates(self._recipe, optimizer, plan)

    def _recipe(self, plan: Plan) -> Recipe:
        warmup = warmup_updates(self.warmup, plan, "Linear")
        if self.over is None:
            length = _rest(plan, warmup, "Linear")
        else:
            length = end_of(self.over, plan, start=warmup, asked_by="Linear(over=)") - warmup
        return Recipe(
            text=settings_text(self),
            total=(plan.quiet if self.over is None else plan.planned).updates,
            build=lambda stand_in, _: LinearLR(stand_in, self.start, end_factor=self.final, total_iters=length),
            warmup=warmup,
            ends=self.over is None,
        )


@suggests
@dataclass(frozen=True, slots=True, kw_only=True)
class Cosine(Drawn):
    """torch's `SequentialLR(LinearLR, CosineAnnealingLR)`: warm-up, then half a cosine down over the rest of the run.

    `final` is a factor of each group's own rate (`eta_min = final * lr`). It is the rate that an update after the
    last would have (`T_max` is the rest of the run), so that no update is spent on a rate of 0.
    """

    warmup: Length | None = None
    final: float = 0.0

    def __post_init__(self) -> None:
        check_number(self.final, f"Cosine(final={self.final!r})", least=0, most=1)
        check_warmup(self.warmup, "Cosine")

    def bind(self, optimizer: Optimizer, plan: Plan) -> TableRates:
        """The rates of this optimizer over this plan, whose number of updates must be known."""
        return TableRates(self._recipe, optimizer, plan)

    def _recipe(self, plan: Plan) -> Recipe:
        warmup = warmup_updates(self.warmup, plan, "Cosine")
        rest = _rest(plan, warmup, "Cosine")

        def build(stand_in: Optimizer, _: int) -> LRScheduler:
            group = stand_in.param_groups[0]
            return CosineAnnealingLR(stand_in, rest, eta_min=self.final * group.get("initial_lr", group["lr"]))

        return Recipe(text=settings_text(self), total=plan.quiet.updates, build=build, warmup=warmup)


@suggests
@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupStableDecay(Drawn):
    """Warm-up, then each group's own rate, then down to `final` times it in the last `decay` of the run.

    With T updates in the run, w of warm-up and d of decay, update u (from 0) has the rate lr times
    (u + 1) / (w + 1) for u < w; 1 for w <= u <= T - d; and final + (1 - final) * f(p) with p = (u - (T - d)) / d
    from there, where f(p) is 1 - p ("linear"), 1 - sqrt(p) ("sqrt"), or (1 + cos(pi p)) / 2 ("cosine").
    Stable phase: Hu et al. 2024, arXiv:2404.06395; "sqrt": Hägele et al. 2024, arXiv:2405.18392.
    """

    warmup: Length
    decay: Length
    final: float = 0.0
    shape: Literal["linear", "sqrt", "cosine"] = "linear"

    def __post_init__(self) -> None:
        check_length(self.warmup, "WarmupStableDecay(warmup={}, decay=...)", least=0)
        check_length(self.decay, "WarmupStableDecay(warmup=..., decay={})")
        check_number(self.final, f"WarmupStableDecay(final={self.final!r})", least=0, most=1)
        check_choice(self.shape, "WarmupStableDecay", "shape", choices=tuple(_SHAPES))

    def bind(self, optimizer: Optimizer, plan: Plan) -> TableRates:
        """The rates of this optimizer over this plan, whose number of updates must be known."""
        return TableRates(self._recipe, optimizer, plan)

    def _recipe(self, plan: Plan) -> Recipe:
        total = plan.horizon("WarmupStableDecay")
        warmup = warmup_updates(self.warmup, plan, "WarmupStableDecay")
        falls = start_of(self.decay, plan, end=total, asked_by="WarmupStableDecay(decay=)")
        if falls < warmup:
            raise SettingError(
                message(
                    f"{settings_text(self)}: warm-up and decay together are longer than the run",
                    have=f"{total} updates, {warmup} of them warm-up",
                    want="warmup + decay within the run",
                )
            )
        shape = _SHAPES[self.shape]

        def factor(after: int) -> float:
            progress = (after + warmup - falls) / (total - falls)
            return 1.0 if progress <= 0 else self.final + (1 - self.final) * shape(min(progress, 1.0))

        return Recipe(
            text=settings_text(self),
            total=total,
            build=lambda stand_in, _: LambdaLR(stand_in, factor),
            warmup=warmup,
        )


@dataclass(frozen=True, slots=True)
class FunctionSchedule(Drawn):
    """torch's `LambdaLR` over the run: any function `(update, total) -> factor` of each group's own rate.

    With w updates of warm-up the function counts from its end: update 0 of total - w.
    """

    fn: Callable[[int, int], float]
    _: KW_ONLY
    warmup: Length | None = None

    def __post_init__(self) -> None:
        check_warmup(self.warmup, "FunctionSchedule")
        try:
            inspect.signature(self.fn).bind(0, 1)
        except ValueError:
            return  # a builtin without a signature
        except TypeError as error:
            name = getattr(self.fn, "__name__", repr(self.fn))
            raise SettingError(
                message(
                    f"{name} is no schedule: {error}",
                    want="a function of (update, total) that returns a factor of the rate",
                    fix="schedule=lambda update, total: 1 - update / total",
                )
            ) from None

    def bind(self, optimizer: Optimizer, plan: Plan) -> TableRates:
        """The rates of this optimizer over this plan, whose number of updates must be known."""
        return TableRates(self._recipe, optimizer, plan)

    def _recipe(self, plan: Plan) -> Recipe:
        warmup = warmup_updates(self.warmup, plan, "FunctionSchedule")
        rest = _rest(plan, warmup, "FunctionSchedule")
        text = settings_text(self)

        def factor(update: int) -> float:
            given = self.fn(update, rest)
            try:
                value = float(given)
            except (TypeError, ValueError):
                value = math.nan
            if not 0 <= value < math.inf:
                what = f"{text} gave {given} for {update=}, {rest=}"
                raise SettingError(message(what, want="a factor of at least 0"))
            return value

        return Recipe(
            text=text,
            total=plan.quiet.updates,
            build=lambda stand_in, _: LambdaLR(stand_in, factor),
            warmup=warmup,
        )


_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda p: 1 - p,
    "sqrt": lambda p: 1 - math.sqrt(p),
    "cosine": lambda p: (1 + math.cos(math.pi * p)) / 2,
}


def _rest(plan: Plan, warmup: int, owner: str) -> int:
    total = plan.horizon(owner)
    if warmup >= total:
        raise SettingError(
            message(
                f"{owner}(warmup=): the warm-up leaves nothing of the run",
                have=f"{warmup} updates of warm-up, {total} updates in all",
                want="a warm-up that is shorter than the run",
                fix="warmup=0.1",
            )
        )
    return total - warmup
