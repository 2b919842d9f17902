"""Compares batches bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


def same_bits(one: Any, other: Any) -> bool:
    """Whether two nested batches are alike in every type, shape, stride and bit; False where that is not known."""
    return type(one) is type(other) and _same(one, other)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return _same_tensors(one, other)
    if isinstance(one, np.ndarray | np.generic):
        alike = one.dtype == other.dtype and one.dtype != object and one.shape == other.shape
        return alike and one.tobytes() == other.tobytes()
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(same_bits(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_bits, one, other))
    if is_dataclass(one) and not isinstance(one, type):
        return all(same_bits(getattr(one, field.name), getattr(other, field.name)) for field in fields(one))
    known = isinstance(one, str | bytes | int | float | None)
    return known and repr(one) == repr(other)


def _same_tensors(one: Tensor, other: Tensor) -> bool:
    if one.layout is not torch.strided or other.layout is not torch.strided:
        return False
    alike = one.dtype == other.dtype and one.shape == other.shape and one.stride() == other.stride()
    return alike and torch.equal(_bits(one), _bits(other))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
