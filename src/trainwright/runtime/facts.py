"""What a computation takes from the host beside its inputs: attributes, settings, addresses, hooks, draws.

A recorded one has all of it baked in. So it is compared: where it has changed, the recording is worth nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.optim.optimizer as torch_optimizer
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.runtime.reading import Itself, Reader

Facts = dict[tuple[str, str], Any]
"""By what it belongs to, and its name."""

_OF_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_GLOBAL = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks")
_OF_STEPS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_OF_ALL_STEPS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
_BOOKKEPT = frozenset(
    {"params", "param_names", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "lr_scale"}
)
"""What a group holds for its schedule, or for its names, and no step reads."""


def attributes(
    *owners: tuple[str, Any], device: torch.device, beside: Any = None, met: list[Tensor] | None = None
) -> Facts:
    """What objects, classes, dicts of attributes and all modules in modules hold: see `reading.Reader`.

    `device`: of the run, whose own memory may hold other numbers at each replay. `beside`: what is not followed.
    `met` is given all tensors on the device.
    """
    reader = Reader(device, beside)
    facts: Facts = {}
    for name, owner in owners:
        each = owner.named_modules(prefix=name) if isinstance(owner, nn.Module) else [(name, owner)]
        for place, one in each:
            for attribute, value in reader.held_by(one):
                facts[place, attribute] = value
    if met is not None:
        met += reader.tensors
    return facts


def addresses(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[Any]:
    """Where everything lies that an update reads and writes, and which of it is trained."""
    found: list[Any] = []
    for parameter in model.parameters():
        found += (id(parameter), parameter.data_ptr(), parameter.requires_grad)
    found += [buffer.data_ptr() for buffer in model.buffers()]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            found += [parameter.data_ptr() for parameter in group["params"]]
        for state in optimizer.state.values():
            found += [value.data_ptr() if isinstance(value, Tensor) else value for value in state.values()]
    return found


def around_steps(optimizers: Sequence[Optimizer]) -> list[Any]:
    """What runs with each step of an optimizer, or in its place: hooks on it, hooks on all, a `step` of its own."""
    found: list[Any] = []
    for optimizer in optimizers:
        own = vars(optimizer)
        found += [Itself(hook) for kind in _OF_STEPS for hook in own.get(kind, {}).values()]
        found += [Itself(own.get(name, getattr(type(optimizer), name))) for name in ("step", "zero_grad")]
    for kind in _OF_ALL_STEPS:
        found += [Itself(hook) for hook in getattr(torch_optimizer, kind, {}).values()]
    return found


def settings(optimizers: Sequence[Optimizer], *, rates: bool) -> list[Any]:
    """The hyper-parameters of every group, its learning rate only where `rates` asks for it."""
    return [
        _setting(value, group)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for name, value in group.items()
        if name not in _BOOKKEPT and (rates or name != "lr")
    ]


def hooks_of_others(model: nn.Module) -> Iterator[str]:
    """The hooks that code of the user's own hangs on a model, on its parameters or on all modules, in words."""
    for name in _GLOBAL:
        if any(map(_is_others, getattr(nn.modules.module, name, {}).values())):
            yield "a hook on all modules"
    for place, module in model.named_modules():
        for name in _OF_HOOKS:
            if any(map(_is_others, (getattr(module, name, None) or {}).values())):
                yield f"a hook on {_named(model, place)}"
    for place, parameter in model.named_parameters():
        for name in _OF_TENSORS:
            if any(map(_is_others, (getattr(parameter, name, None) or {}).values())):
                yield f"a hook on {place}"


def draws(device: torch.device) -> Callable[[], str]:
    """Note the random states of the host; what is returned says which of them was drawn from since, or ""."""
    before = random.getstate(), _numpy_state(), torch.get_rng_state()

    def drawn() -> str:
        if random.getstate() != before[0]:
            return "Python's random"
        if _numpy_state() != before[1]:
            return "NumPy's random"
        on_host = device.type != "cpu" and not torch.equal(torch.get_rng_state(), before[2])
        return "torch's random numbers of the CPU" if on_host else ""

    return drawn


def changed(before: Facts, after: Facts) -> str:
    """Name what differs between two sets of attributes; "" where nothing does."""
    if before == after:
        return ""
    for key in before | after:
        if before.get(key, changed) != after.get(key, changed):
            place, attribute = key
            return f"{place}.{attribute}"
    return "an attribute that is not equal to itself"


def _setting(value: Any, group: dict[str, Any]) -> Any:
    """What a setting can be compared by; one that lies with the weights is read anew at each replay."""
    if not isinstance(value, Tensor):
        return value
    there = value.device == group["params"][0].device
    return Itself(value), 0 if there else value._version


def _numpy_state() -> tuple[Any, ...]:
    name, keys, *rest = np.random.get_state(legacy=True)
    return name, np.asarray(keys).tobytes(), *rest


def _is_others(hook: Any) -> bool:
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return module.partition(".")[0] not in ("torch", "trainwright")


def _named(model: nn.Module, place: str) -> str:
    return place or type(model).__name__
