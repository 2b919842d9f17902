"""A tied model, its tree, and checkpoints made of it: shared by the tests of the checkpoint slot."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from trainwright.checkpointing import format as formats
from trainwright.checkpointing.commit import RunDirectory
from trainwright.checkpointing.load import load_checkpoint

NAN, INF = float("nan"), float("inf")


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embed.weight


@contextmanager
def lock(path):
    """Lock a directory as a run does, inside."""
    root = RunDirectory(path, given=str(path))
    root.acquire()
    try:
        yield
    finally:
        root.release()


def tree_of(model, update=0):
    return {"model": model.state_dict(), "progress": {"updates": update, 3: (1, NAN)}, "state": {"a": torch.arange(3)}}


def save(manager, update, **metrics):
    """Judge and save, as a run does after a validation; what is whole then."""
    begin(manager, update, **metrics)
    return manager.completed(wait=True)[-1]


def begin(manager, update, **metrics):
    """Judge and hand on to be saved."""
    if manager.settings.best in metrics:
        manager.judge(metrics, epoch=update // 10, update=update)
    manager.save(tree_of(Tied(), update), update=update, epoch=update // 10, metrics=metrics)


def updates(directory):
    return sorted(int(path.name.removeprefix("update-")) for path in formats.list_checkpoints(Path(directory)))


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1 if path.suffix == ".safetensors" else len(data) // 2] ^= 16
    path.write_bytes(data)


def find_checkpoint(resume, directory, **given):
    """The path of the checkpoint that `resume` means."""
    loaded = load_checkpoint(resume, directory, **given)
    return None if loaded is None else loaded.path
