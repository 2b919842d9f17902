"""Weight averaging: the settings EMA and SWA, and the averages of one model during one `fit`.

The arithmetic is that of `torch.optim.swa_utils`. The number of averages is counted on the host, so nothing is read
from the device. Integer and boolean parameters are not averaged: like buffers, they have their current values in the
averaged model. With a sharded model, each rank averages its shards.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_avg_fn, get_swa_multi_avg_fn

from trainwright.core.checks import check_flag, check_form, check_number, is_count, is_none_or, is_text, settings_text
from trainwright.core.durations import Duration, Epochs, Updates
from trainwright.core.errors import CheckpointError, DataError, SettingError
from trainwright.core.plan import Plan
from trainwright.core.suggestions import suggests
from trainwright.core.torch_private import BatchNorm, buffer_dict, version_of
from trainwright.modules.dtensors import copy_into, is_sharded, local_shards, on_all_ranks, reshard
from trainwright.modules.modes import training_mode
from trainwright.schedules.lengths import Length, check_length

Fold = Callable[[list[Tensor], list[Tensor], int], object]
"""Updates averages in place: (averages, weights, number of averages taken before)."""
Forward = Callable[[], object]
"""Runs the training data through a model once."""
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)


class WeightAveraging:
    """Base class of the settings for `average=`; `bind` makes the object with the state of one `fit`."""

    __slots__ = ()

    def bind(self, model: nn.Module, plan: Plan | None = None) -> AveragedWeights:
        """Return the averages of a model for a plan; SettingError if settings contradict the plan."""
        raise NotImplementedError


@suggests
@dataclass(frozen=True, slots=True)
class EMA(WeightAveraging):
    """Exponential moving average of the weights, updated after each update: decay x average + (1 - decay) x weights.

    The first average is a copy of the weights.

    Args:
        decay: The decay, from 0 to below 1.
        warmup: Whether to limit the decay of update n to (1 + n) / (10 + n), as TensorFlow's
            `tf.train.ExponentialMovingAverage` does with `num_updates`: early weights are forgotten faster.
    """

    decay: float = 0.999
    _: KW_ONLY
    warmup: bool = False

    def __post_init__(self) -> None:
        check_number(self.decay, f"EMA(decay={self.decay!r})", least=0, below=1)
        check_flag(self.warmup, f"EMA(warmup={self.warmup!r})", fix=f"EMA({self.decay!r}, warmup=True)")

    def bind(self, model: nn.Module, plan: Plan | None = None) -> AveragedWeights:
        """Return the averages of a model; `plan` is not used."""
        fold = self._warming if self.warmup else inspect.unwrap(get_ema_multi_avg_fn(self.decay))
        return AveragedWeights(self, model, fold, text=settings_text(self))

    def _warming(self, averages: list[Tensor], weights: list[Tensor], taken: int) -> None:
        update = taken + 1
        get_ema_multi_avg_fn(min(self.decay, (1 + update) / (10 + update)))(averages, weights, taken)


@suggests
@dataclass(frozen=True, slots=True)
class SWA(WeightAveraging):
    """Stochastic weight averaging: the plain mean of the weights, sampled periodically (arXiv 1803.05407).

    Before an evaluation of the averaged weights, their BatchNorm statistics are estimated from the training data, as
    torch's `update_bn` does.

    Args:
        start: When the first weights are sampled: a duration, or a fraction of the run.
        every: The interval: `Epochs(n)` samples at the ends of epochs n, 2n, ...; `Updates(n)` after updates n, 2n, ...
    """

    start: Length = 0.75
    every: Duration = field(default=Epochs(1))

    def __post_init__(self) -> None:
        check_length(self.start, "SWA(start={})", least=0)
        is_epochs = isinstance(self.every, Epochs) and self.every.n == int(self.every.n)
        if not is_epochs and not isinstance(self.every, Updates):
            what = f"SWA(every={self.every!r})"
            raise SettingError(what, want="complete epochs, or updates", fix="every=Epochs(1) or Updates(500)")

    def bind(self, model: nn.Module, plan: Plan | None = None) -> AveragedWeights:
        """Return the averages of a model for a plan; without a plan, `start` must be in updates or epochs.

        SettingError if the plan ends before the first average.
        """
        times = self._times(plan)
        begin = f"epoch {times.epoch:g}" if times.epoch else f"update {times.update}"
        text = f"{settings_text(self)} from {begin}"
        if plan is not None:
            _refuse_never(times, plan, text)
        return SWAWeights(self, model, times, text=text)

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
    """When an SWA takes averages: after every n-th update or epoch, from a first update or epoch on."""

    n: int
    each_epoch: bool
    update: int = 0
    epoch: float = 0

    def due(self, updates: int, epochs: int) -> bool:
        """Return whether an average is due after `updates` updates and `epochs` finished epochs."""
        begun = updates >= self.update and epochs >= self.epoch
        return begun and (epochs if self.each_epoch else updates) % self.n == 0


def _refuse_never(times: _Times, plan: Plan, text: str) -> None:
    """Raise SettingError if an SWA takes no average in this plan, as far as its length is known."""
    plan = plan.planned  # `_times` has recorded the dependency on epoch lengths; this check must not add another
    total = plan.updates
    if times.each_epoch:
        total = plan.epochs if total is None or not plan.updates_in(0) else int(plan.epoch_at(total, "SWA"))
    if total is None:
        return
    last = total // times.n * times.n
    updates = plan.updates_until(last) if times.each_epoch else last
    if last > 0 and times.due(times.update if updates is None else updates, last):
        return
    run = f"{plan.updates} updates" if plan.updates is not None else f"{plan.epochs} epochs"
    fix = f"SWA(0.75, Updates({max(1, (plan.updates or 100) // 10)})), say"
    raise SettingError(f"{text} takes no average in a run of {run}", want="a start inside it", fix=fix)


class AveragedWeights:
    """The averaged weights of a model during one `fit`. A part of every checkpoint.

    Inside `swapped()` and after `apply()`, the model's parameters hold the average, and this object the raw weights.
    """

    each_update = True
    """Whether averages are taken after updates. False: at the ends of epochs, by `epoch_ended`."""

    def __init__(self, settings: WeightAveraging, model: nn.Module, fold: Fold, *, text: str) -> None:
        self.name: str = type(settings).__name__
        self.text = text
        """The settings as text, for the header of a run and for checkpoints."""
        self.taken = 0
        """The number of averages taken."""
        self.is_applied = False
        """Whether the model holds the average now."""
        self._no_grad = torch.no_grad()  # made once, so that an average costs six Python calls
        self._weights: list[Tensor] = []
        self._averages: list[Tensor] = []
        self._raw: list[Tensor] = []
        """Copies of the raw weights while the model holds the average."""
        self._applied: list[tuple[int, Tensor]] | None = None
        """Version and value of each weight directly after `apply`."""
        self._signature: list[Any] | None = None
        self.attach(model)
        self._fold = _on_shards(fold) if is_sharded(*self._weights) else fold

    def take(self, updates: int) -> None:
        """Add the current weights to the average. Called after each update; `updates` is used by SWA only."""
        if self.is_applied:
            what = f"{self.name}: an average was to be taken while the model holds the averaged weights"
            raise SettingError(what, want="the weights that are trained", fix="average.revert() first")
        with self._no_grad:
            for averages, weights in self._groups:
                if self.taken:
                    self._fold(averages, weights, self.taken)
                else:
                    _copy(averages, weights)
        self.taken += 1

    def epoch_ended(self, updates: int, epochs: int) -> None:
        """No-op here; SWA may take an average after `epochs` finished epochs. Called after each epoch."""

    @contextmanager
    def swapped(self, forward: Forward | None = None) -> Iterator[None]:
        """Load the average into the model inside the block; restore the raw weights bit for bit, also after an error.

        No-op before the first average, and if the model already holds the average. If `needs_statistics`, `forward` is
        called, in train mode and without gradients: it must run the training data through the model once.
        """
        if self.is_applied or not self.taken:
            yield
            return
        self._copy_raw(forward)
        try:
            self._load_averages(forward)
            yield
        finally:
            self._load_raw()

    @property
    def needs_statistics(self) -> bool:
        """Whether BatchNorm statistics must be estimated before the average can be evaluated. False here."""
        return False

    @property
    def will_need_statistics(self) -> bool:
        """Whether a later average of this model will need an estimate of BatchNorm statistics. False here."""
        return False

    def apply(self, forward: Forward | None = None) -> bool:
        """Load the average into the model; return False if no average was taken yet. `revert` undoes it.

        A second call, after other weights were loaded into the model, records those as the applied weights.
        """
        if not self.taken:
            return False
        values = self._averages
        if self._applied is not None:
            values = [weight.detach().clone() for weight in self._weights]
        else:
            assert not self.is_applied
            self._copy_raw(forward)
            try:
                self._load_averages(forward)
            except BaseException:
                self._load_raw()
                raise
        self._applied = list(zip(map(version_of, self._weights), values, strict=True))
        return True

    def revert(self) -> bool:
        """Restore the raw weights after `apply`; return whether they were restored.

        No-op if the user has changed weights or replaced parameters since `apply`: training continues from the changed
        weights. A move between devices is no change.
        """
        applied, self._applied = self._applied, None
        if applied is None:
            return False
        self.is_applied = False
        reshard(self._model.modules())
        present = {id(parameter) for parameter in self._model.parameters()}
        unchanged = all(
            id(weight) in present and _is_unchanged(weight, version, value)
            for weight, (version, value) in zip(self._weights, applied, strict=True)
        )
        if not on_all_ranks(unchanged, self._weights):
            return False
        self._load_raw()
        return True

    def attach(self, model: nn.Module) -> None:
        """Average the current parameters of the model; the average of a new parameter starts with its value."""
        assert not self.is_applied
        reshard(model.modules())
        self._model = model
        signature = [(name, id(p), p.device, p.dtype, p.shape) for name, p in model.named_parameters()]
        if signature != self._signature:
            self._collect()
            self._signature = signature

    def state_dict(self) -> dict[str, Any]:
        """Return the raw weights and the counts; call inside `swapped()`, since the saved model holds the average.

        Tensors are not copied. CheckpointError if the model does not hold the average.
        """
        if self.taken and not self.is_applied:
            raise CheckpointError(
                f"the state of {self.name} was asked for while the model holds its raw weights",
                want="a checkpoint whose model holds the averaged weights",
                fix="with average.swapped(): save(model.state_dict(), average.state_dict())",
            )
        raw = dict(zip(self._names, self._raw, strict=True)) if self.taken else None
        return {"name": self.name, "settings": self.text, "taken": self.taken, "raw": raw}

    def load_state_dict(self, tree: Mapping[str, Any]) -> str | None:
        """Take the weights just loaded into the model as the average, then load the raw weights into the model.

        Returns a line of text if the settings differ. CheckpointError for another kind of average or another model.
        """
        assert self._applied is not None or not self.is_applied
        self._check(tree)
        self.taken, self.is_applied, self._applied = tree["taken"], False, None
        if tree["raw"] is not None:
            with torch.no_grad():
                _copy(self._averages, self._weights)
                for name, weight in zip(self._names, self._weights, strict=True):
                    copy_into(weight, tree["raw"][name])
        return None if tree["settings"] == self.text else f"average changed: {tree['settings']} -> {self.text}"

    def _collect(self) -> None:
        """List the parameters with their averages, and group both by device and dtype for foreach kernels."""
        known = {id(weight): average for weight, average in zip(self._weights, self._averages, strict=True)}
        named = self._model.named_parameters()
        averaged: dict[str, Tensor] = {name: weight for name, weight in named if _is_averaged(name, weight)}
        self._names, self._weights, self._averages = list(averaged), list(averaged.values()), []
        groups: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for weight in self._weights:
            average = known.get(id(weight))
            if average is None or average.shape != weight.shape:
                average = weight.detach().clone()
            average = average.to(weight.device, weight.dtype)
            self._averages.append(average)
            averages, weights = groups.setdefault((weight.device, weight.dtype), ([], []))
            averages.append(average)
            weights.append(weight)
        self._groups = list(groups.values())

    def _copy_raw(self, forward: Forward | None) -> None:
        """Copy the weights of the model."""
        reshard(self._model.modules())
        self._raw = [weight.detach().clone() for weight in self._weights]

    def _load_averages(self, forward: Forward | None) -> None:
        self.is_applied = True
        with torch.no_grad():
            _copy(self._weights, self._averages)

    def _load_raw(self) -> None:
        reshard(self._model.modules())
        with torch.no_grad():
            _copy(self._weights, self._raw)
        self.is_applied, self._raw = False, []

    def _check(self, tree: Mapping[str, Any]) -> None:
        """Raise CheckpointError for the state of another kind of average or another model, before any change."""
        check_form(tree, name=is_text, settings=is_text, taken=is_count, raw=is_none_or(_are_tensors))
        if tree["name"] != self.name:
            have, want = f"{tree['settings']} in the checkpoint", self.text
            what = "the checkpoint has another kind of average"
            fix = 'fit(..., resume_fresh=("average",)), or resume with the one of the checkpoint'
            raise CheckpointError(what, have=have, want=want, fix=fix)
        if tree["raw"] is not None:
            self._check_shapes(tree["raw"], dict(zip(self._names, self._weights, strict=True)))

    def _check_shapes(self, saved: Mapping[str, Tensor], live: Mapping[str, Tensor]) -> None:
        if {name: t.shape for name, t in saved.items()} != {name: t.shape for name, t in live.items()}:
            what = f"the raw weights beside the {self.name} are those of another model"
            raise CheckpointError(what, have=_differences(saved, live), want="the model as it was saved")


class SWAWeights(AveragedWeights):
    """The averaged weights of an `SWA`, with BatchNorm statistics that are estimated for the mean weights."""

    def __init__(self, settings: SWA, model: nn.Module, times: _Times, *, text: str) -> None:
        self._times, self.each_update = times, not times.each_epoch
        self._in_eval: frozenset[str] = frozenset()
        """Names of modules in eval mode, within a model in train mode, when the last average was taken."""
        self._statistics: dict[str, Tensor] | None = None
        """BatchNorm statistics of the averaged weights; None until they are estimated."""
        self._raw_statistics: dict[str, Tensor] = {}
        super().__init__(settings, model, _mean, text=text)

    def take(self, updates: int) -> None:
        """Take an average if one is due after `updates` applied updates. Called after each update."""
        if self.each_update and self._times.due(updates, 0):
            self._take(updates)

    def epoch_ended(self, updates: int, epochs: int) -> None:
        """Take an average if one is due after `epochs` finished epochs. Called after each epoch."""
        if not self.each_update and self._times.due(updates, epochs):
            self._take(updates)

    @property
    def needs_statistics(self) -> bool:
        """Whether BatchNorm statistics must be estimated before the average can be evaluated."""
        return self.taken > 0 and self._statistics is None and bool(estimable(self._model, self._in_eval))

    @property
    def will_need_statistics(self) -> bool:
        """Whether a later average of this model will need an estimate of BatchNorm statistics."""
        return bool(estimable(self._model, _in_eval(self._model)))

    def attach(self, model: nn.Module) -> None:
        """Average the current parameters of the model; discard the statistics if a parameter or layer has changed."""
        before = self._signature
        super().attach(model)
        if self._signature != before or set(self._statistics or ()) != set(self._live_statistics()):
            self._statistics = None

    def state_dict(self) -> dict[str, Any]:
        """Return the raw weights and statistics, and the counts; call inside `swapped()`."""
        statistics = self._raw_statistics if self.taken else {}
        return super().state_dict() | {"statistics": statistics, "in_eval": sorted(self._in_eval)}

    def load_state_dict(self, tree: Mapping[str, Any]) -> str | None:
        """Take the weights and statistics just loaded into the model as the average, then load the raw ones."""
        news = super().load_state_dict(tree)
        self._in_eval, self._statistics = frozenset(tree["in_eval"]), None
        if tree["raw"] is not None:
            self._statistics = self._copied_statistics()
            self._set_statistics(tree["statistics"])
        return news

    def _take(self, updates: int) -> None:
        super().take(updates)
        self._statistics, self._in_eval = None, _in_eval(self._model)

    def _copy_raw(self, forward: Forward | None) -> None:
        if self.needs_statistics and forward is None:
            raise SettingError(
                f"{self.name}: BatchNorm statistics must be estimated before the averaged weights are evaluated",
                have=", ".join(list(estimable(self._model, self._in_eval))[:5]) or "the model itself",
                want="a function that runs the training data once through the model",
                fix="average.swapped(lambda: [model(x) for x, _ in train])",
            )
        super()._copy_raw(forward)
        self._raw_statistics = self._copied_statistics()

    def _load_averages(self, forward: Forward | None) -> None:
        super()._load_averages(forward)
        if self._statistics is None:
            with torch.no_grad():
                new = estimate(self._model, self._in_eval, forward)
            reshard(self._model.modules())
            self._statistics = {**self._raw_statistics, **new}  # `new` lacks layers that no batch reached
        self._set_statistics(self._statistics)

    def _load_raw(self) -> None:
        super()._load_raw()
        self._set_statistics(self._raw_statistics)

    def _live_statistics(self) -> dict[str, Tensor]:
        return statistics_of(estimable(self._model, self._in_eval))

    def _copied_statistics(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self._live_statistics().items()}

    def _set_statistics(self, values: Mapping[str, Tensor]) -> None:
        live = self._live_statistics()
        with torch.no_grad():
            for name, value in values.items():
                live[name].copy_(value)

    def _check(self, tree: Mapping[str, Any]) -> None:
        super()._check(tree)
        check_form(tree, statistics=_are_tensors, in_eval=lambda names: isinstance(names, list))
        if tree["raw"] is not None:
            self._check_shapes(tree["statistics"], statistics_of(estimable(self._model, tree["in_eval"])))


_mean_of_one = inspect.unwrap(get_swa_avg_fn())
_mean_of_many = inspect.unwrap(get_swa_multi_avg_fn())


def _mean(averages: list[Tensor], weights: list[Tensor], taken: int) -> None:
    """Update a plain mean as torch's `AveragedModel` does on this device: without foreach on the CPU."""
    if averages[0].device.type != "cpu":
        _mean_of_many(averages, weights, taken)
        return
    for average, weight in zip(averages, weights, strict=True):
        average.copy_(_mean_of_one(average, weight, taken))


