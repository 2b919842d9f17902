"""Findings in what the model gets: inputs out of scale, and batches so small that an update is mostly overhead."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainwright.core.durations import Updates
from trainwright.core.errors import listed
from trainwright.core.records import Update
from trainwright.core.speed import Speed
from trainwright.core.torch_private import named_leaves, tree_leaves
from trainwright.observers.throughput import Throughput
from trainwright.protocols import Observer
from trainwright.tools.batching import joined
from trainwright.tools.finding import Finding, silent
from trainwright.tools.findings_model import trained_by
from trainwright.tools.watching import Entered, Recording
from trainwright.trainer import Trainer
from trainwright.update.window import find_rows

LARGE, LARGE_FEATURE, TINY = 3.0, 10.0, 0.01
"""Root mean square of all numbers, of those of one feature, and largest number, outside of which inputs are scaled."""
FEW_ROWS, NEARLY_FREE, SHORT = 16, 1.25, 0.02
"""Rows of a tiny batch; what twice as many cost there, as a ratio; seconds below which an update is timed for it."""
TIMED = 12
"""Updates that are timed, for the rule on tiny batches."""
FEWEST, MOST = 3, 9
"""How often that is done: the more often, the shorter an update is."""
LOOKS, BETWEEN = 12, 4
"""How often it is looked whether a device has work left, and the updates between two looks."""


_WIDE = (torch.float64, torch.complex128)
_WIDE_NAMES = ("float64", "complex128")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """How a device was used in some updates."""

    device: str
    rows: int
    """Of a micro-batch."""
    looks: int
    """How often it was looked whether it had work left when the host had handed it all it had."""
    busy: int
    """How often it had."""
    used: int
    """Bytes at the peak."""
    total: int
    """Bytes that it has."""


def of_inputs(seen: Recording, batches: Sequence[Any]) -> Iterator[Finding]:
    """Find numbers out of scale in what layers got straight from the data.

    The rule: the root mean square of all that entered is above 3, or that of one feature (channel, for images) above
    10, or no number is as large as 0.01. Token numbers never enter a layer so, and a normalisation that comes first
    is the model's own cure.
    """
    scaled = {layer: one for layer, one in seen.entered.items() if one.count and out_of_scale(one)}
    broken = [layer for layer, one in seen.entered.items() if not one.finite]
    if broken:
        yield Finding(
            "inputs that are not finite",
            f"NaN or infinite numbers enter {listed(broken)}",
            "each of them makes the loss, and with it every weight, NaN",
            "x = torch.nan_to_num(x)  # or leave these rows out",
            tuple(broken),
        )
    if scaled:
        entered = next(iter(scaled.values()))
        mean, _, rms = moments(entered)
        whole = float(mean.mean())
        std = max(0.0, rms**2 - whole**2) ** 0.5
        spread = f"mean {whole:.3g}, standard deviation {std:.3g}, largest {entered.largest:.3g}"
        yield Finding(
            "inputs not normalised",
            f"what enters {listed(list(scaled))} has {spread}",
            "large or offset inputs make the loss steep in some directions and flat in others: rates must be small",
            _normalising(entered, batches),
            tuple(scaled),
        )


def of_dtypes(trainer: Trainer[Any], batches: Sequence[Any]) -> Iterator[Finding]:
    """Find weights and columns of a batch in float64: NumPy's default, and rarely meant. A note where it is torch's."""
    weights = [f"{root}.{name}" for root, name, one in trained_by(trainer) if one.dtype in _WIDE]
    columns = [
        f"batch{name}"
        for name, one in named_leaves(batches[0])
        if isinstance(one, Tensor | np.ndarray) and one.ndim and str(one.dtype).removeprefix("torch.") in _WIDE_NAMES
    ]
    if not weights and not columns:
        return
    what = ["model"] * bool(weights) + ["data"] * bool(columns)
    fix = ["model.float()"] * bool(weights) + ["x.astype(np.float32), or x.float(), in the data"] * bool(columns)
    yield Finding(
        f"float64 {' and '.join(what)}",
        f"double precision: {listed([*weights[:2], *columns])}" + (f" ({len(weights)} weights)" if weights else ""),
        "float64 takes twice the memory of float32, and twice the time or more to compute with: far more on most GPUs",
        " and ".join(fix),
        (*weights, *columns),
        level="note" if torch.get_default_dtype() is torch.float64 else "problem",
    )


def moments(entered: Entered) -> tuple[Tensor, Tensor, float]:
    """Mean and standard deviation by feature, and the root mean square of all."""
    mean, square = entered.sums / entered.count, entered.squares / entered.count
    return mean, (square - mean.square()).clamp_min(0).sqrt(), float(square.mean().sqrt())


def out_of_scale(entered: Entered) -> bool:
    """Whether what entered breaks the rule; numbers that are not finite are another finding."""
    if not entered.finite:
        return False
    rms = (entered.squares / entered.count).sqrt()
    overall = float(rms.square().mean().sqrt())
    return overall > LARGE or float(rms.max()) > LARGE_FEATURE or 0 < entered.largest < TINY


def of_sizes(trainer: Trainer[Any], batches: Sequence[Any]) -> list[Finding]:
    """Findings on how many rows an update has, timed where there are few of them or a device may be idle."""
    rows = find_rows(batches[0]) or 0
    if trainer.device.type == "cuda":
        found = small_batch(_device_facts(trainer, batches, rows))
        return [] if found is None else [found]
    if not 0 < rows <= FEW_ROWS:
        return []
    once = update_seconds(trainer, batches)
    if once >= SHORT:
        return []
    twice = [joined([batch, batch]) if _has_rows_alone(batch) else None for batch in batches]
    if any(batch is None for batch in twice):
        return []
    try:
        tries = min(MOST, max(FEWEST, round(SHORT / once)))
        ratios = [_ratio(trainer, batches, twice) for _ in range(tries)]
    except Exception:  # whatever the user's step raises where rows twice are no batch of it: then nothing is known
        return []
    found = tiny_batch(rows=rows, ratio=statistics.median(ratios))
    return [] if found is None else [found]


def tiny_batch(*, rows: int, ratio: float) -> Finding | None:
    """Find a batch of at most 16 rows where twice as many take less than 1.25 times as long."""
    if rows > FEW_ROWS or ratio >= NEARLY_FREE:
        return None
    return Finding(
        "tiny batch",
        f"a batch has {rows} row{'s' if rows > 1 else ''}; twice as many take {ratio:.2f} times as long",
        "an update is mostly overhead, of Python and of starting kernels, that more rows would share",
        f"batch_size={max(4 * rows, 32)}  # and the learning rate by the same factor (linear rule)",
        (f"{rows} rows",),
    )


def small_batch(facts: DeviceFacts) -> Finding | None:
    """Find batches that leave a device waiting: out of work at half of the looks or more, half of its memory free."""
    if facts.looks < 4 or 2 * facts.busy > facts.looks or 2 * facts.used > facts.total:
        return None
    memory = f"{facts.used / facts.total:.0%} of its memory"
    return Finding(
        "small batches on a big GPU",
        f"{facts.device} had no work left at {facts.looks - facts.busy} of {facts.looks} looks, and used {memory}",
        "the host starts kernels more slowly than the device finishes them: more rows would cost little",
        f"batch_size={2 * facts.rows}  # and twice the learning rate (linear rule)",
        (f"{facts.rows} rows",),
    )


def update_seconds(trainer: Trainer[Any], batches: Sequence[Any], *, updates: int = TIMED) -> float:
    """The median of the times between updates, in seconds, of a trial on these batches."""
    ticks = _Ticks(time.process_time if trainer.device.type == "cpu" else time.perf_counter)
    each = trainer.accumulate[0][1]
    used = [batches[index % len(batches)] for index in range((updates + 2) * each)]
    silent(trainer, observers=[ticks]).fit(used, max_updates=updates + 1)
    return statistics.median(after - before for before, after in zip(ticks.times, ticks.times[1:], strict=False))


class _Ticks(Observer):
    """Notes the time at each update."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.times: list[float] = []
        self._clock = clock

    def on_update(self, update: Update) -> None:
        self.times.append(self._clock())


