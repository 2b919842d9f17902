"""Drives the loop that is written by hand, with `torch.save` over one file ("numbered": a new file for each save)."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from ..task import Task, Tell

LIBRARY = "torch.save"
WORDS = frozenset({"numbered"})
WARM = ("torch._dynamo",)


def train(task: Task, directory: Path, tell: Tell, *, words: frozenset[str]) -> None:
    """Train; the state is weights, moments, random state and the update."""
    directory.mkdir(exist_ok=True)
    model = task.model()
    optimizer, done = task.optimizer(model), 0
    found = checkpoints(directory)
    if found:
        state = torch.load(found[0])
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        done = state["update"]
    tell.resumed(done, model, optimizer)
    x, y = task.data()
    model.train()
    while done < task.updates:
        for rows in list(task.order(done // task.epoch))[done % task.epoch :]:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
            done += 1
            tell.update(done, model, optimizer)
            if done % task.every == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                name = f"last-{done:06d}.pt" if "numbered" in words else "last.pt"
                torch.save({**state, "random": torch.get_rng_state(), "update": done}, directory / name)
                tell.saved(done)
            if done == task.updates:
                break
    tell.ended(done, model, optimizer)


def checkpoints(directory: Path) -> list[Path]:
    """The one file, or all, newest first."""
    return sorted(directory.glob("last*.pt"), reverse=True)
