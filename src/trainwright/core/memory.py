"""How much memory a device's allocator or the process has, as the host knows it: nothing waits for the device."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable

import torch

_FULL = (
    *("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory"),
    *("CUDA error: out of memory", "CUDA out of memory", "MPS backend out of memory"),
    *("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED"),
)
"""How torch says that memory has run out, where the class of the error does not."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there was no memory for a tensor: torch's own class, a MemoryError, or its words."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _FULL)


def free_memory(device: torch.device, let_go: Callable[[], None] = lambda: None) -> None:
    """Give back what nobody holds any more. `let_go` is called when the device has done all that it was given."""
    gc.collect()  # graphs of autograd that are held in a ring
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    let_go()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()


def left_on(device: torch.device) -> int:
    """Bytes that tensors may yet take on a CUDA device: those that torch keeps, and free ones as far as it may go.

    A process may have been given a share of the device (`torch.cuda.set_per_process_memory_fraction`).
    """
    free, total = torch.cuda.mem_get_info(device)
    reserved: int = torch.cuda.memory_reserved(device)
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total) - reserved
    return max(0, min(free, allowed)) + reserved - torch.cuda.memory_allocated(device)


def device_memory(device: torch.device) -> dict[str, int]:
    """Return bytes by name: `allocated`, `reserved`, `peak` (of allocated, so far) on CUDA, `allocated` on mps.

    On the CPU `process`, what is resident of this process; nothing where the system does not tell.
    """
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        kinds = {"allocated": "allocated_bytes.all.current", "reserved": "reserved_bytes.all.current"}
        found = {name: stats.get(kind, 0) for name, kind in kinds.items()}
        return found | {"peak": stats.get("allocated_bytes.all.peak", 0)}
    if device.type == "mps":
        return {"allocated": torch.mps.current_allocated_memory()}
    if device.type == "cpu" and sys.platform == "linux":
        with open("/proc/self/statm", encoding="ascii") as file:  # pages: of all, and resident ones
            return {"process": int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")}
    return {}
