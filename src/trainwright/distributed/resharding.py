"""Checkpoint state of sharded models: selects the pieces that a rank saves, and loads them into any other sharding.

`torch.distributed.checkpoint` (DCP) plans the pieces and loads them. The files are safetensors and JSON, which cannot
execute code on load; DCP's own format contains a pickle.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.futures import Future
from torch.optim import Optimizer

from trainwright.core.errors import CheckpointError
from trainwright.core.torch_private import set_versions, versions_of
from trainwright.core.trees import Keys, NamedParts, parameters_in, path_text
from trainwright.distributed.pieces import LazyTensor, Piece, PieceReader, Placeholder, TensorPieces
from trainwright.distributed.world import World
from trainwright.modules.dtensors import copy_into
from trainwright.protocols import Stateful, Tree


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """A tree of state, split from its sharded tensors."""

    tree: dict[str, Tree]
    """The state, with placeholders for the sharded tensors."""
    tensors: dict[str, Tensor]
    """The local parts that this rank saves, by tensor name; not copied."""
    pieces: dict[str, TensorPieces]
    """Every sharded tensor by name, with the piece that this rank saves, if any."""


def split(tree: Mapping[str, Tree], *, file: str, dtypes: Collection[torch.dtype]) -> Split:
    """Split the sharded tensors from `{part: state}`. `file`: the name of the file for this rank's pieces.

    Tensor names are the same on every rank. CheckpointError for a tensor that cannot be stored; `dtypes`: the dtypes
    that files support.
    """
    found: dict[str, DTensor] = {}

    def take(value: Any, keys: Keys) -> Any:
        if not isinstance(value, DTensor):
            return value
        _check(value, keys, dtypes)
        name = _name(keys, found)
        found[name] = cast(DTensor, value.detach())
        on_cpu = value.device.type == "cpu" or keys[0] == "model"  # the model's `load_state_dict` moves tensors
        return Placeholder(name, "" if on_cpu else value.device.type)

    rest = _walked(dict(tree), (), take)
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(dict(found), is_coordinator=False)
    pieces = {name: TensorPieces(value.dtype, tuple(value.shape), ()) for name, value in found.items()}
    tensors: dict[str, Tensor] = {}
    for item in planner.create_local_plan().items:
        name, chunk = item.index.fqn, cast(Any, item.tensor_data).chunk
        local = planner.resolve_data(item)
        assert isinstance(local, Tensor)
        if local.numel() and _is_first_of_equals(found[name]):
            piece = Piece(file, tuple(chunk.offsets), tuple(chunk.sizes))
            tensors[name], pieces[name] = local, TensorPieces(local.dtype, tuple(found[name].shape), (piece,))
    return Split(rest, tensors, pieces)


def place(
    tree: Mapping[str, Tree],
    parts: Mapping[str, Stateful],
    *,
    world: World,
    likes: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Tree]:
    """Return a loaded `{part: state}` with every tensor sharded as the current one of its part, or complete.

    The loaded tensors are complete, or LazyTensors, of which DCP reads the parts that each rank needs. All ranks call
    this; CheckpointError on all ranks if a file is damaged. Optimizer state is sharded like its parameter. `likes`:
    trees of tensors to shard like, by part, for parts that hold no tensors yet.
    """
    targets: dict[str, Tensor] = {}
    readers: list[PieceReader] = []

    def target(stored: LazyTensor, like: Any) -> Tensor:
        readers[:] = [stored.reader]
        fits = isinstance(like, DTensor) and like.shape == stored.shape
        targets[stored.name] = (
            torch.empty_like(like, dtype=stored.dtype, requires_grad=False)
            if fits
            else torch.empty(stored.shape, dtype=stored.dtype)
        )
        return targets[stored.name]

    def like(name: str, state: Tree) -> Any:
        if name in likes:
            return likes[name]
        return _likes(parts[name], state) if name in parts else None

    placed = {name: _placed(state, like(name, state), target) for name, state in tree.items()}
    if readers:
        _load(targets, readers[0], world)
    return placed


def _load(targets: dict[str, Tensor], reader: PieceReader, world: World) -> None:
    """Fill the targets through DCP; the same CheckpointError on all ranks."""
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    try:
        load(dict(targets), storage_reader=_DcpReader(reader), planner=planner, process_group=world.host)
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        raise CheckpointError(str(first)) from error


class _DcpReader(StorageReader):
    """Reads the pieces of a checkpoint for DCP. Each file is read completely, so that every byte is checked."""

    def __init__(self, reader: PieceReader) -> None:
        self._reader = reader

    def reset(self, checkpoint_id: Any = None) -> None:
        """No-op: there is no state between loads."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the pieces of all tensors as DCP's metadata."""
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=tensor.dtype),
                    torch.Size(tensor.shape),
                    [
                        ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))
                        for piece in tensor.pieces
                    ],
                )
                for name, tensor in self._reader.tensors.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """No-op: the plan holds all that `read_data` needs."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy the pieces of a plan into their targets, file by file."""
        by_file: dict[str, list[Any]] = {}
        for item in plan.items:
            name, offsets = item.storage_index.fqn, tuple(item.storage_index.offset or ())
            piece = next(one for one in self._reader.tensors[name].pieces if one.offsets == offsets)
            by_file.setdefault(piece.file, []).append(item)
        for file in sorted(by_file):
            tensors = self._reader.read(file)
            for item in by_file[file]:
                source = tensors[item.storage_index.fqn]
                for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    source = source.narrow(dim, start, length)
                into = planner.resolve_tensor(item).detach()
                into.copy_(source)
                planner.commit_tensor(item, into)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Return False: a reader belongs to one checkpoint and has no id."""
        return False


@dataclass(frozen=True, slots=True, eq=False)
class _Of:
    """A placeholder for all optimizer state of one parameter: its tensors are sharded like `parameter`."""

    parameter: Tensor


def _likes(part: Any, state: Tree) -> Any:
    """Return a tree with the current tensors of a part, at the paths of the saved ones in `state`."""
    if isinstance(part, Optimizer):
        return {"state": {index: _Of(one) for index, one in enumerate(parameters_in(part))}}
    if isinstance(part, NamedParts) and isinstance(state, Mapping):
        return {name: _likes(one, state.get(name)) for name, one in part.parts.items()}
    return part.state_dict() if isinstance(part, nn.Module) or _holds_pieces(state) else None


def _holds_pieces(state: Tree) -> bool:
    held: list[LazyTensor] = []
    _walked(state, (), lambda value, _: held.append(value) if isinstance(value, LazyTensor) else value)
    return bool(held)


def _placed(saved: Tree, like: Any, target: Callable[[LazyTensor, Any], Tensor]) -> Tree:
    if isinstance(saved, LazyTensor | Tensor):
        alike = like.parameter if isinstance(like, _Of) else like
        if isinstance(saved, LazyTensor):
            return target(saved, alike)
        fits = isinstance(alike, DTensor) and not isinstance(saved, DTensor) and alike.shape == saved.shape
        return _sharded_like(alike, saved) if fits else saved
    if type(saved) in (dict, OrderedDict):
        return _as(saved, [(key, _placed(one, _at(like, key), target)) for key, one in saved.items()])
    if type(saved) in (list, tuple):
        return type(saved)(_placed(one, _at(like, index), target) for index, one in enumerate(saved))
    return saved


def _at(like: Any, key: Any) -> Any:
    """Return the value at a key of a tree; None if there is no such key."""
    if isinstance(like, _Of):
        return like
    if isinstance(like, Mapping):
        return like.get(key)
    return like[key] if isinstance(like, list | tuple) and key < len(like) else None


def _sharded_like(like: Any, complete: Tensor) -> Tensor:
    """Return a complete tensor sharded like another one; each rank copies its part."""
    sharded = torch.empty_like(like, dtype=complete.dtype, requires_grad=False)
    with torch.no_grad():
        copy_into(sharded, complete)
    return sharded


def _walked(value: Any, keys: Keys, take: Callable[[Any, Keys], Any]) -> Any:
    """Return a tree with every leaf replaced by the result of `take`."""
    if type(value) in (dict, OrderedDict):
        return _as(value, [(key, _walked(one, (*keys, key), take)) for key, one in value.items()])
    if type(value) in (list, tuple):
        return type(value)(_walked(one, (*keys, index), take) for index, one in enumerate(value))
    return take(value, keys)


def _as(before: Any, pairs: list[tuple[Any, Any]]) -> Any:
    """Return a dict of the class of `before`, with the version metadata of a module's `state_dict`."""
    after = type(before)(pairs)
    if (versions := versions_of(before)) is not None:
        set_versions(after, versions)
    return after


def _is_first_of_equals(tensor: DTensor) -> bool:
    """Return whether this rank saves its part: of ranks with equal parts only the first one does."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    return not any(
        at and isinstance(placement, Replicate) for at, placement in zip(coordinate, tensor.placements, strict=True)
    )


def _check(tensor: DTensor, keys: Keys, dtypes: Collection[torch.dtype]) -> None:
    what = ""
    if not all(type(placement) in (Shard, Replicate) for placement in tensor.placements):
        what = f"is placed as {tensor.placements}; only shards and copies are stored"
    elif tensor.dtype not in dtypes:
        what = f"has dtype {tensor.dtype}, which a safetensors file cannot hold"
    elif tensor.grad_fn is not None:
        what = "belongs to a graph; store its .detach()"
    if what:
        raise CheckpointError(f"{path_text(keys)} {what}: it cannot be saved", where=True)


def _name(keys: Keys, taken: Mapping[str, Any]) -> str:
    plain = ".".join(str(key) for key in keys).encode("utf-8", "backslashreplace").decode()
    name, n = plain, 1
    while name in taken:
        n += 1
        name = f"{plain}~{n}"
    return name
