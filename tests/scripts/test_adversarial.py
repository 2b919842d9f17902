"""Adversarial training: each batch is moved up its own loss (FGSM) before it is learned, and so it is validated."""

from __future__ import annotations

import torch
from plain_scripts import assert_near_history, assert_no_longer, assert_same_weights, digits, made
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from trainwright import StepOutput, Trainer, accuracy


def start():
    x, y = digits(400, torch.float64)
    model = made(lambda: nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10)), dtype=torch.float64)
    loaders = [TensorDataset(x[:300], y[:300]), TensorDataset(x[300:], y[300:])]
    return model, DataLoader(loaders[0], 64, shuffle=True), DataLoader(loaders[1], 64)


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.01)


@torch.enable_grad()
def attacked(model, x, y, strength=0.03):
    """The batch, each pixel moved by `strength` to where the loss is larger."""
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
    return (x + strength * slope.sign()).clamp(0, 1).detach()


def by_hand(model, train, val, epochs):
    optimizer, history = adam(model), []
    for _ in range(epochs):
        model.train()
        sums, rows = torch.zeros(2, dtype=torch.float64), 0
        for x, y in train:
            output = model(attacked(model, x, y))
            loss = F.cross_entropy(output, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sums += torch.stack([loss.detach() * len(y), (output.argmax(1) == y).sum()])
            rows += len(y)
        row = {"loss": sums[0].item() / rows, "accuracy": sums[1].item() / rows}
        model.eval()
        sums, rows = torch.zeros(2, dtype=torch.float64), 0
        for x, y in val:
            output = model(attacked(model, x, y)).detach()
            sums += torch.stack([F.cross_entropy(output, y) * len(y), (output.argmax(1) == y).sum()])
            rows += len(y)
        history.append(row | {"val_loss": sums[0].item() / rows, "val_accuracy": sums[1].item() / rows})
    return history


def by_trainer(model, train, val, epochs):
    class Adversarial(Trainer):
        def training_step(self, batch):
            x, y = batch
            output = self.model(attacked(self.model, x, y))
            return StepOutput(F.cross_entropy(output, y), output, y)

    trainer = Adversarial(model, adam(model), metrics={"accuracy": accuracy}, console=False)
    return trainer.fit(train, val, epochs=epochs).history


def rng_put_back(by):
    """The plain loop's validation loader draws a seed, where the Trainer's puts the random state back."""
    model, train, val = start()
    return model, by(model, train, [*val], 8)


def test_adversarial_training_gives_what_its_plain_loop_gives():
    plain, reported = rng_put_back(by_hand)
    model, history = rng_put_back(by_trainer)
    assert_near_history(history, reported)
    assert_same_weights(model, plain)
    assert reported[-1]["val_accuracy"] > 0.5


def test_adversarial_training_is_no_longer_than_its_plain_loop():
    assert_no_longer([by_trainer], [by_hand])
