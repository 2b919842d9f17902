"""Several processes: training without data, predictions batch by batch, and partial evaluations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from distributed.pool import pool
from trainwright import Trainer

X = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)


class Plays(Trainer[Any]):
    """Each rank makes rows of its own."""

    def training_step(self, batch: Any) -> Any:
        if self.evaluating is not None:
            return super().training_step(batch)
        assert batch is None
        return loss_of(self.model, float(self.world.rank + 1) * (self.progress.updates + 1))


def loss_of(model: nn.Module, size: float) -> Any:
    x = torch.full((2, 3), size)
    return nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))


def trained() -> Any:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    trainer = Plays(model, optimizer, nn.MSELoss(), accumulate=2, console=False)
    trainer.fit(None, (X, Y), max_updates=4, validate_at_start=True, max_val_batches=1)
    outputs = list(trainer.predict_batches(X, batch_size=3))
    iterator = trainer.predict_batches(X, batch_size=2)
    next(iterator)
    del iterator
    partial = trainer.evaluate((X, Y), batch_size=3, max_batches=2)
    whole = trainer.evaluate((X[:6], Y[:6]), batch_size=3)
    return model.weight.detach(), trainer.history, outputs, trainer.predict(X), (partial, whole)


@pytest.mark.parametrize("size", [2, 3])
def test_each_rank_makes_its_rows_and_the_window_is_that_of_all(size: int) -> None:
    found = pool(size).run(trained)
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for update in range(1, 5):
        optimizer.zero_grad()
        torch.stack([loss_of(model, float(rank + 1) * update) for rank in range(size)]).mean().backward()
        optimizer.step()
    for weight, history, outputs, joined, (partial, whole) in found:
        torch.testing.assert_close(weight, model.weight.detach())
        assert history == found[0][1] and [row["update"] for row in history] == [0, 4]
        assert [len(output) for output in outputs] == [3, 3, 1]
        torch.testing.assert_close(torch.cat(outputs), joined)
        assert partial == pytest.approx({**whole, "val_first_batches": 2.0})
