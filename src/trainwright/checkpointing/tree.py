"""Converts a tree of state to JSON and named tensors, and back without loss. Does not use pickle.

A value without a JSON type becomes a tagged node, an object with a key that begins with "$": a tuple is
`{"$tuple": [...]}`, a tensor `{"$tensor": name}`. Memory shared by several tensors is stored once, and shared again
after loading, with the same strides and offsets.
"""

from __future__ import annotations

import base64
import enum
import json
import math
import os
import re
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from trainwright.checkpointing.tensorfile import DTYPES, TAGS
from trainwright.core.device import Home
from trainwright.core.errors import CheckpointError
from trainwright.core.torch_private import set_versions, versions_of
from trainwright.core.trees import Keys, path_text
from trainwright.distributed.pieces import Placeholder
from trainwright.protocols import Stateful, Tree

MAX_DEPTH = 100
"""Maximum depth of a tree. A tree that contains itself exceeds it."""
KINDS = "biufcmMSU"
"""Kinds of NumPy dtypes that consist of plain bytes; objects do not."""
_NUMPY_DTYPE = re.compile(rf"[<>|][{KINDS}]\d+(\[\w+\])?")
"""The form of `dtype.str` for these kinds."""
_DTYPES = {str(dtype): dtype for dtype in (*DTYPES.values(), torch.complex32, torch.complex128)}
"""torch dtypes by name. Dtypes that safetensors lacks are stored as bytes."""
DEFECTS = (
    *(AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RuntimeError, RecursionError),
    *(MemoryError, CheckpointError),
)
"""Errors that a decoder may raise for data that `flatten` did not return."""


def flatten(tree: Tree) -> tuple[Any, dict[str, Tensor]]:
    """Return JSON data, and the tensors that it names. The tensors share memory with those of the tree.

    CheckpointError for a value that would not be restored exactly, with its path and the value to store instead.
    """
    encoder = _Encoder()
    jsonable = encoder.node(tree, ())
    return jsonable, encoder.arrays | _store(encoder.tensors)


def plain_data(tree: Tree) -> tuple[Any, list[str]]:
    """Return the JSON data of `flatten` with empty tensor nodes, and the tensors' names. Raises like `flatten`."""
    encoder = _Encoder()
    jsonable = encoder.node(tree, ())
    return jsonable, [*encoder.arrays, *(node.name for node in encoder.tensors)]


def loads(
    text: str | bytes,
    tensors: Mapping[str, Tensor],
    *,
    label: str = "a tree",
    device: Home | None = None,
    find: Callable[[Placeholder], Any] | None = None,
) -> Any:
    """Return the tree of `flatten` from its JSON text and its `tensors`, whose memory it shares.

    - `label`: the file, for errors.
    - `device`: tensors from an accelerator are moved to it. It may be a function of the saved device's name, such as
      "cuda:1". None leaves all tensors on the CPU.
    - `find`: returns the tensor of a placeholder.

    CheckpointError if the text is not from `flatten`.
    """
    try:
        return _Decoder(tensors, device, find).value(json.loads(text))
    except torch.OutOfMemoryError:
        raise  # the device is full; the checkpoint is not damaged
    except DEFECTS as error:
        why = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{label} is damaged: {why}", where=False) from error


def tensor_defect(tensor: Tensor) -> str:
    """Return why a tensor cannot be saved; empty if it can."""
    if type(tensor) not in (Tensor, Parameter):
        return f"is a {type(tensor).__name__}, and only plain tensors and parameters come back as they were"
    if tensor.is_meta:
        return "is on the meta device and has no values"
    if tensor.is_nested or tensor.layout is not torch.strided:
        return f"has layout {'nested' if tensor.is_nested else tensor.layout}; only dense tensors are stored"
    if str(tensor.dtype) not in _DTYPES:
        return f"has dtype {tensor.dtype}, which cannot be stored"
    if tensor.grad_fn is not None:
        return "belongs to a graph; store its .detach()"
    return ""


# From values to nodes


