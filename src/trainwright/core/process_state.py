"""Contexts for the global switches of torch: grad mode and autocast around a call, and all switches restored."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


@contextmanager
def reset_grad_and_autocast(device_type: str) -> Iterator[None]:
    """Enable gradients and disable every autocast around `fit`, which may be called in a step, a probe or `no_grad`."""
    # `inference_mode(False)` sets more than its name says, so that it is entered only inside of inference mode.
    inferring = torch.inference_mode(mode=False) if torch.is_inference_mode_enabled() else nullcontext()
    autocast = _autocast_off(device_type, shares_cache=False) if _depth() else nullcontext()
    with inferring, torch.enable_grad(), autocast:
        yield


def beside_training(device_type: str) -> AbstractContextManager[None]:
    """Return a context without autocast for a pass without a trace, which may run inside a step under autocast."""
    return _autocast_off(device_type, shares_cache=True) if _depth() else nullcontext()


@contextmanager
def _autocast_off(device_type: str, *, shares_cache: bool) -> Iterator[None]:
    """Disable the autocast around a call, and shield the call from its cache of casted weights.

    Autocast drops its casts of weights only when the outermost context is left, so that a trainer inside of one would
    read casts of weights that have changed since. With `shares_cache` the cache is left as it is and not used inside:
    a step under way continues with its casts. Otherwise the cache is dropped, and each step inside has its own.
    """
    enabled = {kind: torch.is_autocast_enabled(kind) for kind in {device_type, "cpu"}}
    caching = torch.is_autocast_cache_enabled()
    left = 0 if shares_cache else _depth()
    try:
        _switch(dict.fromkeys(enabled, False), caching=caching and not shares_cache)
        if left:
            torch.clear_autocast_cache()
        for _ in range(left):
            torch.autocast_decrement_nesting()
        yield
    finally:
        for _ in range(left):
            torch.autocast_increment_nesting()
        if left:
            torch.clear_autocast_cache()
        _switch(enabled, caching=caching)


def _depth() -> int:
    """Return the number of autocast contexts around the call."""
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth


def _switch(enabled: dict[str, bool], *, caching: bool) -> None:
    torch.set_autocast_cache_enabled(caching)
    for kind, on in enabled.items():
        torch.set_autocast_enabled(kind, on)


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


@contextmanager
def unwarned() -> Iterator[None]:
    """Suppress the warnings of torch's older switches for float32 products: only those exist in all versions.

    Torch 2.9, and some after it, warn where they are read or set.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Please use the new API settings to control TF32")
        yield


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


def matmul_precision() -> str | None:
    """Return the process's float32 matmul precision; None where backends were set one by one."""
    try:
        with unwarned():
            return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def matmul_precisions() -> list[tuple[Any, str]]:
    """Return the backends with a float32 precision of their own for matrix products (torch 2.9 on), with it."""
    return _with_precision(torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None))


def _operations() -> list[tuple[Any, str]]:
    """Return the operations of cuDNN with a float32 precision of their own, with it."""
    return _with_precision(*(getattr(torch.backends.cudnn, name, None) for name in ("conv", "rnn")))


def _with_precision(*backends: Any) -> list[tuple[Any, str]]:
    return [(backend, backend.fp32_precision) for backend in backends if hasattr(backend, "fp32_precision")]
