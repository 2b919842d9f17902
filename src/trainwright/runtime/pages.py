"""Makes tensors for what is read from files, in memory that the system may hand out in huge pages."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

HUGE = 1 << 21
"""Bytes of a huge page on x86-64; elsewhere it is a multiple or a part of one, and only a hint is lost."""


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """`torch.empty` on the CPU; to fill it for the first time costs half, where Linux gives huge pages to who asks."""
    tensor = torch.empty(shape, dtype=dtype)
    first = -(-tensor.data_ptr() // HUGE) * HUGE
    size = (tensor.data_ptr() + tensor.numel() * tensor.element_size() - first) // HUGE * HUGE
    if size > 0 and (advise := _advise()):
        advise(first, size, mmap.MADV_HUGEPAGE)
    return tensor


@cache
def _advise() -> Callable[[int, int, int], int] | None:
    """The system's `madvise`; what it returns is of no interest, since all that it is told is a hint."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    call = ctypes.CDLL(None).madvise
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return call  # type: ignore[no-any-return]
