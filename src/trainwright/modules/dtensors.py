"""Sharded weights (torch's DTensor): local shards, complete tensors, and norms and flags over all ranks.

`torch.distributed.tensor` is not imported here: if a model has DTensors, it is already imported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import reduce
from math import inf
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from trainwright.core.device import widest_float
from trainwright.core.torch_private import all_reduce


def is_sharded(*tensors: Tensor) -> bool:
    """Return whether any of the tensors is a DTensor."""
    module = _tensors()
    return module is not None and any(isinstance(tensor, module.DTensor) for tensor in tensors)


def local_shards(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the local shard of each tensor, which shares its memory; plain tensors are returned unchanged."""
    with torch.no_grad():
        return [_local(tensor) for tensor in tensors]


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the complete tensor on every rank; a plain tensor unchanged. A collective for a sharded tensor."""
    if not is_sharded(tensor):
        return tensor
    sharded: Any = tensor
    gathered: Tensor = sharded.full_tensor()
    return gathered


def copy_into(into: Tensor, value: Tensor) -> None:
    """Copy a complete or sharded `value` into a tensor in place; if `into` is sharded, each rank copies its shard."""
    if is_sharded(into):
        _copy_shard(into, value)
    else:
        into.copy_(value)


def _copy_shard(into: Tensor, value: Tensor) -> None:
    target, given = cast(Any, into), cast(Any, value)
    if not is_sharded(value):
        replicated = [_tensors().Replicate()] * target.device_mesh.ndim
        here = value.to(target.device, target.dtype)
        given = _tensors().DTensor.from_local(here, target.device_mesh, replicated, run_check=False)
    mine, theirs = local_shards([target, given.redistribute(target.device_mesh, target.placements)])
    mine.copy_(theirs)
    torch.autograd.graph.increment_version(into)  # a write to the local shard does not increase the DTensor's version


def on_all_ranks(claim: bool, tensors: Sequence[Tensor]) -> bool:
    """Return whether a condition on tensors holds on all ranks with shards of them. A collective if any is sharded."""
    shards = [tensor for tensor in tensors if is_sharded(tensor)]
    if not shards:
        return claim
    denied = torch.tensor(0.0 if claim else 1.0, device=shards[0].device)
    return all(float(_all_reduce(denied, groups, "max")) == 0.0 for groups in _by_groups(shards))


def global_norms(norms: Tensor, of: Sequence[Tensor]) -> Tensor:
    """Return the 2-norms of complete tensors, given those of the local shards. A collective if any is sharded."""
    sharded_over = _by_groups(of)
    if sharded_over.keys() <= {()}:
        return norms
    squares = norms.square()
    place = {id(tensor): index for index, tensor in enumerate(of)}
    for groups, tensors in sharded_over.items():
        mine = [place[id(tensor)] for tensor in tensors]
        squares[mine] = _all_reduce(squares[mine], groups, "sum")
    return squares.sqrt()


def reshard(modules: Iterable[Any]) -> None:
    """Reshard the FSDP modules among `modules`.

    A forward without a backward leaves gathered weights. The next forward would use them, even if the shards have
    changed since.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        for module in modules:
            if isinstance(module, fsdp.FSDPModule):
                module.reshard()


class Shards(list[Tensor]):
    """A list of parameters, some of them sharded, with norms and clips of their gradients.

    Methods that reduce over ranks are collectives and return the same value on each rank.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters)
        self._by_groups = _by_groups(self)
        self._dtype = reduce(torch.promote_types, [parameter.dtype for parameter in self])

    def gradients(self) -> list[Tensor]:
        """Return the local gradients, without empty shards."""
        return _gradients(self)

    def norm(self, norm_type: float = 2.0) -> Tensor:
        """Return the total norm of all gradients as a 0-dim tensor, by scalar all-reduces."""
        parts = [self._norm_of(parameters, groups, norm_type) for groups, parameters in self._by_groups.items()]
        device = parts[0].device
        joined = torch.stack([part.to(device) for part in parts])
        norm = joined[0] if len(parts) == 1 else torch.linalg.vector_norm(joined, norm_type)
        return norm.to(self._dtype)

    def clip_norm(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip gradients in place as torch's `clip_grad_norm_` does; return the norm before clipping."""
        norm = self.norm(norm_type)
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for (device, _), gradients in _by_kind(self.gradients()).items():
            torch._foreach_mul_(gradients, factor.to(device))
        return norm

    def clip_value(self, limit: float) -> None:
        """Clip gradients in place as torch's `clip_grad_value_` does."""
        for gradients in _by_kind(self.gradients()).values():
            torch._foreach_clamp_min_(gradients, -limit)
            torch._foreach_clamp_max_(gradients, limit)

    def max_over_ranks(self, flag: Tensor) -> Tensor:
        """Set `flag` to its maximum over all ranks in place; return it."""
        for groups in self._by_groups:
            flag.copy_(_all_reduce(flag, groups, "max"))
        return flag

    def _norm_of(self, parameters: list[Tensor], groups: MeshGroups, norm_type: float) -> Tensor:
        """Return the norm of gradients sharded over the same groups; in the widest dtype, since powers may overflow."""
        device = parameters[0].device
        gradients = _gradients(parameters)
        norm = get_total_norm(gradients, norm_type) if gradients else torch.zeros((), device=device)
        norm = norm.to(device, widest_float(device))
        if norm_type == inf:  # a maximum over ranks may hide a NaN
            both = torch.stack([norm.nan_to_num(0.0, posinf=inf), norm.isnan().to(norm.dtype)])
            highest, unknown = _all_reduce(both, groups, "max")
            return torch.where(unknown > 0, torch.nan, highest)
        return _all_reduce(norm**norm_type, groups, "sum") ** (1.0 / norm_type)


MeshGroups = tuple[str, ...]
"""Names of the process groups over which a tensor is sharded; empty for a plain tensor."""


def _tensors() -> Any:
    return sys.modules.get("torch.distributed.tensor")


def _local(tensor: Any) -> Tensor:
    here: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return here


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    found = local_shards(parameter.grad for parameter in parameters if parameter.grad is not None)
    dense = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in found]
    return [gradient for gradient in dense if gradient.numel()]


def _by_kind(tensors: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """Group tensors by device and dtype, for foreach kernels."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return groups


def _by_groups(tensors: Iterable[Tensor]) -> dict[MeshGroups, list[Tensor]]:
    groups: dict[MeshGroups, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(_mesh_groups(tensor), []).append(tensor)
    return groups


def _mesh_groups(tensor: Any) -> MeshGroups:
    if not is_sharded(tensor):
        return ()
    mesh, placed = tensor.device_mesh, enumerate(tensor.placements)
    return tuple(mesh.get_group(dim).group_name for dim, placement in placed if not placement.is_replicate())


def _all_reduce(value: Tensor, groups: MeshGroups, how: str) -> Tensor:
    """Return the "sum" or "max" of a value over the ranks of these groups."""
    for name in groups:
        value = all_reduce(value, how, name)
    return value
