"""Measurements of a run between its updates, for observers: probes, speed, profiles, weight statistics."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from math import inf
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainwright.core import host_reads
from trainwright.core.device import device_memory, widest_float
from trainwright.core.durations import Trigger
from trainwright.core.errors import SettingError, first_line, not_built
from trainwright.core.suggestions import did_you_mean
from trainwright.core.trees import tensors_in
from trainwright.evaluation.passes import probe_context
from trainwright.modules.dtensors import is_sharded, local_shards
from trainwright.modules.flops import count_flops, peak_of
from trainwright.observers.probes import ModelStatistics, ParameterStatistics, Probe, Statistics
from trainwright.observers.profiler import Profile
from trainwright.observers.throughput import Speed, Throughput
from trainwright.protocols import listeners
from trainwright.update import batches
from trainwright.update.trainer_like import TrainerLike, active_observers
from trainwright.update.window import find_rows

if TYPE_CHECKING:
    from trainwright.fit.run import Run


class Inspector:
    """Measures one run at its boundaries, with the settings of one `RunObserver`.

    `next_update` requests a boundary; other boundaries come too. All methods are no-ops by default.
    """

    def before_boundary(self) -> None:
        """Run first at a boundary, before the counters are updated."""

    def at_boundary(self, *, epoch_ended: bool) -> None:
        """Measure, and report to the observers. The counters are up to date."""

    def after_boundary(self) -> None:
        """Run last at a boundary, before the next update."""

    def next_update(self) -> float:
        """Return the update of the next requested boundary; infinity for none."""
        return inf


def inspectors_of(run: Run) -> list[Inspector]:
    """Return an inspector for each `RunObserver`: clocks first, probes last."""
    observers = run.trainer.observers
    clocks = [
        SpeedMeter(observer, run) for observer in active_observers(run.trainer) if isinstance(observer, Throughput)
    ]
    profiles = [ProfileRecorder(observer, run) for observer in observers if isinstance(observer, Profile)]
    weights = [WeightMeter(observer, run) for observer in observers if isinstance(observer, Statistics)]
    probes = [ProbeRunner(observer, run) for observer in observers if isinstance(observer, Probe)]
    return [*clocks, *profiles, *weights, *probes]


class ProbeRunner(Inspector):
    """Calls the function of one `Probe`, and records its numbers."""

    def __init__(self, probe: Probe, run: Run) -> None:
        self._probe, self._run = probe, run
        self._trigger = Trigger(probe.duration, run.counters, of="every")

    def at_boundary(self, *, epoch_ended: bool) -> None:
        """Call the function if it is due, and was not called before an interrupted validation."""
        run, counters = self._run, self._run.counters
        if not counters.interrupted_validation and self._trigger.fires(counters, epoch_ended=epoch_ended):
            with probe_context(run.trainer, run.source):
                numbers = self._probe.fn(run.trainer)
            run.tracker.record_probe(numbers, self._probe.name)

    def next_update(self) -> float:
        """Return the update of the next call."""
        return self._trigger.next_update(self._run.counters)


class SpeedMeter(Inspector):
    """Measures rows per second for one `Throughput`; only the time of updates counts."""

    def __init__(self, settings: Throughput, run: Run) -> None:
        self._run, self._trainer, self._settings = run, run.trainer, settings
        self._trigger = Trigger(settings.duration, run.counters, of="every")
        self._alone = run.rank_sync is None
        self._operations = OperationCount(settings, run.trainer)
        self._on_speed = listeners(active_observers(run.trainer), "on_speed")
        self._stream = torch.cuda.current_stream(run.trainer.device) if run.trainer.device.type == "cuda" else None
        self._memory_epoch, self._memory_sizes = -1, dict[str, int]()
        self._begin(run.counters.rows, run.counters.updates)
        self.after_boundary()

    def before_boundary(self) -> None:
        """Stop the clock: work between updates does not count. Sample whether the device is busy."""
        if self._stream is not None:
            self._samples += 1
            self._busy += not self._stream.query()  # no synchronization
        self._seconds += time.perf_counter() - self._started
        self._data_seconds += self._run.data_seconds - self._data_seconds_before

    def after_boundary(self) -> None:
        """Start the clock."""
        self._data_seconds_before, self._started = self._run.data_seconds, time.perf_counter()

    def next_update(self) -> float:
        """Return the update of the next report; infinity with several ranks, which report at shared boundaries."""
        return self._trigger.next_update(self._run.counters) if self._alone else float("inf")

    def at_boundary(self, *, epoch_ended: bool) -> None:
        """Call `on_speed` of all observers after `every`, at the end of an epoch and at the end of the run."""
        counters = self._run.counters
        fires = self._trigger.fires(counters, epoch_ended=epoch_ended)
        if not (fires or epoch_ended or counters.stopped) or counters.rows == self._rows or not self._seconds:
            return
        flops, peak, note = self._operations.per_row(self._run.tracker.window)
        speed = Speed(
            epoch=counters.earlier_epochs + counters.epoch,
            update=counters.earlier_updates + counters.updates,
            seconds=self._seconds,
            rows=counters.rows - self._rows,
            updates=counters.updates - self._updates,
            data_seconds=self._data_seconds,
            flops_per_row=flops,
            peak=peak,
            looks=self._samples,
            busy=self._busy,
            memory=self._memory(counters.epoch) | device_memory(self._trainer.device),
            note=note,
        )
        self._begin(counters.rows, counters.updates)
        for notify in self._on_speed:
            notify(speed)

    def _memory(self, epoch: int) -> dict[str, int]:
        """Return the memory of the run by kind. Measured once per epoch, since it visits every tensor."""
        if self._memory_epoch != epoch:
            self._memory_epoch, self._memory_sizes = epoch, memory_by_kind(self._trainer)
        return self._memory_sizes

    def _begin(self, rows: int, updates: int) -> None:
        self._rows, self._updates = rows, updates
        self._seconds = self._data_seconds = 0.0
        self._samples = self._busy = 0


class OperationCount:
    """FLOPs per row and peak of the devices, computed once, after the first window."""

    def __init__(self, settings: Throughput, trainer: TrainerLike) -> None:
        self._settings, self._trainer = settings, trainer
        self._result: tuple[float | None, float | None, str] | None = None

    def per_row(self, window: Any) -> tuple[float | None, float | None, str]:
        """Return FLOPs per row, the peak of all devices in FLOP/s, and the reason if one is None."""
        if self._result is None:
            self._result = self._find(window)
        return self._result

    def _find(self, window: Any) -> tuple[float | None, float | None, str]:
        settings, trainer = self._settings, self._trainer
        device = torch.cuda.get_device_name(trainer.device) if trainer.device.type == "cuda" else trainer.device.type
        peak = settings.peak or peak_of(device)
        if peak is None:
            return settings.flops_per_row, None, f"the peak of {device} is not known: Throughput(peak=...)"
        peak *= trainer.world.size
        if settings.flops_per_row is not None:
            return settings.flops_per_row, peak, ""
        unknown = _why_unknown(trainer, window)
        if unknown:
            return None, peak, f"{unknown}: Throughput(flops_per_row=...)"
        try:
            return _counted(trainer, window.batches[0]), peak, ""
        except Exception as error:  # the model may raise anything on the meta device
            why = first_line(error, 80)
            return None, peak, f"the model does not run on the meta device ({why}): Throughput(flops_per_row=...)"


def memory_by_kind(trainer: TrainerLike) -> dict[str, int]:
    """Return the bytes of the run's tensors on this rank, by kind."""
    parameters = list(trainer.model.parameters())
    states = [state for optimizer in trainer.optimizers.values() for state in optimizer.state.values()]
    return {
        "parameters": _size(parameters),
        "gradients": _size(p.grad for p in parameters if p.grad is not None),
        "optimizer": _size(tensors_in(states)),
        "buffers": _size(trainer.model.buffers()),
    }


