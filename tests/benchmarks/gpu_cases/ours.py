"""This package by its public API: with its defaults, and compiled."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from gpu_cases.entry import Batch, Clock, Contestant, Task


def train(task: Task, clock: Clock, *, compiles: str | None = None, device_data: bool = True) -> nn.Module:
    """Train from ready batches; where the task has rows on the host, from these."""
    from trainwright import Fast, MeanLoss, Observer, Trainer
    from trainwright.data import Normalize
    from trainwright.observers import Validation

    class EpochEnds(Observer):
        def on_epoch(self, record: Validation) -> None:
            clock.epoch_ended()

    class OwnLoss(Trainer[nn.Module]):
        def training_step(self, batch: Batch) -> MeanLoss:
            return MeanLoss(self.model(*batch), task.counts(batch))

    compile_ = {"regions": compiles, "backend": task.bench.backend} if compiles else None
    more: dict[str, Any] = {} if task.rows is None else {"device_data": device_data}
    model = task.model(by_hand=False)
    trained = model if task.rows is None else nn.Sequential(Normalize(MEAN, STD), model)
    kind = Trainer if task.criterion is not None else OwnLoss
    trainer = kind(
        trained,
        task.optimizer(model.parameters(), fused=True),
        task.criterion,
        precision=task.precision,
        clip=task.clip,
        device=task.device,
        console=False,
        observers=[EpochEnds()],
        fast=Fast(compile=compile_, **more),
    )
    trainer.fit(data_of(task), epochs=1 + task.epochs)
    clock.note = trainer.fast_path
    return model


def data_of(task: Task) -> Any:
    """Ready batches, or images on the host, which the first layer of the model normalizes."""
    if task.rows is None:
        return list(task.data)
    from trainwright import batches

    return batches(task.rows, task.batch_size, shuffle=True, seed=1)


def order(task: Task) -> list[list[Tensor]]:
    """The numbers of the rows of each batch of each epoch, as `data_of` deals them."""
    import torch

    from trainwright import batches

    assert task.rows is not None
    numbers = batches(torch.arange(len(task.rows[0])), task.batch_size, shuffle=True, seed=1)
    return [list(numbers) for _ in range(1 + task.epochs)]


MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
OURS = Contestant("trainwright", train, note="its defaults")
COMPILED = Contestant(
    "trainwright-compile", partial(train, compiles="full"), note='Fast(compile="full")', equals="compile"
)
REGIONAL = Contestant(
    "trainwright-compile", partial(train, compiles="regional"), note='Fast(compile="regional")', equals=None
)
