"""Runs contestants in turn, round by round: times, memory, waits of the host, and whether their weights agree."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import replace
from math import isnan
from typing import Any

import torch
from contestants.measuring import quiet
from torch import Tensor, nn

from gpu_cases.entry import Case, Clock, Contestant, Runs, Task

WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cudaMemcpy")
"""Calls of CUDA's runtime in which the host waits."""


class Rounds:
    """A case under way: everybody trains once untimed, then once a round, in orders there and back."""

    def __init__(self, case: Case, task: Task) -> None:
        self.case, self.task = case, task
        self.found = {one.name: Runs(absent=one.absent(task.bench)) for one in case.contestants}
        self._begun = _weights(task.model(), task.device)
        self._wanted: dict[str, Tensor] = {}
        """Weights that others must have, by whose they are."""
        self._others = {one.equals for one in case.contestants}

    def run(self) -> dict[str, Runs]:
        """Return what was found of each; who fails is left out from then on."""
        try:
            self._run_all()
        finally:
            gc.unfreeze()
        return self.found

    def _run_all(self) -> None:
        for number in range(self.task.bench.rounds + 1):
            if number < 2:
                gc.collect()
                gc.freeze()  # nobody pays for the modules of all others
            for one in self.case.contestants if number % 2 == 0 else self.case.contestants[::-1]:
                self._try(one, timed=number > 0)
        if self.case.counts_syncs and self.task.bench.on_cuda:
            for one in self.case.contestants:
                self._count(one)

    def _try(self, one: Contestant, *, timed: bool) -> None:
        runs = self.found[one.name]
        if runs.failed or runs.absent:
            return
        try:
            self._once(one, runs, timed=timed)
        except Exception as error:  # anything that another library may raise: it is reported in the table
            runs.failed = _reported(error)

    def _once(self, one: Contestant, runs: Runs, *, timed: bool) -> None:
        task, device = self._task(one), self.task.device
        before = _tidy(device)
        clock, compiled = Clock(task), _compiled()
        with quiet():
            model = one.train(task, clock)
        if len(clock.times) != 1 + task.epochs:
            raise RuntimeError(f"{len(clock.times)} epochs ended, not {1 + task.epochs}")
        runs.note = runs.note or clock.note  # of the first run, which says what was compiled
        runs.graphs += _compiled() - compiled
        if timed:
            runs.seconds.append(clock.seconds / task.updates)
            if device.type == "cuda":
                runs.allocations.append(clock.allocations)
                runs.peak.append(torch.cuda.max_memory_allocated(device) - before)
        self._compare(one, runs, model)

    def _task(self, one: Contestant) -> Task:
        return replace(self.task, data=self.task.variants[one.variant]) if one.variant else self.task

    def _compare(self, one: Contestant, runs: Runs, model: nn.Module) -> None:
        """Keep the weights of the first run of whoever is a reference; compare all later runs of all with them."""
        own = _weights(model, self.task.device)
        if one.name in self._others and one.name not in self._wanted:
            self._wanted[one.name] = own
        wanted = self._wanted.get(one.equals or one.name)
        if wanted is not None:
            differs = float((own - wanted).norm() / (wanted - self._begun).norm())
            runs.differs = max(differs, runs.differs or 0.0, key=lambda one: (isnan(one), one))

    def _count(self, one: Contestant) -> None:
        """Count the waits of the host in one more run, untimed, by torch's profiler."""
        runs = self.found[one.name]
        if runs.failed or runs.absent:
            return
        try:
            runs.syncs = waits(self._task(one), one.train)
        except Exception as error:  # as above
            runs.failed = f"profiled: {_reported(error)}"


def waits(task: Task, train: Callable[[Task, Clock], nn.Module]) -> dict[str, float]:
    """Return how often per update the host waits for the device, by the name of the call."""
    kinds = torch.profiler.ProfilerActivity
    profiled: Any = torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA])
    _tidy(task.device)
    clock = Clock(task, begin=profiled.start)
    try:
        with quiet():
            train(task, clock)
    finally:
        if clock.times:  # else it has not begun
            profiled.stop()
    counted = {one.key: one.count for one in profiled.key_averages() if one.key in WAITS}
    clocks_own = len(clock.times) - 1
    counted["cudaDeviceSynchronize"] = max(0, counted.get("cudaDeviceSynchronize", 0) - clocks_own)
    return {name: count / task.updates for name, count in counted.items()}


def _reported(error: Exception) -> str:
    """An error in one line, as a table has them."""
    return " ".join(f"{type(error).__name__}: {error}".replace("|", "/").split())[:400]


def _tidy(device: torch.device) -> int:
    """Clear away what the one before left; return the bytes that are still taken."""
    gc.collect()
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _compiled() -> int:
    """The graphs that torch has compiled in this process so far."""
    utils = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else utils.counters["stats"]["unique_graphs"]


def _weights(model: nn.Module, device: torch.device) -> Tensor:
    """All parameters, on the device that they began on: some libraries leave them elsewhere."""
    return torch.cat([parameter.detach().to(device, torch.float32).flatten() for parameter in model.parameters()])
