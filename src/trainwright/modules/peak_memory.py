"""Measures the most memory that a piece of work takes: by the allocator of a device, else by what tensors it makes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from trainwright.core.memory import free_memory, left_on
from trainwright.core.torch_private import storage_id


class Peaks(Protocol):
    """Measures the most memory in use while a context lasts."""

    what: str
    """What is measured, in words."""
    peak: int
    """Bytes at most, in the last context; what was there before it is in them."""

    refuses: bool
    """Whether the device itself says no in time; else a budget must be kept to."""

    def left(self) -> int | None:
        """Bytes that tensors may take here in all, those that there are included; None where nobody can tell."""

    def watching(self) -> AbstractContextManager[None]:
        """Measure inside."""
        ...


class AllocatorPeaks:
    """What torch's allocator of a CUDA device had given out at most."""

    what = "torch.cuda.max_memory_allocated"
    refuses = True

    def __init__(self, device: torch.device, known: Iterable[Tensor] = ()) -> None:
        self._device, self.peak = device, 0

    def left(self) -> int | None:
        """What is free for this process, and what tensors take already."""
        free_memory(self._device)
        return left_on(self._device) + int(torch.cuda.memory_allocated(self._device))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Measure inside."""
        free_memory(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        try:
            yield
        finally:
            torch.cuda.synchronize(self._device)
            self.peak = torch.cuda.max_memory_allocated(self._device)


class TensorPeaks:
    """The bytes of all tensors that operations have made and that were alive at once, beside those that are `known`.

    What a kernel needs for itself is not seen, nor what lies outside of tensors.
    """

    what = "the bytes of tensors that were alive at once"
    refuses = False

    def __init__(self, device: torch.device, known: Iterable[Tensor] = ()) -> None:
        self._device, self.peak = device, 0
        self._known = list({storage_id(tensor.untyped_storage()): tensor for tensor in known}.values())

    def left(self) -> int | None:
        """Half of the memory that the system, and the control group of this process, have left on a CPU."""
        free = _free_on_the_host() if self._device.type == "cpu" else None
        return None if free is None else free // 2 + self._before

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Measure inside."""
        from trainwright.modules.tensor_memory import Living

        free_memory(self._device)
        living = Living(self._known)
        try:
            with living:
                yield
        finally:
            self.peak = self._before + living.peak

    @property
    def _before(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self._known)


PEAKS: dict[str, Callable[[torch.device, Iterable[Tensor]], Peaks]] = {"cuda": AllocatorPeaks}
"""What measures, by device type; elsewhere tensors are counted."""


def peaks_of(device: torch.device, known: Iterable[Tensor]) -> Peaks:
    """What measures on a device; `known`: tensors that are there before."""
    return PEAKS.get(device.type, TensorPeaks)(device, known)


def _free_on_the_host() -> int | None:
    """Bytes that may be had without swapping, as far as Linux tells: of the machine, and of the control group."""
    if sys.platform != "linux":
        return None
    told = Path("/proc/meminfo").read_text(encoding="ascii")
    found = [int(line.split()[1]) * 1024 for line in told.splitlines() if line.startswith("MemAvailable:")]
    limit, used = (_number(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    found += [] if limit is None or used is None else [max(0, limit - used)]
    return min(found, default=None)


def _number(path: str) -> int | None:
    try:
        text = Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
