"""This package, from memory, from the user's loader over tensors and from any other loader."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from contestants.entry import Contestant
from contestants.tasks import MAX_LR, Clock, Task


def train(task: Task, clock: Clock, *, data: Callable[[Task], Any], console: bool = True) -> nn.Module:
    from trainwright import Observer, OneCycle, Trainer
    from trainwright.observers import Validation

    class EpochEnds(Observer):
        def on_epoch(self, record: Validation) -> None:
            clock.epoch_ended()

    model = task.model()
    trainer = Trainer(
        model,
        task.optimizer(model),
        task.criterion(),
        accumulate=task.accumulate,
        clip=task.clip,
        schedule=OneCycle(max_lr=MAX_LR) if task.full else None,
        console=console,
        observers=[EpochEnds()],
    )
    trainer.fit(data(task), epochs=1 + task.epochs)
    return model


def evaluation(task: Task, *, data: Callable[[Task], Any]) -> Callable[[], float]:
    from trainwright import Trainer

    trainer, held_out = Trainer(task.model(), None, task.criterion()), data(task)
    return lambda: trainer.evaluate(held_out)["val_loss"]


def ordered(task: Task) -> Any:
    from trainwright import batches

    return batches((task.inputs, task.targets), task.size)


def _ours(name: str, data: Callable[[Task], Any], held_out: Callable[[Task], Any], **kept: Any) -> Contestant:
    return Contestant(name, partial(train, data=data), partial(evaluation, data=held_out), **kept)


CONTESTANTS = [
    _ours("trainwright", Task.batches, ordered, order=Task.batches, note="batches(...)"),
    _ours("trainwright-loader", Task.loader, Task.held_out, note="the loader of plain"),
    _ours(
        "trainwright-other",
        Task.other_loader,
        Task.other_held_out,
        base="plain-other",
        note="the loader of plain-other",
    ),
    Contestant(
        "trainwright-silent",
        partial(train, data=Task.batches, console=False),
        order=Task.batches,
        note="batches(...), console=False",
    ),
]
