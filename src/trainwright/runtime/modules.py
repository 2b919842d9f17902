"""Module modes: each module's own, kept over an evaluation, and woken where a model was left in eval mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase


@contextmanager
def evaluating(*roots: nn.Module) -> Iterator[None]:
    """Eval mode inside; afterwards every module has its own mode again, whatever it was."""
    modes = [(module, module.training) for root in roots for module in root.modules()]
    try:
        for root in roots:
            root.eval()
        yield
    finally:
        _put_back(roots, modes)


def wake(model: nn.Module) -> list[str]:
    """Switch a model that lies wholly in eval mode to train mode; return the names of what was switched.

    A module that has parameters none of which requires a gradient stays in eval mode, with all that lies inside it.
    A model with any module in train mode is left as it is.
    """
    if any(module.training for module in model.modules()):
        return []
    asleep: set[nn.Module] = set()
    for module in model.modules():
        parameters = list(module.parameters())
        if parameters and not any(p.requires_grad for p in parameters):
            asleep.update(module.modules())
    switched = [(name, module) for name, module in model.named_modules() if module not in asleep]
    _put_back((model,), [(module, module not in asleep) for module in model.modules()])
    return [name or type(model).__name__ for name, _ in switched]


def running_statistics(model: nn.Module) -> list[Tensor]:
    """The buffers that a forward in train mode moves: running mean, variance and count of normalisation layers."""
    return [
        buffer
        for module in model.modules()
        if isinstance(module, _NormBase) and module.track_running_stats
        for buffer in module.buffers(recurse=False)
    ]


def _put_back(roots: tuple[nn.Module, ...], modes: list[tuple[nn.Module, bool]]) -> None:
    for root in roots:
        if any(type(module).train is not nn.Module.train for module in root.modules()):
            # A module with a `train` of its own (merged LoRA weights, say) must hear of the change.
            root.train(next(mode for module, mode in modes if module is root))
    for module, mode in modes:
        module.training = mode
