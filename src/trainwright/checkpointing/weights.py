"""Writes the weights of a model to one safetensors file, with tied tensors stored once, and loads them into a model."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from trainwright.checkpointing import tensorfile
from trainwright.checkpointing.files import FileReader, replace_file
from trainwright.checkpointing.tree import DEFECTS, loads, plain_data, tensor_defect
from trainwright.core.checks import local_path
from trainwright.core.errors import CheckpointError, SettingError, listed, message, warn_user
from trainwright.core.torch_private import set_versions, versions_of
from trainwright.distributed.pieces import LazyTensor
from trainwright.modules.dtensors import copy_into, is_sharded, local_shards, on_all_ranks

TIED, EXTRA, VERSIONS = "trainwright.tied", "trainwright.extra", "trainwright.versions"
"""Keys of the file's metadata: further names of tied tensors, extra state without tensors, module versions."""
FROZEN, SAMPLE = "trainwright.frozen", 64
"""The metadata key of omitted frozen weights, and the number of elements of each that are compared."""
LISTED = 10
"""Maximum number of names in an error."""


class PartialWeights(OrderedDict[str, Any]):
    """A state dict without the frozen weights, of `Checkpoint(trainable_only=True)`."""

    frozen: Mapping[str, str] = {}
    """Name -> fingerprint of the omitted frozen weights."""


def without_frozen(state: Mapping[str, Any], frozen: Collection[str]) -> PartialWeights:
    """Return a state dict without the tensors of these names, but with their fingerprints."""
    partial_weights = PartialWeights({name: value for name, value in state.items() if name not in frozen})
    partial_weights.frozen = {name: _fingerprint(state[name]) for name in state if name in frozen}
    set_versions(partial_weights, versions_of(state))
    return partial_weights


def completed(weights: PartialWeights, model: nn.Module, *, source: str) -> tuple[OrderedDict[str, Any], list[str]]:
    """Return the weights, completed by the model's frozen ones, and the names of those that differ from the saved run.

    CheckpointError if the model lacks an omitted weight.
    """
    have = model.state_dict()
    missing = [name for name in weights.frozen if not isinstance(have.get(name), Tensor)]
    if missing:
        raise CheckpointError(
            f"{source} holds the trainable weights alone, and this {type(model).__name__} lacks frozen ones of its run",
            have=f"no {listed(missing, LISTED)}",
            fix="build the model as when it was saved, and load its frozen weights",
        )
    complete = OrderedDict({**{name: have[name] for name in weights.frozen}, **weights})
    set_versions(complete, versions_of(weights))
    return complete, [name for name, saved in weights.frozen.items() if _fingerprint(have[name]) != saved]


def other_frozen(names: Sequence[str], *, source: str) -> str:
    """Return the message on frozen weights that differ from those of the saved run."""
    several = f"{len(names)} frozen weights differ" if len(names) > 1 else "a frozen weight differs"
    return f"{source} holds the trainable weights alone, and {several} from those of its run: {listed(names, 5)}"


