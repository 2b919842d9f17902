"""Distillation: a frozen teacher beside the model, two named losses."""

from __future__ import annotations

import torch
from plain_scripts import assert_no_longer, assert_same_history, assert_same_weights, digits, made
from torch import nn
from torch.nn import functional as F

from trainwright import Checkpoint, StepOutput, Trainer, accuracy, batches, load_weights

EPOCHS = 3


def small():
    return nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


def large():
    return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 10))


def imitation(output, wanted, temperature=2.0):
    log_guess, wanted = F.log_softmax(output / temperature, 1), F.softmax(wanted / temperature, 1)
    return F.kl_div(log_guess, wanted, reduction="batchmean") * temperature**2


class Distillation(Trainer):
    def training_step(self, batch):
        x, y = batch
        output = self.model(x)
        soft = imitation(output, self.frozen["teacher"](x))
        return StepOutput({"hard": F.cross_entropy(output, y), "soft": soft}, output, y)


def by_trainer(model, teacher, train, val, **settings):
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    settings = {"metrics": {"accuracy": accuracy}, "frozen": {"teacher": teacher}, "console": False, **settings}
    return Distillation(model, optimizer, **settings).fit(train, val, epochs=EPOCHS).history


def by_hand(model, teacher, train, val):
    optimizer, history = torch.optim.Adam(model.parameters(), lr=3e-3), []
    teacher.eval()
    for epoch in range(EPOCHS):
        model.train()
        for x, y in train.epoch(epoch):
            optimizer.zero_grad()
            output = model(x)
            with torch.no_grad():
                wanted = teacher(x)
            (F.cross_entropy(output, y) + imitation(output, wanted)).backward()
            optimizer.step()
        model.eval()
        totals, hits, rows = torch.zeros(3, dtype=torch.float64), 0, 0
        with torch.no_grad():
            for x, y in val:
                output = model(x)
                hard, soft = F.cross_entropy(output, y), imitation(output, teacher(x))
                totals += torch.stack([hard + soft, hard, soft]).double() * len(y)
                hits += (output.argmax(1) == y).sum().item()
                rows += len(y)
        row = dict(zip(("val_loss", "val_hard", "val_soft"), (totals / rows).tolist(), strict=True))
        history.append(row | {"val_accuracy": hits / rows})
    return history


def data():
    x, y = digits(500)
    return batches((x[:400], y[:400]), 32, shuffle=True, seed=0), batches((x[400:], y[400:]), 48)


def test_distillation_is_its_plain_loop():
    ours, theirs, teacher = made(small), made(small), made(large, seed=1)
    before = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
    history = by_trainer(ours, teacher, *data())
    assert all(module.training for module in teacher.modules())
    assert all(p.requires_grad and p.grad is None for p in teacher.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in teacher.state_dict().items())
    assert_same_history(history, by_hand(theirs, teacher, *data()))
    assert_same_weights(ours, theirs)


def test_a_teacher_is_in_no_checkpoint(tmp_path):
    ours, teacher = made(small), made(large, seed=1)
    by_trainer(ours, teacher, *data(), checkpoint=Checkpoint(tmp_path))
    assert load_weights(tmp_path, which="last").keys() == ours.state_dict().keys()


def test_distillation_is_no_longer_than_its_plain_loop():
    assert_no_longer([Distillation, by_trainer], [by_hand])
