"""State that differs between ranks (random states, statistics, rows), and state that rank 0 broadcasts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from trainwright.core.plan import Plan
from trainwright.core.rng import random_state, rng_preserved, seed, set_random_state
from trainwright.core.torch_private import BatchNorm, versions_preserved
from trainwright.core.trees import parameters_in
from trainwright.distributed.mesh import Shard, Slice
from trainwright.distributed.world import World, packed, unpacked
from trainwright.modules.dtensors import is_sharded, reshard
from trainwright.modules.modes import running_statistics
from trainwright.protocols import Tree
from trainwright.update.trainer_like import TrainerLike, networks_of

if TYPE_CHECKING:
    from trainwright.data.source import Source
    from trainwright.update.loss_tracker import LossTracker

PROCESSES = "processes"
"""The part of a checkpoint with the separate states of several ranks."""


def assign_shard(trainer: TrainerLike, *sources: Source) -> None:
    """Assign each source the rows of this rank; DataError for one that cannot be sharded."""
    for source in sources:
        source.shard(_part(trainer))


@contextmanager
def rng_of_rank0(world: World, generators: Sequence[Any] = ()) -> Iterator[None]:
    """Set the random state of rank 0 on all ranks inside the block, in which the order of the data is drawn.

    At the end, other ranks continue with their earlier state. `generators` (those of the data) are set as on rank 0,
    and not restored.
    """
    own = random_state()
    state, states = world.broadcast((own, [generator.get_state() for generator in generators]))
    if world.is_main:
        yield
        return
    set_random_state(state)
    for generator, one in zip(generators, states, strict=True):
        generator.set_state(one)
    try:
        yield
    finally:
        set_random_state(own)


def epoch_batches(world: World, source: Source, epoch: int, *, skip: int = 0) -> Iterator[Any]:
    """Return the batches of an epoch; all ranks draw its order from the random state of rank 0."""
    if world.size == 1:
        return iter(source.epoch(epoch, skip) if skip else source.epoch(epoch))
    with rng_of_rank0(world, list(source.generators)):
        return iter(source.epoch(epoch, skip))


def describe_ranks(trainer: TrainerLike, plan: Plan, *, apart: bool) -> list[str]:
    """Return the lines of the header on several ranks. `apart`: whether each rank reads separate batches."""
    world: Any = trainer.world
    size = None if plan.batch_size is None else plan.batch_size * (world.mesh.data if apart else 1)
    rows = "" if size is None else f": {_part(trainer).layout_text(size)} rows in a micro-batch"
    by = f"{world.size} processes by {type(trainer.parallel).__name__} on {world.backend}{rows}"
    late = 'on_error="save" saves nothing here: of several processes the others are somewhere else'
    return [by, late] if trainer.on_error == "save" else [by]


def complete_batches(trainer: TrainerLike, source: Source) -> Iterator[Any]:
    """Return the complete batches of a pass, the same on every rank; for a sharded stream, those of this rank."""
    return iter(source.epoch(0)) if trainer.world.size == 1 else _complete_on_each_rank(trainer, cast(Any, source))


def _complete_on_each_rank(trainer: TrainerLike, source: Any) -> Iterator[Any]:
    source.shard(Shard(0, 1))
    try:
        for one in epoch_batches(trainer.world, source, 0):
            yield one.batch
    finally:
        source.shard(_part(trainer))  # a custom source is not copied: training continues with it


def shard_batches(trainer: TrainerLike, source: Source, tracker: LossTracker) -> Iterator[Any]:
    """Yield this rank's slices of the batches of an evaluation; dummies only for a sharded model."""
    shards = trainer.parallel.shards
    slices = epoch_batches(trainer.world, source, 0)
    if shards and source.length is None:
        slices = equally_long(trainer.world, slices)
    for one in slices:
        tracker.recording = one.rows != 0
        if tracker.recording or shards:
            yield one.batch


def equally_long(world: World, own: Iterator[Slice]) -> Iterator[Slice]:
    """Yield the batches of a stream, then its last batch as a dummy until the streams of all ranks have ended."""
    last: Slice | None = None
    while True:
        found = next(own, None)
        have, lack = world.sum_numbers(found is not None, found is None and last is None)
        if not have:
            return
        if lack:  # a rank without any batch uses that of another rank
            firsts = world.all_gather(None if found is None else packed(found))
            last = unpacked(next(first for first in firsts if first is not None)) if last is None else last
        last = found if found is not None else last
        assert last is not None
        yield last if found is not None else last._replace(rows=0)


@contextmanager
def rank0_buffers(trainer: TrainerLike) -> Iterator[None]:
    """Set the buffers of rank 0 on all ranks inside the block, so that all evaluate the same model."""
    buffers = _unsharded(trainer.model.buffers())
    copies = [buffer.detach().clone() for buffer in buffers]
    with versions_preserved(buffers):
        trainer.world.broadcast_tensors(buffers)
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in zip(buffers, copies, strict=True):
                    buffer.copy_(before)


@contextmanager
def among_ranks(trainer: TrainerLike) -> Iterator[None]:
    """Watch the other ranks, and draw separate random numbers on each rank, inside the block of a run."""
    world = trainer.world
    if trainer.parallel.shards:
        from trainwright.distributed.fsdp import recover

        recover(trainer.model)
    if world.size == 1:
        yield
        return
    from trainwright.distributed.ddp import DDP

    same_noise = isinstance(trainer.parallel, DDP) and trainer.parallel.same_noise
    with world.watch(partial(position_text, trainer)), per_rank_noise(world, same=same_noise):
        yield