def _fingerprint(tensor: Tensor) -> str:
    """Return dtype, shape and a checksum of `SAMPLE` evenly spaced elements of a tensor, as text."""
    if is_sharded(tensor):
        return ""
    flat = tensor.detach().reshape(-1)
    sample = flat[:: max(1, len(flat) // SAMPLE)][:SAMPLE].cpu().contiguous()
    return f"{tensor.dtype} {tuple(tensor.shape)} {crc32(sample.view(torch.uint8).numpy().tobytes()):08x}"


def save_weights(path: str | Path, state_dict: Mapping[str, Any]) -> None:
    """Write a `state_dict` to one safetensors file. The file is complete or absent; tied tensors are stored once.

    Only the owner can read the file. Missing parent directories are created.

    Args:
        path: The file.
        state_dict: Tensors by name.
    """
    if not isinstance(state_dict, Mapping):
        what = f"save_weights({type(path).__name__}, {type(state_dict).__name__})"
        fix = 'save_weights("model.safetensors", model.state_dict())'
        raise TypeError(message(what, want="a path and a state_dict", fix=fix))
    path = local_path(path, "save_weights({}, ...)", file=True)
    contents = weights_contents(state_dict)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{path} could not be written", have=str(error)) from error
    replace_file(path, contents)


def weights_contents(state: Mapping[str, Any]) -> tensorfile.Contents:
    """Return the file of a `state_dict`, without a copy. CheckpointError names a value that cannot be saved."""
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    for name, tensor in tensors.items():
        _check_storable(name, tensor)
    ties = _ties(tensors)
    metadata = {"format": "pt"}
    if ties:
        metadata[TIED] = json.dumps(ties)
    if extra := {name: value for name, value in state.items() if name not in tensors}:
        metadata[EXTRA] = _extra_text(extra)
    if isinstance(state, PartialWeights):
        metadata[FROZEN] = json.dumps(dict(state.frozen))
    if versions := versions_of(state):
        metadata[VERSIONS] = json.dumps(plain_data(dict(versions))[0])
    once = {name: tensor for name, tensor in tensors.items() if name not in ties}
    return tensorfile.Contents(once, metadata)


def _check_storable(name: str, tensor: Tensor) -> None:
    what = tensor_defect(tensor) or _expanded(tensor)
    if not what and tensor.dtype not in tensorfile.TAGS:
        what = f"has dtype {tensor.dtype}, which a safetensors file cannot hold"
    if what:
        raise CheckpointError(f"model[{name!r}] {what}", want="dense tensors of a dtype that files have")


def _expanded(tensor: Tensor) -> str:
    """Return the defect of an expanded tensor. torch cannot copy into it: its elements share memory."""
    shares = any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return "is expanded, so that several of its elements share their memory; store .clone() of it" if shares else ""


def _extra_text(extra: Mapping[str, Any]) -> str:
    """Return extra state without tensors as JSON."""
    plain, nested = plain_data({"model": dict(extra)})
    if nested:
        what = f"the model's extra state holds a tensor inside another value: {nested[0]}"
        raise CheckpointError(what, fix="return a tensor, or plain data, from get_extra_state()")
    return json.dumps(plain["model"])


def read_weights(file: FileReader, *, fill: bool = True, model: nn.Module | None = None) -> OrderedDict[str, Any]:
    """Return the `state_dict` in a file of weights, on the CPU. Reads files of other writers too.

    `fill`: False returns tensors without values. `model`: CheckpointError, before the tensors are read, if a shape
    differs from that of this model.
    """
    check = None if model is None else partial(_check_shapes, model, file.label)
    contents = tensorfile.read(file, fill=fill, check=check)
    is_partial = FROZEN in contents.metadata
    weights = PartialWeights(contents.tensors) if is_partial else OrderedDict[str, Any](contents.tensors)
    try:
        if isinstance(weights, PartialWeights):
            weights.frozen = _read_frozen(contents.metadata[FROZEN])
        ties = json.loads(contents.metadata.get(TIED, "{}"))
        weights.update({name: contents.tensors[original] for name, original in ties.items()})
        weights.update(loads(contents.metadata.get(EXTRA, "{}"), {}))
        if VERSIONS in contents.metadata:
            set_versions(weights, OrderedDict(loads(contents.metadata[VERSIONS], {})))
    except DEFECTS as error:
        raise CheckpointError(f"{file.label} is damaged: its metadata cannot be read ({error!r})") from error
    return weights


def _read_frozen(text: str) -> dict[str, str]:
    frozen = json.loads(text)
    if not isinstance(frozen, dict) or not all(isinstance(value, str) for value in frozen.values()):
        raise ValueError(f"{FROZEN} is no dict of texts")
    return frozen


def load_into(model: nn.Module, weights: Mapping[str, Any], *, source: str) -> None:
    """Load weights into a model. CheckpointError, and no change, if names or shapes differ.

    For a sharded model every rank passes the same complete weights, and loads its shard.
    """
    have = model.state_dict()
    empty = [name for name, tensor in have.items() if isinstance(tensor, Tensor) and tensor.is_meta]
    if empty:  # torch would copy into meta tensors without an error, and load nothing
        what = f"{source} cannot be loaded: {listed(empty, LISTED)} of this {type(model).__name__} have no data"
        fix = 'model.to_empty(device="cpu") before load_weights(path, model)'
        raise SettingError(what, have="tensors on the meta device", fix=fix)
    given: OrderedDict[str, Any] = OrderedDict(weights)
    set_versions(given, versions_of(weights))
    if isinstance(weights, PartialWeights):
        given, differing = completed(weights, model, source=source)
        if differing:
            warn_user(other_frozen(differing, source=source))
    tensors = {name: value for name, value in have.items() if isinstance(value, Tensor)}
    differ = _complete_ties(tensors, given, ties=_ties_of(model, tensors))
    lines = {
        "missing": [name for name in have if name not in given],
        "not used": [name for name in given if name not in have],
        "shape": [shape_difference(name, given[name], have[name]) for name in have if name in given],
        "tied": differ,
    }
    wrong = {label: [name for name in names if name] for label, names in lines.items()}
    if any(wrong.values()):
        raise _misfit(model, source, wrong)
    for name, tensor in tensors.items():
        if is_sharded(tensor) and not is_sharded(given[name]):
            complete, given[name] = given[name], torch.empty_like(tensor)
            with torch.no_grad():
                copy_into(given[name], complete)
    model.load_state_dict(given)


def _ties_of(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return further name -> first name of a model's tied tensors. Sharded ones are compared by parameter."""
    plain = {name: tensor for name, tensor in tensors.items() if not is_sharded(tensor)}
    ties = _ties(plain)
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False) if len(plain) < len(tensors) else ():
        if name in tensors and name not in plain and (original := first.setdefault(id(parameter), name)) != name:
            ties[name] = original
    return ties


def _ties(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return further name -> first name of tied tensors."""
    first: dict[Any, str] = {}
    ties = {}
    for name, tensor in tensors.items():
        layout = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        if tensor.numel() and (original := first.setdefault(layout, name)) != name:
            ties[name] = original
    return ties


def _complete_ties(have: Mapping[str, Tensor], given: dict[str, Any], *, ties: Mapping[str, str]) -> list[str]:
    """Add missing names of tied tensors to the given weights; return ties with differing given values."""
    groups: dict[str, list[str]] = {}
    for name in have:
        groups.setdefault(ties.get(name, name), []).append(name)
    differ = []
    for names in groups.values():
        known = [name for name in names if name in given]
        for name in names if known else ():
            given.setdefault(name, given[known[0]])
        differ += [f"{known[0]} and {name}" for name in known[1:] if not _equal(given[known[0]], given[name])]
    return differ


def _equal(first: Any, second: Any) -> bool:
    return first is second or (torch.is_tensor(first) and torch.is_tensor(second) and _same_bytes(first, second))


def _same_bytes(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors have equal bytes; NaN equals itself."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    if is_sharded(first) and is_sharded(second):  # the same answer on all ranks, which load or refuse together
        return on_all_ranks(_same_bytes(*local_shards([first, second])), [first])
    raw = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (first, second)]
    return torch.equal(*raw)


def _check_shapes(model: nn.Module, source: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError if tensors of a file differ in shape from those of the model."""
    have = model.state_dict()
    tensors = {name: value for name, value in have.items() if isinstance(value, Tensor)}
    given = {name: torch.empty(shape, device="meta") for name, shape in shapes.items() if name in have}
    wrong = [text for name, tensor in given.items() if (text := shape_difference(name, tensor, have[name]))]
    if not wrong:
        return
    ties = _ties_of(model, tensors)
    lines = {
        "missing": [name for name in tensors if name not in shapes and ties.get(name, name) not in shapes],
        "not used": [name for name in shapes if name not in have],
        "shape": wrong,
    }
    raise _misfit(model, source, lines)


def _misfit(model: nn.Module, source: str, lines: Mapping[str, list[str]]) -> CheckpointError:
    """Return the error that lists the tensors of a file that do not fit a model."""
    text = "\n".join(f"  {label:<9}{listed(names, LISTED)}" for label, names in lines.items() if names)
    return CheckpointError(f"{source} does not fit this {type(model).__name__}; nothing was loaded\n{text}", where=True)


def shape_difference(name: str, given: Any, have: Any) -> str:
    """Return text on the difference in shape between a given value and the model's tensor; empty if none."""
    if not isinstance(have, Tensor) or nn.parameter.is_lazy(have):
        return ""
    if not isinstance(given, Tensor | LazyTensor):
        return f"{name} is a {type(given).__name__}, the model's is a tensor"
    shape = tuple(given.shape)
    return "" if shape == tuple(have.shape) else f"{name} {shape}, the model's is {tuple(have.shape)}"
