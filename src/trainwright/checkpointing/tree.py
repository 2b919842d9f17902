"""Converts a tree of state to JSON and named tensors, and back exactly as it was; never by pickle.

What JSON has no word for is a tagged node, an object with a key that begins with "$": a tuple is
`{"$tuple": [...]}`, a tensor `{"$tensor": name}`. Memory that several tensors share is stored once, and they share it
again afterwards: ties, strides and offsets included.
"""

from __future__ import annotations

import base64
import enum
import json
import math
import os
import re
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
"""Levels of a tree; one that contains itself has more."""
KINDS = "biufcmMSU"
"""Kinds of NumPy dtypes that are bytes and nothing else; objects are not."""
_NUMPY_DTYPE = re.compile(rf"[<>|][{KINDS}]\d+(\[\w+\])?")
"""`dtype.str` of one of them."""
_DTYPES = {str(dtype): dtype for dtype in (*DTYPES.values(), torch.complex32, torch.complex128)}
"""Dtypes of torch by name; those that the file format lacks are stored as bytes."""


def flatten(tree: Tree) -> tuple[Any, dict[str, Tensor]]:
    """Return plain JSON data and the tensors that it names, which share memory with the tree's.

    Raises CheckpointError for a value that would not come back as it was, with its path and what to do.
    """
    encoder = _Encoder()
    jsonable = encoder.node(tree, ())
    return jsonable, encoder.arrays | _store(encoder.tensors)


def unflatten(
    jsonable: Any,
    tensors: Mapping[str, Tensor],
    *,
    device: Home | None = None,
    find: Callable[[Placeholder], Any] | None = None,
) -> Tree:
    """Return the tree that `flatten` was given; its tensors are views of `tensors`, which may change with them.

    Tensors that were on an accelerator are moved to `device`, which may be a function of the device's name, such as
    "cuda:1"; None leaves all on the CPU. `find` returns the tensor that a placeholder stands for.
    Raises CheckpointError where the data are not what `flatten` returns.
    """
    try:
        return _Decoder(tensors, device, find).value(jsonable)
    except CheckpointError:
        raise
    except (
        *(AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RuntimeError, RecursionError),
        MemoryError,
    ) as error:
        what = "a tree cannot be read: its nodes do not fit its tensors"
        raise CheckpointError(what, have=f"{type(error).__name__}: {error}", where=False) from error


def tensor_defect(tensor: Tensor) -> str:
    """Return why a tensor cannot be stored, or an empty string."""
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


@dataclass(slots=True, eq=False)
class _TensorNode:
    """A tensor of a tree, the name that it is stored under, and its node, which `_store` fills in."""

    name: str
    tensor: Tensor
    node: dict[str, Any]


