"""Measures the speed of training: rows and updates per second, share of the peak, waiting for data, memory by kind."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real

from trainwright.core.durations import Duration, Epochs, Seconds, Updates, check_duration
from trainwright.core.errors import SettingError
from trainwright.core.suggestions import suggests
from trainwright.observers.probes import RunObserver
from trainwright.observers.table import amount, byte_size, joined

_KINDS = ("allocated", "peak", "reserved", "process", "parameters", "gradients", "optimizer", "buffers")
INPUT_BOUND = 0.1
"""Share of the time spent waiting for data from which on the data are what to make faster."""


@suggests
class Throughput(RunObserver):
    """Has a run call `on_speed` of all observers with its `Speed`: after each `every`, and at the end of each epoch.

    The console prints a line per epoch, the journal writes every record, and an observer of your own gets them as
    `on_speed`. `flops_per_row`: operations of one row forward and backward; by default they are counted once, on
    the meta device, where the steps are the default ones. `peak`: operations per second that one device can do; by
    default its maker's figure for dense bfloat16, where the device is known by name. Between two reports it costs
    nothing, and it never waits for the device.
    """

    def __init__(
        self,
        *,
        every: Duration = Updates(100),  # noqa: B008
        flops_per_row: float | None = None,
        peak: float | None = None,
    ) -> None:
        check_duration(every, "every", call="Throughput({})")
        if isinstance(every, Seconds):
            what = f"Throughput(every={every}) would ask the clock at every update"
            raise SettingError(what, want="Updates(n) or Epochs(n)", fix="Throughput(every=Updates(100))")
        self.duration: Updates | Epochs = every
        self.flops_per_row = _positive("flops_per_row", flops_per_row, "count_flops(model, x) / len(x)")
        self.peak = _positive("peak", peak, "989e12")


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """One stretch of training, pauses for validations, probes and saves left out; numbers are of all processes."""

    epoch: int
    """Finished epochs over all stages."""
    update: int
    """Updates applied so far over all stages."""
    seconds: float
    """How long it took."""
    rows: int
    updates: int
    waited: float
    """Seconds of it spent waiting for data."""
    flops_per_row: float | None = None
    """Floating-point operations of one row forward and backward, a multiplication with its addition being two."""
    peak: float | None = None
    """Operations per second that the devices could do, all of them together."""
    looks: int = 0
    """How often it was looked whether an accelerator had work left when the host had handed it all it had."""
    busy: int = 0
    """How often it had."""
    memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the first process: `parameters`, `gradients`, `optimizer`, `buffers`, of the weights that it holds;
    on CUDA what the allocator has, `allocated`, `reserved` and the `peak` so far; on the CPU the whole `process`."""
    note: str = ""
    """Why there is no `mfu`."""

    @property
    def rows_per_second(self) -> float:
        """Rows trained on per second."""
        return self.rows / self.seconds

    @property
    def updates_per_second(self) -> float:
        """Applied updates per second."""
        return self.updates / self.seconds

    @property
    def waiting(self) -> float:
        """Share of the time spent waiting for data, 0 to 1."""
        return min(1.0, self.waited / self.seconds)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation (PaLM, arXiv 2204.02311, B): what the model needs per second over the peak."""
        if self.flops_per_row is None or self.peak is None:
            return None
        return self.rows_per_second * self.flops_per_row / self.peak

    @property
    def bound(self) -> str:
        """What bounds it: "input", or on an accelerator "compute" or "launch"; "" where that cannot be told.

        An accelerator that mostly has work left when the host has handed it all it had is what the run waits for;
        one that has none left waits for the host. On a CPU both are the same processor.
        """
        if self.waiting >= INPUT_BOUND:
            return "input"
        if not self.looks:
            return ""
        return "compute" if 2 * self.busy > self.looks else "launch"


def merged(speeds: Sequence[Speed]) -> Speed:
    """One record of stretches that follow one another; memory is that of the last, peaks with it."""
    last = speeds[-1]
    return Speed(
        epoch=last.epoch,
        update=last.update,
        seconds=sum(speed.seconds for speed in speeds),
        rows=sum(speed.rows for speed in speeds),
        updates=sum(speed.updates for speed in speeds),
        waited=sum(speed.waited for speed in speeds),
        flops_per_row=last.flops_per_row,
        peak=last.peak,
        looks=sum(speed.looks for speed in speeds),
        busy=sum(speed.busy for speed in speeds),
        memory=last.memory,
        note=last.note,
    )


def speed_lines(speeds: Sequence[Speed], width: int, *, notes: bool = True) -> list[str]:
    """Return what a console says of stretches of training that follow one another; `notes`: why a number is missing."""
    speed = merged(speeds)
    parts = [f"{amount(speed.rows_per_second)} rows/s", f"{_short(speed.updates_per_second)} updates/s"]
    parts.append(f"{speed.waiting:.0%} waiting for data")
    if speed.mfu is not None:
        parts.append(f"MFU {speed.mfu:.1%}")
    parts += [f"{speed.bound}-bound"] if speed.bound else []
    parts += [f"{kind} {byte_size(speed.memory[kind])}" for kind in _KINDS if speed.memory.get(kind)]
    parts += [f"no MFU: {speed.note}"] if speed.note and notes else []
    return joined(parts, width, start=" speed     ")


def _short(value: float) -> str:
    """A rate that may be well below one."""
    return amount(value) if value >= 100 else f"{value:.3g}"


def _positive(name: str, value: float | None, example: str) -> float | None:
    """Refuse what is no amount of operations."""
    if value is None or (
        isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value) and value > 0
    ):
        return value
    what = f"Throughput({name}={value!r})"
    raise SettingError(what, want="a number above 0, or None", fix=f"Throughput({name}={example})")
