"""Loaders read together give the weights of the plain loop."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from trainwright import SumLoss, Trainer, batches
from trainwright.data import together

from .world_runs import apart, flat, rows_of_classes

EXACT = 1e-12
EPOCHS = 3


class Both(Trainer[nn.Module]):
    """Classes of labeled rows, and outputs that stay near those of unlabeled ones: a sum over all rows of both."""

    def training_step(self, batch: Any) -> Any:
        x, y = batch["labeled"]
        (u,) = batch["unlabeled"]
        return SumLoss(*total(self.model, x, y, u))


def total(model: nn.Module, x: Tensor, y: Tensor, u: Tensor) -> tuple[Tensor, int]:
    """The sum of the losses, and the rows of both."""
    return F.cross_entropy(model(x), y, reduction="sum") + model(u).square().sum(), len(x) + len(u)


def network(*more: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), *more, nn.Linear(8, 3)).double()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loaders(*, kind: str = "batches") -> dict[str, Any]:
    """40 labeled rows in batches of 8, 18 others in batches of 6."""
    x, y = rows_of_classes(40)
    u, _ = rows_of_classes(18, seed=9)
    if kind == "loaders":
        torch.manual_seed(6)
        return {
            "labeled": DataLoader(TensorDataset(x, y), 8, shuffle=True),
            "unlabeled": DataLoader(TensorDataset(u), 6, shuffle=True),
        }
    return {"labeled": batches((x, y), 8, shuffle=True, seed=3), "unlabeled": batches((u,), 6, shuffle=True, seed=4)}


def by_hand(accumulate: int) -> dict[str, Any]:
    """The plain loop: the shorter loader over and over, each pass shuffled anew, across the ends of epochs."""
    model, given = network(), loaders()
    optimizer = sgd(model)

    def others() -> Iterator[Tensor]:
        for _ in cycle([0]):
            yield from (u for (u,) in given["unlabeled"])

    other = others()
    for _ in range(EPOCHS):
        micro = [(x, y, next(other)) for x, y in given["labeled"]]
        for start in range(0, len(micro), accumulate):
            optimizer.zero_grad()
            sums = [total(model, *one) for one in micro[start : start + accumulate]]
            (sum(loss for loss, _ in sums) / sum(rows for _, rows in sums)).backward()
            optimizer.step()
    return {"weights": flat(model), "history": []}


def by_trainer(kind: str, accumulate: int) -> dict[str, Any]:
    """The same by the Trainer."""
    model = network()
    trainer = Both(model, sgd(model), accumulate=accumulate, console=False)
    result = trainer.fit(together(**loaders(kind=kind)), together(**loaders()), epochs=EPOCHS)
    return {"weights": flat(model), "history": result.history}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_weights_are_those_of_the_plain_loop(accumulate: int) -> None:
    given = by_trainer("batches", accumulate)
    assert apart({**given, "history": []}, by_hand(accumulate)) <= EXACT
