"""How fast a stretch of training went: rates, share of the peak, waiting for data, memory, and what bounds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

INPUT_BOUND = 0.1
"""Share of the time spent waiting for data from which on the data are what to make faster."""


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


def together(speeds: Sequence[Speed]) -> Speed:
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
