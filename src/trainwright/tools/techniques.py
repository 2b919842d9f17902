"""The eight techniques of `advise`, the measurement of updates, and the listed settings of the process.

To add a technique: write a function that returns a `Technique`, and add a line to `techniques`.
"""

from __future__ import annotations

import copy
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, count, pairwise
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from trainwright.acceleration.compilation import find_regions
from trainwright.acceleration.switches import wants_channels_last
from trainwright.core.device import usable_cores
from trainwright.core.errors import TrainwrightError
from trainwright.data.opening import batches, open_source
from trainwright.data.row_batches import Batches
from trainwright.data.source import Source
from trainwright.modules.activations import checkpoint_activations, is_recomputed
from trainwright.modules.peak_memory import LiveTensors
from trainwright.tools.trainer_snapshot import TrainerSnapshot
from trainwright.tools.trial import joined, variant
from trainwright.trainer import Trainer
from trainwright.update.trainer_like import free_transfer_memory

COMPILING = 40.0
"""Estimated seconds for the compilation of a model."""
WORKERS = 4
"""Maximum number of loader workers to try; never more than cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Technique:
    """One change to try, and its application."""

    name: str
    how: str = ""
    """The line of code that applies it."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of `variant`."""
    around: Callable[[Trainer[Any]], AbstractContextManager[Any]] = lambda _: nullcontext()
    """A context that applies it, for changes other than settings of the trainer."""
    data: Any = None
    """The source that it reads; None: that of the comparison."""
    why_not: str = ""
    """The reason why it cannot be tried; empty if it can."""
    reads: bool = False
    """Whether it is compared on updates that read the user's data; else on ready batches."""
    start: float = 0.0
    """Estimated seconds of its start-up. Above 0, one long block is timed instead of many."""
    same_numbers: bool = True
    """Whether the loss should be equal up to rounding."""


def techniques(
    trainer: Trainer[Any], train: Any, ready: list[Any], *, seconds_per_row: float, patience: float
) -> list[Technique]:
    """Return the techniques for this trainer, its data `train`, and `ready` batches of them.

    `seconds_per_row`: time to read a row. `patience`: maximum seconds for a copy of the data to memory.
    """
    of_data = [_workers(train), _in_memory(train, seconds_per_row=seconds_per_row, patience=patience)]
    of_model = [make(trainer) for make in (_bf16, _fused, _compile, _channels_last, _checkpointing)]
    return [*of_model, _larger_batch(ready), *of_data]


def _bf16(trainer: Trainer[Any]) -> Technique:
    how, on = 'Trainer(..., precision="bf16")', str(trainer.precision) == "bf16"
    return Technique(name="bf16", how=how, settings={"precision": "bf16"}, why_not="it is on" if on else "")


def _fused(trainer: Trainer[Any]) -> Technique:
    optimizers = list(trainer.optimizers.values())
    names = sorted({type(one).__name__ for one in optimizers})
    kind = next((name for name in names if name in dir(torch.optim)), "AdamW")
    why_not = ""
    if any("fused" not in one.defaults or type(one).__name__ not in dir(torch.optim) for one in optimizers):
        why_not = f"{' and '.join(names)} of this kind cannot be fused"
    elif all(group.get("fused") for one in optimizers for group in one.param_groups):
        why_not = "it is on"
    how = f"torch.optim.{kind}(..., fused=True)"
    return Technique(name="fused optimizer", how=how, around=_with_fused_optimizers, why_not=why_not)


@contextmanager
def _with_fused_optimizers(trainer: Trainer[Any]) -> Iterator[None]:
    """Context with fused optimizers of the same class, settings and parameters."""
    own = dict(trainer.optimizers)
    try:
        for name, optimizer in own.items():
            kind: Any = type(optimizer)
            groups = [{**group, "fused": True, "foreach": None} for group in optimizer.param_groups]
            trainer.optimizers[name] = kind(groups)
        yield
    finally:
        trainer.optimizers.update(own)


def _compile(trainer: Trainer[Any]) -> Technique:
    return Technique(
        name="compile",
        how='Trainer(..., fast=Fast(compile="regional"))',
        settings={"fast": replace(trainer.fast, compile="regional")},
        why_not="" if trainer.fast.compile is None else "it is on",
        start=COMPILING,
    )


def _channels_last(trainer: Trainer[Any]) -> Technique:
    images = any(isinstance(module, nn.Conv2d | nn.ConvTranspose2d) for module in trainer.model.modules())
    on = "it is on" if wants_channels_last(trainer) else ""
    return Technique(
        name="channels-last",
        how="Trainer(..., fast=Fast(channels_last=True))",
        settings={"fast": replace(trainer.fast, channels_last=True)},
        why_not=on if images else "the model has no convolution over images",
    )


