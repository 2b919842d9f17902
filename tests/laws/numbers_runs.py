"""Rows in uneven batches, small runs and a metric object: shared by the tests of the Numbers law."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainwright import EarlyStopping, MeanLoss, StepOutput, Trainer


def close(value, expected, rel=1e-6):
    assert value == pytest.approx(expected, rel=rel), (value, expected)


def rows_of_data(rows=20, classes=3, seed=0):
    """Rows whose losses differ a lot, so that a mean of batch means is far from the mean."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 4, generator=generator) * torch.linspace(0.1, 5, rows)[:, None]
    return x, torch.randint(0, classes, (rows,), generator=generator)


def cut(x, y, sizes):
    return list(zip(x.split(sizes), y.split(sizes), strict=True))


UNEVEN = [6, 6, 6, 2]


def linear():
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def trainer(model=None, loss=None, cls=Trainer, lr=0.1, **settings):
    model = linear() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return cls(model, optimizer, nn.CrossEntropyLoss() if loss is None else loss, console=False, **settings)


class Errors:
    """A metric object: mean absolute error over all rows."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.total, self.rows = 0.0, 0

    def update(self, output, target):
        self.total += float((output[:, 0] - target).abs().double().sum())
        self.rows += len(target)

    def compute(self):
        return self.total / self.rows

    def state_dict(self):
        return {"total": self.total, "rows": self.rows}

    def load_state_dict(self, tree):
        self.total, self.rows = tree["total"], tree["rows"]


def distance(output, target):
    return (output[:, 0] - target).abs()


class Planned(Trainer):
    """Validates to numbers that are planned, one per epoch."""

    planned = ()

    def validation_step(self, batch):
        return StepOutput(
            MeanLoss(torch.tensor(self.planned[self.progress.epoch - 1], dtype=torch.float64), 1), None, None
        )


def run_planned(values, patience, min_delta, mode):
    class Here(Planned):
        planned = tuple(values)

    early = EarlyStopping("val_loss", mode=mode, patience=patience, min_delta=min_delta)
    made = trainer(cls=Here, early_stopping=early)
    batch = [(torch.zeros(1, 4), torch.zeros(1, dtype=torch.long))]
    return made.fit(batch, batch, epochs=len(values))
