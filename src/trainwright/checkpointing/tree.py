"""Turns a tree of plain data into JSON and named tensors, and back exactly as it was; never by pickle.

What JSON has no word for is a tagged node, an object with a key that begins with "$": a tuple is
`{"$tuple": [...]}`, a tensor `{"$tensor": name}`. Tensors that share memory share it again afterwards.
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
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from trainwright.checkpointing import views
from trainwright.core.device import Home
from trainwright.core.errors import CheckpointError, message
from trainwright.protocols import Stateful, Tree

Keys = tuple[Any, ...]
"""The way from the root of a tree to one of its values."""

MAX_DEPTH = 100
"""Levels of a tree; one that contains itself has more."""
KINDS = "biufcmMSU"
"""Kinds of NumPy's dtypes that are bytes and nothing else; objects are not."""
_DTYPE = re.compile(rf"[<>|][{KINDS}]\d+(\[\w+\])?")
"""What `dtype.str` is of one of them."""


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Stands in a tree for a tensor that is stored beside it under a name; `device`: where it lay if not on the CPU."""

    name: str
    device: str = ""


def flatten(tree: Tree) -> tuple[Any, dict[str, Tensor]]:
    """Plain JSON data and the tensors that it names, which share memory with the tree's.

    Raises CheckpointError for a value that would not come back as it was, with the way to it and what to do.
    """
    encoder = _Encoder()
    jsonable = encoder.node(tree, ())
    return jsonable, encoder.arrays | views.store(encoder.found)


def unflatten(
    jsonable: Any,
    tensors: Mapping[str, Tensor],
    *,
    device: Home | None = None,
    elsewhere: Callable[[Elsewhere], Any] | None = None,
) -> Tree:
    """The tree that `flatten` was given; its tensors are views of `tensors`, which may be changed by them.

    Tensors that lay on an accelerator are put on `device`, which may be a function of where each of them lay, such as
    "cuda:1"; None leaves all on the CPU. `elsewhere` gives the tensors that are stored beside the tree.
    Raises CheckpointError where the data are not what `flatten` gives.
    """
    try:
        return _Decoder(tensors, device, elsewhere).value(jsonable)
    except CheckpointError:
        raise
    except (
        *(AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RuntimeError, RecursionError),
        MemoryError,
    ) as error:
        what = "a tree cannot be read: its nodes do not fit its tensors"
        raise CheckpointError(message(what, have=f"{type(error).__name__}: {error}", where=False)) from error


def where(keys: Keys) -> str:
    """A way into a tree as it is written in Python: `state['queue'][3]`."""
    first, *rest = keys or ("tree",)
    name = first if isinstance(first, str) and first.isidentifier() else f"tree[{first!r}]"
    return name + "".join(f"[{key!r}]" for key in rest)


class _Encoder:
    """Collects the tensors while a tree is walked."""

    def __init__(self) -> None:
        self.found: list[views.Found] = []
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
            raise _refused(keys, views.defect(value), fix="x.detach().clone() of it, or leave it out")
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
        """A module's `state_dict`, whose versions lie in an attribute."""
        versions = getattr(value, "_metadata", None)
        node = {"$ordered": self.pairs(value, keys)}
        return node if versions is None else node | {"versions": self.node(versions, (*keys, "_metadata"))}

    def elsewhere(self, value: Elsewhere, _: Keys) -> Any:
        return {"$elsewhere": value.name} | ({"device": value.device} if value.device else {})

    def pairs(self, value: Mapping[Any, Any], keys: Keys) -> Any:
        for key in value:
            if type(key) not in (str, int):
                raise _refused(keys, f"has the key {key!r}, a {_kind(key)}", fix="use a str or an int as the key")
        return [
            [self.integer(key, keys) if type(key) is int else key, self.node(value[key], (*keys, key))] for key in value
        ]

    def tensor(self, value: Tensor, keys: Keys) -> Any:
        if defect := views.defect(value):
            raise _refused(keys, defect)
        found = views.Found(self.name(keys), value, {})
        self.found.append(found)
        return found.node

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
        """A name for a tensor that no other has, and that every reader of the file can decode."""
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
    Elsewhere: _Encoder.elsewhere,
}


class _Decoder:
    """Makes values of nodes; equal nodes of tensors and arrays give one and the same object."""

    def __init__(
        self, tensors: Mapping[str, Tensor], device: Home | None, elsewhere: Callable[[Elsewhere], Any] | None
    ) -> None:
        self._elsewhere = elsewhere
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
            cast(Any, value)._metadata = self.value(node["versions"])
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
                tensors.setdefault(name, self._moved_home(self._tensors[name], node))
            self._seen[key] = views.restore(node, tensors)
        return self._seen[key]

    def elsewhere(self, node: dict[str, Any]) -> Any:
        if self._elsewhere is None:
            raise CheckpointError(f"a tree holds {node['$elsewhere']}, and its tensor is not there")
        value = self._elsewhere(Elsewhere(node["$elsewhere"], node.get("device", "")))
        return self._moved_home(value, node) if isinstance(value, Tensor) else value

    def _moved_home(self, tensor: Tensor, node: dict[str, Any]) -> Tensor:
        """Put a tensor that lay on an accelerator where it belongs now."""
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
    "$elsewhere": _Decoder.elsewhere,
    "$array": _Decoder.array,
}


def _numpy_dtype(text: str) -> np.dtype[Any]:
    """A dtype of plain bytes; anything else (objects are pointers) is refused."""
    if type(text) is not str or not _DTYPE.fullmatch(text):
        raise CheckpointError(f"a tree holds an array of dtype {text!r}, which is never written")
    return np.dtype(text)


def _kind(value: Any) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _cure(value: Any) -> str:
    for kinds, cure in _cures():
        if isinstance(value, kinds):
            return cure
    return "leave it out, or store the plain data that it is made of"


def _cures() -> tuple[tuple[type | tuple[type, ...], str], ...]:
    """What to write instead of a value, by its type; a function, since `numpy.random` is slow to import."""
    return (
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


def _refused(keys: Keys, what: str, *, fix: str = "") -> CheckpointError:
    want = "None, bool, int, float, str, bytes, tensor, ndarray, list, tuple, or a dict with str or int keys"
    return CheckpointError(message(f"{where(keys)} {what}: it cannot be saved", want=want, fix=fix))
