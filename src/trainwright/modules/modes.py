"""Module modes: each one's own, kept over an evaluation or a block, and woken where a model was left in eval mode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.core.errors import message
from trainwright.core.torch_private import buffer_dict, parameter_dict, versions_preserved
from trainwright.core.trees import inside
from trainwright.modules.dtensors import reshard
from trainwright.modules.freezing import has_running_statistics, held

Modes = list[tuple[nn.Module, bool]]
"""The modules inside a root, itself the first of them, each with its mode."""
_TRAIN, _EVAL, _SETATTR = nn.Module.train, nn.Module.eval, nn.Module.__setattr__
_set = object.__setattr__
"""Sets a mode past the look for parameters that torch makes at each assignment: it is none."""


@contextmanager
def mode(module: nn.Module, *, train: bool) -> Iterator[None]:
    """Train or eval mode inside; afterwards every module has its own mode again, also after an error.

    What `freeze` keeps in eval mode stays there.
    """
    if not isinstance(train, bool):
        raise TypeError(
            message(f"mode(module, train={train!r})", want="True or False", fix="mode(module, train=False)")
        )
    modes = _modes((module,))
    try:
        module.train(train)
        yield
    finally:
        _put_back(modes)


def evaluating(*roots: nn.Module) -> AbstractContextManager[None]:
    """Eval mode inside; afterwards every module has its own mode again, whatever it was."""
    return _Evaluating(roots)


def untouched(*roots: nn.Module, shows_gradients: bool = False) -> AbstractContextManager[None]:
    """Put back what a pass may move although it trains nothing: gradients, `requires_grad`, normalisation statistics.

    Gradients are None inside, so that a `backward` in there adds to nothing; with `shows_gradients` they can be read.
    A module with a `train` of its own may change its tensors with its mode, as merged LoRA weights do, and not come
    back to the last bit: what it holds itself is put back. A sharded model holds its shards before and after.
    """
    return _Untouched(roots, shows_gradients=shows_gradients)


class _Evaluating:
    """Eval mode inside; a class, as the next, since every evaluation enters them."""

    __slots__ = ("_modes", "_roots")

    def __init__(self, roots: tuple[nn.Module, ...]) -> None:
        self._roots = roots

    def __enter__(self) -> None:
        self._modes = _modes(self._roots)
        try:
            for found in self._modes:
                _to_eval(found)
        except BaseException:
            _put_back(self._modes)
            raise

    def __exit__(self, *error: object) -> None:
        _put_back(self._modes)


class _Untouched:
    """Puts back what a pass may move."""

    __slots__ = ("_found", "_hidden", "_kept", "_moved", "_roots", "_shows")

    def __init__(self, roots: tuple[nn.Module, ...], *, shows_gradients: bool) -> None:
        self._roots, self._shows = roots, shows_gradients

    def __enter__(self) -> None:
        reshard(*self._roots)
        self._found, self._moved = _kept_by(self._roots)
        self._kept = [tensor.detach().clone() for tensor in self._moved] if self._moved else []
        self._hidden = unnoticed(self._moved) if self._moved else None
        if self._hidden is not None:
            self._hidden.__enter__()
        for parameter, _, gradient in self._found:
            if gradient is not None and not self._shows:
                parameter.grad = None

    def __exit__(self, *error: Any) -> None:
        try:
            reshard(*self._roots)
            if self._hidden is not None:
                try:
                    with torch.no_grad():
                        for tensor, before in zip(self._moved, self._kept, strict=True):
                            tensor.copy_(before)
                finally:
                    self._hidden.__exit__(*error)
        finally:
            for parameter, wanted, gradient in self._found:
                if parameter.requires_grad != wanted:
                    parameter.requires_grad_(wanted)
                if parameter.grad is not gradient:
                    parameter.grad = gradient


def unnoticed(tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Hide from autograd that tensors are changed inside, and changed back bit for bit before the end.

    A step under way may have saved them for its backward, which would refuse them else.
    """
    versioned = tuple(tensor for tensor in tensors if not tensor.is_inference())
    return versions_preserved(versioned)


def wake(model: nn.Module) -> list[str]:
    """Switch a model that lies wholly in eval mode to train mode; return the names of what was switched.

    A module that has parameters none of which requires a gradient stays in eval mode, with all that lies inside it,
    and so does what `freeze` keeps there. A model with any module in train mode is left as it is.
    """
    if any(module.training for module in model.modules()):
        return []
    asleep = {module for module in model.modules() if held(module)}
    for module in model.modules():
        parameters = list(module.parameters())
        if parameters and not any(p.requires_grad for p in parameters):
            asleep.update(module.modules())
    switched = [(name, module) for name, module in model.named_modules() if module not in asleep]
    _put_back([[(module, module not in asleep) for module in model.modules()]])
    return [name or type(model).__name__ for name, _ in switched]


def running_statistics(model: nn.Module) -> list[Tensor]:
    """The buffers that a forward in train mode moves: running mean, variance and count of normalisation layers."""
    return [
        buffer for module in inside(model) if has_running_statistics(module) for buffer in module.buffers(recurse=False)
    ]


@contextmanager
def untrained(*roots: nn.Module) -> Iterator[None]:
    """Eval mode and no parameter that requires a gradient inside; both put back afterwards."""
    wanted = [(p, p.requires_grad) for root in roots for p in root.parameters()]
    with evaluating(*roots):
        for parameter, _ in wanted:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter, before in wanted:
                parameter.requires_grad_(before)


def _modes(roots: tuple[nn.Module, ...]) -> list[Modes]:
    """What the modes are now."""
    return [[(module, module.training) for module in inside(root)] for root in roots]


def _put_back(each: list[Modes]) -> None:
    for modes in each:
        for module, _ in modes:
            if type(module).train is not _TRAIN:
                # A module with a `train` of its own (merged LoRA weights, say) must hear of the change.
                root, mode = modes[0]
                root.train(mode)
                break
    for modes in each:
        for module, mode in modes:
            wanted = mode and ("train" not in module.__dict__ or not held(module))
            if module.training is wanted:
                continue
            if type(module).__setattr__ is _SETATTR:
                _set(module, "training", wanted)
            else:
                module.training = wanted


def _to_eval(modes: Modes) -> None:
    """What `eval` of a root does: by itself where a module has its own ways, else without a call for each module."""
    for module, _ in modes:
        kind = type(module)
        if kind.train is not _TRAIN or kind.eval is not _EVAL or "train" in module.__dict__:
            modes[0][0].eval()
            return
    for module, mode in modes:
        if mode is False:
            continue
        if type(module).__setattr__ is _SETATTR:
            _set(module, "training", False)
        else:
            module.training = False


def _kept_by(roots: tuple[nn.Module, ...]) -> tuple[list[tuple[nn.Parameter, bool, Tensor | None]], list[Tensor]]:
    """What `untouched` puts back, in one walk: each parameter with its flag and gradient, and the tensors that move.

    Those are running statistics, and what modules with a `train` of their own hold themselves.
    """
    found: list[tuple[nn.Parameter, bool, Tensor | None]] = []
    moved: list[Tensor] = []
    for root in roots:
        for module in inside(root):
            for parameter in parameter_dict(module).values():
                if parameter is not None:
                    found.append((parameter, parameter.requires_grad, parameter.grad))
            if type(module).train is not _TRAIN:
                moved += _moved_by_mode(module)
            elif buffer_dict(module) and has_running_statistics(module):
                moved += module.buffers(recurse=False)
    return found, moved


def _moved_by_mode(module: nn.Module) -> list[Tensor]:
    """The tensors of a module with a `train` of its own, without those of the modules inside it."""
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]
