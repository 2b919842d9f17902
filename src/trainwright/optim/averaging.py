"""Settings of weight averaging: EMA and SWA, with the arithmetic of `torch.optim.swa_utils`."""

from __future__ import annotations

import inspect
from dataclasses import KW_ONLY, dataclass, field

from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_avg_fn, get_swa_multi_avg_fn

from trainwright.core.checks import check_flag, check_number
from trainwright.core.durations import Duration, Epochs, Updates
from trainwright.core.errors import SettingError
from trainwright.core.plan import Plan
from trainwright.core.suggestions import suggests
from trainwright.optim.averaged_weights import AveragedWeights
from trainwright.schedules.lengths import Length, check_length
from trainwright.schedules.settings import settings_text


class WeightAveraging:
    """Base class of the settings that fill the slot `average`; `bind` makes the object with state for each `fit`."""

    __slots__ = ()

    def bind(self, model: nn.Module, plan: Plan | None = None) -> AveragedWeights:
        """Return the averages of this model over this plan; settings that contradict the plan are refused here."""
        raise NotImplementedError


@suggests
@dataclass(frozen=True, slots=True)
class EMA(WeightAveraging):
    """Exponential moving average, taken after every update: decay x average + (1 - decay) x weights.

    The first one copies the weights. `warmup`: until it is larger, the decay of update n is (1 + n) / (10 + n), as in
    TensorFlow's `tf.train.ExponentialMovingAverage` with `num_updates`; a young average then forgets faster.
    """

    decay: float = 0.999
    _: KW_ONLY
    warmup: bool = False

    def __post_init__(self) -> None:
        check_number(self.decay, f"EMA(decay={self.decay!r})", least=0, below=1)
        check_flag(self.warmup, f"EMA(warmup={self.warmup!r})", fix=f"EMA({self.decay!r}, warmup=True)")

    def bind(self, model: nn.Module, plan: Plan | None = None) -> AveragedWeights:
        """Return the averages of this model; no plan is needed."""
        fold = self._warming if self.warmup else inspect.unwrap(get_ema_multi_avg_fn(self.decay))
        return AveragedWeights(self, model, fold=fold, text=settings_text(self))

    def _warming(self, averages: list[Tensor], weights: list[Tensor], taken: int) -> None:
        update = taken + 1
        get_ema_multi_avg_fn(min(self.decay, (1 + update) / (10 + update)))(averages, weights, taken)


@suggests
@dataclass(frozen=True, slots=True)
class SWA(WeightAveraging):
    """Stochastic weight averaging: the plain mean of the weights at every `every`, from `start` on (arXiv 1803.05407).

    `start`: a duration, or a fraction of the run; the weights there are the first of the mean. `every`: Epochs(n), at
    the ends of epochs n, 2n, ..., or Updates(n), after updates n, 2n, ... BatchNorm statistics are estimated anew for
    the averaged weights, as torch's `update_bn` does, whenever they are evaluated.
    """

    start: Length = 0.75
    every: Duration = field(default=Epochs(1))

    def __post_init__(self) -> None:
        check_length(self.start, "SWA(start={})", least=0)
        is_epochs = isinstance(self.every, Epochs) and self.every.n == int(self.every.n)
        if not is_epochs and not isinstance(self.every, Updates):
            what = f"SWA(every={self.every!r})"
            raise SettingError(what, want="whole epochs, or updates", fix="every=Epochs(1) or Updates(500)")

    def bind(self, model: nn.Module, plan: Plan | None = None) -> AveragedWeights:
        """Return the averages of this model over this plan; without a plan `start` must be in updates or epochs.

        SettingError if no average would be taken in this plan.
        """
        times = self._times(plan)
        begin = f"epoch {times.epoch:g}" if times.epoch else f"update {times.update}"
        text = f"{settings_text(self)} from {begin}"
        if plan is not None:
            _refuse_never(times, plan, text)
        each_update = not times.each_epoch
        return AveragedWeights(
            self, model, fold=_mean, text=text, due=times.due, each_update=each_update, estimates=True
        )

    def _times(self, plan: Plan | None) -> _Times:
        n, each_epoch = int(self.every.n), isinstance(self.every, Epochs)
        if each_epoch and isinstance(self.start, Epochs):
            return _Times(n, each_epoch=True, epoch=self.start.n)
        if isinstance(self.start, Updates) or not self.start:
            return _Times(n, each_epoch, update=self.start.n if isinstance(self.start, Updates) else 0)
        if plan is None:
            raise SettingError(
                f"SWA(start={self.start!r}) without a plan: at which update that is, is unknown",
                want="a start in updates, or the plan of the run",
                fix="SWA(Updates(1000)).bind(model), or .bind(model, Plan(max_updates=10_000))",
            )
        return _Times(n, each_epoch, update=plan.in_updates(self.start, "SWA(start=)"))


@dataclass(frozen=True, slots=True)
class _Times:
    """The times of an SWA: every n-th update or end of an epoch, from an update or an epoch on."""

    n: int
    each_epoch: bool
    update: int = 0
    epoch: float = 0

    def due(self, updates: int, epochs: int) -> bool:
        """Return whether an average is due after so many updates and finished epochs."""
        begun = updates >= self.update and epochs >= self.epoch
        return begun and (epochs if self.each_epoch else updates) % self.n == 0


_mean_of_one = inspect.unwrap(get_swa_avg_fn())
_mean_of_many = inspect.unwrap(get_swa_multi_avg_fn())


def _mean(averages: list[Tensor], weights: list[Tensor], taken: int) -> None:
    """Update a plain mean with the function that torch's `AveragedModel` uses on this device: on a CPU no foreach."""
    if averages[0].device.type != "cpu":
        _mean_of_many(averages, weights, taken)
        return
    for average, weight in zip(averages, weights, strict=True):
        average.copy_(_mean_of_one(average, weight, taken))


def _refuse_never(times: _Times, plan: Plan, text: str) -> None:
    """Refuse an SWA that takes no average in this plan, as far as the plan is known."""
    plan = plan.planned  # the plan that records which settings depend on epoch lengths was asked before
    total = _finished_epochs(plan) if times.each_epoch else plan.updates
    if total is None:
        return
    last = total // times.n * times.n
    updates = plan.updates_until(last) if times.each_epoch else last
    if last > 0 and times.due(times.update if updates is None else updates, last):
        return
    run = f"{plan.updates} updates" if plan.updates is not None else f"{plan.epochs} epochs"
    fix = f"SWA(0.75, Updates({max(1, (plan.updates or 100) // 10)})), say"
    raise SettingError(f"{text} takes no average in a run of {run}", want="a start inside it", fix=fix)


def _finished_epochs(plan: Plan) -> int | None:
    """Return the number of epochs that such a run finishes; None if unknown."""
    if plan.updates is None or not plan.updates_in(0):
        return plan.epochs
    return int(plan.epoch_at(plan.updates, "SWA"))