class _Speeds(Observer):
    """Keeps what was told of the speed."""

    def __init__(self) -> None:
        self.found: list[Speed] = []

    def on_speed(self, speed: Speed) -> None:
        self.found.append(speed)


def _has_rows_alone(batch: Any) -> bool:
    """Whether a batch is nothing but tensors of as many rows."""
    leaves = tree_leaves(batch)
    return all(isinstance(one, Tensor) and one.ndim and len(one) == len(leaves[0]) for one in leaves)


def _ratio(trainer: Trainer[Any], batches: Sequence[Any], twice: Sequence[Any]) -> float:
    """How much longer an update takes on these; taken there and back, so that a machine getting slower says little."""
    return update_seconds(trainer, twice) / update_seconds(trainer, batches)


def speeds(trainer: Trainer[Any], batches: Sequence[Any]) -> list[Speed]:
    """The speed of stretches of a few updates; it is looked at the end of each whether the device has work left."""
    told, updates = _Speeds(), LOOKS * BETWEEN
    used = [batches[index % len(batches)] for index in range((updates + 2) * trainer.accumulate[0][1])]
    asked = Throughput(every=Updates(BETWEEN), flops_per_row=1.0)  # which needs no counting then
    silent(trainer, observers=[asked, told]).fit(used, max_updates=updates + 1)
    return told.found[1:]


def _device_facts(trainer: Trainer[Any], batches: Sequence[Any], rows: int) -> DeviceFacts:
    device, told = trainer.device, speeds(trainer, batches)
    return DeviceFacts(
        device=torch.cuda.get_device_name(device),
        rows=rows,
        looks=sum(one.looks for one in told),
        busy=sum(one.busy for one in told),
        used=torch.cuda.max_memory_allocated(device),
        total=torch.cuda.get_device_properties(device).total_memory,
    )


def _normalising(entered: Entered, batches: Sequence[Any]) -> str:
    """The line that normalises: images by `Normalize`, with what was seen; columns by their own mean and deviation."""
    mean, std, _ = moments(entered)
    if entered.kind != "conv2d" or len(mean) > 4 or not bool((std > 0).all()):
        return "x = (x - x.mean(0)) / x.std(0).clamp_min(1e-6)  # of the training rows; the same numbers for the others"
    leaves = tree_leaves(batches[0])
    bytes_ = any(isinstance(one, Tensor) and one.dtype is torch.uint8 and one.ndim == 4 for one in leaves)
    unit = 255 if bytes_ else 1
    numbers = [", ".join(f"{float(one) / unit:.4g}" for one in each) for each in (mean, std)]
    comma = "," if len(mean) == 1 else ""
    return f"batches(..., augment=Normalize(mean=({numbers[0]}{comma}), std=({numbers[1]}{comma})))"
