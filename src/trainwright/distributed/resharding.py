"""Checkpoints of sharded models: which boxes of which tensors a process writes, and where what was saved belongs now.

What is to be written is planned by `torch.distributed.checkpoint` (DCP), and DCP loads it into any other sharding; the
files between are safetensors and JSON, of which no byte can run: DCP's own format has a pickle.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
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

from trainwright.checkpointing import tensorfile
from trainwright.checkpointing.pieces import Piece, Pieces, Stored, Whole
from trainwright.checkpointing.tree import Elsewhere, Keys, where
from trainwright.core.errors import CheckpointError
from trainwright.core.trees import parameters_in
from trainwright.distributed.world import World
from trainwright.modules.dtensors import put
from trainwright.protocols import Stateful, Tree


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """A tree, and beside it the tensors of which this process holds a part only."""

    tree: dict[str, Tree]
    """It names the sharded tensors."""
    tensors: dict[str, Tensor]
    """What of them this process has to write, by name; not copied."""
    wholes: dict[str, Whole]
    """All of them, each with the pieces that this process writes: one, or none."""


def split(tree: Mapping[str, Tree], *, file: str) -> Split:
    """Take the sharded tensors out of `{part: state}`; `file`: where this process will write its pieces.

    The same names on every process. CheckpointError names a tensor that cannot be stored.
    """
    found: dict[str, DTensor] = {}

    def take(value: Any, keys: Keys) -> Any:
        if not isinstance(value, DTensor):
            return value
        _check(value, keys)
        name = _name(keys, found)
        found[name] = cast(DTensor, value.detach())
        on_cpu = value.device.type == "cpu" or keys[0] == "model"  # a model's own loading moves it
        return Elsewhere(name, "" if on_cpu else value.device.type)

    kept = _walked(dict(tree), (), take)
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(dict(found), is_coordinator=False)
    wholes = {name: Whole(value.dtype, tuple(value.shape), ()) for name, value in found.items()}
    tensors: dict[str, Tensor] = {}
    for item in planner.create_local_plan().items:
        name, chunk = item.index.fqn, cast(Any, item.tensor_data).chunk
        local = planner.resolve_data(item)
        assert isinstance(local, Tensor)
        if local.numel() and _is_first_of_equals(found[name]):
            piece = Piece(file, tuple(chunk.offsets), tuple(chunk.sizes))
            tensors[name], wholes[name] = local, Whole(local.dtype, tuple(found[name].shape), (piece,))
    return Split(kept, tensors, wholes)


def place(
    tree: Mapping[str, Tree],
    parts: Mapping[str, Stateful],
    *,
    world: World,
    likes: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Tree]:
    """Give every tensor of a loaded `{part: state}` the form that its part has now: sharded as there, or whole.

    For trees of whole tensors and for such whose tensors are still in files, which DCP reads: each process what it
    needs. All processes call it alike; CheckpointError on all where a file is damaged. An optimizer's state of a
    sharded parameter is sharded like it. `likes`: trees of tensors, by part, for parts that hold no tensors yet.
    """
    targets: dict[str, Tensor] = {}
    pieces: list[Pieces] = []

    def target(stored: Stored, like: Any) -> Tensor:
        pieces[:] = [stored.pieces]
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
    if pieces:
        _load(targets, pieces[0], world)
    return placed


def _load(targets: dict[str, Tensor], pieces: Pieces, world: World) -> None:
    """Have DCP fill the targets; one error for all processes."""
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    group = getattr(world, "host", None)
    try:
        load(dict(targets), storage_reader=_Reader(pieces), planner=planner, process_group=group)
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        raise CheckpointError(str(first)) from error


class _Reader(StorageReader):
    """Gives DCP the pieces of a checkpoint; a file is read as a whole, so that each of its bytes is checked."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept between loads."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The list of the pieces in DCP's words."""
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=whole.dtype),
                    torch.Size(whole.shape),
                    [
                        ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))
                        for piece in whole.pieces
                    ],
                )
                for name, whole in self._pieces.wholes.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing is to be set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what is asked for into its places, file by file."""
        by_file: dict[str, list[Any]] = {}
        for item in plan.items:
            name, offsets = item.storage_index.fqn, tuple(item.storage_index.offset or ())
            piece = next(one for one in self._pieces.wholes[name].pieces if one.offsets == offsets)
            by_file.setdefault(piece.file, []).append(item)
        for file in sorted(by_file):
            tensors = self._pieces.read(file)
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
        """It is made for one checkpoint, and asked for none."""
        return False


@dataclass(frozen=True, slots=True, eq=False)
class _Of:
    """Stands for all state that an optimizer keeps for one parameter."""

    parameter: Tensor


def _likes(part: Any, state: Tree) -> Any:
    """A tree with tensors as a part has them now, where those of its saved `state` belong."""
    if isinstance(part, Optimizer):
        return {"state": {index: _Of(one) for index, one in enumerate(parameters_in(part))}}
    named: Any = getattr(part, "parts", None)
    if isinstance(named, Mapping) and isinstance(state, Mapping):
        return {name: _likes(one, state.get(name)) for name, one in named.items()}
    return part.state_dict() if isinstance(part, nn.Module) or _holds_pieces(state) else None


def _holds_pieces(state: Tree) -> bool:
    held: list[Stored] = []
    _walked(state, (), lambda value, _: held.append(value) if isinstance(value, Stored) else value)
    return bool(held)


def _placed(saved: Tree, like: Any, target: Callable[[Stored, Any], Tensor]) -> Tree:
    if isinstance(saved, Stored | Tensor):
        alike = like.parameter if isinstance(like, _Of) else like
        if isinstance(saved, Stored):
            return target(saved, alike)
        fits = isinstance(alike, DTensor) and not isinstance(saved, DTensor) and alike.shape == saved.shape
        return _spread(saved, alike) if fits else saved
    if type(saved) in (dict, OrderedDict):
        return _as(saved, [(key, _placed(one, _at(like, key), target)) for key, one in saved.items()])
    if type(saved) in (list, tuple):
        return type(saved)(_placed(one, _at(like, index), target) for index, one in enumerate(saved))
    return saved


def _at(like: Any, key: Any) -> Any:
    """What lies at a key of a tree that may have no such key."""
    if isinstance(like, _Of):
        return like
    if isinstance(like, Mapping):
        return like.get(key)
    return like[key] if isinstance(like, list | tuple) and key < len(like) else None


def _spread(whole: Tensor, like: Any) -> Tensor:
    """A whole tensor as one that is sharded like another; each process keeps its part."""
    spread = torch.empty_like(like, dtype=whole.dtype, requires_grad=False)
    with torch.no_grad():
        put(spread, whole)
    return spread


def _walked(value: Any, keys: Keys, take: Callable[[Any, Keys], Any]) -> Any:
    """A tree in which every leaf is replaced by what `take` makes of it."""
    if type(value) in (dict, OrderedDict):
        return _as(value, [(key, _walked(one, (*keys, key), take)) for key, one in value.items()])
    if type(value) in (list, tuple):
        return type(value)(_walked(one, (*keys, index), take) for index, one in enumerate(value))
    return take(value, keys)


def _as(before: Any, pairs: list[tuple[Any, Any]]) -> Any:
    """A dict of the kind of another one; a module's `state_dict` keeps its versions."""
    after = type(before)(pairs)
    if hasattr(before, "_metadata"):
        after._metadata = before._metadata
    return after


def _is_first_of_equals(tensor: DTensor) -> bool:
    """Whether this process is to write its part: of those that hold the same one only the first does."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    return not any(
        at and isinstance(placement, Replicate) for at, placement in zip(coordinate, tensor.placements, strict=True)
    )


def _check(tensor: DTensor, keys: Keys) -> None:
    what = ""
    if not all(type(placement) in (Shard, Replicate) for placement in tensor.placements):
        what = f"is placed as {tensor.placements}; only shards and copies are stored"
    elif tensor.dtype not in tensorfile.TAGS:
        what = f"has dtype {tensor.dtype}, which a safetensors file cannot hold"
    elif tensor.grad_fn is not None:
        what = "belongs to a graph; store its .detach()"
    if what:
        raise CheckpointError(f"{where(keys)} {what}: it cannot be saved", where=True)


def _name(keys: Keys, taken: Mapping[str, Any]) -> str:
    plain = ".".join(str(key) for key in keys).encode("utf-8", "backslashreplace").decode()
    name, n = plain, 1
    while name in taken:
        n += 1
        name = f"{plain}~{n}"
    return name
