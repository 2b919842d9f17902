"""Measures a run between its updates, for observers: probes, its speed, profiles, and statistics of its weights."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from math import inf
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainwright.core import host_reads
from trainwright.core.device import widest_float
from trainwright.core.errors import SettingError, first_line, not_built
from trainwright.core.memory import device_memory
from trainwright.core.model_statistics import ModelStatistics, ParameterStatistics
from trainwright.core.speed import Speed
from trainwright.core.suggestions import did_you_mean
from trainwright.core.trees import tensors_in
from trainwright.core.triggers import Trigger
from trainwright.evaluation.passes import probe_context
from trainwright.modules.dtensors import is_sharded, local_shards
from trainwright.modules.flops import count_flops, peak_of
from trainwright.observers.probes import Probe
from trainwright.observers.profiler import Profile
from trainwright.observers.statistics import Statistics
from trainwright.observers.throughput import Throughput
from trainwright.protocols import listeners
from trainwright.update import batches
from trainwright.update.owner import Owner, active_observers
from trainwright.update.window import find_rows

if TYPE_CHECKING:
    from trainwright.fit.run import Run


class Inspector:
    """Looks into a run between updates for an observer; it says after which updates, and no other one pays for it."""

    def pause(self) -> None:
        """Called first: all work of the device is done, and the counters are those of the last time. No-op."""

    def report(self, *, epoch_ended: bool) -> None:
        """Report to the observers; the counters are up to date. No-op."""

    def next_update(self) -> float:
        """Return the update after which the loop must come back for it; infinite where it has no need of its own."""
        return inf

    def resume(self) -> None:
        """Called last, before the next update. No-op."""


def inspectors_of(run: Run) -> list[Inspector]:
    """Return an inspector for each observer that asks for speed, a profile, statistics or a probe; clocks first."""
    speed = [SpeedMeter(one, run) for one in active_observers(run.owner) if isinstance(one, Throughput)]
    made: list[Inspector] = [*speed]
    for one in run.owner.observers:
        if isinstance(one, Profile):
            made.append(ProfileRecorder(one, run))
        elif isinstance(one, Statistics):
            made.append(WeightMeter(one, run))
    return [*made, *(ProbeRunner(one, run) for one in run.owner.observers if isinstance(one, Probe))]


class ProbeRunner(Inspector):
    """Calls the function of one `Probe`, and records the numbers that it returns."""

    def __init__(self, probe: Probe, run: Run) -> None:
        self._probe, self._run = probe, run
        self._trigger = Trigger(probe.duration, run.counters, of="every")

    def report(self, *, epoch_ended: bool) -> None:
        """Call the function where its turn has come, unless it was called before the validation was interrupted."""
        run, counters = self._run, self._run.counters
        if not counters.pause and self._trigger.fires(counters, epoch_ended=epoch_ended):
            with probe_context(run.owner, run.source):
                numbers = self._probe.fn(run.owner)
            run.tracker.record_probe(numbers, self._probe.name)

    def next_update(self) -> float:
        """Return the update of its next turn."""
        return self._trigger.next_update(self._run.counters)


class SpeedMeter(Inspector):
    """The speed that one `Throughput` asks for: the time of updates alone, and the rows trained in it."""

    def __init__(self, asked: Throughput, run: Run) -> None:
        self._run, self._owner, self._asked = run, run.owner, asked
        self._trigger = Trigger(asked.duration, run.counters, of="every")
        self._alone = run.rank_sync is None
        self._operations = Operations(asked, run.owner)
        self._on_speed = listeners(active_observers(run.owner), "on_speed")
        self._looks_at = torch.cuda.current_stream(run.owner.device) if run.owner.device.type == "cuda" else None
        self._held_in, self._sizes = -1, dict[str, int]()
        self._begin(run.counters.rows, run.counters.updates)
        self.resume()

    def pause(self) -> None:
        """Stop the clock: what is done in a pause is no training. Looks whether the device has work left."""
        if self._looks_at is not None:
            self._looks += 1
            self._busy += not self._looks_at.query()  # asks, and waits for nothing
        self._seconds += time.perf_counter() - self._started
        self._waited += self._run.waited - self._waited_before

    def resume(self) -> None:
        """Start the clock."""
        self._waited_before, self._started = self._run.waited, time.perf_counter()

    def next_update(self) -> float:
        """The update at which the loop must pause for it; several processes pause where all do, and not for one."""
        return self._trigger.next_update(self._run.counters) if self._alone else float("inf")

    def report(self, *, epoch_ended: bool) -> None:
        """Tell all observers, where its turn has come, where an epoch is over and where the run ends."""
        counters = self._run.counters
        fires = self._trigger.fires(counters, epoch_ended=epoch_ended)
        if not (fires or epoch_ended or counters.stopped) or counters.rows == self._rows or not self._seconds:
            return
        flops, peak, note = self._operations.of(self._run.tracker.window)
        speed = Speed(
            epoch=counters.earlier_epochs + counters.epoch,
            update=counters.earlier_updates + counters.updates,
            seconds=self._seconds,
            rows=counters.rows - self._rows,
            updates=counters.updates - self._updates,
            waited=self._waited,
            flops_per_row=flops,
            peak=peak,
            looks=self._looks,
            busy=self._busy,
            memory=self._held(counters.epoch) | device_memory(self._owner.device),
            note=note,
        )
        self._begin(counters.rows, counters.updates)
        for notify in self._on_speed:
            notify(speed)

    def _held(self, epoch: int) -> dict[str, int]:
        """What the run holds, counted again in each epoch: it is walked through tensor by tensor."""
        if self._held_in != epoch:
            self._held_in, self._sizes = epoch, held_by(self._owner)
        return self._sizes

    def _begin(self, rows: int, updates: int) -> None:
        self._rows, self._updates = rows, updates
        self._seconds = self._waited = 0.0
        self._looks = self._busy = 0


class Operations:
    """What a row needs, and what the devices can do: asked once, when the first window has run."""

    def __init__(self, asked: Throughput, owner: Owner) -> None:
        self._asked, self._owner = asked, owner
        self._found: tuple[float | None, float | None, str] | None = None

    def of(self, window: Any) -> tuple[float | None, float | None, str]:
        """Operations per row, the peak of all devices, and why one of them is missing."""
        if self._found is None:
            self._found = self._find(window)
        return self._found

    def _find(self, window: Any) -> tuple[float | None, float | None, str]:
        asked, owner = self._asked, self._owner
        device = torch.cuda.get_device_name(owner.device) if owner.device.type == "cuda" else owner.device.type
        peak = asked.peak or peak_of(device)
        if peak is None:
            return asked.flops_per_row, None, f"the peak of {device} is not known: Throughput(peak=...)"
        peak *= owner.world.size
        if asked.flops_per_row is not None:
            return asked.flops_per_row, peak, ""
        unknown = _unknown(owner, window)
        if unknown:
            return None, peak, f"{unknown}: Throughput(flops_per_row=...)"
        try:
            return _counted(owner, window.batches[0]), peak, ""
        except Exception as error:  # the model's own, which may be any: it was not written for the meta device
            why = first_line(error, 80)
            return None, peak, f"the model does not run on the meta device ({why}): Throughput(flops_per_row=...)"


def held_by(owner: Owner) -> dict[str, int]:
    """Bytes of what the run holds on this process, by kind."""
    parameters = list(owner.model.parameters())
    states = [state for one in owner.optimizers.values() for state in one.state.values()]
    return {
        "parameters": _size(parameters),
        "gradients": _size(p.grad for p in parameters if p.grad is not None),
        "optimizer": _size(tensors_in(states)),
        "buffers": _size(owner.model.buffers()),
    }


def _size(tensors: Iterable[Tensor]) -> int:
    """Bytes of what lies on this process."""
    held = list(tensors)
    return sum(one.numel() * one.element_size() for one in (local_shards(held) if is_sharded(*held) else held))


def _unknown(owner: Owner, window: Any) -> str:
    """Why the operations of a row cannot be counted; "" where they can."""
    hooks = owner._hooks
    if hooks.steps_itself or hooks.computes_itself or hooks.updates_itself:
        return "how often steps of your own run a model is not known"
    if hooks.split is not batches.split:
        return "what a split of your own gives the model is not known"
    if window is None or not find_rows(window.batches[0]):
        return "no batch tells its rows"
    if is_sharded(*owner.model.parameters()):
        return "a model in shards cannot be copied without its numbers"
    return ""


def _counted(owner: Owner, batch: Any) -> float:
    """Operations of a row: the model's on one batch, forward and backward, by the rows of the batch."""
    inputs, _ = batches.split(batch) if owner.loss is not None else (batch, None)
    if isinstance(inputs, Mapping):
        flops = count_flops(owner.model, **inputs)
    else:
        flops = count_flops(owner.model, *(inputs if isinstance(inputs, tuple | list) else (inputs,)))
    rows = find_rows(batch)
    assert rows  # asked before
    return flops / rows


