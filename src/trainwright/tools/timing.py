"""Times a few updates of a trainer with one setting changed, counts their memory, and splits an update into phases."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import chain, count, pairwise
from typing import Any, cast

import torch

from trainwright.data.source import Source
from trainwright.modules.peak_memory import LiveTensors
from trainwright.tools.techniques import Technique
from trainwright.tools.trainer_snapshot import TrainerSnapshot
from trainwright.tools.trial import variant
from trainwright.trainer import Trainer
from trainwright.update.trainer_like import free_transfer_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The measurements of one block of updates."""

    seconds: tuple[float, ...]
    """Per row, in each segment."""
    cpu: tuple[float, ...]
    """The same in CPU time of the process, which other processes on the machine do not add to."""
    updates_per_second: float
    loss: float | None
    """The mean loss of all updates; None where a custom `update` returns none."""


def run_block(
    trainer: Trainer[Any], before: TrainerSnapshot, technique: Technique, *, updates: int, warm: int, segments: int = 1
) -> Block:
    """Run `warm` updates and then `segments` times `updates` from the captured state, and restore it.

    They are one `fit` of a variant of the trainer, so that the time is that of `fit`. The clock is read where the loop
    asks for the first micro-batch of a window: all updates before are made, and the device has finished them.
    """
    try:
        with technique.around(trainer):
            twin = variant(trainer, **{"average": trainer.average, **technique.settings})
            clock = Clock(twin, warm=warm, updates=updates, segments=segments)
            result = twin.fit(clock.over(technique.data), epochs=1)
            free_transfer_memory(twin._hooks)
    finally:
        before.restore()
    return Block(
        seconds=clock.per_row(clock.stamps),
        cpu=clock.per_row(clock.cpu_stamps),
        updates_per_second=segments * updates / (clock.stamps[-1] - clock.stamps[0]),
        loss=result.history[-1].get("loss"),
    )


def peak_memory(trainer: Trainer[Any], before: TrainerSnapshot, technique: Technique) -> int:
    """Return the peak bytes that one update adds to those before it: of the allocator on CUDA, else of tensors."""
    if trainer.device.type == "cuda":
        synchronize(trainer.device)
        torch.cuda.reset_peak_memory_stats(trainer.device)
        allocated = torch.cuda.memory_allocated(trainer.device)
        run_block(trainer, before, technique, updates=1, warm=1)
        return torch.cuda.max_memory_allocated(trainer.device) - allocated
    living = LiveTensors(before.tensors)
    with living:
        run_block(trainer, before, technique, updates=1, warm=0)
    return living.peak


class Clock:
    """Reads the clock between the windows of a trial, from inside the iteration over the data."""

    def __init__(self, trainer: Trainer[Any], *, warm: int, updates: int, segments: int) -> None:
        self._device, self._rows_of = trainer.device, trainer._hooks.rows
        self._every = trainer.accumulate[0][1]
        self._warm, self._updates, self._segments = warm, updates, segments
        self.stamps: list[float] = []
        """Start of each segment, and end of the last; seconds."""
        self.cpu_stamps: list[float] = []
        """The same in CPU time of the process."""
        self.waited = 0.0
        """Seconds of waiting for data in all segments."""
        self._rows: list[int] = []

    def per_row(self, stamps: Sequence[float]) -> tuple[float, ...]:
        """Return the seconds per row of each segment between these stamps."""
        lengths = (end - begin for begin, end in pairwise(stamps))
        return tuple(length / rows for length, rows in zip(lengths, self._rows, strict=True))

    def over(self, source: Source) -> Source:
        """Return the data with an epoch of as many micro-batches as the trial takes; passes repeat."""
        aside: Any = source.independent_copy()
        aside = copy.copy(source) if aside is source else aside
        epochs = aside.epoch
        total = (self._warm + self._segments * self._updates) * self._every
        aside.length, aside.rows = total, None
        aside.epoch = lambda epoch, skip=0: self._timed(chain.from_iterable(map(epochs, count())), total)
        return cast(Source, aside)

    @property
    def runs(self) -> bool:
        """Whether the warm updates are over."""
        return bool(self.stamps)

    def _timed(self, batches: Iterator[Any], total: int) -> Iterator[Any]:
        for position in range(total):
            if position % self._every == 0:
                self._read(position // self._every)
            begun = time.perf_counter()
            batch = next(batches)
            if self.runs:
                self.waited += time.perf_counter() - begun
                self._rows[-1] += self._rows_of(batch)
            yield batch
        self._read(total // self._every)
        self._rows.pop()

    def _read(self, update: int) -> None:
        """Read the clocks where a segment begins or ends."""
        done = update - self._warm
        if done >= 0 and done % self._updates == 0:
            synchronize(self._device)
            self.stamps.append(time.perf_counter())
            self.cpu_stamps.append(time.process_time())
            self._rows.append(0)


def synchronize(device: torch.device) -> None:
    """Wait until an accelerator has finished its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """Mean seconds of an update by phase."""

    data: float
    """Waiting for micro-batches."""
    forward: float
    """The model."""
    backward: float
    """The loss, all gradients, and the loop itself."""
    optimizer: float
    """The optimizer's step."""

    @property
    def total(self) -> float:
        """Seconds of an update."""
        return float(sum(asdict(self).values()))

    @property
    def shares(self) -> dict[str, float]:
        """The share of each phase, 0 to 1, in their order."""
        return {name: value / self.total for name, value in asdict(self).items()}


def measure_phases(trainer: Trainer[Any], before: TrainerSnapshot, data: Source, *, updates: int) -> Phases:
    """Run a few updates on the user's data, time each phase of them, and restore the state.

    Each phase waits for an accelerator, so that phases do not overlap as they do in a run.
    """
    twin = variant(trainer, average=trainer.average, fast=trainer.fast)
    clock = Clock(twin, warm=1, updates=updates, segments=1)
    seconds = {"forward": 0.0, "optimizer": 0.0}

    def add(name: str, sign: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            synchronize(trainer.device)
            seconds[name] += sign * time.perf_counter() if clock.runs else 0.0

        return hook

    try:
        with ExitStack() as hooks:
            hooks.callback(twin.model.register_forward_pre_hook(add("forward", -1)).remove)
            hooks.callback(twin.model.register_forward_hook(add("forward", 1)).remove)
            for optimizer in twin.optimizers.values():
                hooks.callback(optimizer.register_step_pre_hook(add("optimizer", -1)).remove)
                hooks.callback(optimizer.register_step_post_hook(add("optimizer", 1)).remove)
            twin.fit(clock.over(data), epochs=1)
            free_transfer_memory(twin._hooks)
    finally:
        before.restore()
    seconds["data"] = clock.waited
    seconds["backward"] = max(0.0, clock.stamps[-1] - clock.stamps[0] - sum(seconds.values()))
    return Phases(**{name: value / updates for name, value in seconds.items()})
