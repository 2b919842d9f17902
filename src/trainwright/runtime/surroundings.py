"""What surrounds a call of the library in its process: grad mode and autocast of whoever calls, out of its way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


@contextmanager
def training_afresh(device_type: str) -> Iterator[None]:
    """Gradients on and no autocast but the trainer's own, wherever `fit` is called: in a step, a probe, a `no_grad`."""
    # Its guard sets more than its name says, so that it is only used where there is something to leave.
    inferring = torch.inference_mode(mode=False) if torch.is_inference_mode_enabled() else nullcontext()
    with inferring, torch.enable_grad(), _own_autocast(device_type, shares_cache=False):
        yield


def beside_training(device_type: str) -> AbstractContextManager[None]:
    """No autocast but the trainer's own for a pass without a trace, also in the midst of a step under autocast."""
    return _own_autocast(device_type, shares_cache=True) if _depth() else nullcontext()


@contextmanager
def _own_autocast(device_type: str, *, shares_cache: bool) -> Iterator[None]:
    """Switch off an autocast that surrounds the call, and keep from the casted weights that it has at hand.

    Autocast keeps its casts of weights until the outermost context is left, so that inside another one a trainer
    would go on with casts of weights that have changed since. With `shares_cache` the casts stay where they are, and
    nothing inside reads or adds any: a step that is under way goes on as if there had been nothing. Otherwise they are
    dropped, and each step inside has its own, as when nothing surrounds it.
    """
    depth = _depth()
    if not depth:
        yield
        return
    enabled = {kind: torch.is_autocast_enabled(kind) for kind in {device_type, "cpu"}}
    caching = torch.is_autocast_cache_enabled()
    left = 0 if shares_cache else depth
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
    """How many contexts of autocast the call is in."""
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth


def _switch(enabled: dict[str, bool], *, caching: bool) -> None:
    torch.set_autocast_cache_enabled(caching)
    for kind, on in enabled.items():
        torch.set_autocast_enabled(kind, on)