class _Encoder:
    """Converts values to nodes, and collects the tensors on the way."""

    def __init__(self) -> None:
        self.tensors: list[_TensorNode] = []
        self.arrays: dict[str, Tensor] = {}
        self._names = {"__metadata__"}
        self._seen: dict[int, dict[str, Any]] = {}

    def node(self, value: Any, keys: Keys) -> Any:
        if len(keys) > MAX_DEPTH:
            raise _refused(keys[:3], f"contains itself, or is nested deeper than {MAX_DEPTH} levels")
        encode = _ENCODERS.get(type(value))
        if encode is not None:
            return encode(self, value, keys)
        if isinstance(value, np.generic) and value.dtype.kind in "biufcmM":
            return {"$scalar": value.dtype.str, "bytes": value.tobytes().hex()}
        if isinstance(value, Tensor):
            raise _refused(keys, tensor_defect(value), fix="x.detach().clone() of it, or leave it out")
        raise _refused(keys, f"is a {_kind(value)}", fix=_cure(value))

    def plain(self, value: Any, _: Keys) -> Any:
        return value

    def integer(self, value: int, _: Keys) -> Any:
        return value if -(1 << 63) <= value < 1 << 63 else {"$int": hex(value)}

    def number(self, value: float, _: Keys) -> Any:
        return value if math.isfinite(value) else {"$float": str(value)}

    def octets(self, value: bytes, _: Keys) -> Any:
        return {"$bytes": base64.b64encode(value).decode("ascii")}

    def items(self, value: list[Any], keys: Keys) -> Any:
        return [self.node(item, (*keys, index)) for index, item in enumerate(value)]

    def fixed(self, value: tuple[Any, ...], keys: Keys) -> Any:
        return {"$tuple": [self.node(item, (*keys, index)) for index, item in enumerate(value)]}

    def mapping(self, value: dict[Any, Any], keys: Keys) -> Any:
        pairs = self.pairs(value, keys)
        if all(type(key) is str and not key.startswith("$") for key in value):
            return dict(pairs)
        return {"$dict": pairs}

    def counter(self, value: Counter[Any], keys: Keys) -> Any:
        return {"$counter": self.pairs(value, keys)}

    def ordered(self, value: OrderedDict[Any, Any], keys: Keys) -> Any:
        versions = versions_of(value)  # of a module's `state_dict`: the version of each submodule
        node = {"$ordered": self.pairs(value, keys)}
        return node if versions is None else node | {"versions": self.node(versions, (*keys, "_metadata"))}

    def placeholder(self, value: Placeholder, _: Keys) -> Any:
        return {"$elsewhere": value.name} | ({"device": value.device} if value.device else {})

    def pairs(self, value: Mapping[Any, Any], keys: Keys) -> Any:
        for key in value:
            if type(key) not in (str, int):
                raise _refused(keys, f"has the key {key!r}, a {_kind(key)}", fix="use a str or an int as the key")
        return [
            [self.integer(key, keys) if type(key) is int else key, self.node(value[key], (*keys, key))] for key in value
        ]

    def tensor(self, value: Tensor, keys: Keys) -> Any:
        if defect := tensor_defect(value):
            raise _refused(keys, defect)
        self.tensors.append(_TensorNode(self.name(keys), value.resolve_conj().resolve_neg(), {}))
        return self.tensors[-1].node

    def array(self, value: Any, keys: Keys) -> Any:
        if id(value) in self._seen:
            return self._seen[id(value)]
        if value.dtype.kind not in KINDS:
            raise _refused(keys, f"is an array of {value.dtype}", fix="an array of numbers, or .tolist() of it")
        order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
        flat = (value.T if order == "F" else value).reshape(-1)
        flat = np.ascontiguousarray(flat) if flat.flags.writeable else flat.copy()
        name = self.name(keys)
        self.arrays[name] = torch.from_numpy(flat.view(np.uint8))
        node = {"$array": name, "dtype": value.dtype.str, "shape": list(value.shape), "order": order}
        self._seen[id(value)] = node
        return node

    def name(self, keys: Keys) -> str:
        """Return a name for a tensor that no other has, and that every reader of the file can decode."""
        plain = ".".join(str(key) for key in keys).encode("utf-8", "backslashreplace").decode() or "tree"
        name, n = plain, 1
        while name in self._names:
            n += 1
            name = f"{plain}~{n}"
        self._names.add(name)
        return name


_ENCODERS: dict[type, Callable[[_Encoder, Any, Keys], Any]] = {
    type(None): _Encoder.plain,
    bool: _Encoder.plain,
    str: _Encoder.plain,
    int: _Encoder.integer,
    float: _Encoder.number,
    bytes: _Encoder.octets,
    list: _Encoder.items,
    tuple: _Encoder.fixed,
    dict: _Encoder.mapping,
    Counter: _Encoder.counter,  # the milestones of torch's MultiStepLR
    OrderedDict: _Encoder.ordered,
    Tensor: _Encoder.tensor,
    Parameter: _Encoder.tensor,
    np.ndarray: _Encoder.array,
    Placeholder: _Encoder.placeholder,
}


class _Decoder:
    """Converts nodes to values; equal nodes of tensors and arrays give one and the same object."""

    def __init__(
        self, tensors: Mapping[str, Tensor], device: Home | None, find: Callable[[Placeholder], Any] | None
    ) -> None:
        self._find = find
        self._tensors = tensors
        self._device = device
        self._moved: dict[str, Tensor] = {}
        self._seen: dict[str, Any] = {}

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
        if key not in self._seen:
            tensors = self._tensors
            if "device" in node and self._device is not None:
                name = node["$tensor"]
                tensors = self._moved
                tensors.setdefault(name, self._on_its_device(self._tensors[name], node))
            self._seen[key] = _restore(node, tensors)
        return self._seen[key]

    def placeholder(self, node: dict[str, Any]) -> Any:
        if self._find is None:
            raise CheckpointError(f"a tree holds {node['$elsewhere']}, and its tensor is not there")
        value = self._find(Placeholder(node["$elsewhere"], node.get("device", "")))
        return self._on_its_device(value, node) if isinstance(value, Tensor) else value

    def _on_its_device(self, tensor: Tensor, node: dict[str, Any]) -> Tensor:
        """Move a tensor that was on an accelerator to the device for it now."""
        if "device" not in node or self._device is None:
            return tensor
        return tensor.to(self._device if isinstance(self._device, torch.device) else self._device(node["device"]))

    def array(self, node: dict[str, Any]) -> Any:
        key = json.dumps(node, sort_keys=True)
        if key not in self._seen:
            memory = cast(Any, self._tensors[node["$array"]].numpy())
            dtype = _numpy_dtype(node["dtype"])
            self._seen[key] = np.ndarray(node["shape"], dtype=dtype, buffer=memory, order=node["order"])
        return self._seen[key]


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


# Tensors that share memory


