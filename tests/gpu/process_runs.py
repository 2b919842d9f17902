"""Runs of one process that has a process group: FSDP, DDP and sums over NCCL on a GPU, over gloo on the CPU.

A program of its own, which leaves no group behind: `python process_runs.py cuda`; it prints "all are the same".
"""

from __future__ import annotations

import socket
import sys
from typing import Any

import torch
import torch.distributed as dist
from gpu_runs import Case, data_of, distance, trained, watch_of
from torch import nn

from trainwright import DDP, FSDP
from trainwright.distributed.ddp import GradientBuckets, Wrapped
from trainwright.distributed.world import ProcessGroupWorld


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Any) -> Any:
        return x + torch.relu(self.linear(x))


def blocks() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), Block(), Block(), nn.Linear(64, 5))


def main(kind: str, updates: int) -> None:
    """Do everything on this kind of device."""
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    identity = {"device_id": device} if kind == "cuda" else {}
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1, **identity)
    try:
        check_fsdp(device, updates)
        check_ddp(device)
        check_sums(device)
    finally:
        dist.destroy_process_group()
    print("all are the same")


def check_fsdp(device: torch.device, updates: int) -> None:
    """A model in shards of one process is trained as a plain one."""
    for precision in (None, "bf16"):
        case = Case("adamw", 0.25, "four", precision, "step")
        plain = trained(case, device, build=blocks, updates=updates, parallel=None)
        sharded = trained(case, device, build=blocks, updates=updates, parallel=FSDP({Block}))
        assert type(sharded.world) is ProcessGroupWorld, sharded.world
        whole = blocks()
        whole.load_state_dict(
            {
                name: one.full_tensor() if hasattr(one, "full_tensor") else one
                for name, one in sharded.model.state_dict().items()
            }
        )
        assert distance(plain.model, whole) <= (1e-5 if precision is None else 1e-3), precision
        assert abs(watch_of(sharded).records[-1].loss - watch_of(plain).records[-1].loss) < 1e-2


class Loss(nn.Module):
    """A module whose forward is the step."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any) -> Any:
        x, y = (one.to(next(self.model.parameters()).device) for one in batch)
        return nn.functional.cross_entropy(self.model(x), y)


def check_ddp(device: torch.device) -> None:
    """Gradients that are averaged over one process are its own; packed to 16 bits they are rounded so."""
    window = data_of(Case())[:3]
    plain = Loss(blocks().to(device))
    for batch in window:
        plain(batch).backward()
    compressions = [None, "bf16"] if device.type == "cuda" else [None]
    for compress in compressions:
        ours = Loss(blocks().to(device))
        wrapped = Wrapped(ours, DDP(compress=compress), ProcessGroupWorld(), unused=False)
        for number, batch in enumerate(window):
            wrapped(batch, last=number == len(window) - 1).backward()
        for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
            wanted = other.grad if compress is None else other.grad.bfloat16().float()
            torch.testing.assert_close(
                one.grad, wanted, rtol=1e-2 if compress else 1e-6, atol=1e-4 if compress else 1e-7
            )


def check_sums(device: torch.device) -> None:
    """Sums and averages of one process are its own numbers, wherever they lie."""
    world = ProcessGroupWorld()
    assert world.sum_numbers(1.5, 2.0) == [1.5, 2.0]
    assert world.all_gather({"a": 1}) == [{"a": 1}]
    there, here = torch.arange(4.0, device=device), torch.arange(3.0)
    world.all_reduce(there)
    world.all_reduce(here)
    assert there.tolist() == [0, 1, 2, 3]
    assert here.tolist() == [0, 1, 2]
    parameters = list(blocks().to(device).parameters())
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 0.5)
    reported = GradientBuckets(parameters, world, bucket_mb=1.0).average(torch.tensor([2.0, 1.0], device=device))
    assert torch.as_tensor(reported).tolist() == [2.0, 1.0]
    assert all((one.grad == 0.5).all() for one in parameters)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 20)
