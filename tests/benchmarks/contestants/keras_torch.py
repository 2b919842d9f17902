"""Keras with torch as its backend: the same torch model in a Keras model, and Keras's own AdamW."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from contestants.entry import Contestant
from contestants.tasks import LR, MAX_LR, Clock, Drawn, Task


def keras() -> Any:
    """Return the package with torch behind it."""
    os.environ.setdefault("KERAS_BACKEND", "torch")
    import keras

    assert keras.backend.backend() == "torch", "set KERAS_BACKEND=torch"
    return keras


def compiled(task: Task) -> tuple[Any, nn.Module]:
    """Return the Keras model, ready to fit, and the torch model in it."""
    own, model = keras(), task.model()

    class Wrapped(own.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner = own.layers.TorchModuleWrapper(model)

        def call(self, inputs: Any) -> Any:
            return self.inner(inputs)

    def loss(target: Tensor, output: Tensor) -> Tensor:
        return F.cross_entropy(output, target.long())

    wrapped = Wrapped()
    optimizer = own.optimizers.AdamW(
        rates(task) if task.full else LR,
        weight_decay=0.01,
        epsilon=1e-8,
        global_clipnorm=task.clip,
        gradient_accumulation_steps=task.accumulate if task.full else None,
    )
    wrapped.compile(optimizer, loss=loss, jit_compile=False)
    wrapped.test_on_batch(task.inputs[: task.size], task.targets[: task.size])  # else fit looks first
    optimizer.build(wrapped.trainable_variables)
    return wrapped, model


def rates(task: Task) -> Any:
    """Return OneCycle's rates, without its momentum."""
    import torch

    own = keras()
    drawn = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=LR, momentum=0.9)
    scheduler, found = task.scheduler(drawn), []
    assert scheduler is not None
    for _ in range(task.updates):
        found.append(drawn.param_groups[0]["lr"])
        drawn.step()
        if len(found) < task.updates:
            scheduler.step()

    class OneCycle(own.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step: Any) -> float:
            return found[min(int(step) // task.accumulate, len(found) - 1)]

        def get_config(self) -> dict[str, float]:
            return {"max_lr": MAX_LR}

    return OneCycle()


def train_keras(task: Task, clock: Clock) -> nn.Module:
    wrapped, model = compiled(task)
    ended = keras().callbacks.LambdaCallback(on_epoch_end=clock.epoch_ended)
    wrapped.fit(task.loader(), epochs=1 + task.epochs, callbacks=[ended], verbose=0)
    return model


def evaluation_keras(task: Task) -> Callable[[], float]:
    wrapped, _ = compiled(task)
    loader = task.held_out()
    return lambda: float(wrapped.evaluate(loader, verbose=0))


CONTESTANTS = [
    Contestant(
        "keras",
        train_keras,
        evaluation_keras,
        order=partial(Drawn, restarts=1),
        package="keras",
        tolerance=None,
        note="on torch, its own AdamW, which is not fused and has no momentum in OneCycle; prints nothing",
    )
]
