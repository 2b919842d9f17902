"""Stores memory that tensors share once, and makes the same views of it again: ties, strides and offsets included."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from trainwright.checkpointing.tensorfile import DTYPES, TAGS

_RAW = {str(dtype): dtype for dtype in (*DTYPES.values(), torch.complex32, torch.complex128)}
"""Dtypes by name; those that the file format lacks are stored as bytes."""


@dataclass(slots=True, eq=False)
class Found:
    """One tensor of a tree, the name that it would be stored under and the node that is filled in for it."""

    name: str
    tensor: Tensor
    node: dict[str, Any]


def defect(tensor: Tensor) -> str:
    """Why a tensor cannot be stored, or an empty string."""
    if type(tensor) not in (Tensor, Parameter):
        return f"is a {type(tensor).__name__}, and only plain tensors and parameters come back as they were"
    if tensor.is_meta:
        return "is on the meta device and has no values"
    if tensor.is_nested or tensor.layout is not torch.strided:
        return f"has layout {'nested' if tensor.is_nested else tensor.layout}; only dense tensors are stored"
    if str(tensor.dtype) not in _RAW:
        return f"has dtype {tensor.dtype}, which cannot be stored"
    if tensor.grad_fn is not None:
        return "belongs to a graph; store its .detach()"
    return ""


def store(found: Sequence[Found]) -> dict[str, Tensor]:
    """Fill the node of every tensor in `found`; give what is to be written: each piece of memory once, not copied."""
    layouts: dict[Any, list[Found]] = {}
    for item in found:
        item.tensor = item.tensor.resolve_conj().resolve_neg()
        tensor = item.tensor
        key = (_storage(tensor), tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride())
        layouts.setdefault(key, []).append(item)
    stored: dict[str, Tensor] = {}
    for cluster in _clusters(layouts.values()):
        name = cluster[0][0].name
        stored[name] = _alone(name, cluster[0]) if len(cluster) == 1 else _together(name, cluster)
    return stored


def restore(node: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Tensor:
    """The tensor that a node of `store` stands for, as a view of `tensors[...]` wherever it was one."""
    tensor = tensors[node["$tensor"]].detach()
    dtype = _RAW[node["dtype"]] if "dtype" in node else tensor.dtype
    if "offset" in node:
        flat = _as_dtype(tensor, dtype)
        tensor = flat.as_strided(node["size"], node["stride"], flat.storage_offset() + node["offset"])
    else:
        if "dtype" in node:
            tensor = _as_dtype(tensor, dtype).reshape(node["size"])
        if "stride" in node:
            tensor = torch.empty_strided(tensor.shape, node["stride"], dtype=dtype, device=tensor.device).copy_(tensor)
    requires_grad = bool(node.get("requires_grad"))
    if node.get("parameter"):
        return Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad)


def _clusters(layouts: Iterable[list[Found]]) -> Iterator[list[list[Found]]]:
    """Layouts whose memory overlaps, together; all others alone."""
    last: tuple[int, int] | None = None
    cluster: list[list[Found]] = []
    for items in sorted(layouts, key=lambda items: (_storage(items[0].tensor), *_extent(items[0].tensor))):
        start, stop = _extent(items[0].tensor)
        if last and last[0] == _storage(items[0].tensor) and start < last[1] and start < stop:
            last = (last[0], max(last[1], stop))
            cluster.append(items)
            continue
        if cluster:
            yield cluster
        cluster, last = [items], (_storage(items[0].tensor), stop)
    if cluster:
        yield cluster


def _alone(name: str, items: list[Found]) -> Tensor:
    tensor = items[0].tensor.detach()
    native = tensor.dtype in TAGS
    fields: dict[str, Any] = {} if native else {"dtype": str(tensor.dtype), "size": list(tensor.shape)}
    start, stop = _extent(tensor)
    if tensor.stride() != torch.empty(tensor.shape, device="meta").stride():
        fields["stride"] = list(tensor.stride())
        if stop - start <= tensor.numel() * tensor.element_size():
            fields |= {"offset": 0, "size": list(tensor.shape)}
            tensor = _flat(tensor, start, stop, native=native)
    if not native and "offset" not in fields:
        tensor = tensor.contiguous().reshape(-1).view(torch.uint8)
    for item in items:
        item.node |= {"$tensor": name, **fields, **_flags(item.tensor)}
    return tensor


def _together(name: str, cluster: list[list[Found]]) -> Tensor:
    members = [items[0].tensor for items in cluster]
    width = max(member.element_size() for member in members)
    start = min(_extent(member)[0] for member in members) // width * width
    stop = max(_extent(member)[1] for member in members)
    native = len({member.dtype for member in members}) == 1 and members[0].dtype in TAGS
    for items in cluster:
        for item in items:
            tensor = item.tensor
            offset = tensor.storage_offset() - start // tensor.element_size()
            layout = {"offset": offset, "size": list(tensor.shape), "stride": list(tensor.stride())}
            dtype = {} if native else {"dtype": str(tensor.dtype)}
            item.node |= {"$tensor": name, **layout, **dtype, **_flags(tensor)}
    return _flat(members[0].detach(), start, stop, native=native)


def _flat(tensor: Tensor, start: int, stop: int, *, native: bool) -> Tensor:
    """Bytes `start` to `stop` of the tensor's storage, in its own dtype where the file format has it."""
    if native:
        width = tensor.element_size()
        return tensor.as_strided(((stop - start) // width,), (1,), start // width)
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), start, (stop - start,), (1,))


def _flags(tensor: Tensor) -> dict[str, Any]:
    flags: dict[str, Any] = {"requires_grad": True} if tensor.requires_grad else {}
    if type(tensor) is Parameter:
        flags["parameter"] = True
    if tensor.device.type != "cpu":
        flags["device"] = str(tensor.device)
    return flags


def _storage(tensor: Tensor) -> int:
    """What two tensors have in common where they share memory."""
    return int(tensor.untyped_storage()._cdata)


def _extent(tensor: Tensor) -> tuple[int, int]:
    """First byte and end of what a tensor touches in its storage."""
    width = tensor.element_size()
    start = int(tensor.storage_offset()) * width
    if not tensor.numel():
        return start, start
    reach = sum((int(n) - 1) * int(stride) for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (reach + 1) * width


def _as_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The same memory in one dimension and another dtype; bytes at the end that fill no item are left out."""
    flat = tensor.reshape(-1).view(torch.uint8)
    return flat[: flat.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
