"""The switches of the process that make computing faster or repeatable: read all, and put back."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_CUDNN = ("enabled", "benchmark", "benchmark_limit", "deterministic")


@contextmanager
def kept_switches() -> Iterator[None]:
    """Put back at the end every switch of the process that something inside may have changed.

    These are the grad mode, threads, the dtype of new tensors, float32 matmul precision, cuDNN's switches,
    deterministic algorithms, whether numbers below the normal range are flushed to zero, and the garbage collector.
    """
    grad, threads, dtype = torch.is_grad_enabled(), torch.get_num_threads(), torch.get_default_dtype()
    matmul, backends = matmul_precision(), matmul_precisions()
    cudnn = {name: getattr(torch.backends.cudnn, name) for name in _CUDNN}
    tf32, operations = _tf32(), _operations()
    exact, flushes, collects = _exact(), flushes_denormal(), gc.isenabled()
    try:
        yield
    finally:
        torch.set_grad_enabled(grad)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        for name, value in cudnn.items():
            if getattr(torch.backends.cudnn, name) != value:
                setattr(torch.backends.cudnn, name, value)
        _put_back(matmul, tf32, [*backends, *operations])
        if _exact() != exact:  # asked first: torch imports its compiler's settings to set it, for a second or more
            torch.use_deterministic_algorithms(exact[0], warn_only=exact[1])
        if flushes_denormal() != flushes:
            torch.set_flush_denormal(flushes)
        (gc.enable if collects else gc.disable)()


@contextmanager
def unwarned() -> Iterator[None]:
    """No warning of torch's older switches for float32 products inside: the only ones that all versions have.

    Torch 2.9, and some after it, warn where they are read or set.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Please use the new API settings to control TF32")
        yield


def flushes_denormal() -> bool:
    """Whether numbers below the normal range are taken as zero: torch has no getter for its switch."""
    return bool((torch.full((), 2.0**-149) + 0.0 == 0.0).item())


def _exact() -> tuple[bool, bool]:
    """Whether deterministic algorithms are asked for, and others only warned of."""
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _put_back(matmul: str | None, tf32: bool | None, backends: list[tuple[Any, str]]) -> None:
    """Set what float32 products are computed by as it was: the older switches first, since they write the newer."""
    with unwarned():
        if matmul is not None and matmul_precision() != matmul:
            torch.set_float32_matmul_precision(matmul)
        if tf32 is not None and _tf32() != tf32:
            torch.backends.cudnn.allow_tf32 = tf32
    for backend, precision in backends:
        if backend.fp32_precision != precision:
            backend.fp32_precision = precision


def _tf32() -> bool | None:
    """Whether cuDNN may round float32 to TF32; None where torch does not tell, for operations were set one by one."""
    try:
        with unwarned():
            return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:
        return None


def matmul_precision() -> str | None:
    """The process's float32 matmul precision; None where torch does not tell, for backends were set one by one."""
    try:
        with unwarned():
            return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def matmul_precisions() -> list[tuple[Any, str]]:
    """The backends that have a float32 precision of their own for matrix products (from torch 2.9 on), with it."""
    return _with_precision(torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None))


def _operations() -> list[tuple[Any, str]]:
    """The operations of cuDNN that have a float32 precision of their own, with it."""
    return _with_precision(*(getattr(torch.backends.cudnn, name, None) for name in ("conv", "rnn")))


def _with_precision(*backends: Any) -> list[tuple[Any, str]]:
    return [(backend, backend.fp32_precision) for backend in backends if hasattr(backend, "fp32_precision")]