def _checkpointing(trainer: Trainer[Any]) -> Technique:
    blocks = find_regions(trainer.model, "regional")
    kinds = {type(block) for block in blocks} if blocks != [trainer.model] else set()
    names = ", ".join(sorted(kind.__name__ for kind in kinds)) or "Block"
    on = any(map(is_recomputed, trainer.model.modules()))
    return Technique(
        name="activation checkpointing",
        how=f"checkpoint_activations(model, blocks={{{names}}})",
        around=lambda twin: checkpoint_activations(twin.model, blocks=kinds),
        why_not="it is on" if on else "" if kinds else "the model repeats no block of layers",
    )


def _larger_batch(ready: list[Any]) -> Technique:
    how = "batches of twice the rows, and every lr times 2 (SGD) or 1.41 (Adam)"
    technique = Technique(name="batch size x2", how=how, same_numbers=False)
    if len(ready) < 2:
        return replace(technique, why_not="it takes two batches")
    try:
        pairs = [joined(ready[i : i + 2]) for i in range(0, len(ready) - 1, 2)]
    except TrainwrightError as error:
        return replace(technique, why_not=str(error).splitlines()[0])
    return replace(technique, data=open_source(pairs))


def _workers(train: Any) -> Technique:
    """Try workers if the loader has none, and no workers if it has some."""
    now = train.num_workers if isinstance(train, DataLoader) else 0
    now = train._settings.workers if isinstance(train, Batches) else now
    number = 0 if now else min(WORKERS, usable_cores())
    how = f"DataLoader(..., num_workers={number})  # or batches(..., workers={number})"
    technique = Technique(name=f"{number} worker{'' if number == 1 else 's'}", how=how, reads=True)
    if isinstance(train, Batches) and not train.in_memory:
        other = copy.copy(train)
        other._settings = replace(train._settings, workers=number)
        return replace(technique, data=open_source(other))
    if isinstance(train, Batches) or (type(train) is DataLoader and type(train.dataset) is TensorDataset):
        return replace(technique, why_not="a batch is one gather from memory")
    if type(train) is not DataLoader or train.batch_sampler is None or isinstance(train.dataset, IterableDataset):
        return replace(technique, why_not=f"a {type(train).__name__} of batches has no rows that workers could read")
    loader = DataLoader(
        train.dataset,
        batch_sampler=train.batch_sampler,
        num_workers=number,
        collate_fn=train.collate_fn,
        pin_memory=train.pin_memory,
        worker_init_fn=train.worker_init_fn,
        generator=train.generator,
    )
    return replace(technique, data=open_source(loader))


def _in_memory(train: Any, *, seconds_per_row: float, patience: float) -> Technique:
    how = "batches(data_set, ..., in_memory=True)"
    technique = Technique(name="in memory", how=how, reads=True, same_numbers=False)
    data_set: Any = train.dataset if isinstance(train, DataLoader) else None
    if isinstance(train, Batches):
        data_set = train.data_set
    source: Any = open_source(train) if isinstance(train, DataLoader | Batches) else None
    if source is not None and (source.in_memory or type(data_set) is TensorDataset):
        return replace(technique, why_not="it is on")
    if source is None or data_set is None or isinstance(data_set, IterableDataset):
        return replace(technique, why_not="there is no map-style data set to read")
    reading = 2 * seconds_per_row * len(data_set)
    if reading > patience:
        return replace(technique, why_not=f"to read all rows takes about {reading:.0f} s; try it by hand")
    try:
        copied = batches(data_set, source.batch_size or 1, shuffle=True, seed=0, in_memory=True)
    except TrainwrightError as error:
        return replace(technique, why_not=str(error).splitlines()[0])
    return replace(technique, data=open_source(copied))


def process_settings(device: torch.device) -> list[str]:
    """Return lines of code for settings of the process that may help on this machine. Not measured."""
    cores, cpu, linux = usable_cores(), device.type == "cpu", sys.platform == "linux"
    threads, interop = torch.get_num_threads(), torch.get_num_interop_threads()
    offered = [
        (torch.is_anomaly_enabled(), "torch.autograd.set_detect_anomaly(False)", "anomaly mode makes updates slow"),
        (not cpu, 'Trainer(..., precision="tf32")', "float32 matrices and convolutions"),
        (not cpu, 'torch.cuda.set_sync_debug_mode("warn")', "names lines that wait for the GPU, such as loss.item()"),
        (threads != cores, f"OMP_NUM_THREADS={cores} python train.py", "large layers"),
        (threads != 1, "OMP_NUM_THREADS=1 python train.py", "small layers, a busy machine"),
        (interop != 1, "torch.set_num_interop_threads(1)", "a model without parallel branches"),
        (cores > 1, "OMP_PROC_BIND=close OMP_PLACES=cores python train.py", "a machine of your own"),
        (linux, "LD_PRELOAD=libjemalloc.so.2 python train.py", "large temporaries"),
        (linux, "THP_MEM_ALLOC_ENABLE=1 python train.py", "large temporaries: huge pages"),
        (cpu, "torch.set_flush_denormal(True)", "numbers that fade over many steps"),
    ]
    return [f"{how}  # {note}" for applies, how, note in offered if applies and how.partition("=")[0] not in os.environ]