class ProfileRecorder(Inspector):
    """One profile of a run. Of several processes all pause for it, and the first one records."""

    def __init__(self, asked: Profile, run: Run) -> None:
        self._asked, self._run, self._here = asked, run, run.owner.is_main
        first = run.counters.updates + asked.after
        self._stops = [first - 1, first, first + asked.updates]
        """The updates after which it warms up, begins and ends."""
        before = run.counters.earlier_updates
        if self._here:
            asked.expect(before + first + 1, before=before)

    def pause(self) -> None:
        """End where the last update was made."""
        if len(self._stops) == 1 and self._comes():
            self._stops.clear()
            if self._here:
                counters = self._run.counters
                self._asked.end(counters.earlier_updates + counters.updates)

    def next_update(self) -> float:
        """The next of its stops."""
        return next((stop for stop in self._stops if stop > self._run.counters.updates), inf)

    def resume(self) -> None:
        """Warm up, or begin, where it is time to."""
        if self._run.counters.stopped:  # at its end, or by a checkpoint of a finished run
            self._stops.clear()
        elif len(self._stops) == 3 and self._comes():
            self._stops.pop(0)
            if self._here:
                self._asked.warm_up(self._run.owner.device)
        elif len(self._stops) == 2 and self._comes():
            self._stops.pop(0)
            if self._here:
                self._asked.begin()

    def _comes(self) -> bool:
        return self._run.counters.updates >= self._stops[0]


