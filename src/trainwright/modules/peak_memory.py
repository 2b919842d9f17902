"""Peak memory of a block of code: by the allocator on a CUDA device, else by a count of live storages."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from trainwright.core.device import available_memory, release_memory
from trainwright.core.torch_private import TorchDispatchMode, sparse_parts, storage_id
from trainwright.core.trees import tensors_in

T = TypeVar("T")


class AllocatorPeaks:
    """Peak memory by torch's allocator on a CUDA device. Not run on a GPU yet."""

    what = "torch.cuda.max_memory_allocated"
    refuses = True
    """Whether the device raises an out-of-memory error in time; otherwise the caller must stay within a budget."""

    def __init__(self, device: torch.device, known: Iterable[Tensor] = ()) -> None:
        self._device, self.peak = device, 0
        """`peak`: the peak in bytes of the last `watching`, including memory from before it."""

    def left(self) -> int | None:
        """Return the free bytes for this process plus those of existing tensors."""
        release_memory(self._device)
        return available_memory(self._device) + int(torch.cuda.memory_allocated(self._device))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Measure the peak inside the block."""
        release_memory(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        try:
            yield
        finally:
            torch.cuda.synchronize(self._device)
            self.peak = torch.cuda.max_memory_allocated(self._device)


class TensorPeaks:
    """Peak memory as the bytes of live tensors, including those of `known`.

    Workspaces of kernels and memory outside of tensors are not counted.
    """

    what = "the bytes of tensors that were alive at once"
    refuses = False

    def __init__(self, device: torch.device, known: Iterable[Tensor] = ()) -> None:
        self._device, self.peak = device, 0
        self._known = list({storage_id(tensor.untyped_storage()): tensor for tensor in known}.values())

    def left(self) -> int | None:
        """Return half of the free memory of system and cgroup plus the `known` tensors, on a CPU; else None."""
        free = _free_on_the_host() if self._device.type == "cpu" else None
        return None if free is None else free // 2 + self._before

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Measure the peak inside the block."""
        release_memory(self._device)
        living = LiveTensors(self._known)
        try:
            with living:
                yield
        finally:
            self.peak = self._before + living.peak

    @property
    def _before(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self._known)


Peaks = AllocatorPeaks | TensorPeaks

PEAKS: dict[str, Callable[[torch.device, Iterable[Tensor]], Peaks]] = {"cuda": AllocatorPeaks}
"""The class that measures, by device type; TensorPeaks for all others."""


def peaks_of(device: torch.device, known: Iterable[Tensor]) -> Peaks:
    """Return the object that measures on a device; `known`: tensors that already exist."""
    return PEAKS.get(device.type, TensorPeaks)(device, known)


def _free_on_the_host() -> int | None:
    """Return the bytes available without swapping in machine and cgroup; None except on Linux."""
    if sys.platform != "linux":
        return None
    meminfo = Path("/proc/meminfo").read_text(encoding="ascii")
    found = [int(line.split()[1]) * 1024 for line in meminfo.splitlines() if line.startswith("MemAvailable:")]
    limit, used = (_number(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    found += [] if limit is None or used is None else [max(0, limit - used)]
    return min(found, default=None)


def _number(path: str) -> int | None:
    try:
        text = Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


class LiveTensors(TorchDispatchMode):
    """Context manager that counts the bytes of live storages that operations inside it have allocated.

    Views of one storage are counted once. Works on the meta device too, where storages have a size. `known`: existing
    tensors, which are not counted. `maker`: returns the key in `by` for a new storage.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.maker: Callable[[], Any] = lambda: None
        self.now = 0
        """Live bytes."""
        self.peak = 0
        """The maximum of `now`."""
        self.by: dict[Any, int] = {}
        """Live bytes, by maker."""
        self._alive: dict[int, tuple[int, Any]] = {}
        # References are kept, since the address of a freed storage may be reused.
        self._known = [tensor.untyped_storage() for tensor in known]
        self._addresses = {storage_id(storage) for storage in self._known}

    def __torch_dispatch__(
        self, func: Callable[..., T], types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> T:
        """Run an operation and count the storages of its results."""
        output = func(*args, **(kwargs or {}))
        for tensor in tensors_in(output):
            for piece in _pieces(tensor):
                self._note(piece)
        return output

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage_id(storage)
        if key in self._addresses or key in self._alive:
            return
        size, maker = storage.nbytes(), self.maker()
        self._alive[key] = size, maker
        self.now += size
        self.by[maker] = self.by.get(maker, 0) + size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._released, key)

    def _released(self, key: int) -> None:
        size, maker = self._alive.pop(key)
        self.now -= size
        self.by[maker] -= size


def _pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the dense tensors inside a tensor: the tensor itself, or indices and values of a sparse one."""
    if tensor.layout is torch.sparse_coo:
        return sparse_parts(tensor)
    return (tensor,)
