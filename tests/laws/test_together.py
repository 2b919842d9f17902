"""Loaders read together: the plain loop, a resume, and any number of processes give the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from distributed.pool import pool
from trainwright import Checkpoint, Observer, StepOutput, SumLoss, Trainer, Updates, batches
from trainwright.data import together
from trainwright.observers import Update

from .world_runs import apart, flat, rows_of_classes

EXACT = 1e-12
EPOCHS = 3


class Both(Trainer[nn.Module]):
    """Classes of labelled rows, and outputs that stay near those of unlabelled ones: a sum over all rows of both."""

    def training_step(self, batch: Any) -> Any:
        x, y = batch["labelled"]
        (u,) = batch["unlabelled"]
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
    """40 labelled rows in batches of 8, 18 others in batches of 6."""
    x, y = rows_of_classes(40)
    u, _ = rows_of_classes(18, seed=9)
    if kind == "loaders":
        torch.manual_seed(6)
        return {
            "labelled": DataLoader(TensorDataset(x, y), 8, shuffle=True),
            "unlabelled": DataLoader(TensorDataset(u), 6, shuffle=True),
        }
    return {"labelled": batches((x, y), 8, shuffle=True, seed=3), "unlabelled": batches((u,), 6, shuffle=True, seed=4)}


def by_hand(accumulate: int) -> dict[str, Any]:
    """The plain loop: the shorter loader over and over, each pass shuffled anew, across the ends of epochs."""
    model, given = network(), loaders()
    optimizer = sgd(model)

    def others() -> Iterator[Tensor]:
        for _ in cycle([0]):
            yield from (u for (u,) in given["unlabelled"])

    other = others()
    for _ in range(EPOCHS):
        micro = [(x, y, next(other)) for x, y in given["labelled"]]
        for start in range(0, len(micro), accumulate):
            optimizer.zero_grad()
            sums = [total(model, *one) for one in micro[start : start + accumulate]]
            (sum(loss for loss, _ in sums) / sum(rows for _, rows in sums)).backward()
            optimizer.step()
    return {"weights": flat(model), "history": []}


def by_trainer(kind: str, accumulate: int) -> dict[str, Any]:
    """The same by the Trainer, on as many processes as there are."""
    model = network()
    trainer = Both(model, sgd(model), accumulate=accumulate, console=False)
    result = trainer.fit(together(**loaders(kind=kind)), together(**loaders()), epochs=EPOCHS)
    return {"weights": flat(model), "history": result.history}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_weights_are_those_of_the_plain_loop(accumulate: int) -> None:
    given = by_trainer("batches", accumulate)
    assert apart({**given, "history": []}, by_hand(accumulate)) <= EXACT


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", ["batches", "loaders"])
def test_processes_give_what_one_gives(kind: str, size: int) -> None:
    """With `DataLoader`s too, both of which draw their orders from the process's random state."""
    alone = by_trainer(kind, 2)
    for outcome in pool(size).run(by_trainer, kind, 2):
        assert apart(outcome, alone) <= EXACT


class Seen(Observer):
    """The loss of every update."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_update(self, update: Update) -> None:
        self.losses.append(update.loss)


class Stopping(Both):
    """Ends after an update."""

    at = 0

    def after_update(self) -> None:
        if self.progress.updates == self.at:
            self.stop("cut")


def trained(directory: Path, kind: str, *, at: int = 0, resume: str | None = None) -> tuple[Any, list[float]]:
    torch.manual_seed(8)
    model, seen = network(nn.Dropout(0.3)), Seen()
    checkpoint = Checkpoint(directory, every=Updates(1), keep=1)
    trainer = Stopping(model, sgd(model), accumulate=2, checkpoint=checkpoint, console=False, observers=[seen])
    trainer.at = at
    data, val = together(**loaders(kind=kind)), together(**loaders())
    if resume:
        torch.manual_seed(99)  # a new process draws anew
    result = trainer.fit(data, val, epochs=EPOCHS, resume=resume)
    return (flat(model), result.history), seen.losses


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", ["batches", "loaders"])
@pytest.mark.parametrize("at", [1, 2, 3, 5, 7])
def test_a_run_that_was_cut_goes_on_bit_for_bit(tmp_path: Path, kind: str, at: int) -> None:
    whole, losses = trained(tmp_path / "whole", kind)
    _, before = trained(tmp_path / "cut", kind, at=at)
    assert len(before) == at
    resumed, after = trained(tmp_path / "cut", kind, resume="auto")
    assert before + after == losses
    assert torch.equal(torch.as_tensor(resumed[0]), torch.as_tensor(whole[0]))
    assert resumed[1] == whole[1]


def test_the_rows_of_an_update_are_those_of_the_first_loader() -> None:
    rows = []

    class Rows(Observer):
        def on_update(self, update: Update) -> None:
            rows.append(update.rows)

    model = network()
    Both(model, sgd(model), console=False, observers=[Rows()]).fit(together(**loaders()), epochs=1)
    assert rows == [8] * 5


def test_steps_may_say_what_a_loss_is_a_mean_over() -> None:
    """A loss over the second loader alone, and a metric fed by hand."""

    class Second(Both):
        def training_step(self, batch: Any) -> Any:
            x, y = batch["labelled"]
            (u,) = batch["unlabelled"]
            return StepOutput(SumLoss(self.model(u).square().sum(), len(u)), self.model(x), y)

    model = network()
    x, _ = rows_of_classes(18, seed=9)
    trainer = Second(model, sgd(model), console=False)
    data = together(labelled=batches(rows_of_classes(4), 4), unlabelled=batches((x,), 8))
    with torch.no_grad():
        whole = model(x).square().sum().item() / 18
    assert trainer.evaluate(data)["val_loss"] == pytest.approx(whole, abs=1e-12)
