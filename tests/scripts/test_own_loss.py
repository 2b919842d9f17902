"""A model that returns its loss and nothing else: a density of pictures, in bits per pixel."""

from __future__ import annotations

import math

import pytest
import torch
from plain_scripts import assert_no_longer, assert_same_history, assert_same_weights, digits, made
from torch import nn

from trainwright import Derived, Trainer, batches

EPOCHS = 3


class Mixture(nn.Module):
    """Minus the log density of rows under a mixture of normal distributions, over the rows."""

    def __init__(self, parts=8):
        super().__init__()
        self.shares, self.means = nn.Parameter(torch.zeros(parts)), nn.Parameter(0.5 + 0.1 * torch.randn(parts, 64))
        self.log_scales = nn.Parameter(torch.full((parts, 64), -1.0))

    def forward(self, x):
        parts = torch.distributions.Normal(self.means, self.log_scales.exp()).log_prob(x[:, None]).sum(-1)
        return -(parts + self.shares.log_softmax(0)).logsumexp(1).mean()


def bits(loss):
    return loss / 64 / math.log(2)


def by_trainer(model, train, val):
    metrics = {"bits": Derived(lambda numbers: bits(numbers["loss"]))}
    trainer = Trainer(model, torch.optim.Adam(model.parameters(), lr=0.01), metrics=metrics, console=False)
    return trainer.fit(train, val, epochs=EPOCHS).history


def by_hand(model, train, val):
    optimizer, history = torch.optim.Adam(model.parameters(), lr=0.01), []
    for epoch in range(EPOCHS):
        total = rows = 0
        for x in train.epoch(epoch):
            optimizer.zero_grad()
            loss = model(x)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(x)
            rows += len(x)
        row = {"loss": total / rows, "bits": bits(total / rows)}
        total = rows = 0
        with torch.no_grad():
            for x in val:
                total += model(x).item() * len(x)
                rows += len(x)
        history.append(row | {"val_loss": total / rows, "val_bits": bits(total / rows)})
    return history


def data():
    x, _ = digits(400)
    return batches(x[:300], 32, shuffle=True, seed=0), batches(x[300:], 40)


def test_a_model_that_returns_its_loss_is_its_plain_loop():
    ours, theirs = made(Mixture), made(Mixture)
    history = by_trainer(ours, *data())
    assert_same_history(history, by_hand(theirs, *data()))
    assert_same_weights(ours, theirs)
    assert history[-1]["val_bits"] < history[0]["val_bits"]


def test_a_model_that_returns_outputs_in_place_of_its_loss_is_named():
    trainer = Trainer(model := nn.Linear(64, 3), torch.optim.SGD(model.parameters(), lr=0.1), console=False)
    with pytest.raises(ValueError, match=r"Linear returned a tensor of shape \(32, 3\)(.|\n)*CrossEntropyLoss"):
        trainer.fit(data()[0], epochs=1)


def test_a_model_that_returns_its_loss_is_no_longer_than_its_plain_loop():
    assert_no_longer([by_trainer], [by_hand])
