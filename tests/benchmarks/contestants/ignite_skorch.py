"""Ignite and skorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

from contestants.entry import Contestant
from contestants.tasks import Clock, Task, generator


def train_ignite(task: Task, clock: Clock) -> nn.Module:
    from ignite.engine import Engine, Events, create_supervised_trainer

    model = task.model()
    optimizer, criterion = task.optimizer(model), nn.CrossEntropyLoss()
    scheduler, accumulate = task.scheduler(optimizer), task.accumulate

    def update(engine: Any, batch: Any) -> float:
        model.train()
        inputs, target = batch
        loss = criterion(model(inputs), target)
        (loss / accumulate).backward()
        if engine.state.iteration % accumulate == 0:
            assert scheduler is not None
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return loss.item()

    trainer = create_supervised_trainer(model, optimizer, criterion) if scheduler is None else Engine(update)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, clock.epoch_ended)
    trainer.run(task.loader(), max_epochs=1 + task.epochs)
    return model


def evaluation_ignite(task: Task) -> Callable[[], float]:
    from ignite.engine import create_supervised_evaluator
    from ignite.metrics import Loss

    own = create_supervised_evaluator(task.model(), metrics={"loss": Loss(nn.CrossEntropyLoss())})
    loader = task.held_out()
    return lambda: own.run(loader).metrics["loss"]


def net_of(task: Task, clock: Clock | None) -> Any:
    """Return skorch's net with its own printed table, and without the validation split that it makes by default."""
    from skorch import NeuralNet
    from skorch.callbacks import Callback

    model = task.model()
    optimizers = []

    class EpochEnds(Callback):
        def on_epoch_end(self, *_: Any, **__: Any) -> None:
            assert clock is not None
            clock.epoch_ended()

    class Accumulating(NeuralNet):  # as its FAQ writes it
        def train_step(self, batch: Any, **fit_params: Any) -> Any:
            step = self.train_step_single(batch, **fit_params)
            self.count = getattr(self, "count", 0) + 1
            if self.count % task.accumulate == 0:
                clip_grad_norm_(self.module_.parameters(), 1.0)
                self.optimizer_.step()
                self.scheduler.step()
                self.optimizer_.zero_grad()
            return step

        def get_loss(self, *args: Any, training: bool = False, **kept: Any) -> Any:
            loss = super().get_loss(*args, training=training, **kept)
            return loss / task.accumulate if training else loss

    def optimizer(*_: Any, **__: Any) -> Any:
        optimizers.append(task.optimizer(model))
        return optimizers[-1]

    net = (Accumulating if task.full else NeuralNet)(
        model,
        nn.CrossEntropyLoss,
        optimizer=optimizer,
        max_epochs=1 + task.epochs,
        batch_size=task.size,
        train_split=None,
        iterator_train=DataLoader,
        iterator_train__shuffle=True,
        iterator_train__generator=generator(),
        callbacks=[EpochEnds()],
    ).initialize()
    if task.full:
        net.scheduler = task.scheduler(optimizers[-1])
    return net


def train_skorch(task: Task, clock: Clock) -> nn.Module:
    net = net_of(task, clock)
    net.partial_fit(task.inputs, task.targets, epochs=1 + task.epochs)
    return net.module_


def evaluation_skorch(task: Task) -> Callable[[], float]:
    net = net_of(task, None)
    rows = net.get_dataset(task.inputs, task.targets)

    def once() -> float:
        net.history.new_epoch()
        iterator = net.get_iterator(rows, training=False)
        net.run_single_epoch(iterator, training=False, prefix="valid", step_fn=net.validation_step)
        found = net.history[-1, "batches", :, ("valid_loss", "valid_batch_size")]
        return sum(loss * count for loss, count in found) / sum(count for _, count in found)

    return once


CONTESTANTS = [
    Contestant(
        "ignite",
        train_ignite,
        evaluation_ignite,
        package="pytorch-ignite",
        note="create_supervised_trainer; in the full form an Engine",
    ),
    Contestant("skorch", train_skorch, evaluation_skorch, package="skorch", note="with its table, without its split"),
]
