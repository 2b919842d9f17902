"""LBFGS on a full batch, as in PyTorch's time-sequence example: a recurrent network that goes on with sine waves."""

from __future__ import annotations

import torch
from plain_scripts import assert_near_history, assert_no_longer, assert_same_weights
from torch import nn

from trainwright import Trainer


class Waves(nn.Module):
    """Predicts the next value of each wave; (rows, length) to (rows, length)."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRU(1, 8, batch_first=True)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.cell(x.unsqueeze(2))[0]).squeeze(2)


def start():
    torch.manual_seed(0)
    waves = torch.sin((torch.arange(24.0).double() + 20 * torch.rand(9, 1).double()) / 4)
    train, val = (waves[3:, :-1], waves[3:, 1:]), (waves[:3, :-1], waves[:3, 1:])
    return Waves().double(), train, val


def lbfgs(model):
    return torch.optim.LBFGS(model.parameters(), lr=0.8, max_iter=8)


def by_hand(model, train, val, steps):
    optimizer, loss_of = lbfgs(model), nn.MSELoss()
    history = []
    for _ in range(steps):
        model.train()

        def closure():
            optimizer.zero_grad()
            loss = loss_of(model(train[0]), train[1])
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        model.eval()
        with torch.no_grad():
            val_loss = loss_of(model(val[0]), val[1])
        history.append({"loss": loss.item(), "val_loss": val_loss.item()})
    return history


def by_trainer(model, train, val, steps):
    class Closed(Trainer):
        def update(self, window):
            self.apply_gradients(closure=lambda: self.compute_gradients(window))

    trainer = Closed(model, lbfgs(model), nn.MSELoss(), console=False)
    return trainer.fit([train], [val], epochs=steps).history


def test_lbfgs_gives_what_its_plain_loop_gives():
    plain, train, val = start()
    told = by_hand(plain, train, val, 6)
    model, train, val = start()
    assert_near_history(by_trainer(model, train, val, 6), told)
    assert_same_weights(model, plain)
    assert told[-1]["loss"] < 0.2 * told[0]["loss"]


def test_lbfgs_is_no_longer_than_its_plain_loop():
    assert_no_longer([by_trainer], [by_hand])
