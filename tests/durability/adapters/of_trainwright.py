"""Drives trainwright: saves in the background unless "sync"; "workers" reads through a DataLoader with two of them.

"persistent": the workers live on from epoch to epoch; "slow": each row takes a millisecond; "raise": a save that fails
ends the run.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainwright import Checkpoint, Observer, OneCycle, Trainer, Updates, batches

from ..task import Task, Tell

LIBRARY = "trainwright"
WORDS = frozenset({"sync", "background", "workers", "persistent", "slow", "raise"})
WRITES_WITH_OS = True
WARM = ("torch._dynamo",)


class Reported(Trainer[nn.Module]):
    """Tells of every update; the weights are those after it."""

    tell: Tell

    def after_update(self) -> None:
        """Tell."""
        self.tell.update(self.progress.updates, self.model, self.optimizer)


class Watch(Observer):
    """Tells where training goes on, and what is saved."""

    def __init__(self, tell: Tell) -> None:
        self.tell = tell
        self.trainer: Any = None

    def on_fit_start(self, plan: Any) -> None:
        """Tell the state that was loaded."""
        trainer = self.trainer
        self.tell.resumed(trainer.progress.updates, trainer.model, trainer.optimizer)

    def on_save(self, saved: Any) -> None:
        """Tell what is whole."""
        self.tell.saved(saved.update)


class Slow(TensorDataset):
    """Rows that take their time, so that the loop mostly waits for them."""

    def __getitem__(self, index: int) -> Any:
        """The row, a millisecond later."""
        time.sleep(0.001)
        return super().__getitem__(index)


def train(task: Task, directory: Path, tell: Tell, *, words: frozenset[str]) -> None:
    """Train with validation, a best and two last checkpoints, so that retention removes some of both."""
    model, watch = task.model(), Watch(tell)
    trainer = Reported(
        model,
        task.optimizer(model),
        nn.CrossEntropyLoss(),
        schedule=OneCycle(max_lr=3e-3),
        checkpoint=Checkpoint(directory, every=Updates(task.every), best="val_loss", keep=2, **_saving(words)),
        observers=[watch],
        console=False,
    )
    trainer.tell, watch.trainer = tell, trainer
    x, y = task.data()
    held_out = batches((x[:32], y[:32]), 32)
    result = trainer.fit(_loader(task, words), held_out, max_updates=task.updates, resume="auto")
    best = result.best
    rest = (result.history, best and (best.value, best.update), result.stopped)
    tell.ended(result.updates, model, trainer.optimizer, rest=rest)


def _saving(words: frozenset[str]) -> dict[str, Any]:
    known = {field.name for field in dataclasses.fields(Checkpoint)}
    asked = {"async_save": "sync" not in words, "on_save_error": "raise" if "raise" in words else "warn"}
    return {name: value for name, value in asked.items() if name in known}


def _loader(task: Task, words: frozenset[str]) -> Any:
    if "workers" not in words:
        return batches(task.data(), task.batch, shuffle=True, seed=task.seed)
    kept = "persistent" in words
    data = (Slow if "slow" in words else TensorDataset)(*task.data())
    return DataLoader(data, task.batch, shuffle=True, num_workers=2, persistent_workers=kept)


def checkpoints(directory: Path) -> list[Path]:
    """The checkpoints by name, newest first."""
    return sorted(directory.glob("update-*"), reverse=True)
