"""The only module that reads numbers from tensors: several together, in one transfer per device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainwright.core.device import widest_float


def read(values: Sequence[float | Tensor]) -> list[float]:
    """Return all values as floats; tensors on an accelerator are read in one transfer, which synchronizes.

    The values are scalars: plain numbers, or tensors of one element. Reads from the CPU do not wait.
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
"""Returns the value of a scalar tensor on the CPU, without a wait."""


def as_count(count: float | Tensor) -> float | Tensor:
    """Return a count as a divisor: a number, or for a tensor on an accelerator a scalar of its widest float dtype.

    Wide, since torch divides integers in float32. Tensors on the CPU are read, which does not wait.
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