def _size(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors; for sharded tensors those of this rank."""
    tensors = list(tensors)
    local = local_shards(tensors) if is_sharded(*tensors) else tensors
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


def _why_unknown(trainer: TrainerLike, window: Any) -> str:
    """Return why FLOPs per row cannot be counted; empty if they can."""
    hooks = trainer._hooks
    if hooks.overrides_training_step or hooks.overrides_compute_gradients or hooks.has_custom_update:
        return "steps of your own may call the model any number of times"
    if hooks.split is not batches.split:
        return "a split of your own may give the model any inputs"
    if window is None or not find_rows(window.batches[0]):
        return "the number of rows of a batch is unknown"
    if is_sharded(*trainer.model.parameters()):
        return "a sharded model cannot be copied to the meta device"
    return ""


def _counted(trainer: TrainerLike, batch: Any) -> float:
    """Return FLOPs per row: those of forward and backward of one batch, divided by its rows."""
    inputs, _ = batches.split(batch) if trainer.loss is not None else (batch, None)
    if isinstance(inputs, Mapping):
        flops = count_flops(trainer.model, **inputs)
    else:
        flops = count_flops(trainer.model, *(inputs if isinstance(inputs, tuple | list) else (inputs,)))
    rows = find_rows(batch)
    assert rows  # checked by `_why_unknown`
    return flops / rows


class ProfileRecorder(Inspector):
    """Records one profile of a run, on rank 0. All ranks pause for it."""

    def __init__(self, settings: Profile, run: Run) -> None:
        self._settings, self._run, self._is_main = settings, run, run.trainer.is_main
        first = run.counters.updates + settings.after
        self._stops = [first - 1, first, first + settings.updates]
        """The updates after which the profile warms up, begins and ends."""
        before = run.counters.earlier_updates
        if self._is_main:
            settings.expect(before + first + 1, before=before)

    def before_boundary(self) -> None:
        """End the profile after its last update."""
        if len(self._stops) == 1 and self._is_due():
            self._stops.clear()
            if self._is_main:
                counters = self._run.counters
                self._settings.end(counters.earlier_updates + counters.updates)

    def next_update(self) -> float:
        """Return the update after which the profile warms up, begins or ends next."""
        return next((stop for stop in self._stops if stop > self._run.counters.updates), inf)

    def after_boundary(self) -> None:
        """Warm up the profiler one update before the profile, then begin it."""
        if self._run.counters.stopped:  # the run ends, or had ended before its resume
            self._stops.clear()
        elif len(self._stops) == 3 and self._is_due():
            self._stops.pop(0)
            if self._is_main:
                self._settings.warm_up(self._run.trainer.device)
        elif len(self._stops) == 2 and self._is_due():
            self._stops.pop(0)
            if self._is_main:
                self._settings.begin()

    def _is_due(self) -> bool:
        return self._run.counters.updates >= self._stops[0]


class WeightMeter(Inspector):
    """Measures the weights before and after every n-th update, on rank 0. All ranks pause for it."""

    def __init__(self, settings: Statistics, run: Run) -> None:
        self._settings, self._run, self._trainer = settings, run, run.trainer
        self._on_statistics = listeners(active_observers(run.trainer), "on_statistics")
        self._before: list[tuple[str, Tensor, Tensor]] = []
        """(name, parameter, copy) of each parameter, if the next update is measured."""
        self._check()

    def at_boundary(self, *, epoch_ended: bool) -> None:
        """Compare the weights with their copies, and report."""
        counters, before = self._run.counters, self._before
        if not before or counters.updates % self._settings.duration.n:
            return
        self._before = []
        statistics = ModelStatistics(
            epoch=counters.earlier_epochs + counters.epoch,
            update=counters.earlier_updates + counters.updates,
            parameters=_measured(before),
        )
        for notify in self._on_statistics:
            notify(statistics)

    def next_update(self) -> float:
        """Return the update before the next measured one, then the measured one."""
        updates, each = self._run.counters.updates, self._settings.duration.n
        turn = (updates // each + 1) * each
        return max(turn - 1, updates + 1)

    def after_boundary(self) -> None:
        """Copy the weights if the next update is measured."""
        self._before = []
        if (self._run.counters.updates + 1) % self._settings.duration.n == 0 and self._trainer.is_main:
            self._before = [(name, parameter, parameter.detach().clone()) for name, parameter in self._chosen()]

    def _chosen(self) -> list[tuple[str, Any]]:
        pattern = self._settings.parameters
        return [
            (name, parameter)
            for name, parameter in self._trainer.model.named_parameters()
            if fnmatchcase(name, pattern)
        ]

    def _check(self) -> None:
        chosen = self._chosen()
        if is_sharded(*(parameter for _, parameter in chosen)):
            raise not_built("Statistics of a model in shards", "DDP(), or leave it out")
        if not chosen:
            names = [name for name, _ in self._trainer.model.named_parameters()]
            pattern = self._settings.parameters
            what = f"Statistics(parameters={pattern!r}) matches none of the model's.{did_you_mean(pattern, names)}"
            raise SettingError(what, have=", ".join(names[:8]), fix='Statistics(parameters="*")')


@torch.no_grad()
def _measured(before: list[tuple[str, Tensor, Tensor]]) -> dict[str, ParameterStatistics]:
    """Return the statistics of each parameter, with one transfer from the device."""
    numbers: list[Tensor | float] = []
    for _, parameter, copied in before:
        weight = parameter.detach()
        numbers += [*_summary(weight), _norm(weight - copied), _norm(copied)]
        numbers += [] if parameter.grad is None else _summary(parameter.grad)
    read = iter(host_reads.read(numbers))
    return {name: _statistics(parameter, read) for name, parameter, _ in before}


def _statistics(parameter: Tensor, read: Any) -> ParameterStatistics:
    norm, largest, zeros, nonfinite, update_norm, norm_before = (next(read) for _ in range(6))
    size = max(1, parameter.numel())
    of_gradient: dict[str, Any] = {}
    if parameter.grad is not None:
        grad_norm, grad_max, grad_zeros, grad_nonfinite = (next(read) for _ in range(4))
        of_gradient = {"grad_norm": grad_norm, "grad_max": grad_max, "grad_zeros": grad_zeros / size}
        of_gradient["grad_nonfinite"] = int(grad_nonfinite)
    return ParameterStatistics(
        elements=parameter.numel(),
        weight_norm=norm,
        weight_max=largest,
        weight_zeros=zeros / size,
        weight_nonfinite=int(nonfinite),
        update_norm=update_norm,
        before=norm_before,
        **of_gradient,
    )


def _summary(tensor: Tensor) -> list[Tensor | float]:
    """Return norm, largest absolute value, number of zeros and of non-finite elements. Sparse tensors are supported."""
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    if not values.numel():
        return [0.0, 0.0, float(tensor.numel()), 0.0]
    zeros = tensor.numel() - torch.count_nonzero(values)
    return [_norm(values), values.abs().amax(), zeros, torch.isfinite(values).logical_not().sum()]


def _norm(tensor: Tensor) -> Tensor:
    magnitude = tensor.abs() if tensor.is_complex() else tensor
    norm: Tensor = torch.linalg.vector_norm(magnitude, dtype=widest_float(tensor.device))
    return norm
