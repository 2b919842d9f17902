"""How many cores this process may use: those that it is bound to, no more than its control group allows."""

from __future__ import annotations

import os
from pathlib import Path


def usable_cores() -> int:
    """The cores that this process is bound to, no more than its control group may use; at least 1."""
    affinity = getattr(os, "sched_getaffinity", None)
    bound = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return max(1, min(bound, int(_quota() or bound)))


def _quota() -> float | None:
    """Cores' worth of time that the control group of this process may use; None where there is no limit."""
    for path, joined in (("/sys/fs/cgroup/cpu.max", True), ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", False)):
        file = Path(path)
        if not file.is_file():
            continue
        parts = file.read_text().split()
        period = parts[1] if joined else Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us").read_text()
        return None if parts[0] in ("max", "-1") else max(1.0, float(parts[0]) / float(period))
    return None
