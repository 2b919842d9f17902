"""The whole weights of a sharded model: gathered into plain tensors on the first process."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import Tensor, nn

from trainwright.core.torch_private import set_versions, versions_of
from trainwright.distributed.world import World
from trainwright.modules.dtensors import full_tensor


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
    set_versions(full, versions_of(state))
    return full if world.is_main else {}


def _gathered(value: Any, *, keeps: bool) -> Any:
    """The whole of a value on the CPU, a copy; None on a process that only takes part."""
    if not isinstance(value, Tensor):
        return value
    full = full_tensor(value.detach())
    return full.to("cpu", copy=True) if keeps else None
