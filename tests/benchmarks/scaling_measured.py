"""The formulas of scaling_model.py against 2 processes on this machine: gloo over loopback, nothing else to be had.

`alpha` and `bandwidth` are fitted to all-reduces of every other size; the sizes between them, an update of DDP and an
`all_gather_object` are then predicted and measured. What is compared is medians; both processes keep one thread.
"""

from __future__ import annotations

import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from scaling_model import AGREED, Link, exposed, objects, ring
from torch import nn
from torch.nn.parallel import DistributedDataParallel

N, LIMIT = 2, 300.0
"""Processes, and the seconds after which they are ended."""
SIZES = [4**k for k in range(1, 12)]
"""Bytes: 4 to 4 Mi."""
WIDTH, LAYERS, BATCH = 512, 4, 128
Times = dict[Any, list[float]]


def check(rounds: int) -> None:
    """Measure, fit, predict, and print each measured median beside what was predicted."""
    found = measured(rounds)
    reduced = {size: statistics.median(found[size]) for size in SIZES}
    link = fitted({size: reduced[size] for size in SIZES[::2]})
    print(f"torch {torch.__version__}, gloo, {N} processes of 1 thread on {platform.machine()}, n = {rounds} each")
    print(f"fitted to every other size: alpha {link.alpha * 1e6:.0f} us, bandwidth {link.bandwidth / 1e9:.2f} GB/s\n")
    print("| | predicted, us | measured, us | quartiles | measured / predicted |\n|---|--:|--:|--:|--:|")
    for size in SIZES:
        kind = "fitted" if size in SIZES[::2] else "predicted"
        line(f"all-reduce of {size:,} bytes, {kind}", ring(N, size, link), found[size])
    line("`all_gather_object`, which `World.all_gather` is", objects(N, AGREED, link), found["gather"])
    for name, predicted in updates_of(found, link).items():
        line(name, predicted, found["update"])


def updates_of(found: Times, link: Link) -> dict[str, float]:
    """What an update of DDP should take: all-reduces beside the backward, and after it."""
    alone, backward = (statistics.median(found[name]) for name in ("alone", "backward"))
    each = [ring(N, bytes_, link) for bytes_ in found["buckets"]]
    buckets = f"{len(each)} buckets of {sum(found['buckets']) / 1e6:.1f} MB in all"
    return {
        f"update of DDP, {buckets}, hidden behind backward": alone + exposed(sum(each), each[-1], backward),
        f"update of DDP, {buckets}, nothing hidden": alone + sum(each),
    }


def line(name: str, predicted: float, times: list[float]) -> None:
    """One row of the table."""
    low, middle, high = statistics.quantiles(times, n=4)
    spread = f"{low * 1e6:,.0f} to {high * 1e6:,.0f}"
    print(f"| {name} | {predicted * 1e6:,.0f} | {middle * 1e6:,.0f} | {spread} | {middle / predicted:.2f} |")


def fitted(times: dict[int, float]) -> Link:
    """The link whose all-reduces differ least from these, each by its share of the time."""
    sizes = torch.tensor(list(times), dtype=torch.float64)
    taken = torch.tensor(list(times.values()), dtype=torch.float64)
    steps, moved = 2 * (N - 1), 2 * (N - 1) / N * sizes
    system = torch.stack([torch.full_like(sizes, steps), moved], 1) / taken[:, None]
    alpha, per_byte = torch.linalg.lstsq(system, torch.ones(len(sizes), 1, dtype=torch.float64)).solution.flatten()
    return Link(float(alpha), 1 / float(per_byte))


def measured(rounds: int) -> Times:
    """The first process's times; RuntimeError where the two are not done in time."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        mine, theirs = context.Pipe(duplex=False)
        processes = [context.Process(target=_run, args=(rank, directory, theirs, rounds)) for rank in range(N)]
        try:
            for process in processes:
                process.start()
            theirs.close()
            if not mine.poll(LIMIT):
                raise RuntimeError(f"{N} processes were not done in {LIMIT:g} s")
            found: Times = mine.recv()
            for process in processes:
                process.join(10)
            return found
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()


def _run(rank: int, directory: str, pipe: Any, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=N, timeout=timedelta(seconds=60)
    )
    found = _collectives(rounds) | _updates(rounds)
    if rank == 0:
        pipe.send(found)
    dist.barrier()
    dist.destroy_process_group()


def _timed(times: list[float], do: Callable[[], object]) -> None:
    dist.barrier()
    begun = time.perf_counter()
    do()
    times.append(time.perf_counter() - begun)


def _collectives(rounds: int) -> Times:
    found: Times = {size: [] for size in SIZES} | {"gather": []}
    for _ in range(rounds + 1):
        for size in SIZES:
            tensor = torch.zeros(size // 4)
            _timed(found[size], lambda tensor=tensor: dist.all_reduce(tensor))
        _timed(found["gather"], lambda: dist.all_gather_object([None] * N, b"x" * int(AGREED)))
    return {name: times[1:] for name, times in found.items()}  # the first round warms up


def _updates(rounds: int) -> Times:
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=1, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs, found = torch.randn(BATCH, WIDTH), {"alone": [], "backward": [], "update": []}

    def update() -> None:
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        begun = time.perf_counter()
        loss.backward()
        found["backward"].append(time.perf_counter() - begun)
        optimizer.step()

    def alone() -> None:
        with model.no_sync():
            update()

    backwards: list[float] = []
    for _ in range(rounds + 3):  # DDP rebuilds its buckets after the first
        _timed(found["alone"], alone)
        backwards.append(found["backward"][-1])
        _timed(found["update"], update)
    sizes = model._get_ddp_logging_data()["rebuilt_bucket_sizes"] or model._get_ddp_logging_data()["bucket_sizes"]
    kept: Times = {"backward": backwards[3:]} | {name: found[name][3:] for name in ("alone", "update")}
    return kept | {"buckets": [float(one) for one in sizes.split(",")]}
