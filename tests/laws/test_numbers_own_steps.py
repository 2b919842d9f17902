"""Validation weighs what a step of the user's own returns by what torch divided by, as training does (law Numbers)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from trainwright import MeanLoss, StepOutput, Trainer
from trainwright.update.losses import CountObserver

CLASSES = 5
WEIGHT = torch.tensor([1.0, 2.0, 0.5, 1.5, 3.0])


def ragged(seed=0):
    """Two batches of token numbers; most targets of the second are ignored."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(CLASSES, (2, 4, 6), generator=generator)
    y = torch.randint(CLASSES, (2, 4, 6), generator=generator)
    y[1, :, 1:] = -100
    return [(x[0], y[0]), (x[1], y[1])]


def functional(output, y):
    return F.cross_entropy(output.flatten(0, 1), y.flatten())


def weighted(output, y):
    return F.cross_entropy(output.flatten(0, 1), y.flatten(), WEIGHT)


def module(output, y):
    return nn.CrossEntropyLoss(weight=WEIGHT)(output.movedim(-1, 1), y)


def log_likelihood(output, y):
    return F.nll_loss(output.log_softmax(-1).flatten(0, 1), y.flatten(), ignore_index=-100)


LOSSES = {"function": functional, "weighted": weighted, "module": module, "nll": log_likelihood}


def trainer_of(kind, loss):
    class Own(Trainer):
        def training_step(self, batch):
            output = self.model(batch[0])
            return StepOutput(loss(output, batch[1]), output, batch[1]) if kind == "step" else loss(output, batch[1])

    class Returns(nn.Embedding):
        def forward(self, x, y):
            return SimpleNamespace(loss=loss(super().forward(x), y))

    torch.manual_seed(0)
    model = (Returns if kind == "model" else nn.Embedding)(CLASSES, CLASSES)
    cls, given = (Trainer, loss) if kind == "loss" else (Own, None)
    cls = Trainer if kind == "model" else cls
    return cls(model, torch.optim.SGD(model.parameters(), lr=0.0), given, console=False)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kind", ["bare", "step", "model", "loss"])
def test_validation_counts_what_training_counts(kind, loss):
    trainer, data = trainer_of(kind, LOSSES[loss]), ragged()
    row = trainer.fit(data, data, epochs=1).history[0]
    table = trainer.model.weight.detach()
    x, y = (torch.cat(column) for column in zip(*data, strict=True))
    exact = LOSSES[loss](table[x].double() if loss not in ("weighted", "module") else table[x], y)
    assert row["val_loss"] == pytest.approx(exact.item(), rel=1e-6)
    assert row["val_loss"] == pytest.approx(row["loss"], rel=1e-12)


def test_the_law_sees_that_rows_are_counted(monkeypatch):
    monkeypatch.setattr(CountObserver, "count_of", lambda self, loss: None)
    with pytest.raises(AssertionError):
        test_validation_counts_what_training_counts("bare", "function")


@pytest.mark.parametrize("changed", [lambda loss: 2 * loss, lambda loss: MeanLoss(loss, 7)])
def test_a_loss_that_is_not_torchs_own_any_more_is_weighed_as_before(changed):
    class Own(Trainer):
        def training_step(self, batch):
            return changed(functional(self.model(batch[0]), batch[1]))

    torch.manual_seed(0)
    model, data = nn.Embedding(CLASSES, CLASSES), ragged()
    row = Own(model, torch.optim.SGD(model.parameters(), lr=0.0), console=False).fit(data, data, epochs=1).history[0]
    assert row["val_loss"] == pytest.approx(row["loss"], rel=1e-12)
