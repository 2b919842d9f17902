"""Looks at updates of a run in its steady state: what waits, what is allocated, which calls of CUDA are made."""

from __future__ import annotations

import json
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from trainwright import Observer
from trainwright.update.deferred_check import AHEAD

WARM, STEADY = 10, 20
"""Updates that may go by, and updates that are looked at."""
WHOLE = WARM + STEADY + 2 * AHEAD + 4
"""Updates of a run that is looked at: so many that it pauses for nothing while it is."""
WAITS = re.compile(r"cuda(StreamSynchronize|DeviceSynchronize|Memcpy|Memset)(_v\d+)?|cu(Stream|Ctx)Synchronize")
ALLOCATES = re.compile(r"cuda(Malloc\w*|Free\w*|Host(Alloc|Register|Unregister))|cuMem(Alloc|Free|Create|Map|Unmap)\w*")
LAUNCHES = re.compile(r"cudaLaunchKernel\w*|cuLaunchKernel\w*")

Opens = Callable[[], AbstractContextManager[Any]]


class Between(Observer):
    """Has a context open from the record of one update to that of another; both come in the thread of training."""

    def __init__(self, within: Opens, *, first: int = WARM, last: int = WARM + STEADY) -> None:
        self._within, self._first, self._last = within, first, last
        self.stack = ExitStack()
        self.looked = 0
        """Updates whose records came while it was open."""

    def on_update(self, update: Any) -> None:
        if update.update == self._last:
            self.stack.close()
        self.looked += self._first < update.update <= self._last
        if update.update == self._first:
            self.stack.enter_context(self._within())


def steady(trainer: Any, data: Any, within: Opens, *, updates: int = WHOLE, first: int = WARM) -> Any:
    """Fit a trainer, with a context open while `STEADY` updates go by, fewer in a shorter run."""
    between = Between(within, first=first, last=min(first + STEADY, updates))
    trainer.observers = (*trainer.observers, between)
    torch.manual_seed(7)
    try:
        trainer.fit(data, max_updates=updates)
    finally:
        between.stack.close()
    assert between.looked == min(STEADY, updates - first), f"looked at {between.looked} updates"
    return trainer


@contextmanager
def no_sync(device: torch.device) -> Iterator[None]:
    """Have every wait for a stream, and every blocking copy, raise."""
    if device.type != "cuda":
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it does not find every wait: the others are looked for elsewhere
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def memory_counts(device: torch.device) -> dict[str, int]:
    """What the allocators of the device, and of pinned host memory, have counted."""
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    names = ("num_device_alloc", "num_device_free", "num_alloc_retries", "num_sync_all_streams", "num_ooms")
    counts = {name: stats.get(name, 0) for name in names}
    host = torch.cuda.host_memory_stats() if hasattr(torch.cuda, "host_memory_stats") else {}
    return counts | {name: host.get(name, 0) for name in ("num_host_alloc", "num_host_free")}


@contextmanager
def counting_memory(device: torch.device, changes: dict[str, int]) -> Iterator[None]:
    """Put into `changes` what the allocators did inside, by name, where they did anything."""
    before = memory_counts(device)
    yield
    changes.update(
        {name: value - before[name] for name, value in memory_counts(device).items() if value != before[name]}
    )


@contextmanager
def profiled(device: torch.device, path: Path, calls: Counter[str]) -> Iterator[None]:
    """Count the calls of CUDA that are made inside by the threads that compute, those of autograd included."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        profiler = torch.profiler.profile(activities=activities, acc_events=True)
        profiler.start()
    # The profiler waits for the device where it stops: what is counted lies between two marks of our own.
    _mark("steady begins")
    yield
    _mark("steady ends")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        profiler.stop()
        profiler.export_chrome_trace(str(path))
    calls.update(calls_in(json.loads(path.read_text(encoding="utf-8"))["traceEvents"]))


def _mark(name: str) -> None:
    with torch.profiler.record_function(name):
        pass


def calls_in(events: list[dict[str, Any]]) -> Counter[str]:
    """The calls of CUDA between the two marks, by name, in threads that ran operations there."""
    marks = {one["name"]: one for one in events if one.get("cat") == "user_annotation"}
    begins, ends = marks["steady begins"], marks["steady ends"]
    inside = [one for one in events if "ts" in one and begins["ts"] <= one["ts"] < ends["ts"]]
    threads = {begins["tid"]} | {one["tid"] for one in inside if one.get("cat") == "cpu_op"}
    return Counter(
        one["name"] for one in inside if one.get("cat") in ("cuda_runtime", "cuda_driver") and one["tid"] in threads
    )


def matching(calls: Counter[str], names: re.Pattern[str]) -> dict[str, int]:
    """The calls of these names."""
    return {name: count for name, count in calls.items() if names.fullmatch(name)}


class Blocked(Observer):
    """Keeps the device busy from the record of one update on, and notes when the records after it come."""

    def __init__(self, device: torch.device, seconds: float, *, first: int = WARM) -> None:
        self._device, self._seconds, self._first = device, seconds, first
        self._begun = 0.0
        self.came: list[float] = []
        """Seconds after the device was blocked at which each record after that came."""

    def on_update(self, update: Any) -> None:
        if update.update > self._first:
            self.came.append(time.perf_counter() - self._begun)
        elif update.update == self._first:
            if self._device.type == "cuda":
                torch.cuda._sleep(int(self._seconds * CYCLES))
            self._begun = time.perf_counter()


CYCLES = 2e9
"""Clock ticks of a second, about: the fastest clocks of such devices are at 1.7 to 2 GHz."""


def blocked(
    trainer: Any, data: Any, device: torch.device, *, seconds: float = 1.0, updates: int = WHOLE
) -> list[float]:
    """Fit a trainer; the seconds that the host took for each update from one on, behind which the device is blocked."""
    sleeps = Blocked(device, seconds, first=min(WARM, updates - 1))
    trainer.observers = (*trainer.observers, sleeps)
    trainer.fit(data, max_updates=updates)
    return sleeps.came
