"""The whole weights of a sharded model: gathered into plain tensors on the first process, and dealt out again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from trainwright.base.errors import CheckpointError, message
from trainwright.parallel.world import World
from trainwright.runtime.shards import is_sharded, put, whole

LISTED = 10
"""Names that an error lists."""


def full_state_dict(model: nn.Module, world: World) -> dict[str, Any]:
    """The model's `state_dict` of whole tensors on the CPU, on the first process; nothing on the others.

    All processes call it: one tensor after the other is gathered. Tied weights are one tensor. Buffers are those of
    the first process.
    """
    tied = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    state = model.state_dict()  # from here on the model holds its shards
    gathered: dict[Any, Any] = {}
    full: OrderedDict[str, Any] = OrderedDict()
    for name, value in state.items():
        key = tied.get(name, name)
        if key not in gathered:
            gathered[key] = _gathered(value, keeps=world.is_main)
        full[name] = gathered[key]
    cast(Any, full)._metadata = getattr(state, "_metadata", None)
    return full if world.is_main else {}


def load_full(model: nn.Module, state_dict: Mapping[str, Any], world: World) -> None:
    """Load whole weights that the first process has into the shards of all; what the others give is not looked at.

    All processes call it, and CheckpointError is raised on all: names and shapes must be exactly those of the model.
    """
    have = model.state_dict()
    wrong = world.same(_misfit(model, have, state_dict) if world.is_main else "")
    if wrong:
        raise CheckpointError(wrong)
    plain = {name: value for name, value in state_dict.items() if not isinstance(value, Tensor)}
    extra = world.same(plain if world.is_main else None) or {}
    with torch.no_grad():
        for name, value in have.items():
            if isinstance(value, Tensor):
                _deal(value, state_dict.get(name) if world.is_main else None, world)
    if extra:
        model.load_state_dict({**have, **extra})


def _gathered(value: Any, *, keeps: bool) -> Any:
    """The whole of a value on the CPU, a copy; None on a process that only takes part."""
    if not isinstance(value, Tensor):
        return value
    full = whole(value.detach())
    return full.to("cpu", copy=True) if keeps else None


def _misfit(model: nn.Module, have: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """What stands in the way of loading, in words."""
    lines = {
        "missing": [name for name in have if name not in given],
        "not used": [name for name in given if name not in have],
        "shape": [
            f"{name} {tuple(given[name].shape)}, the model's is {tuple(value.shape)}"
            for name, value in have.items()
            if isinstance(value, Tensor) and isinstance(given.get(name), Tensor) and given[name].shape != value.shape
        ],
    }
    text = "\n".join(f"  {label:<9}{', '.join(names[:LISTED])}" for label, names in lines.items() if names)
    if not text:
        return ""
    return message(f"the weights do not fit this {type(model).__name__}; nothing was loaded\n{text}")


def _deal(into: Tensor, value: Tensor | None, world: World) -> None:
    """Give every process its part of the first one's `value`: the whole is sent, and each keeps what is its own."""
    if value is None:
        sent = torch.empty(into.shape, dtype=into.dtype, device=into.device)
    else:
        sent = value.detach().to(into.device, into.dtype).clone()
    world.align([sent])
    if is_sharded(into):
        put(into, sent)
    else:
        into.copy_(sent)
