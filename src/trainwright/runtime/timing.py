"""Have cuDNN choose its algorithms by timing them, while a context lasts and as long as inputs keep their shapes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

SHAPES = 8
"""Input shapes, of the model's first convolution, up to which timing pays: each new one is timed anew."""


def may_time(model: nn.Module) -> bool:
    """Whether there is something to time, and nobody asked for the same algorithms in each run."""
    cudnn = torch.backends.cudnn
    strict = cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    return not cudnn.benchmark and not strict and _first_convolution(model) is not None


@contextmanager
def timed_by_cudnn(model: nn.Module, *, watches: bool = True) -> Iterator[None]:
    """`torch.backends.cudnn.benchmark` is on inside; put back afterwards.

    Where it `watches`, it is off again when more than `SHAPES` shapes have come.
    """
    first, seen = _first_convolution(model), set[tuple[Any, ...]]()
    assert first is not None
    before = torch.backends.cudnn.benchmark

    def look(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if inputs and isinstance(inputs[0], Tensor):
            seen.add((module.training, *inputs[0].shape))
        if len(seen) > SHAPES:
            torch.backends.cudnn.benchmark = before

    handle = first.register_forward_pre_hook(look) if watches else None
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()
        torch.backends.cudnn.benchmark = before


def _first_convolution(model: nn.Module) -> nn.Module | None:
    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    return next((module for module in model.modules() if isinstance(module, kinds)), None)
