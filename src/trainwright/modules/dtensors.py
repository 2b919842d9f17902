"""Weights of which each process holds a shard (torch's DTensors): their local parts, and norms and flags of all parts.

Nothing here is imported for them: who has such weights has imported torch's module of them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import reduce
from math import inf
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from trainwright.core.device import widest_float
from trainwright.core.trees import inside


def is_sharded(*tensors: Tensor) -> bool:
    """Whether any of these is a tensor that several processes hold together."""
    module = _tensors()
    return module is not None and any(isinstance(tensor, module.DTensor) for tensor in tensors)


def local(tensors: Iterable[Tensor]) -> list[Tensor]:
    """What this process holds of each tensor, to be changed in place; a plain one as it is."""
    with torch.no_grad():
        return [_local(tensor) for tensor in tensors]


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor on every process, a plain one as it is; where it is sharded, all processes call this."""
    if not is_sharded(tensor):
        return tensor
    sharded: Any = tensor
    gathered: Tensor = sharded.full_tensor()
    return gathered


def put(into: Tensor, value: Tensor) -> None:
    """Copy `value` into a tensor in place: each process its part, where `into` is sharded; `value` may be whole."""
    if not is_sharded(into):
        into.copy_(value)
        return
    target, given = cast(Any, into), cast(Any, value)
    if not is_sharded(value):
        replicated = [_tensors().Replicate()] * target.device_mesh.ndim
        here = value.to(target.device, target.dtype)
        given = _tensors().DTensor.from_local(here, target.device_mesh, replicated, run_check=False)
    mine, theirs = local([target, given.redistribute(target.device_mesh, target.placements)])
    mine.copy_(theirs)
    torch.autograd.graph.increment_version(into)  # a write to what lies here is none to the tensor


def everywhere(claim: bool, tensors: Sequence[Tensor]) -> bool:
    """Whether a claim about tensors holds on every process that has a part of them; all of these call this."""
    shards = [tensor for tensor in tensors if is_sharded(tensor)]
    if not shards:
        return claim
    denied = torch.tensor(0.0 if claim else 1.0, device=shards[0].device)
    return all(float(_joined(denied, spread, "max")) == 0.0 for spread in _by_spread(shards))


def joined_norms(norms: Tensor, of: Sequence[Tensor]) -> Tensor:
    """The 2-norms of whole tensors, from those of the parts of them that lie here; all that hold parts call this."""
    spreads = _by_spread(of)
    if spreads.keys() <= {()}:
        return norms
    squares = norms.square()
    place = {id(tensor): index for index, tensor in enumerate(of)}
    for spread, tensors in spreads.items():
        mine = [place[id(tensor)] for tensor in tensors]
        squares[mine] = _joined(squares[mine], spread, "sum")
    return squares.sqrt()


def reshard(*roots: nn.Module) -> None:
    """Have the modules of sharded models hold their shards, also those that a forward without a backward left whole.

    The whole weights that such a forward leaves would be used again by the next one, whatever has become of the shards.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    modules: list[Any] = [module for root in roots for module in inside(root)]
    for module in modules:
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


class Shards(list[Tensor]):
    """Parameters some of which are sharded, and their gradients as one.

    Every method that joins the processes is for all of them alike; what it returns is the same on each.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters)
        self._spreads = _by_spread(self)
        self._dtype = reduce(torch.promote_types, [parameter.dtype for parameter in self])

    def gradients(self) -> list[Tensor]:
        """What this process holds of the gradients; shards without an element are left out."""
        return _gradients(self)

    def norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of all gradients together, a 0-dim tensor: one reduction of a scalar over the processes."""
        parts = [self._norm_of(parameters, spread, norm_type) for spread, parameters in self._spreads.items()]
        device = parts[0].device
        joined = torch.stack([part.to(device) for part in parts])
        norm = joined[0] if len(parts) == 1 else torch.linalg.vector_norm(joined, norm_type)
        return norm.to(self._dtype)

    def clip_norm(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip in place as torch's `clip_grad_norm_`; return the norm before."""
        norm = self.norm(norm_type)
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for (device, _), gradients in _by_kind(self.gradients()).items():
            torch._foreach_mul_(gradients, factor.to(device))
        return norm

    def clip_value(self, limit: float) -> None:
        """Clip in place as torch's `clip_grad_value_`."""
        for gradients in _by_kind(self.gradients()).values():
            torch._foreach_clamp_min_(gradients, -limit)
            torch._foreach_clamp_max_(gradients, limit)

    def highest(self, flag: Tensor) -> Tensor:
        """The highest value that a flag has on any process, put into `flag`."""
        for spread in self._spreads:
            flag.copy_(_joined(flag, spread, "max"))
        return flag

    def _norm_of(self, parameters: list[Tensor], spread: Spread, norm_type: float) -> Tensor:
        """The norm of the gradients that are spread in one way; in the widest type, for powers overflow."""
        device = parameters[0].device
        gradients = _gradients(parameters)
        norm = get_total_norm(gradients, norm_type) if gradients else torch.zeros((), device=device)
        norm = norm.to(device, widest_float(device))
        if norm_type == inf:  # a maximum over processes hides a NaN
            both = torch.stack([norm.nan_to_num(0.0, posinf=inf), norm.isnan().to(norm.dtype)])
            highest, unknown = _joined(both, spread, "max")
            return torch.where(unknown > 0, torch.nan, highest)
        return _joined(norm**norm_type, spread, "sum") ** (1.0 / norm_type)


Spread = tuple[str, ...]
"""The names of the process groups over which a tensor is cut; none for a plain one."""


def _tensors() -> Any:
    return sys.modules.get("torch.distributed.tensor")


def _local(tensor: Any) -> Tensor:
    here: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return here


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    found = local(parameter.grad for parameter in parameters if parameter.grad is not None)
    dense = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in found]
    return [gradient for gradient in dense if gradient.numel()]


def _by_kind(tensors: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """Tensors that a kernel takes together."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return groups


def _by_spread(tensors: Iterable[Tensor]) -> dict[Spread, list[Tensor]]:
    groups: dict[Spread, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(_spread(tensor), []).append(tensor)
    return groups


def _spread(tensor: Any) -> Spread:
    if not is_sharded(tensor):
        return ()
    mesh, placed = tensor.device_mesh, enumerate(tensor.placements)
    return tuple(mesh.get_group(dim).group_name for dim, placement in placed if not placement.is_replicate())


def _joined(value: Tensor, spread: Spread, how: str) -> Tensor:
    """The "sum" or "max" of a value over the processes that hold parts of tensors of one spread."""
    collectives = torch.ops._c10d_functional  # what torch's own DTensors reduce with, less their bookkeeping
    for name in spread:
        value = collectives.wait_tensor(collectives.all_reduce(value, how, name))
    return value