def _store(nodes: Sequence[_TensorNode]) -> dict[str, Tensor]:
    """Fill in the node of every tensor; return the tensors to write: each region of memory once, not copied."""
    layouts: dict[Any, list[_TensorNode]] = {}
    for one in nodes:
        tensor = one.tensor
        key = (_storage_of(tensor), tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride())
        layouts.setdefault(key, []).append(one)
    stored: dict[str, Tensor] = {}
    for cluster in _overlapping(layouts.values()):
        name = cluster[0][0].name
        stored[name] = _store_one(name, cluster[0]) if len(cluster) == 1 else _store_region(name, cluster)
    return stored


def _overlapping(layouts: Iterable[list[_TensorNode]]) -> Iterator[list[list[_TensorNode]]]:
    """Yield layouts whose memory overlaps together, all others alone."""
    cluster: list[list[_TensorNode]] = []
    storage: Any = None
    end = 0
    for nodes in sorted(layouts, key=lambda nodes: (_storage_of(nodes[0].tensor), *_extent(nodes[0].tensor))):
        start, stop = _extent(nodes[0].tensor)
        if cluster and storage == _storage_of(nodes[0].tensor) and start < end and start < stop:
            end = max(end, stop)
            cluster.append(nodes)
            continue
        if cluster:
            yield cluster
        cluster, storage, end = [nodes], _storage_of(nodes[0].tensor), stop
    if cluster:
        yield cluster


def _store_one(name: str, nodes: list[_TensorNode]) -> Tensor:
    """Store a tensor that overlaps no other with its own shape, so that any reader of the file can use it."""
    tensor = nodes[0].tensor.detach()
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
    for one in nodes:
        one.node |= {"$tensor": name, **fields, **_flags(one.tensor)}
    return tensor


def _store_region(name: str, cluster: list[list[_TensorNode]]) -> Tensor:
    """Store the region of memory that several tensors share; each of them is a view of it."""
    members = [nodes[0].tensor for nodes in cluster]
    width = max(member.element_size() for member in members)
    start = min(_extent(member)[0] for member in members) // width * width
    stop = max(_extent(member)[1] for member in members)
    native = len({member.dtype for member in members}) == 1 and members[0].dtype in TAGS
    for one in (one for nodes in cluster for one in nodes):
        tensor = one.tensor
        offset = tensor.storage_offset() - start // tensor.element_size()
        layout = {"offset": offset, "size": list(tensor.shape), "stride": list(tensor.stride())}
        dtype = {} if native else {"dtype": str(tensor.dtype)}
        one.node |= {"$tensor": name, **layout, **dtype, **_flags(tensor)}
    return _flat(members[0].detach(), start, stop, native=native)


def _restore(node: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the tensor that a node stands for, a view of `tensors[...]` wherever it was one."""
    tensor = tensors[node["$tensor"]].detach()
    dtype = _DTYPES[node["dtype"]] if "dtype" in node else tensor.dtype
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


def _flat(tensor: Tensor, start: int, stop: int, *, native: bool) -> Tensor:
    """Return bytes `start` to `stop` of the tensor's storage, in its own dtype where the file format has it."""
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


def _storage_of(tensor: Tensor) -> tuple[str, int, int]:
    """Return what two tensors have in common where they share memory; an empty one shares it with itself alone."""
    storage = tensor.untyped_storage()
    return str(tensor.device), storage.data_ptr() or -id(tensor), storage.nbytes()


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte and the end of what a tensor touches in its storage."""
    width = tensor.element_size()
    start = int(tensor.storage_offset()) * width
    if not tensor.numel():
        return start, start
    reach = sum((int(n) - 1) * int(stride) for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (reach + 1) * width


def _as_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """View memory in one dimension and another dtype; bytes at the end that fill no item are left out."""
    flat = tensor.reshape(-1).view(torch.uint8)
    return flat[: flat.numel() // dtype.itemsize * dtype.itemsize].view(dtype)


def _numpy_dtype(text: str) -> np.dtype[Any]:
    """Return a dtype of plain bytes; any other (objects are pointers) is refused."""
    if type(text) is not str or not _NUMPY_DTYPE.fullmatch(text):
        raise CheckpointError(f"a tree holds an array of dtype {text!r}, which is never written")
    return np.dtype(text)


# Refusals


def _kind(value: Any) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _cure(value: Any) -> str:
    """Return what to write instead of a value, by its type."""
    cures: tuple[tuple[type | tuple[type, ...], str], ...] = (  # made here: `numpy.random` is slow to import
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
    return "leave it out, or store the plain data that it is made of"


def _refused(keys: Keys, what: str, *, fix: str = "") -> CheckpointError:
    want = "None, bool, int, float, str, bytes, tensor, ndarray, list, tuple, or a dict with str or int keys"
    return CheckpointError(f"{path_text(keys)} {what}: it cannot be saved", want=want, fix=fix)