def _on_shards(fold: Fold) -> Fold:
    """Return a fold over local shards; exact, since the arithmetic is elementwise."""

    def folded(averages: list[Tensor], weights: list[Tensor], taken: int) -> object:
        return fold(local_shards(averages), local_shards(weights), taken)

    return folded


def _copy(into: list[Tensor], values: list[Tensor]) -> None:
    torch._foreach_copy_(local_shards(into), local_shards(values))


def _is_averaged(name: str, weight: Tensor) -> bool:
    """Return whether a parameter is averaged; False for integers and booleans, SettingError if it cannot be."""
    if weight.layout != torch.strided:
        raise SettingError(f"{name} cannot be averaged: its layout is {weight.layout}", fix="leave average= out")
    if not weight.is_floating_point() and not weight.is_complex():
        return False
    if weight.dtype not in DTYPES:
        what = f"{name} cannot be averaged: its dtype is {weight.dtype}"
        raise SettingError(what, want="float16, bfloat16, float32, float64 or complex weights")
    return True


def _is_unchanged(weight: Tensor, version: int, value: Tensor) -> bool:
    """Return whether a parameter was not written to since it had this version and value.

    In-place writes increase torch's version counter, even if the values are equal (`load_state_dict`). Writes through
    `.data` do not, so values are compared too.
    """
    if version_of(weight) != version or weight.dtype != value.dtype:
        return False
    now, then = local_shards((weight.detach(), value))
    return now.shape == then.shape and torch.allclose(now.to(then.device), then, rtol=0, atol=0, equal_nan=True)


