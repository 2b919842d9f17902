"""Isolation of a run or an evaluation from grad mode and autocast of the calling code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


@contextmanager
def reset_grad_and_autocast(device_type: str) -> Iterator[None]:
    """Enable gradients and disable autocast around `fit`, which may be called in a step, a probe or `no_grad`."""
    # `inference_mode(False)` also changes other state, so it is entered inside of inference mode only.
    inferring = torch.inference_mode(mode=False) if torch.is_inference_mode_enabled() else nullcontext()
    autocast = _autocast_off(device_type, shares_cache=False) if _depth() else nullcontext()
    with inferring, torch.enable_grad(), autocast:
        yield


def beside_training(device_type: str) -> AbstractContextManager[None]:
    """Return a context without autocast, for a traceless pass, which may run inside a step under autocast."""
    return _autocast_off(device_type, shares_cache=True) if _depth() else nullcontext()


@contextmanager
def _autocast_off(device_type: str, *, shares_cache: bool) -> Iterator[None]:
    """Disable an outer autocast inside the block, and its cache of cast weights.

    Autocast drops cached weights only at the end of the outermost context, so a trainer inside of one would read casts
    of weights that have changed since. With `shares_cache` the cache is kept but not used inside, so that the outer
    step continues with its casts. Otherwise the cache is dropped, and each step inside has its own.
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
    """Return the number of active autocast contexts."""
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth


def _switch(enabled: dict[str, bool], *, caching: bool) -> None:
    torch.set_autocast_cache_enabled(caching)
    for kind, on in enabled.items():
        torch.set_autocast_enabled(kind, on)
