"""A sharded model and its manager, on every process of a pool: shared by the tests of checkpoints that all write."""

from __future__ import annotations

import threading

import torch
from torch import nn

from trainwright.checkpointing import files, tensorfile
from trainwright.checkpointing.checkpoint import Checkpoint
from trainwright.checkpointing.load import load_checkpoint, load_weights
from trainwright.distributed.resharding import place
from trainwright.distributed.world import ProcessGroupWorld


class Model(nn.Module):
    """Of rows that no number of processes divides, of one row, with a buffer, and with tied weights."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 5)
        self.layer = nn.Sequential(nn.Linear(5, 11), nn.Tanh(), nn.Linear(11, 5))
        self.scale = nn.Parameter(torch.ones(1, 5))
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.layer(self.norm(self.embed(x))) * self.scale)


def made(*, shards=True):
    """A model and its optimizer."""
    model = Model().double()
    if shards:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model.layer)
        fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def train(model, optimizer, updates, *, start=0):
    """The same rows on every process."""
    for update in range(start, start + updates):
        generator = torch.Generator().manual_seed(update)
        x = torch.randint(7, (6,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), (x + 1) % 7).backward()
        optimizer.step()


def tree_of(model, optimizer, update):
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "progress": {"updates": update},
        "state": {"rank": 0, "a": torch.arange(3)},
    }


def keep(directory, *, resuming=False, **settings):
    world = ProcessGroupWorld()
    manager = Checkpoint(directory, **settings).bind("one", world=world)
    manager.prepare(resuming=resuming)
    return world, manager


def whole(state):
    """The same tree of plain tensors; collective where there are shards."""
    if isinstance(state, dict):
        return {key: whole(one) for key, one in state.items()}
    if isinstance(state, torch.Tensor):
        return state.full_tensor().clone() if hasattr(state, "full_tensor") else state.clone()
    return state


def run(directory, at=(2, 4), **settings):
    """Train, saving at some updates; what the whole state was at the last."""
    _, manager = keep(directory, **settings)
    model, optimizer = made()
    done = 0
    for update in at:
        train(model, optimizer, update - done, start=done)
        done = update
        manager.save(tree_of(model, optimizer, update), update=update, epoch=0)
        state = whole(model.state_dict()), whole(optimizer.state_dict()["state"])
        with torch.no_grad():  # what is trained meanwhile
            kept = [parameter.to_local().clone() for parameter in model.parameters()]
            for parameter in model.parameters():
                parameter.to_local().zero_()
        manager.completed(wait=True)
        with torch.no_grad():
            for parameter, before in zip(model.parameters(), kept, strict=True):
                parameter.to_local().copy_(before)
    manager.release()
    return state


def resume(directory, where="auto", *, shards=True):
    """Load into a fresh model, sharded or not; the state, and that of two updates later."""
    world = ProcessGroupWorld()
    loaded = load_checkpoint(where, directory, world=world, lazy_shards=shards)
    assert loaded is not None
    model, optimizer = made(shards=shards)
    tree = loaded.tree
    if shards:
        tree = place(tree, {"model": model, "optimizer": optimizer}, world=world)
    model.load_state_dict(tree["model"])
    optimizer.load_state_dict(tree["optimizer"])
    first = whole(model.state_dict()), whole(optimizer.state_dict()["state"])
    train(model, optimizer, 2, start=tree["progress"]["updates"])
    return loaded.path.name, first, whole(model.state_dict()), tree["state"]["a"].tolist()


def weights_into(directory):
    """Load the best weights into a sharded model."""
    model, _ = made()
    load_weights(directory, model, which="last")
    return whole(model.state_dict())


def resume_and_save(directory):
    """Go on from the newest checkpoint, and save update 3."""
    world, manager = keep(directory, resuming=True)
    model, optimizer = made()
    loaded = load_checkpoint("auto", directory, run=manager.run_id, world=world, lazy_shards=True)
    manager.adopt(loaded)
    place(loaded.tree, {"model": model, "optimizer": optimizer}, world=world)
    manager.save(tree_of(model, optimizer, 3), update=3, epoch=0)
    manager.completed(wait=True)
    manager.release()
    return [path.name for path in manager.saved]


def trained_meanwhile(directory):
    """Save, and train on before a byte is written; whether the checkpoint holds the state of its boundary."""
    _, manager = keep(directory)
    model, optimizer = made()
    train(model, optimizer, 1)
    state, gate, write = whole(model.state_dict()), threading.Event(), tensorfile.write
    files.tensorfile.write = lambda *given: (gate.wait(20), write(*given))[1]
    try:
        manager.save(tree_of(model, optimizer, 1), update=1, epoch=0)
        train(model, optimizer, 1, start=1)
        gate.set()
        manager.completed(wait=True)
    finally:
        files.tensorfile.write = write
        manager.release()
    saved = load_weights(directory, which="last")
    return all(torch.equal(saved[name], value) for name, value in state.items())
