"""Measures the speed of training: rows and updates per second, FLOPs utilization, data waits, memory by kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trainwright.core.checks import check_number
from trainwright.core.durations import Duration, Epochs, Seconds, Updates, check_duration
from trainwright.core.errors import SettingError
from trainwright.core.suggestions import suggests
from trainwright.observers.probes import RunObserver
from trainwright.observers.table import amount, byte_size, joined

_KINDS = ("allocated", "peak", "reserved", "process", "parameters", "gradients", "optimizer", "buffers")
INPUT_BOUND = 0.1
"""Minimum share of time spent waiting for data in an input-bound run."""


@suggests
class Throughput(RunObserver):
    """Sends `Speed` to `on_speed` of all observers once per `every`, and at the end of each epoch.

    The console prints one line per epoch; the journal writes every record. Costs nothing between two reports, and never
    synchronizes with the device.

    Args:
        every: The interval.
        flops_per_row: FLOPs of forward and backward for one row. None: counted once on the meta device, for default
            steps.
        peak: FLOP/s of one device. None: the vendor's figure for dense bfloat16, if known.
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
        for name, value, example in (
            ("flops_per_row", flops_per_row, "count_flops(model, x) / len(x)"),
            ("peak", peak, "989e12"),
        ):
            if value is not None:
                check_number(value, f"Throughput({name}={value!r})", above=0, fix=f"Throughput({name}={example})")
        self.flops_per_row, self.peak = flops_per_row, peak


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """The speed of training between two reports, over all ranks. Validations, probes and saves do not count."""

    epoch: int
    """Finished epochs over all stages."""
    update: int
    """Updates applied so far over all stages."""
    seconds: float
    """Time of the updates between the two reports."""
    rows: int
    updates: int
    data_seconds: float
    """The part of `seconds` spent waiting for data."""
    flops_per_row: float | None = None
    """FLOPs of forward and backward for one row; a multiply-add counts as two."""
    peak: float | None = None
    """The peak of all devices together, in FLOP/s."""
    looks: int = 0
    """Number of checks, after the launch of an update, whether the accelerator is busy."""
    busy: int = 0
    """Number of checks that found it busy."""
    memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes on rank 0 by kind: `parameters`, `gradients`, `optimizer`, `buffers` (its shards alone). On CUDA also
    `allocated`, `reserved` and `peak` of the allocator; on the CPU also `process`."""
    note: str = ""
    """The reason if `mfu` is None."""

    @property
    def rows_per_second(self) -> float:
        """Trained rows per second."""
        return self.rows / self.seconds

    @property
    def updates_per_second(self) -> float:
        """Applied updates per second."""
        return self.updates / self.seconds

    @property
    def waiting(self) -> float:
        """Share of the time spent waiting for data, 0 to 1."""
        return min(1.0, self.data_seconds / self.seconds)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: FLOP/s of the model over the peak (PaLM, arXiv 2204.02311, appendix B)."""
        if self.flops_per_row is None or self.peak is None:
            return None
        return self.rows_per_second * self.flops_per_row / self.peak

    @property
    def bound(self) -> str:
        """The bottleneck: "input", or on an accelerator "compute" or "launch"; "" if unknown.

        An accelerator that is usually busy after the launch of an update is the bottleneck ("compute"). One that is
        idle waits for the host ("launch"). On a CPU the two cannot be told apart.
        """
        if self.waiting >= INPUT_BOUND:
            return "input"
        if not self.looks:
            return ""
        return "compute" if 2 * self.busy > self.looks else "launch"


def merged(speeds: Sequence[Speed]) -> Speed:
    """Merge consecutive records into one. Memory is that of the last."""
    last = speeds[-1]
    return Speed(
        epoch=last.epoch,
        update=last.update,
        seconds=sum(speed.seconds for speed in speeds),
        rows=sum(speed.rows for speed in speeds),
        updates=sum(speed.updates for speed in speeds),
        data_seconds=sum(speed.data_seconds for speed in speeds),
        flops_per_row=last.flops_per_row,
        peak=last.peak,
        looks=sum(speed.looks for speed in speeds),
        busy=sum(speed.busy for speed in speeds),
        memory=last.memory,
        note=last.note,
    )


def speed_lines(speeds: Sequence[Speed], width: int, *, notes: bool = True) -> list[str]:
    """Return the console lines for consecutive records. `notes`: add the reason for a missing number."""
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
    """Format a rate, which may be far below one."""
    return amount(value) if value >= 100 else f"{value:.3g}"