@dataclass(slots=True, eq=False)
class _TensorNode:
    """A tensor of a tree, its name in the file, and its node, which `_store` fills in."""

    name: str
    tensor: Tensor
    node: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Encoder:
    """Converts values to nodes, and collects their tensors."""

    tensors: list[_TensorNode] = field(default_factory=list)
    arrays: dict[str, Tensor] = field(default_factory=dict)
    names: set[str] = field(default_factory=lambda: {"__metadata__"})
    array_nodes: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Nodes of arrays, by the id of the array."""

    def node(self, value: Any, keys: Keys) -> Any:
        if len(keys) > MAX_DEPTH:
            raise _refused(keys[:3], f"contains itself, or is nested deeper than {MAX_DEPTH} levels")
        encode = _ENCODERS.get(type(value), _Encoder.other)
        return encode(self, value, keys)

    def plain(self, value: Any, _: Keys) -> Any:
        return value

    def integer(self, value: int, _: Keys) -> Any:
        return value if -(1 << 63) <= value < 1 << 63 else {"$int": hex(value)}

    def number(self, value: float, _: Keys) -> Any:
        return value if math.isfinite(value) else {"$float": str(value)}

    def octets(self, value: bytes, _: Keys) -> Any:
        return {"$bytes": base64.b64encode(value).decode("ascii")}

    def sequence(self, value: list[Any] | tuple[Any, ...], keys: Keys) -> Any:
        items = [self.node(item, (*keys, index)) for index, item in enumerate(value)]
        return items if type(value) is list else {"$tuple": items}

    def mapping(self, value: dict[Any, Any], keys: Keys) -> Any:
        pairs = self.pairs(value, keys)
        is_plain = all(type(key) is str and not key.startswith("$") for key in value)
        return dict(pairs) if is_plain else {"$dict": pairs}

    def counter(self, value: Counter[Any], keys: Keys) -> Any:
        return {"$counter": self.pairs(value, keys)}

    def ordered(self, value: OrderedDict[Any, Any], keys: Keys) -> Any:
        versions = versions_of(value)  # of a module's `state_dict`: the version of each submodule
        node = {"$ordered": self.pairs(value, keys)}
        return node if versions is None else node | {"versions": self.node(versions, (*keys, "_metadata"))}

    def pairs(self, value: Mapping[Any, Any], keys: Keys) -> Any:
        for key in value:
            if type(key) not in (str, int):
                raise _refused(keys, f"has the key {key!r}, a {_kind(key)}", fix="use a str or an int as the key")
        return [[self.node(key, keys), self.node(item, (*keys, key))] for key, item in value.items()]

    def placeholder(self, value: Placeholder, _: Keys) -> Any:
        return {"$elsewhere": value.name} | ({"device": value.device} if value.device else {})

    def tensor(self, value: Tensor, keys: Keys) -> Any:
        if defect := tensor_defect(value):
            raise _refused(keys, defect)
        self.tensors.append(_TensorNode(self.name(keys), value.resolve_conj().resolve_neg()))
        return self.tensors[-1].node

    def array(self, value: Any, keys: Keys) -> Any:
        if value.dtype.kind not in KINDS:
            raise _refused(keys, f"is an array of {value.dtype}", fix="an array of numbers, or .tolist() of it")
        if id(value) not in self.array_nodes:
            name, order = self.name(keys), "F" if value.flags.fnc else "C"
            flat = np.require(value.reshape(-1, order=order), requirements=["C", "W"])  # a copy only if necessary
            self.arrays[name] = torch.from_numpy(flat.view(np.uint8))
            node = {"$array": name, "dtype": value.dtype.str, "shape": list(value.shape), "order": order}
            self.array_nodes[id(value)] = node
        return self.array_nodes[id(value)]

    def other(self, value: Any, keys: Keys) -> Any:
        """Encode a NumPy scalar; refuse any other value."""
        if isinstance(value, np.generic) and value.dtype.kind in "biufcmM":
            return {"$scalar": value.dtype.str, "bytes": value.tobytes().hex()}
        if isinstance(value, Tensor):
            raise _refused(keys, tensor_defect(value), fix="x.detach().clone() of it, or leave it out")
        raise _refused(keys, f"is a {_kind(value)}", fix=_cure(value))

    def name(self, keys: Keys) -> str:
        """Return a unique name for a tensor that every reader of safetensors can decode."""
        path = ".".join(str(key) for key in keys).encode("utf-8", "backslashreplace").decode() or "tree"
        name, n = path, 1
        while name in self.names:
            n += 1
            name = f"{path}~{n}"
        self.names.add(name)
        return name


_ENCODERS: dict[type, Callable[[_Encoder, Any, Keys], Any]] = {
    type(None): _Encoder.plain,
    bool: _Encoder.plain,
    str: _Encoder.plain,
    int: _Encoder.integer,
    float: _Encoder.number,
    bytes: _Encoder.octets,
    list: _Encoder.sequence,
    tuple: _Encoder.sequence,
    dict: _Encoder.mapping,
    Counter: _Encoder.counter,  # the milestones of torch's MultiStepLR
    OrderedDict: _Encoder.ordered,
    Tensor: _Encoder.tensor,
    Parameter: _Encoder.tensor,
    np.ndarray: _Encoder.array,
    Placeholder: _Encoder.placeholder,
}


# The memory of tensors


def _store(nodes: list[_TensorNode]) -> dict[str, Tensor]:
    """Fill in the node of every tensor; return the tensors to write: each region of memory once, without a copy."""
    storages: dict[Any, list[_TensorNode]] = {}
    for node in nodes:
        storages.setdefault(_storage(node.tensor), []).append(node)
    stored = {}
    for sharing in storages.values():
        for cluster in [sharing] if len(sharing) == 1 else _clusters(sharing):
            stored[cluster[0].name] = _store_cluster(cluster)
    return stored


def _store_cluster(cluster: list[_TensorNode]) -> Tensor:
    """Return the stored tensor of a cluster: a single tensor in its own shape, or the memory shared by several."""
    name, tensor = cluster[0].name, cluster[0].tensor
    layout = _own_layout(tensor)
    if layout is None or len({_layout(sharer.tensor) for sharer in cluster}) > 1:
        return _store_region(name, cluster)
    for sharer in cluster:
        sharer.node |= {"$tensor": name, **layout, **_flags(sharer.tensor)}
    return tensor.detach()


def _clusters(nodes: list[_TensorNode]) -> list[list[_TensorNode]]:
    """Group tensors of one storage by overlapping memory, and by equal place and layout."""
    clusters: list[list[_TensorNode]] = []
    end = 0
    for node in sorted(nodes, key=lambda node: _extent(node.tensor)):
        start, stop = _extent(node.tensor)
        if clusters and (start < min(end, stop) or _layout(node.tensor) == _layout(clusters[-1][0].tensor)):
            clusters[-1].append(node)
            end = max(end, stop)
        else:
            clusters.append([node])
            end = stop
    return clusters


def _own_layout(tensor: Tensor) -> dict[str, Any] | None:
    """Return the layout fields of a tensor that is stored alone; None if its memory must be stored as a region."""
    is_native = tensor.dtype in TAGS
    if is_native and tensor.stride() == torch.empty(tensor.shape, device="meta").stride():
        return {}
    return {"stride": list(tensor.stride())} if is_native and _has_gaps(tensor) else None


def _has_gaps(tensor: Tensor) -> bool:
    """Return whether the memory between the first and the last element of a tensor has gaps."""
    start, stop = _extent(tensor)
    return stop - start > tensor.numel() * tensor.element_size()


def _store_region(name: str, cluster: list[_TensorNode]) -> Tensor:
    """Return the memory region shared by tensors, in their dtype or as bytes. Each tensor is a view of it."""
    first = cluster[0].tensor.detach()
    width = max(sharer.tensor.element_size() for sharer in cluster)
    start = min(_extent(sharer.tensor)[0] for sharer in cluster) // width * width
    stop = max(_extent(sharer.tensor)[1] for sharer in cluster)
    is_native = first.dtype in TAGS and all(sharer.tensor.dtype == first.dtype for sharer in cluster)
    for sharer in cluster:
        tensor = sharer.tensor
        offset = tensor.storage_offset() - start // tensor.element_size()
        layout = {"offset": offset, "size": list(tensor.shape), "stride": list(tensor.stride())}
        dtype = {} if is_native else {"dtype": str(tensor.dtype)}
        sharer.node |= {"$tensor": name, **layout, **dtype, **_flags(tensor)}
    if is_native:
        return first.as_strided(((stop - start) // width,), (1,), start // width)
    empty = torch.empty(0, dtype=torch.uint8, device=first.device)
    return empty.set_(first.untyped_storage(), start, (stop - start,), (1,))


def _flags(tensor: Tensor) -> dict[str, Any]:
    flags: dict[str, Any] = {"requires_grad": True} if tensor.requires_grad else {}
    if type(tensor) is Parameter:
        flags["parameter"] = True
    if tensor.device.type != "cpu":
        flags["device"] = str(tensor.device)
    return flags


def _storage(tensor: Tensor) -> tuple[str, int, int]:
    """Return a key that is equal for tensors of one storage; an empty tensor has a key of its own."""
    storage = tensor.untyped_storage()
    return str(tensor.device), storage.data_ptr() or -id(tensor), storage.nbytes()


def _layout(tensor: Tensor) -> Any:
    """Return the place of a tensor in its storage, and its layout."""
    return tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride()


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the byte range (start, stop) of a tensor in its storage."""
    width = tensor.element_size()
    start = int(tensor.storage_offset()) * width
    if not tensor.numel():
        return start, start
    reach = sum((int(n) - 1) * int(stride) for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (reach + 1) * width


# From nodes to values


@dataclass(slots=True, eq=False)
class _Decoder:
    """Converts nodes to values. Equal nodes of tensors and arrays give the same object."""

    tensors: Mapping[str, Tensor]
    device: Home | None
    find: Callable[[Placeholder], Any] | None
    on_device: dict[str, Tensor] = field(default_factory=dict)
    """Moved tensors of the file, by name."""
    values: dict[str, Any] = field(default_factory=dict)
    """Values of tensors and arrays, by the text of their node."""

    def value(self, node: Any) -> Any:
        if type(node) is list:
            return [self.value(item) for item in node]
        if type(node) is not dict:
            return node
        tag = next((key for key in node if key.startswith("$")), None)
        if tag is None:
            return {key: self.value(item) for key, item in node.items()}
        if tag not in _DECODERS:
            raise CheckpointError(f"a tree holds a node {tag!r} that this version does not know")
        return _DECODERS[tag](self, node)

    def pairs(self, pairs: Any) -> Any:
        return [(self.value(key), self.value(item)) for key, item in pairs]

    def ordered(self, node: dict[str, Any]) -> Any:
        value = OrderedDict(self.pairs(node["$ordered"]))
        if "versions" in node:
            set_versions(value, self.value(node["versions"]))
        return value

    def scalar(self, node: dict[str, Any]) -> Any:
        return np.frombuffer(bytes.fromhex(node["bytes"]), dtype=_numpy_dtype(node["$scalar"]))[0]

    def tensor(self, node: dict[str, Any]) -> Any:
        key = json.dumps(node, sort_keys=True)
        if key not in self.values:
            stored = self.on_its_device(node) if "device" in node else self.tensors[node["$tensor"]]
            self.values[key] = _restore(node, stored)
        return self.values[key]

    def placeholder(self, node: dict[str, Any]) -> Any:
        if self.find is None:
            raise CheckpointError(f"a tree holds {node['$elsewhere']}, and its tensor is not there")
        value = self.find(Placeholder(node["$elsewhere"], node.get("device", "")))
        return self.moved(value, node) if isinstance(value, Tensor) and "device" in node else value

    def on_its_device(self, node: dict[str, Any]) -> Tensor:
        """Return a tensor of the file on its device; moved once for all nodes that share its memory."""
        name = node["$tensor"]
        if name not in self.on_device:
            self.on_device[name] = self.moved(self.tensors[name], node)
        return self.on_device[name]

    def moved(self, tensor: Tensor, node: dict[str, Any]) -> Tensor:
        """Move a tensor that was on an accelerator to its new device."""
        if self.device is None:
            return tensor
        return tensor.to(self.device if isinstance(self.device, torch.device) else self.device(node["device"]))

    def array(self, node: dict[str, Any]) -> Any:
        key = json.dumps(node, sort_keys=True)
        if key not in self.values:
            memory = cast(Any, self.tensors[node["$array"]].numpy())
            dtype = _numpy_dtype(node["dtype"])
            self.values[key] = np.ndarray(node["shape"], dtype=dtype, buffer=memory, order=node["order"])
        return self.values[key]


_DECODERS: dict[str, Callable[[_Decoder, dict[str, Any]], Any]] = {
    "$int": lambda _, node: int(node["$int"], 16),
    "$float": lambda _, node: float(node["$float"]),
    "$bytes": lambda _, node: base64.b64decode(node["$bytes"], validate=True),
    "$tuple": lambda decoder, node: tuple(decoder.value(node["$tuple"])),
    "$dict": lambda decoder, node: dict(decoder.pairs(node["$dict"])),
    "$counter": lambda decoder, node: Counter(dict(decoder.pairs(node["$counter"]))),
    "$ordered": _Decoder.ordered,
    "$scalar": _Decoder.scalar,
    "$tensor": _Decoder.tensor,
    "$elsewhere": _Decoder.placeholder,
    "$array": _Decoder.array,
}


def _restore(node: Mapping[str, Any], stored: Tensor) -> Tensor:
    """Return the tensor of a node; a view of `stored` if it was saved as a view."""
    tensor = stored.detach()
    if not node.keys().isdisjoint(("offset", "dtype", "stride")):
        tensor = _laid_out(tensor, node)
    if node.get("parameter"):
        return Parameter(tensor, requires_grad=bool(node.get("requires_grad")))
    return tensor.requires_grad_(bool(node.get("requires_grad")))


def _laid_out(tensor: Tensor, node: Mapping[str, Any]) -> Tensor:
    """Return a stored tensor in the dtype and layout of a node."""
    dtype = _DTYPES[node["dtype"]] if "dtype" in node else tensor.dtype
    if "offset" in node:
        flat = _as_dtype(tensor, dtype)
        return flat.as_strided(node["size"], node["stride"], flat.storage_offset() + node["offset"])
    if "dtype" in node:
        tensor = _as_dtype(tensor, dtype).reshape(node["size"])
    if "stride" in node:
        tensor = torch.empty_strided(tensor.shape, node["stride"], dtype=dtype, device=tensor.device).copy_(tensor)
    return tensor


def _as_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """View memory as one dimension of another dtype; drop incomplete bytes at the end."""
    flat = tensor.reshape(-1).view(torch.uint8)
    return flat[: flat.numel() // dtype.itemsize * dtype.itemsize].view(dtype)


def _numpy_dtype(text: str) -> np.dtype[Any]:
    """Return a dtype of plain bytes. Refuses any other: objects are pointers."""
    if type(text) is not str or not _NUMPY_DTYPE.fullmatch(text):
        raise CheckpointError(f"a tree holds an array of dtype {text!r}, which is never written")
    return np.dtype(text)


# Refusals


def _kind(value: Any) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _cure(value: Any) -> str:
    """Return the expression to store in place of a value, by its type."""
    cures: tuple[tuple[type | tuple[type, ...], str], ...] = (  # built here: `numpy.random` is slow to import
        (enum.Enum, "store x.value"),
        ((set, frozenset), "store sorted(x)"),
        ((tuple,), "store tuple(x)"),
        ((list, deque), "store list(x)"),
        (dict, "store dict(x)"),
        ((str, os.PathLike, torch.device, torch.dtype), "store str(x)"),
        ((int, complex), "store int(x), or (x.real, x.imag)"),
        (float, "store float(x)"),
        ((bytearray, memoryview), "store bytes(x)"),
        ((torch.Generator, np.random.Generator), "store its state: get_state(), or bit_generator.state"),
        (np.ndarray, "store np.array(x)"),
        (Stateful, "store x.state_dict() and load it again, or give x to parts()"),
    )
    for kinds, cure in cures:
        if isinstance(value, kinds):
            return cure
    return "leave it out, or store the plain data in it"


def _refused(keys: Keys, what: str, *, fix: str = "") -> CheckpointError:
    want = "None, bool, int, float, str, bytes, tensor, ndarray, list, tuple, or a dict with str or int keys"
    return CheckpointError(f"{path_text(keys)} {what}: it cannot be saved", want=want, fix=fix)
