"""BatchNorm statistics of averaged weights, estimated by a pass over the training data as torch's `update_bn` does."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainwright.base.errors import DataError, message
from trainwright.runtime.modules import mode

Forward = Callable[[], object]
"""Runs the training data once through a model."""


def estimable(model: nn.Module, asleep: Collection[str]) -> dict[str, _BatchNorm]:
    """The BatchNorm layers that track statistics, by name, without those asleep: in eval mode by the user's wish."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.num_batches_tracked is not None and name not in asleep
    }


def statistics_of(norms: Mapping[str, _BatchNorm]) -> dict[str, Tensor]:
    """The buffers of BatchNorm layers, by name."""
    return {
        f"{name}.{key}".lstrip("."): buffer
        for name, norm in norms.items()
        for key, buffer in norm.named_buffers(recurse=False)
    }


def estimate(model: nn.Module, asleep: Collection[str], forward: Forward | None) -> dict[str, Tensor]:
    """The statistics of the weights that the model holds: plain means over all batches that `forward` runs.

    Called without gradients. The model is in train mode meanwhile, what is asleep apart; modes, momenta and every
    buffer are put back. A layer that no batch went through is left out. DataError where that is so for all of them.
    """
    norms = estimable(model, asleep)
    if not norms:
        return {}
    assert forward is not None
    momenta = {name: norm.momentum for name, norm in norms.items()}
    with _training(model, asleep):
        try:
            for norm in norms.values():
                norm.reset_running_stats()
                norm.momentum = None  # torch's word for a plain mean over all batches
            forward()
            seen = {name: norm for name, norm in norms.items() if int(norm.num_batches_tracked or 0)}
            if not seen:
                have = f"no batch went through {', '.join(list(norms)[:5]) or 'the model'}"
                what = "BatchNorm statistics of the averaged weights cannot be estimated"
                raise DataError(message(what, have=have, want="training data that can be iterated again", where=False))
            return {name: value.clone() for name, value in statistics_of(seen).items()}
        finally:
            for name, norm in norms.items():
                norm.momentum = momenta[name]


@contextmanager
def _training(model: nn.Module, asleep: Collection[str]) -> Iterator[None]:
    """Train mode inside, what is asleep apart; afterwards every mode and every buffer is what it was."""
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        with mode(model, train=True):
            for name, module in model.named_modules():
                if name in asleep:
                    module.training = False
            yield
    finally:
        for module, name, buffer, value in buffers:
            module._buffers[name] = buffer
            buffer.copy_(value)