def _are_tensors(value: object) -> bool:
    """Return whether a value is a dict of tensors."""
    return isinstance(value, Mapping) and all(isinstance(tensor, Tensor) for tensor in value.values())


def _differences(saved: Mapping[str, Tensor], live: Mapping[str, Tensor]) -> str:
    """Return the first five names with different shapes, and both shapes, as text."""
    before, now = ({name: tuple(t.shape) for name, t in tensors.items()} for tensors in (saved, live))
    different = [name for name in sorted(before | now) if before.get(name) != now.get(name)]
    return "; ".join(
        f"{name} (checkpoint {before.get(name, 'none')}, model {now.get(name, 'none')})" for name in different[:5]
    )


def _in_eval(model: nn.Module) -> frozenset[str]:
    """Return the names of modules in eval mode within a model in train mode; an empty set for a model in eval mode."""
    if not model.training:
        return frozenset()
    return frozenset(name for name, module in model.named_modules() if not module.training)


def estimable(model: nn.Module, in_eval: Collection[str]) -> dict[str, BatchNorm]:
    """Return the BatchNorm layers that track statistics, by name, except those in `in_eval`."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, BatchNorm) and module.num_batches_tracked is not None and name not in in_eval
    }


def statistics_of(norms: Mapping[str, BatchNorm]) -> dict[str, Tensor]:
    """Return the buffers of BatchNorm layers, by name."""
    return {
        f"{name}.{key}".lstrip("."): buffer
        for name, norm in norms.items()
        for key, buffer in norm.named_buffers(recurse=False)
    }


def estimate(model: nn.Module, in_eval: Collection[str], forward: Forward | None) -> dict[str, Tensor]:
    """Return BatchNorm statistics for the current weights: plain means over all batches that `forward` runs.

    As torch's `update_bn`. Call without gradients. The model is in train mode except for `in_eval`; modes, momenta and
    all buffers are restored. Layers that no batch reached are left out; DataError if no layer was reached.
    """
    norms = estimable(model, in_eval)
    if not norms:
        return {}
    assert forward is not None
    momenta = {name: norm.momentum for name, norm in norms.items()}
    with _training(model, in_eval):
        try:
            for norm in norms.values():
                norm.reset_running_stats()
                norm.momentum = None  # None makes torch compute a plain mean over all batches
            forward()
            seen = {name: norm for name, norm in norms.items() if int(norm.num_batches_tracked or 0)}
            if not seen:
                have = f"no batch went through {', '.join(list(norms)[:5]) or 'the model'}"
                what = "BatchNorm statistics of the averaged weights cannot be estimated"
                raise DataError(what, have=have, want="training data that can be iterated again", where=False)
            return {name: value.clone() for name, value in statistics_of(seen).items()}
        finally:
            for name, norm in norms.items():
                norm.momentum = momenta[name]


@contextmanager
def _training(model: nn.Module, in_eval: Collection[str]) -> Iterator[None]:
    """Set train mode inside the block except for `in_eval`; restore all modes and buffers."""
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in buffer_dict(module).items()
        if buffer is not None
    ]
    try:
        with training_mode(model, True):
            for name, module in model.named_modules():
                if name in in_eval:
                    module.training = False
            yield
    finally:
        for module, name, buffer, value in buffers:
            buffer_dict(module)[name] = buffer
            buffer.copy_(value)
