"""Times a few updates of a trainer with one setting changed, and counts the memory that one takes."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import chain, count, islice, pairwise
from typing import Any, cast

import torch

from trainwright.data.source import Source
from trainwright.modules.tensor_memory import Living
from trainwright.tools.trainer_snapshot import TrainerSnapshot
from trainwright.tools.trial import variant
from trainwright.trainer import Trainer
from trainwright.update.hooks import free_transfer_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to make updates: what is changed for it, and where its batches come from."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of `variant`."""
    around: Callable[[Trainer[Any]], AbstractContextManager[Any]] = lambda _: nullcontext()
    """What is switched for it, in the place of the settings or beside them; undone at its end."""
    data: Any = None
    """What it reads, opened: ready batches, or the user's own data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """What one block of updates came to."""

    seconds: tuple[float, ...]
    """Per row, in each of its segments."""
    cpu: tuple[float, ...]
    """The same in CPU time of the process, which other processes on the machine do not add to."""
    updates_per_second: float
    loss: float | None
    """The mean loss of all its updates; None where an `update` of the user's own tells none."""
    peak: int | None = None
    """Bytes that the allocator had at most beside what was there before; None where the device does not tell."""


def run_block(
    trainer: Trainer[Any], before: TrainerSnapshot, way: Way, *, updates: int, warm: int, segments: int = 1
) -> Block:
    """Make `warm` and then `segments` times `updates` updates from the captured state, which is then restored.

    They are one `fit` of a variant of the trainer, so that what is timed is what `fit` does. The clock is read where
    the loop asks for the first micro-batch of a window: all updates before are then made, and a device that works on
    its own is waited for.
    """
    held = _reset_peak(trainer.device)
    try:
        with way.around(trainer):
            twin = variant(trainer, **{"average": trainer.average, **way.settings})
            clock = Clock(twin, warm=warm, updates=updates, segments=segments)
            result = twin.fit(clock.over(way.data), epochs=1)
            peak = None if held is None else torch.cuda.max_memory_allocated(trainer.device) - held
            free_transfer_memory(twin._hooks)
    finally:
        before.restore()
    return Block(
        seconds=clock.per_row(clock.stamps),
        cpu=clock.per_row(clock.cpu_stamps),
        updates_per_second=segments * updates / (clock.stamps[-1] - clock.stamps[0]),
        loss=result.history[-1].get("loss"),
        peak=peak,
    )


class Clock:
    """Deals out the micro-batches of a trial, and reads the clock between its segments."""

    def __init__(self, trainer: Trainer[Any], *, warm: int, updates: int, segments: int) -> None:
        self._device, self._rows_of = trainer.device, trainer._hooks.rows
        self._every = trainer.accumulate[0][1]
        self._warm, self._updates, self._segments = warm, updates, segments
        self.stamps: list[float] = []
        """When each segment began, and the last one ended; seconds."""
        self.cpu_stamps: list[float] = []
        """The same in CPU time of the process."""
        self.rows: list[int] = []
        """The rows of each segment."""

    def per_row(self, stamps: Sequence[float]) -> tuple[float, ...]:
        """Seconds per row of each segment, between these stamps."""
        lengths = (end - begin for begin, end in pairwise(stamps))
        return tuple(length / rows for length, rows in zip(lengths, self.rows, strict=True))

    def over(self, source: Source) -> Source:
        """The data once more, with an epoch of as many micro-batches as the trial takes; they go round."""
        aside: Any = source.beside()
        aside = copy.copy(source) if aside is source else aside
        epochs = aside.epoch
        total = (self._warm + self._segments * self._updates) * self._every
        aside.length, aside.rows = total, None
        aside.epoch = lambda epoch, skip=0: self._dealt(_all_as_the_first(aside, epochs), total)
        return cast(Source, aside)

    def _dealt(self, epochs: Callable[[int], Iterator[Any]], total: int) -> Iterator[Any]:
        endless = chain.from_iterable(epochs(epoch) for epoch in count())
        for position, batch in enumerate(islice(endless, total)):
            if position % self._every == 0:
                self._look(position // self._every)
            if self.rows:
                self.rows[-1] += self._rows_of(batch)
            yield batch
        self._look(total // self._every)
        self.rows.pop()

    def _look(self, update: int) -> None:
        """Read the clock where a segment begins or ends."""
        done = update - self._warm
        if done >= 0 and done % self._updates == 0:
            synchronise(self._device)
            self.stamps.append(time.perf_counter())
            self.cpu_stamps.append(time.process_time())
            self.rows.append(0)


def _all_as_the_first(source: Any, epochs: Callable[[int], Iterator[Any]]) -> Callable[[int], Iterator[Any]]:
    """The passes of a source of images that a run changes, which counts on that for the pass that begins next alone."""
    given = getattr(source, "_given", None)

    def begun(epoch: int) -> Iterator[Any]:
        if given is not None:
            source._given = given
        return epochs(epoch)

    return begun


def most_taken(trainer: Trainer[Any], before: TrainerSnapshot, way: Way) -> int:
    """The bytes of tensors that one update has alive at most, beside those that were there before it."""
    with way.around(trainer):
        twin = variant(trainer, **{"average": trainer.average, **way.settings})
        clock = Clock(twin, warm=0, updates=1, segments=1)
        living = Living(before.tensors)
        try:
            with living:
                twin.fit(clock.over(way.data), epochs=1)
        finally:
            before.restore()
    return living.peak


def synchronise(device: torch.device) -> None:
    """Wait for a device that works on its own."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def _reset_peak(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    allocated: int = torch.cuda.memory_allocated(device)
    return allocated