class WeightMeter(Inspector):
    """Measures the weights before and after each update whose turn it is; all processes pause, the first measures."""

    def __init__(self, asked: Statistics, run: Run) -> None:
        self._asked, self._run, self._owner = asked, run, run.owner
        self._on_statistics = listeners(active_observers(run.owner), "on_statistics")
        self._before: list[tuple[str, Tensor, Tensor]] = []
        """Name, parameter and a copy of it, where the update to come is measured."""
        self._check()

    def report(self, *, epoch_ended: bool) -> None:
        """Measure, where the update whose weights were kept was made."""
        counters, before = self._run.counters, self._before
        if not before or counters.updates % self._asked.duration.n:
            return
        self._before = []
        told = ModelStatistics(
            epoch=counters.earlier_epochs + counters.epoch,
            update=counters.earlier_updates + counters.updates,
            parameters=_measured(before),
        )
        for notify in self._on_statistics:
            notify(told)

    def next_update(self) -> float:
        """The update before the next turn, then that one."""
        updates, each = self._run.counters.updates, self._asked.duration.n
        turn = (updates // each + 1) * each
        return max(turn - 1, updates + 1)

    def resume(self) -> None:
        """Keep the weights, where the update to come is measured."""
        self._before = []
        if (self._run.counters.updates + 1) % self._asked.duration.n == 0 and self._owner.is_main:
            self._before = [(name, one, one.detach().clone()) for name, one in self._chosen()]

    def _chosen(self) -> list[tuple[str, Any]]:
        pattern = self._asked.parameters
        return [(name, one) for name, one in self._owner.model.named_parameters() if fnmatchcase(name, pattern)]

    def _check(self) -> None:
        chosen = self._chosen()
        if is_sharded(*(parameter for _, parameter in chosen)):
            raise not_built("Statistics of a model in shards", "DDP(), or leave it out")
        if not chosen:
            names = [name for name, _ in self._owner.model.named_parameters()]
            pattern = self._asked.parameters
            what = f"Statistics(parameters={pattern!r}) matches none of the model's.{did_you_mean(pattern, names)}"
            raise SettingError(what, have=", ".join(names[:8]), fix='Statistics(parameters="*")')


@torch.no_grad()
def _measured(before: list[tuple[str, Tensor, Tensor]]) -> dict[str, ParameterStatistics]:
    """The statistics of each parameter, with all numbers of the model read at once."""
    numbers: list[Tensor | float] = []
    for _, parameter, kept in before:
        weight = parameter.detach()
        numbers += [*_four(weight), _norm(weight - kept), _norm(kept)]
        numbers += [] if parameter.grad is None else _four(parameter.grad)
    read = iter(host_reads.read(numbers))
    return {name: _statistics(parameter, read) for name, parameter, _ in before}


def _statistics(parameter: Tensor, read: Any) -> ParameterStatistics:
    norm, largest, zeros, bad, moved, was = (next(read) for _ in range(6))
    size = max(1, parameter.numel())
    told: dict[str, Any] = {}
    if parameter.grad is not None:
        grad_norm, grad_max, grad_zeros, grad_bad = (next(read) for _ in range(4))
        told = {"grad_norm": grad_norm, "grad_max": grad_max, "grad_zeros": grad_zeros / size}
        told["grad_nonfinite"] = int(grad_bad)
    return ParameterStatistics(
        elements=parameter.numel(),
        weight_norm=norm,
        weight_max=largest,
        weight_zeros=zeros / size,
        weight_nonfinite=int(bad),
        update_norm=moved,
        before=was,
        **told,
    )


def _four(tensor: Tensor) -> list[Tensor | float]:
    """Norm, largest absolute value, zeros, elements that are not finite; a sparse tensor leaves zeros out."""
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    if not values.numel():
        return [0.0, 0.0, float(tensor.numel()), 0.0]
    zeros = tensor.numel() - torch.count_nonzero(values)
    return [_norm(values), values.abs().amax(), zeros, torch.isfinite(values).logical_not().sum()]


def _norm(tensor: Tensor) -> Tensor:
    magnitude = tensor.abs() if tensor.is_complex() else tensor
    norm: Tensor = torch.linalg.vector_norm(magnitude, dtype=widest_float(tensor.device))
    return norm
