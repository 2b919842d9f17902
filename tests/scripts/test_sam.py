"""Sharpness-aware minimization of a small classifier of digits, with OneCycle, clipping and validation."""

from __future__ import annotations

import torch
from plain_scripts import assert_near_history, assert_no_longer, assert_same_weights
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from trainwright import OneCycle, Trainer, accuracy


def start():
    torch.manual_seed(0)
    x, y = load_digits(return_X_y=True)
    data = torch.tensor(x, dtype=torch.float64) / 16, torch.tensor(y)
    model = nn.Sequential(nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 10)).double()
    train = DataLoader(TensorDataset(data[0][:300], data[1][:300]), 64, shuffle=True)
    return model, train, (data[0][300:500], data[1][300:500])


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def climb(model, radius=0.05):
    """Move the weights up the gradient, where that is finite; return what they were."""
    weights = [*model.parameters()]
    before = [p.detach().clone() for p in weights]
    norm = nn.utils.get_total_norm([p.grad for p in weights])
    if norm.isfinite():
        with torch.no_grad():
            torch._foreach_add_(weights, [radius * p.grad / norm for p in weights])
    return before


@torch.no_grad()
def put_back(model, before):
    torch._foreach_copy_([*model.parameters()], before)


def by_hand(model, train, val, epochs):
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=epochs * len(train))
    history = []
    for _ in range(epochs):
        model.train()
        total, rows = 0.0, 0
        for x, y in train:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            before = climb(model)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            put_back(model, before)
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            schedule.step()
            total, rows = total + loss.item() * len(x), rows + len(x)
        model.eval()
        with torch.no_grad():
            hits = (model(val[0]).argmax(1) == val[1]).double().mean().item()
        history.append({"loss": total / rows, "val_accuracy": hits})
    return history


def by_trainer(model, train, val, epochs):
    class Sharp(Trainer):
        def update(self, window):
            loss = self.compute_gradients(window)
            before = climb(self.model)
            self.compute_gradients(window)
            put_back(self.model, before)
            self.apply_gradients()
            return loss

    slots = {"clip": 0.3, "schedule": OneCycle(max_lr=0.3), "metrics": {"accuracy": accuracy}}
    trainer = Sharp(model, sgd(model), nn.CrossEntropyLoss(), console=False, **slots)
    return trainer.fit(train, [val], epochs=epochs).history


def test_sam_gives_what_its_plain_loop_gives():
    plain, train, val = start()
    told = by_hand(plain, train, val, 8)
    model, train, val = start()
    assert_near_history(by_trainer(model, train, val, 8), told)
    assert_same_weights(model, plain)
    assert told[-1]["val_accuracy"] > 0.8


def test_sam_is_no_longer_than_its_plain_loop():
    assert_no_longer([by_trainer], [by_hand])
