"""Recomputed blocks on a real GPU: the same bits with dropout and under autocast, and less memory of the allocator."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn

from trainwright.modules import checkpoint_activations

pytestmark = pytest.mark.gpu


def net() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (
        nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.GELU(), nn.Dropout(0.2), nn.Linear(256, 64))
        for _ in range(6)
    )
    return nn.Sequential(*blocks, nn.Linear(64, 10))


def passed(model: nn.Module, x: torch.Tensor, *, autocast: bool) -> tuple[list[torch.Tensor], int]:
    """Gradients, buffers and the next draw; and the bytes that the forward has left."""
    torch.manual_seed(1)
    before = torch.cuda.memory_allocated(x.device)
    with torch.autocast("cuda", torch.bfloat16) if autocast else contextlib.nullcontext():
        output = model(x)
    kept = torch.cuda.memory_allocated(x.device) - before
    output.float().square().mean().backward()
    return [*(p.grad for p in model.parameters()), *model.buffers(), torch.rand(3, device=x.device)], kept


@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_statistics_and_draws_are_the_same(device, deterministic, autocast) -> None:
    plain = net().to(device)
    recomputed = copy.deepcopy(plain)
    checkpoint_activations(recomputed, nn.Sequential)
    x = torch.randn(4096, 64, device=device)
    theirs, kept = passed(plain, x, autocast=autocast)
    ours, less = passed(recomputed, x, autocast=autocast)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert less < 0.2 * kept
