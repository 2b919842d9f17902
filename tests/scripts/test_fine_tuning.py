"""Fine-tuning: a frozen backbone that is set free in epoch 1, a smaller rate for it, an EMA of all weights."""

from __future__ import annotations

import pytest
import torch
from plain_scripts import assert_no_longer, assert_same_history, assert_same_weights, digits, made
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from trainwright import EMA, Checkpoint, Trainer, accuracy, adamw, batches, freeze, unfreeze

EPOCHS = 4


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU())
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.backbone(x))


class FineTuning(Trainer):
    def begin_epoch(self, epoch):
        if epoch == 1:
            unfreeze(self.model.backbone)


def by_trainer(model, train, val):
    freeze(model.backbone)
    optimizer = adamw(lr=1e-2, lrs={"backbone": 1e-3})
    settings = {"metrics": {"accuracy": accuracy}, "average": EMA(0.9), "console": False}
    return FineTuning(model, optimizer, nn.CrossEntropyLoss(), **settings).fit(train, val, epochs=EPOCHS).history


def by_hand(model, train, val):
    model.backbone.requires_grad_(False)
    groups = [
        {"params": [p for p in part.parameters() if (p.dim() > 1) == decays], "lr": lr, "weight_decay": 0.01 * decays}
        for part, lr in ((model.head, 1e-2), (model.backbone, 1e-3))
        for decays in (True, False)
    ]
    optimizer, history = torch.optim.AdamW(groups, fused=True), []
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for epoch in range(EPOCHS):
        model.train()
        if epoch == 0:
            model.backbone.eval()
        if epoch == 1:
            model.backbone.requires_grad_(True)
        for x, y in train.epoch(epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            average.update_parameters(model)
        average.eval()
        total = hits = rows = 0
        with torch.no_grad():
            for x, y in val:
                output = average(x)
                total += F.cross_entropy(output, y, reduction="sum").item()
                hits += (output.argmax(1) == y).sum().item()
                rows += len(y)
        history.append({"val_loss": total / rows, "val_accuracy": hits / rows})
    model.load_state_dict(average.module.state_dict())
    return history


def data():
    x, y = digits(400)
    return batches((x[:300], y[:300]), 32, shuffle=True, seed=0), batches((x[300:], y[300:]), 48)


def test_fine_tuning_is_its_plain_loop():
    ours, theirs = made(Classifier), made(Classifier)
    assert_same_history(by_trainer(ours, *data()), by_hand(theirs, *data()))
    assert_same_weights(ours, theirs)


@pytest.mark.parametrize("stopped", [0.5, 1, 2.5], ids="after epoch {}".format)
def test_fine_tuning_that_was_stopped_goes_on_with_the_same_layers(stopped, tmp_path):
    whole = made(Classifier)
    history = by_trainer(whole, *data())

    def trainer():
        model = made(Classifier)
        freeze(model.backbone)
        return FineTuning(model, adamw(lr=1e-2, lrs={"backbone": 1e-3}), nn.CrossEntropyLoss(), average=EMA(0.9),
                          metrics={"accuracy": accuracy}, checkpoint=Checkpoint(tmp_path), console=False)  # fmt: skip

    trainer().fit(*data(), max_updates=int(stopped * 10))
    again = trainer()
    result = again.fit(*data(), epochs=EPOCHS, resume="auto")
    names = ("val_loss", "val_accuracy")
    assert [[row[name] for name in names] for row in result.history[-2:]] == [
        [row[name] for name in names] for row in history[-2:]
    ]
    assert_same_weights(again.model, whole)


def test_fine_tuning_is_no_longer_than_its_plain_loop():
    assert_no_longer([FineTuning, by_trainer], [by_hand])
