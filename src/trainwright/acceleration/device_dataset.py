"""Copies in-memory data to the accelerator for the duration of a run, if they fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch

from trainwright.core.device import available_memory
from trainwright.core.errors import SettingError
from trainwright.data.source import Source
from trainwright.observers.table import byte_size
from trainwright.update.trainer_like import TrainerLike

AUTO_MEMORY_FRACTION = 0.25
"""Maximum share of the free device memory for data with "auto": the need of the run is unknown at that time."""


def place_data(trainer: TrainerLike, source: Source, val: Mapping[str, Source], *, undo: ExitStack) -> list[str]:
    """Copy data to the device by `Fast(device_data=...)`, until `undo` is closed; return header lines.

    "auto": as many data sets as fit into `AUTO_MEMORY_FRACTION` of the free memory of a CUDA device, training data
    first; none if hooks of the user read batches on the host. True: all in-memory data; SettingError if they do not
    fit.
    """
    wanted = trainer.fast.device_data
    if wanted is False or (wanted == "auto" and not _moves_by_default(trainer)):
        return []
    sizes = _sizes(trainer, {"training": source, **val})
    if wanted is True and "training" not in sizes:
        raise _nowhere(source)
    return list(_placed(trainer, sizes, undo))


def _moves_by_default(trainer: TrainerLike) -> bool:
    """Return whether no hook of the user reads batches on the host."""
    from trainwright.acceleration.transfer import Moving

    return isinstance(trainer._hooks.move, Moving) and not trainer._hooks.overrides_count


def _placed(trainer: TrainerLike, sizes: dict[str, tuple[Any, int]], undo: ExitStack) -> Iterator[str]:
    """Copy the data that fit; yield a header line on the data left on the host, and one on the copied data."""
    device, free, asked = trainer.device, free_memory(trainer.device), trainer.fast.device_data is True
    left = None if free is None else int((1.0 if asked else AUTO_MEMORY_FRACTION) * free)
    placed, taken = [], 0
    for name, (source, size) in sizes.items():
        needed = size + _in_hand(trainer, source, size)
        if left is not None and needed > left - taken:
            if asked:
                raise _too_large(trainer, name, needed, left=left - taken)
            assert free is not None
            yield f"{name} data stay on the host: {byte_size(needed)}, where {byte_size(free)} are free on {device}"
            continue
        if size:
            undo.callback(source.reside, None)
            source.reside(device)
            taken += size
            placed.append(name)
    if placed:
        yield f"{' and '.join(placed)} data are on {device}: {byte_size(taken)}"


def free_memory(device: torch.device) -> int | None:
    """Return the free bytes of a device, with torch's cached blocks; None if unknown."""
    return available_memory(device) if device.type == "cuda" else None


def _sizes(trainer: TrainerLike, sources: Mapping[str, Any]) -> dict[str, tuple[Any, int]]:
    """Return name -> (source, bytes) of the sources that can be copied. A source with two names occurs once."""
    found: dict[str, tuple[Any, int]] = {}
    for name, source in sources.items():
        size = source.bytes_on(trainer.device)
        if size is not None and not any(source is other for other, _ in found.values()):
            found[name] = (source, size)
    return found


def _in_hand(trainer: TrainerLike, source: Any, size: int) -> int:
    """Return the bytes of the micro-batches of one window, which exist at the same time."""
    together = max(number for _, number in trainer.accumulate)
    return size * min(together * (source.batch_size or 0), source.rows or 0) // max(source.rows or 1, 1)


def _nowhere(source: Source) -> SettingError:
    return SettingError(
        "Fast(device_data=True), and the training data are not completely in memory",
        have=source.describe(),
        want="batches(...) of arrays or tensors, in their own order or shuffled",
        fix='Fast(device_data="auto"), or batches(data, ..., in_memory=True)',
    )


def _too_large(trainer: TrainerLike, name: str, needed: int, *, left: int) -> SettingError:
    return SettingError(
        f"Fast(device_data=True), and the {name} data do not fit on {trainer.device}",
        have=f"{byte_size(needed)}, and {byte_size(left)} free",
        want="data that fit beside the model",
        fix='Fast(device_data="auto")',
    )
