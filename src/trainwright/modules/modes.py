"""Train and eval mode of modules: context managers that restore modes, and the switch to train mode in `fit`."""

from __future__ import annotations

from collections.abc import Iterator
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
"""The modules inside a root with their modes; the root comes first."""
_TRAIN, _EVAL, _SETATTR = nn.Module.train, nn.Module.eval, nn.Module.__setattr__


@contextmanager
def training_mode(module: nn.Module, train: bool) -> Iterator[None]:
    """Context manager that sets train or eval mode; restores the mode of each module at the end, also on an error.

    Layers that `freeze` keeps in eval mode stay in it.

    Args:
        module: The module.
        train: True for train mode, False for eval mode.
    """
    if not isinstance(train, bool):
        raise TypeError(
            message(f"training_mode(module, {train!r})", want="True or False", fix="training_mode(module, False)")
        )
    modes = [(each, each.training) for each in inside(module)]
    try:
        module.train(train)
        yield
    finally:
        _restore_modes(modes)


class evaluating:  # lower case as torch's no_grad; a class, since every evaluation enters it: cheaper than a generator
    """Context manager that sets eval mode; restores the mode of each module at the end."""

    __slots__ = ("_modes", "_roots")

    def __init__(self, *roots: nn.Module) -> None:
        self._roots = roots

    def __enter__(self) -> None:
        self._modes = [[(module, module.training) for module in inside(root)] for root in self._roots]
        try:
            for modes in self._modes:
                _switch_to_eval(modes)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        for modes in self._modes:
            _restore_modes(modes)


class untouched:  # a class for the same reason
    """Context manager that restores the state that a pass without training may change.

    Restores gradients, `requires_grad`, running statistics, and the tensors of modules that override `train`: those may
    change with the mode, as merged LoRA weights do, with rounding. Gradients are None inside, so that a `backward` does
    not add to them, unless `shows_gradients`. A sharded model is resharded before and after.
    """

    __slots__ = ("_modules", "_parameters", "_roots", "_shows_gradients", "_tensors", "_values", "_versions")

    def __init__(self, *roots: nn.Module, shows_gradients: bool = False) -> None:
        self._roots, self._shows_gradients = roots, shows_gradients

    def __enter__(self) -> None:
        self._modules = modules = [module for root in self._roots for module in inside(root)]
        reshard(modules)
        every = [p for module in modules for p in parameter_dict(module).values() if p is not None]
        self._parameters = [(parameter, parameter.requires_grad, parameter.grad) for parameter in every]
        self._tensors = [tensor for module in modules for tensor in _changed_by_a_pass(module)]
        if self._tensors:
            self._values = [tensor.detach().clone() for tensor in self._tensors]
            self._versions: AbstractContextManager[None] = versions_preserved(self._tensors)
        if not self._shows_gradients:
            for parameter in every:
                parameter.grad = None

    def __exit__(self, *error: Any) -> None:
        try:
            reshard(self._modules)
            if self._tensors:
                with self._versions, torch.no_grad():
                    for tensor, value in zip(self._tensors, self._values, strict=True):
                        tensor.copy_(value)
        finally:
            for parameter, trained, gradient in self._parameters:
                if parameter.requires_grad != trained:
                    parameter.requires_grad_(trained)
                if parameter.grad is not gradient:
                    parameter.grad = gradient


@contextmanager
def untrained(*roots: nn.Module) -> Iterator[None]:
    """Context manager that sets eval mode and `requires_grad=False`; both are restored at the end."""
    parameters = [(p, p.requires_grad) for root in roots for p in root.parameters()]
    with evaluating(*roots):
        for parameter, _ in parameters:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter, trained in parameters:
                parameter.requires_grad_(trained)


def wake(model: nn.Module) -> list[str]:
    """Switch a model to train mode if all of its modules are in eval mode; return the names of the switched modules.

    Modules whose parameters are all frozen stay in eval mode with all modules inside them, as do layers that `freeze`
    keeps in eval mode. No-op for a model with any module in train mode.
    """
    return [] if any(module.training for module in model.modules()) else _wake_trained(model)


def _wake_trained(model: nn.Module) -> list[str]:
    asleep = {module for module in model.modules() if held(module)}
    for module in model.modules():
        parameters = list(module.parameters())
        if parameters and not any(p.requires_grad for p in parameters):
            asleep.update(module.modules())
    switched = [(name, module) for name, module in model.named_modules() if module not in asleep]
    _restore_modes([(module, module not in asleep) for module in model.modules()])
    return [name or type(model).__name__ for name, _ in switched]


def running_statistics(model: nn.Module) -> list[Tensor]:
    """Return the running statistics of norm layers (mean, variance, count), which a forward in train mode changes."""
    return [
        buffer for module in inside(model) if has_running_statistics(module) for buffer in module.buffers(recurse=False)
    ]


def _switch_to_eval(modes: Modes) -> None:
    """Set eval mode: by `eval` of the root if any module overrides `train` or `eval`, else module by module."""
    for module, _ in modes:
        if type(module).train is not _TRAIN or type(module).eval is not _EVAL or "train" in module.__dict__:
            modes[0][0].eval()
            return
    _set_modes([(module, False) for module, _ in modes])


def _restore_modes(modes: Modes) -> None:
    if any(type(module).train is not _TRAIN for module, _ in modes):
        root, training = modes[0]
        root.train(training)  # an overridden `train` may do more than set the mode, such as merge LoRA weights
    _set_modes([(module, training and not held(module)) for module, training in modes])


def _set_modes(modes: Modes) -> None:
    for module, training in modes:
        if module.training is training:
            continue
        if type(module).__setattr__ is _SETATTR:
            object.__setattr__(module, "training", training)  # faster: nn.Module's looks for a parameter of that name
        else:
            module.training = training


def _changed_by_a_pass(module: nn.Module) -> list[Tensor]:
    """Return the tensors of a module itself that a forward or a change of its mode may change."""
    if type(module).train is not _TRAIN:
        return _changed_by_mode(module)
    if buffer_dict(module) and has_running_statistics(module):
        return list(module.buffers(recurse=False))
    return []


def _changed_by_mode(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]
