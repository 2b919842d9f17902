"""How much memory a device's allocator or the process has, as the host knows it: nothing waits for the device."""

from __future__ import annotations

import os
import sys

import torch


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
