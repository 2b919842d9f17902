"""A small model, the plain loop of one process, and the same updates by a sharded model: what the tests compare."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.distributed.fsdp import FSDP, full_state_dict, set_sync, shard
from trainwright.distributed.world import ProcessGroupWorld
from trainwright.optim import Gradients
from trainwright.optim.fused import step_of

CPU = torch.device("cpu")
State = dict[str, Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


class Net(nn.Module):
    """Its dimensions do not go evenly into two: of the head the second process has nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(5, 1)
        self.register_buffer("seen", torch.ones(2))

    def encode(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x))


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().double()


def sharded_net(world: ProcessGroupWorld | None = None, seed: int = 0, **settings: Any) -> Net:
    model = net(seed)
    shard(model, FSDP({Block}, **settings), world or group(), device=CPU)
    return model


def group() -> ProcessGroupWorld:
    return ProcessGroupWorld(local_rank=int(os.environ.get("LOCAL_RANK", "0")), shards=True)


def windows(sizes: list[list[int]]) -> list[list[tuple[Tensor, Tensor]]]:
    """Windows of micro-batches of these sizes."""
    torch.manual_seed(1)
    return [[(torch.randn(n, 3).double(), torch.randn(n, 1).double()) for n in window] for window in sizes]


PAIRS = windows([[4, 3], [2, 6], [5, 2], [4, 4]])
SINGLE = windows([[6], [5], [3], [7]])


def adamw(model: nn.Module, **settings: Any) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, **settings)


def plain_loop(
    data: Any, clip: Callable[[list[nn.Parameter]], Any] | None = None, make: Any = adamw, each: Any = None
) -> tuple[State, list[float]]:
    """One process: the mean over all rows of the window, clipped once."""
    model = net()
    optimizer, norms = make(model), []
    for window in data:
        optimizer.zero_grad()
        x, y = torch.cat([x for x, _ in window]), torch.cat([y for _, y in window])
        nn.functional.mse_loss(model(x), y).backward()
        norms.append(float(nn.utils.get_total_norm([p.grad for p in model.parameters()])))
        if clip is not None:
            clip(list(model.parameters()))
        optimizer.step()
        if each is not None:
            each(model)
    return copy.deepcopy(model.state_dict()), norms


def sharded_loop(
    data: Any,
    clip: Any = None,
    *,
    make: Any = adamw,
    model: nn.Module | None = None,
    each: Any = None,
    settings: dict[str, Any] | None = None,
) -> tuple[State, list[float]]:
    """The same updates by shards: each process runs its rows, and the mean over processes is that over rows."""
    world = group()
    model = sharded_net(world, **(settings or {})) if model is None else model
    optimizer = make(model)
    gradients, step, norms = Gradients(optimizer), step_of(optimizer), []
    for window in data:
        gradients.zero()
        backward_of(model, window, world)
        assert float(gradients.multiply_and_check(0.5)) == 0.0
        norms.append(float(gradients.norm()))
        if clip is not None:
            clip(gradients.parameters)
        step()
        if each is not None:
            each(model)
    return full_state_dict(model, world), norms


def backward_of(model: nn.Module, window: Any, world: ProcessGroupWorld) -> None:
    """The gradient of a window, twice as large as it shall be: the factor is owed."""
    rows = sum(len(y) for _, y in window)
    for place, (x, y) in enumerate(window):
        set_sync(model, place == len(window) - 1)
        mine = slice(len(y) * world.rank // world.size, len(y) * (world.rank + 1) // world.size)
        loss = nn.functional.mse_loss(model(x[mine]).to(y.dtype), y[mine])
        (loss * (2 * world.size * len(y[mine]) / rows)).backward()


def differ(one: State, other: State) -> float:
    """The largest difference of two states."""
    assert list(one) == list(other), (list(one), list(other))
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)
