"""What each process of a run has of its own: its noise, its statistics, its part of the data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from trainwright.core.errors import DataError, message
from trainwright.core.plan import Plan
from trainwright.core.rng import random_state, seed, set_random_state, unmoved
from trainwright.core.trees import parameters_in
from trainwright.distributed.batch_layout import Shard
from trainwright.distributed.world import World
from trainwright.modules.dtensors import is_sharded, reshard
from trainwright.modules.modes import running_statistics, unnoticed
from trainwright.protocols import Source, Tree
from trainwright.update.owner import Owner, networks_of

if TYPE_CHECKING:
    from trainwright.update.loss_tracker import Ledger

PROCESSES = "processes"
"""The part of a checkpoint that holds what each of several processes has of its own."""


def deal(owner: Owner, source: Source) -> Source:
    """Have a source give each of several processes its part; DataError for one that cannot."""
    world = owner.world
    if world.size == 1:
        return source
    give: Any = getattr(source, "deal", None)
    if give is None:
        raise DataError(
            message(
                f"{type(source).__name__} is a source of your own without deal(), and there are {world.size} processes",
                want="deal(self, part): from then on epoch() yields Slice(batch, rows, whole)",
                fix="batches(...), a DataLoader, or sharded(...) for data that are each process's own part",
            )
        )
    give(_part(owner))
    return source


@contextmanager
def as_on_the_first(world: World, generators: Sequence[Any] = ()) -> Iterator[None]:
    """The random state of the first process inside, on all of them: what is drawn there is the order of the data.

    Afterwards the others draw on where they were; `generators`, the data's own, stay where this leaves them.
    """
    if world.size == 1:
        yield
        return
    own = random_state()
    state, states = world.same((own, [generator.get_state() for generator in generators]))
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


def opened(world: World, source: Source, epoch: int, *, skip: int = 0) -> Iterator[Any]:
    """The batches of an epoch; several processes draw its order from the random state of the first one."""
    if world.size == 1:
        return iter(source.epoch(epoch, skip) if skip else source.epoch(epoch))
    with as_on_the_first(world, list(getattr(source, "generators", ()))):
        return iter(source.epoch(epoch, skip))


def shared_out(owner: Owner, plan: Plan, *, apart: bool) -> list[str]:
    """What the header says of several processes; nothing of one. `apart`: each reads batches of its own."""
    world: Any = owner.world
    if world.size == 1:
        return []
    whole = None if plan.batch_size is None else plan.batch_size * (world.size if apart else 1)
    rows = "" if whole is None else f": {_part(owner).told(whole)} rows in a micro-batch"
    by = f"{world.size} processes by {type(owner.parallel).__name__} on {world.backend}{rows}"
    late = 'on_error="save" saves nothing here: of several processes the others are somewhere else'
    return [by, late] if owner.on_error == "save" else [by]


def undealt(owner: Owner, source: Source) -> Iterator[Any]:
    """The whole batches of a pass, on every process alike; of a stream that is its own part those of each."""
    return iter(source.epoch(0)) if owner.world.size == 1 else _wholly(owner, cast(Any, source))


def _wholly(owner: Owner, source: Any) -> Iterator[Any]:
    source.deal(Shard(0, 1))
    try:
        for one in opened(owner.world, source, 0):
            yield one.batch
    finally:
        source.deal(_part(owner))  # a source of the user's own is no copy: training goes on with it


def own_batches(owner: Owner, source: Source, ledger: Ledger) -> Iterator[Any]:
    """The batches of an evaluation that have rows of this process; those that stand in only where all must run."""
    shards = owner.parallel.shards
    slices = opened(owner.world, source, 0)
    if shards and source.length is None:
        from trainwright.evaluation.predictions import in_step

        slices = in_step(owner.world, slices)
    for one in slices:
        ledger.noting = one.rows != 0
        if ledger.noting or shards:
            yield one.batch


@contextmanager
def same_buffers(owner: Owner) -> Iterator[None]:
    """The first process's buffers inside, on all of them: every one evaluates the same model."""
    buffers = _whole(owner.model.buffers())
    kept = [buffer.detach().clone() for buffer in buffers]
    with unnoticed(buffers):
        owner.world.align(buffers)
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in zip(buffers, kept, strict=True):
                    buffer.copy_(before)


@contextmanager
def beside_others(owner: Owner) -> Iterator[None]:
    """A run beside those of other processes: watched over, with noise of its own."""
    world = owner.world
    if owner.parallel.shards:
        from trainwright.distributed.fsdp import recover

        recover(owner.model)
    if world.size == 1:
        yield
        return
    same = getattr(owner.parallel, "same_noise", False)
    with world.watched(partial(standing, owner)), noise_of_its_own(world, same=same):
        yield


