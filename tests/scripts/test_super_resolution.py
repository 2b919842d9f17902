"""Super-resolution: pictures in, larger pictures out; a loss over pixels, PSNR over pictures."""

from __future__ import annotations

import pytest
import torch
from plain_scripts import assert_no_longer, assert_same_history, assert_same_weights, digits, made
from torch import nn
from torch.nn import functional as F

from trainwright import Trainer, batches

EPOCHS = 2


def enlarger():
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1), nn.PixelShuffle(2))


def psnr(output, target):
    """Peak signal-to-noise ratio of each picture, in dB, for pixels of 0 to 1."""
    return -10 * (output - target).square().flatten(1).mean(1).log10()


def by_trainer(model, train, val, loss):
    trainer = Trainer(model, torch.optim.Adam, loss, metrics={"psnr": psnr}, console=False)
    return trainer.fit(train, val, epochs=EPOCHS).history


def by_hand(model, train, val, loss):
    optimizer, history = torch.optim.Adam(model.parameters(), fused=True), []
    for epoch in range(EPOCHS):
        model.train()
        total = elements = 0
        for small, large in train.epoch(epoch):
            optimizer.zero_grad()
            value = loss(model(small), large)
            value.backward()
            optimizer.step()
            total += value.item() * large.numel()
            elements += large.numel()
        row = {"loss": total / elements}
        model.eval()
        total = decibels = rows = elements = 0
        with torch.no_grad():
            for small, large in val:
                output = model(small)
                total += type(loss)(reduction="sum")(output, large).item()
                decibels += psnr(output, large).double().sum().item()
                rows += len(large)
                elements += large.numel()
        history.append(row | {"val_loss": total / elements, "val_psnr": decibels / rows})
    return history


def data():
    large = digits(500)[0].view(-1, 1, 8, 8)
    small = F.avg_pool2d(large, 2)
    return batches((small[:400], large[:400]), 32, shuffle=True, seed=0), batches((small[400:], large[400:]), 48)


@pytest.mark.parametrize("loss", [nn.L1Loss(), nn.MSELoss()], ids=["L1", "MSE"])
def test_super_resolution_is_its_plain_loop(loss):
    ours, theirs = made(enlarger), made(enlarger)
    assert_same_history(by_trainer(ours, *data(), loss), by_hand(theirs, *data(), loss))
    assert_same_weights(ours, theirs)


def test_super_resolution_is_no_longer_than_its_plain_loop():
    assert_no_longer([by_trainer], [by_hand])
