"""The only place where numbers are read from tensors: several at once, in one read for each device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainwright.core.device import widest_float


def read(values: Sequence[float | Tensor]) -> list[float]:
    """Return every value as a float; tensors on an accelerator are read together, once.

    The values are scalars (plain numbers, or tensors of one element). On the CPU a read waits for nothing.
    """
    numbers = []
    for value in values:
        if type(value) is Tensor or isinstance(value, Tensor):
            if not value.is_cpu:
                return _read_together(values)
            numbers.append(value.item())
        else:
            numbers.append(float(value))
    return numbers


host_value = Tensor.item
"""Returns the value of a scalar on the CPU, which waits for nothing."""


def as_count(count: float | Tensor) -> float | Tensor:
    """Return a count that can be divided by: a number, or on an accelerator a scalar in its widest float.

    A read from the CPU waits for nothing. Torch divides integers in float32.
    """
    if not isinstance(count, Tensor):
        return count
    return host_value(count) if count.is_cpu else count.to(widest_float(count.device))


def _read_together(values: Sequence[float | Tensor]) -> list[float]:
    device = next(value.device for value in values if isinstance(value, Tensor) and not value.is_cpu)
    there = [
        value.detach().reshape(()).to(device, widest_float(device))
        for value in values
        if isinstance(value, Tensor) and not value.is_cpu
    ]
    numbers = iter(torch.stack(there).tolist())
    return [next(numbers) if isinstance(value, Tensor) and not value.is_cpu else float(value) for value in values]
