"""Contexts of a run: convolution weights channels-last, and cuDNN's choice of algorithms by timing.

The layouts are tested on the CPU; neither has run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)
_OTHERS = (nn.Linear, nn.Embedding, nn.MultiheadAttention, nn.RNNBase, nn.Conv1d, nn.Conv3d)


def is_convolutional(model: nn.Module) -> bool:
    """Return whether most layers with weights are convolutions over images."""
    convolutional = [isinstance(module, _CONVOLUTIONS) for module in model.modules() if isinstance(module, _LAYERS)]
    return sum(convolutional) * 2 > len(convolutional)


@contextmanager
def channels_last(model: nn.Module, optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Lay weights with four dimensions out channels-last inside, and contiguous afterwards; no value changes.

    Gradients and the optimizers' state get the layout of their weights: fused kernels take them in one layout alone.
    """
    # A weight that shares its memory with another one would get memory of its own.
    laid = [p for p in model.parameters() if p.dim() == 4 and type(p) is nn.Parameter and _is_alone(p)]
    laid = [p for p in laid if not p.is_contiguous(memory_format=torch.channels_last)]
    optimizers = list(optimizers)
    try:
        for parameter in laid:
            _lay(parameter, torch.channels_last)
        align_state(optimizers)
        yield
    finally:
        for parameter in laid:
            _lay(parameter, torch.contiguous_format)
        align_state(optimizers)


def align_state(optimizers: Iterable[Optimizer]) -> None:
    """Give optimizer state the layout of its weight, for weights with four dimensions and state of the same shape."""
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for name, value in state.items() if parameter.dim() == 4 else ():
                if not isinstance(value, Tensor) or value.shape != parameter.shape:
                    continue
                if value.stride() != parameter.stride():
                    state[name] = torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def _is_alone(parameter: Tensor) -> bool:
    return parameter.is_contiguous() and parameter.untyped_storage().nbytes() == parameter.nbytes


def _lay(parameter: nn.Parameter, layout: torch.memory_format) -> None:
    parameter.data = parameter.data.contiguous(memory_format=layout)
    if parameter.grad is not None:
        parameter.grad = parameter.grad.contiguous(memory_format=layout)


_LAYERS = (*_CONVOLUTIONS, *_OTHERS)

SHAPES = 8
"""The number of input shapes of the first convolution up to which timing pays: each new shape is timed."""


def may_time(model: nn.Module) -> bool:
    """Return whether the model has a convolution, and deterministic algorithms are off."""
    cudnn = torch.backends.cudnn
    strict = cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    return not cudnn.benchmark and not strict and _first_convolution(model) is not None


@contextmanager
def timed_by_cudnn(model: nn.Module, *, watches: bool = True) -> Iterator[None]:
    """Set `torch.backends.cudnn.benchmark` inside, and restore it afterwards.

    `watches`: restore it after more than `SHAPES` input shapes.
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