def standing(owner: Owner) -> str:
    """Where this process stands, for the others."""
    counters = owner.counters
    done = bool(counters.stopped) and not counters.batch  # the epoch in hand is one that no longer comes
    epoch = counters.earlier_epochs + counters.epoch + (0 if done else 1)
    return f"epoch {epoch}, after update {counters.earlier_updates + counters.updates}"


@contextmanager
def noise_of_its_own(world: World, *, same: bool) -> Iterator[None]:
    """Have every process but the first draw numbers of its own inside; afterwards all draw what the first does.

    The stream follows from the random state that was found: seeded alike, a run of as many processes draws the same
    again. With `same` all draw what the first draws. After an error each goes on where it was.
    """
    before = random_state()
    first = world.same(before)
    set_random_state(first if same else derived(first, world.rank))
    try:
        yield
    except BaseException:
        set_random_state(before)
        raise
    set_random_state(world.same(random_state()))


def derived(state: dict[str, Any], rank: int) -> dict[str, Any]:
    """The random state that a process other than the first draws from: it follows from the first one's and the rank."""
    if not rank:
        return state
    digest = hashlib.sha256(state["torch"].numpy().tobytes() + rank.to_bytes(4, "little")).digest()
    with unmoved():
        seed(int.from_bytes(digest[:4], "little"))
        return random_state()


def own_state(owner: Owner, source: Source, random: Tree) -> Tree:
    """What this process alone has: its random state, normalisation statistics, and the states of its workers."""
    data: Any = getattr(source, "process_state", None)
    return {
        "random": random,
        "statistics": {name: one.detach().clone() for name, one in _statistics(owner).items()},
        "data": None if data is None else data(),
        "parts": {name: part.state_dict() for name, part in _each(owner).items()},
    }


def own_of(owner: Owner, tree: dict[str, Tree]) -> tuple[Tree | None, int]:
    """Take out of a checkpoint what its processes had of their own; returns this one's, and how many there were.

    None where there were more or fewer: then the first process's is for all, and the others' noise follows from it.
    """
    each: list[Tree] = tree.pop(PROCESSES, None) or []
    world = owner.world
    number = max(1, len(each))
    own = each[world.rank] if world.size > 1 and number == world.size else None
    tree |= {} if own is None else own["parts"]
    if world.rank:
        now = derived(tree["random"]["now"], world.rank) if own is None else own["random"]
        tree["random"] = {**tree["random"], "now": now}
    return own, number


def take_own(owner: Owner, own: Tree | None, *, number: int, source: Source | None) -> list[str]:
    """Go on with what this process had, where the common parts are loaded; returns what the header says."""
    if owner.world.rank:
        owner.ledger.reset()  # the sums of all are the first one's
    if own is not None:
        for name, statistic in _statistics(owner).items():
            statistic.copy_(own["statistics"][name])
    load: Any = getattr(source, "load_process_state", None)
    if load is None or number == owner.world.size == 1:
        return []
    said = load(None if own is None else own["data"])
    return [said] if said else []


def _each(owner: Owner) -> dict[str, Any]:
    """The parts of the user's own of which every process has one."""
    return {name: part for name, part in owner.parts().items() if getattr(part, "each_process", False)}


def retake_shards(owner: Owner) -> None:
    """Have a model that is held in shards hold nothing else, and go by what is trained now."""
    if owner.parallel.shards:
        from trainwright.distributed.fsdp import retake

        reshard(owner.model)
        retake(owner.model)


def align_buffers(owner: Owner) -> None:
    """Give every process the first one's buffers: all evaluate, save and hand back the same model."""
    if owner.world.size > 1:
        owner.world.align(_whole(owner.model.buffers()))


def align_weights(owner: Owner) -> None:
    """Give every process the first one's weights: of the model, a loss, frozen modules, and what else is trained."""
    tensors = [tensor for module in networks_of(owner) for tensor in (*module.parameters(), *module.buffers())]
    tensors += parameters_in(*owner.optimizers.values())
    owner.world.align({id(one): one for one in _whole(tensors)}.values())


def _whole(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Those that every process holds as a whole."""
    return [one for one in tensors if not is_sharded(one)]


def _statistics(owner: Owner) -> dict[str, Tensor]:
    """The running statistics by name: the layers of a model may be registered in another order after a resume."""
    ids = {id(one) for one in running_statistics(owner.model)}
    return {name: buffer for name, buffer in owner.model.named_buffers() if id(buffer) in ids}


def _part(owner: Owner) -> Shard:
    return Shard(owner.world.rank, owner.world.size, least=2 if _normalises_rows(owner) else 1)


def _normalises_rows(owner: Owner) -> bool:
    """Whether a layer in train mode normalises over rows, and so takes no slice of one.

    A model that lies wholly in eval mode is one that `fit` switches to train mode.
    """
    asleep = not any(module.training for module in owner.model.modules())
    return any(
        isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, nn.SyncBatchNorm)
        for module in owner.model.modules()
        if module.training or asleep
    )
