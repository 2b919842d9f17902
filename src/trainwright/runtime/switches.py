"""The switches of the process that make computing faster or repeatable: read all, and put back."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_CUDNN = ("enabled", "benchmark", "benchmark_limit", "deterministic", "allow_tf32")


@contextmanager
def kept_switches() -> Iterator[None]:
    """Put back at the end every switch of the process that something inside may have changed.

    These are the grad mode, threads, the dtype of new tensors, float32 matmul precision, cuDNN's switches,
    deterministic algorithms, whether numbers below the normal range are flushed to zero, and the garbage collector.
    """
    grad, threads, dtype = torch.is_grad_enabled(), torch.get_num_threads(), torch.get_default_dtype()
    matmul, cudnn, backends = _matmul(), {name: getattr(torch.backends.cudnn, name) for name in _CUDNN}, _backends()
    exact = _exact()
    flushes, collects = flushes_denormal(), gc.isenabled()
    try:
        yield
    finally:
        torch.set_grad_enabled(grad)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        if matmul is not None and _matmul() != matmul:
            torch.set_float32_matmul_precision(matmul)
        for name, value in cudnn.items():
            if getattr(torch.backends.cudnn, name) != value:
                setattr(torch.backends.cudnn, name, value)
        for backend, precision in backends:
            backend.fp32_precision = precision
        if _exact() != exact:  # asked first: torch imports its compiler's settings to set it, for a second or more
            torch.use_deterministic_algorithms(exact[0], warn_only=exact[1])
        if flushes_denormal() != flushes:
            torch.set_flush_denormal(flushes)
        (gc.enable if collects else gc.disable)()


def flushes_denormal() -> bool:
    """Whether numbers below the normal range are taken as zero: torch has no getter for its switch."""
    return bool((torch.full((), 2.0**-149) + 0.0 == 0.0).item())


def _exact() -> tuple[bool, bool]:
    """Whether deterministic algorithms are asked for, and others only warned of."""
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _matmul() -> str | None:
    """The process's float32 matmul precision; None where torch does not tell, for backends were set one by one."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _backends() -> list[tuple[Any, str]]:
    """The backends that have a float32 precision of their own for matrix products (from torch 2.9 on), with it."""
    found: list[Any] = [torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)]
    return [(backend, backend.fp32_precision) for backend in found if hasattr(backend, "fp32_precision")]