def position_text(trainer: TrainerLike) -> str:
    """Return the position of this rank in the run as text, for messages of other ranks."""
    counters = trainer._counters
    done = bool(counters.stopped) and not counters.batch  # the run has ended: the current epoch never starts
    epoch = counters.earlier_epochs + counters.epoch + (0 if done else 1)
    return f"epoch {epoch}, after update {counters.earlier_updates + counters.updates}"


@contextmanager
def per_rank_noise(world: World, *, same: bool) -> Iterator[None]:
    """Derive a separate random state for each rank from that of rank 0 inside the block.

    A run with the same seed and number of ranks draws the same numbers again. With `same`, all ranks use the state of
    rank 0. At the end, all ranks get the state of rank 0; after an error, their earlier state.
    """
    before = random_state()
    first = world.broadcast(before)
    set_random_state(first if same else derived_rng(first, world.rank))
    try:
        yield
    except BaseException:
        set_random_state(before)
        raise
    set_random_state(world.broadcast(random_state()))


def derived_rng(state: dict[str, Any], rank: int) -> dict[str, Any]:
    """Return the random state of a rank, derived from that of rank 0; for rank 0, its state unchanged."""
    if not rank:
        return state
    digest = hashlib.sha256(state["torch"].numpy().tobytes() + rank.to_bytes(4, "little")).digest()
    with rng_preserved():
        seed(int.from_bytes(digest[:4], "little"))
        return random_state()


def rank_state(trainer: TrainerLike, *, random: Tree, data: Tree) -> Tree:
    """Return the state of this rank: random states, normalization statistics, position in the data, user parts."""
    return {
        "random": random,
        "statistics": {name: one.detach().clone() for name, one in _statistics(trainer).items()},
        "data": data,
        "parts": {name: part.state_dict() for name, part in _each(trainer).items()},
    }


def take_rank_state(trainer: TrainerLike, tree: dict[str, Tree]) -> tuple[Tree | None, int]:
    """Remove the states of all ranks from a loaded checkpoint; return that of this rank and their number.

    None if the number of ranks has changed: all ranks then use the state of rank 0, with derived random states.
    """
    each: list[Tree] = tree.pop(PROCESSES, None) or []
    world = trainer.world
    number = max(1, len(each))
    own = each[world.rank] if world.size > 1 and number == world.size else None
    if own is not None:
        tree |= {**own["parts"], "data": own["data"]}
    if world.rank:
        now = derived_rng(tree["random"]["now"], world.rank) if own is None else own["random"]
        tree["random"] = {**tree["random"], "now": now}
    return own, number


def load_rank_state(trainer: TrainerLike, own: Tree | None) -> None:
    """Load the state of this rank, after the common parts."""
    if trainer.world.rank:
        trainer._tracker.reset()  # rank 0 has loaded the sums of all ranks
    if own is not None:
        for name, statistic in _statistics(trainer).items():
            statistic.copy_(own["statistics"][name])


def _each(trainer: TrainerLike) -> dict[str, Any]:
    """Return the user's parts that every rank saves separately (`each_process`)."""
    return {name: part for name, part in trainer.parts().items() if getattr(part, "each_process", False)}


def refresh_shards(trainer: TrainerLike) -> None:
    """Free the gathered weights of a sharded model, and update its set of trained parameters."""
    from trainwright.distributed.fsdp import retake

    reshard(trainer.model.modules())
    retake(trainer.model)


def broadcast_buffers(trainer: TrainerLike) -> None:
    """Broadcast the buffers of rank 0, so that all ranks evaluate, save and return the same model."""
    trainer.world.broadcast_tensors(_unsharded(trainer.model.buffers()))


def broadcast_weights(trainer: TrainerLike) -> None:
    """Broadcast the weights and buffers of rank 0: model, loss, frozen modules, and other trained parameters."""
    tensors = [tensor for module in networks_of(trainer) for tensor in (*module.parameters(), *module.buffers())]
    tensors += parameters_in(*trainer.optimizers.values())
    trainer.world.broadcast_tensors({id(one): one for one in _unsharded(tensors)}.values())


def _unsharded(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors that are not sharded."""
    return [one for one in tensors if not is_sharded(one)]


def _statistics(trainer: TrainerLike) -> dict[str, Tensor]:
    """Return the running statistics by name, since a resumed model may register its layers in another order."""
    ids = {id(one) for one in running_statistics(trainer.model)}
    return {name: buffer for name, buffer in trainer.model.named_buffers() if id(buffer) in ids}


def _part(trainer: TrainerLike) -> Shard:
    mesh = trainer.world.mesh
    return Shard(mesh.rank, mesh.data, least=2 if _normalizes_rows(trainer) else 1)


def _normalizes_rows(trainer: TrainerLike) -> bool:
    """Return whether a layer in train mode normalizes over rows, and so fails on a slice of one row.

    A model with all modules in eval mode counts too, since `fit` switches it to train mode.
    """
    in_eval_mode = not any(module.training for module in trainer.model.modules())
    return any(
        isinstance(module, BatchNorm) and not isinstance(module, nn.SyncBatchNorm)
        for module in trainer.model.modules()
        if module.training or in_eval_mode
    )