# The measurement of a block of updates, and of the phases of an update.


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The measurements of one block of updates."""

    seconds: tuple[float, ...]
    """Seconds per row of each segment."""
    cpu: tuple[float, ...]
    """The same in CPU time of the process, which does not include other processes."""
    updates_per_second: float
    loss: float | None
    """The mean loss of all updates; None if a custom `update` returns no loss."""


def run_block(
    trainer: Trainer[Any], before: TrainerSnapshot, technique: Technique, *, updates: int, warm: int, segments: int = 1
) -> Block:
    """Run `warm` updates, then `segments` times `updates`, from the captured state; restore the state.

    All updates are one `fit` of a variant of the trainer, so that the time is that of `fit`. The clock is read when the
    loop requests the first micro-batch of a window, after a synchronization with the device.
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
    """Return the peak bytes that one update adds: by the allocator on CUDA, else by tensors."""
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
    """Reads the clock between the windows of a trial, inside the iteration over the data."""

    def __init__(self, trainer: Trainer[Any], *, warm: int, updates: int, segments: int) -> None:
        self._device, self._rows_of = trainer.device, trainer._hooks.rows
        self._every = trainer.accumulate[0][1]
        self._warm, self._updates, self._segments = warm, updates, segments
        self.stamps: list[float] = []
        """Seconds at the start of each segment, and at the end of the last."""
        self.cpu_stamps: list[float] = []
        """The same in CPU time of the process."""
        self.data_seconds = 0.0
        """Seconds spent waiting for data in all segments."""
        self._rows: list[int] = []

    def per_row(self, stamps: Sequence[float]) -> tuple[float, ...]:
        """Return the seconds per row of each segment, by its stamps."""
        lengths = (end - begin for begin, end in pairwise(stamps))
        return tuple(length / rows for length, rows in zip(lengths, self._rows, strict=True))

    def over(self, source: Source) -> Source:
        """Return a source with one epoch of all micro-batches of the trial; passes over the data repeat."""
        aside: Any = source.independent_copy()
        aside = copy.copy(source) if aside is source else aside
        epochs = aside.epoch
        total = (self._warm + self._segments * self._updates) * self._every
        aside.length, aside.rows = total, None
        aside.epoch = lambda epoch, skip=0: self._timed(chain.from_iterable(map(epochs, count())), total)
        return cast(Source, aside)

    @property
    def runs(self) -> bool:
        """Whether the warm-up is over."""
        return bool(self.stamps)

    def _timed(self, batches: Iterator[Any], total: int) -> Iterator[Any]:
        for position in range(total):
            if position % self._every == 0:
                self._read(position // self._every)
            begun = time.perf_counter()
            batch = next(batches)
            if self.runs:
                self.data_seconds += time.perf_counter() - begun
                self._rows[-1] += self._rows_of(batch)
            yield batch
        self._read(total // self._every)
        self._rows.pop()

    def _read(self, update: int) -> None:
        """Read the clocks if a segment begins or ends here."""
        done = update - self._warm
        if done >= 0 and done % self._updates == 0:
            synchronize(self._device)
            self.stamps.append(time.perf_counter())
            self.cpu_stamps.append(time.process_time())
            self._rows.append(0)


def synchronize(device: torch.device) -> None:
    """Wait until an accelerator has finished its queued work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """Mean seconds per update, by phase."""

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
        """Seconds per update."""
        return float(sum(asdict(self).values()))

    @property
    def shares(self) -> dict[str, float]:
        """Phase -> its share, 0 to 1, in order."""
        return {name: value / self.total for name, value in asdict(self).items()}


def measure_phases(trainer: Trainer[Any], before: TrainerSnapshot, data: Source, *, updates: int) -> Phases:
    """Time the phases of a few updates on the user's data, and restore the state.

    Each phase ends with a synchronization of the accelerator: unlike in a run, phases do not overlap.
    """
    twin = variant(trainer, average=trainer.average)
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
    seconds["data"] = clock.data_seconds
    seconds["backward"] = max(0.0, clock.stamps[-1] - clock.stamps[0] - sum(seconds.values()))
    return Phases(**{name: value / updates for name, value in seconds.items()})
