"""Two tasks at once: one body, two heads, two named losses, metrics that read their own head."""

from __future__ import annotations

import torch
from plain_scripts import assert_no_longer, assert_same_history, assert_same_weights, digits, made
from torch import nn
from torch.nn import functional as F

from trainwright import StepOutput, Trainer, accuracy, batches

EPOCHS = 3


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 32), nn.ReLU())
        self.digit, self.ink = nn.Linear(32, 10), nn.Linear(32, 1)

    def forward(self, x):
        hidden = self.body(x)
        return {"digit": self.digit(hidden), "ink": self.ink(hidden).squeeze(1)}


class TwoTasks(Trainer):
    def training_step(self, batch):
        output = self.model(batch["x"])
        digit, ink = F.cross_entropy(output["digit"], batch["digit"]), F.mse_loss(output["ink"], batch["ink"])
        return StepOutput({"digit_loss": digit, "ink_loss": 0.1 * ink}, output, batch)


def by_trainer(model, train, val):
    metrics = {
        "accuracy": lambda output, target: accuracy(output["digit"], target["digit"]),
        "ink_error": lambda output, target: (output["ink"] - target["ink"]).abs(),
    }
    trainer = TwoTasks(model, torch.optim.Adam(model.parameters(), lr=3e-3), metrics=metrics, console=False)
    return trainer.fit(train, val, epochs=EPOCHS).history


def by_hand(model, train, val):
    optimizer, history = torch.optim.Adam(model.parameters(), lr=3e-3), []
    for epoch in range(EPOCHS):
        row = {}
        for prefix, data in (("", train.epoch(epoch)), ("val_", val)):
            model.train(not prefix)
            losses, hits, error, rows = torch.zeros(3, dtype=torch.float64), 0, 0.0, 0
            for batch in data:
                optimizer.zero_grad()
                with torch.set_grad_enabled(not prefix):
                    output = model(batch["x"])
                    digit = F.cross_entropy(output["digit"], batch["digit"])
                    ink = 0.1 * F.mse_loss(output["ink"], batch["ink"])
                    loss = digit + ink
                if not prefix:
                    loss.backward()
                    optimizer.step()
                n = len(batch["x"])
                losses += torch.stack([loss, digit, ink]).detach().double() * n
                hits += (output["digit"].argmax(1) == batch["digit"]).sum().item()
                error += (output["ink"] - batch["ink"]).detach().abs().double().sum().item()
                rows += n
            for name, value in zip(("loss", "digit_loss", "ink_loss"), (losses / rows).tolist(), strict=True):
                row[prefix + name] = value
            row |= {f"{prefix}accuracy": hits / rows, f"{prefix}ink_error": error / rows}
        history.append(row)
    return history


def data():
    x, digit = digits(500)
    columns = {"x": x, "digit": digit, "ink": x.sum(1) / 10}
    train, val = ({name: one[part] for name, one in columns.items()} for part in (slice(400), slice(400, None)))
    return batches(train, 32, shuffle=True, seed=0), batches(val, 48)


def test_two_tasks_are_their_plain_loop():
    ours, theirs = made(TwoHeads), made(TwoHeads)
    assert_same_history(by_trainer(ours, *data()), by_hand(theirs, *data()))
    assert_same_weights(ours, theirs)


def test_two_tasks_are_no_longer_than_their_plain_loop():
    assert_no_longer([TwoTasks, by_trainer], [by_hand])
