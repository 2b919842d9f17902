"""B0, what the device can do at most: a matrix product, a copy, a transfer, kernels one by one and as a graph."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from gpu_cases.entry import NOT_ON_CPU, Bench

Measured = tuple[str, str, list[float] | str, str]
"""What was measured, its unit, one value a round or why there is none, and what was seen elsewhere."""


def ceilings(bench: Bench) -> list[Measured]:
    """Measure them all, `bench.rounds` times each after an untimed one."""
    size = bench.size(8192, 64)
    rows: list[Measured] = [
        (f"bf16 matrix product, {size} cubed", "TFLOP/s", products(bench, size), "788 (H200), 798 (H100), once each"),
        ("copy on the device, bytes read and written", "GB/s", copies(bench), "4300 (H200), 3000 (H100), once each"),
        ("from pinned memory to the device", "GB/s", transfers(bench), "25 to 55 by PCIe 5"),
    ]
    titles = ("a kernel, enqueued", "a kernel, carried out", "a node of a graph of 1000", "such a graph, enqueued")
    found = kernels(bench) if bench.on_cuda else [NOT_ON_CPU] * 4
    return rows + [(title, "us", one, "") for title, one in zip(titles, found, strict=True)]


def products(bench: Bench, size: int) -> list[float]:
    """Of random numbers: zeros would be multiplied faster."""
    torch.manual_seed(0)
    a, b = (torch.randn(size, size, device=bench.device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    seconds = timed(bench, lambda: torch.mm(a, b, out=out), times=bench.size(20, 2))
    return [2 * size**3 / one / 1e12 for one in seconds]


def copies(bench: Bench) -> list[float]:
    numbers = bench.size(2 * 10**9, 2**16)
    source = torch.ones(numbers, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    return [2 * numbers / one / 1e9 for one in timed(bench, lambda: target.copy_(source), times=bench.size(20, 2))]


def transfers(bench: Bench) -> list[float] | str:
    if not bench.on_cuda:
        return NOT_ON_CPU
    numbers = bench.size(256 * 2**20, 2**16)
    source = torch.ones(numbers, dtype=torch.uint8).pin_memory()
    target = torch.empty(numbers, dtype=torch.uint8, device=bench.device)
    seconds = timed(bench, lambda: target.copy_(source, non_blocking=True), times=bench.size(10, 2))
    return [numbers / one / 1e9 for one in seconds]


def kernels(bench: Bench) -> list[list[float]]:
    """Microseconds of the host and of the device for a small kernel, alone and as a node of a graph."""
    count, value = 1000, torch.zeros((), device=bench.device)

    def chain() -> None:
        for _ in range(count):
            value.add_(1)

    chain()
    torch.cuda.synchronize(bench.device)
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        chain()
    found: list[list[float]] = [[], [], [], []]
    for number in range(bench.rounds + 1):
        one = [*_enqueued_and_done(bench, chain), *_enqueued_and_done(bench, graph.replay)]
        if number:
            for values, seconds, share in zip(found, one, (count, count, 1, count), strict=True):
                values.append(seconds / share * 1e6)
    found[2], found[3] = found[3], found[2]
    return found


def _enqueued_and_done(bench: Bench, work: Callable[[], Any]) -> tuple[float, float]:
    torch.cuda.synchronize(bench.device)
    begun = time.perf_counter()
    work()
    enqueued = time.perf_counter() - begun
    torch.cuda.synchronize(bench.device)
    return enqueued, time.perf_counter() - begun


def timed(bench: Bench, work: Callable[[], Any], *, times: int) -> list[float]:
    """Seconds of one call, round by round, the device being waited for before and after all calls of a round."""
    found = []
    for number in range(bench.rounds + 1):
        wait(bench)
        begun = time.perf_counter()
        for _ in range(times):
            work()
        wait(bench)
        if number:
            found.append((time.perf_counter() - begun) / times)
    return found


def wait(bench: Bench) -> None:
    if bench.on_cuda:
        torch.cuda.synchronize(bench.device)


def table(rows: list[Measured]) -> str:
    """The ceilings in Markdown."""
    lines = ["| ceiling | median | quartiles | unit | seen elsewhere |", "|---|--:|--:|---|---|"]
    for title, unit, values, seen in rows:
        if isinstance(values, str):
            lines.append(f"| {title} | {values} | | {unit} | {seen} |")
            continue
        low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
        middle = statistics.median(values)
        lines.append(f"| {title} | {middle:.4g} | {low:.4g} to {high:.4g} | {unit} | {seen} |")
    return "\n".join([*lines, ""])
