"""Measures the speed of training: rows and updates per second, share of the peak, waiting for data, memory by kind."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real

from trainwright.core.durations import Duration, Epochs, Seconds, Updates, check_duration
from trainwright.core.errors import SettingError
from trainwright.core.speed import Speed, together
from trainwright.core.suggestions import suggests
from trainwright.observers.probes import RunObserver
from trainwright.observers.table import amount, byte_size, joined

_KINDS = ("allocated", "peak", "reserved", "process", "parameters", "gradients", "optimizer", "buffers")


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


def speed_lines(speeds: Sequence[Speed], width: int, *, notes: bool = True) -> list[str]:
    """Return what a console says of stretches of training that follow one another; `notes`: why a number is missing."""
    speed = together(speeds)
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
