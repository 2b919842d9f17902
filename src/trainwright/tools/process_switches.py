"""A context that restores every global switch of torch and of the process that a trial may have changed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trainwright.precision.mixed_precision import matmul_precision, matmul_precisions, unwarned, with_precision

_CUDNN = ("enabled", "benchmark", "benchmark_limit", "deterministic")


@contextmanager
def switches_restored() -> Iterator[None]:
    """Restore at the end every switch of the process that code inside may have changed.

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
        _restore_precision(matmul, tf32, [*backends, *operations])
        if _exact() != exact:  # asked first: torch imports its compiler's settings to set it, for a second or more
            torch.use_deterministic_algorithms(exact[0], warn_only=exact[1])
        if flushes_denormal() != flushes:
            torch.set_flush_denormal(flushes)
        (gc.enable if collects else gc.disable)()


def flushes_denormal() -> bool:
    """Return whether subnormal numbers are flushed to zero: torch has no getter for this switch."""
    return bool((torch.full((), 2.0**-149) + 0.0 == 0.0).item())


def _exact() -> tuple[bool, bool]:
    """Return whether deterministic algorithms are on, and whether others only warn."""
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _restore_precision(matmul: str | None, tf32: bool | None, backends: list[tuple[Any, str]]) -> None:
    """Restore the precision of float32 products: the older switches first, since they write the newer ones."""
    with unwarned():
        if matmul is not None and matmul_precision() != matmul:
            torch.set_float32_matmul_precision(matmul)
        if tf32 is not None and _tf32() != tf32:
            torch.backends.cudnn.allow_tf32 = tf32
    for backend, precision in backends:
        if backend.fp32_precision != precision:
            backend.fp32_precision = precision


def _tf32() -> bool | None:
    """Return whether cuDNN may round float32 to TF32; None where operations were set one by one."""
    try:
        with unwarned():
            return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:
        return None


def _operations() -> list[tuple[Any, str]]:
    """Return the operations of cuDNN with a float32 precision of their own, with it."""
    return with_precision(*(getattr(torch.backends.cudnn, name, None) for name in ("conv", "rnn")))
