"""DCGAN on the digits: two networks, two optimizers, BatchNorm in both."""

from __future__ import annotations

import torch
from plain_scripts import assert_near_history, assert_no_longer, assert_same_weights
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.utils.data import DataLoader, TensorDataset

from trainwright import Trainer


class Nets(nn.Module):
    """A generator of 8 x 8 pictures from 16 numbers, and a discriminator."""

    def __init__(self):
        super().__init__()
        self.G = nn.Sequential(
            *(nn.ConvTranspose2d(16, 8, 4), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.ConvTranspose2d(8, 1, 4, 2, 1), nn.Tanh()),
        )
        self.D = nn.Sequential(
            *(nn.Conv2d(1, 8, 4, 2, 1), nn.BatchNorm2d(8), nn.LeakyReLU(0.2)),
            *(nn.Conv2d(8, 1, 4), nn.Flatten()),
        )


def start():
    torch.manual_seed(0)
    images = torch.tensor(load_digits().images[:150], dtype=torch.float32).unsqueeze(1) / 8 - 1
    return Nets(), DataLoader(TensorDataset(images), 32, shuffle=True)


def adam(net):
    return torch.optim.Adam(net.parameters(), lr=2e-3, betas=(0.5, 0.999))


def by_hand(nets, loader, epochs):
    optimizer_D, optimizer_G = adam(nets.D), adam(nets.G)
    history = []
    for _ in range(epochs):
        sum_D, sum_G, rows = 0.0, 0.0, 0
        for (real,) in loader:
            ones = torch.ones(len(real), 1)
            fake = nets.G(torch.randn(len(real), 16, 1, 1))
            loss_D = bce(nets.D(real), ones) + bce(nets.D(fake.detach()), 0 * ones)
            optimizer_D.zero_grad()
            loss_D.backward()
            optimizer_D.step()
            loss_G = bce(nets.D(fake), ones)
            optimizer_G.zero_grad()
            loss_G.backward()
            optimizer_G.step()
            sum_D += loss_D.item() * len(real)
            sum_G += loss_G.item() * len(real)
            rows += len(real)
        history.append({"loss_D": sum_D / rows, "loss_G": sum_G / rows})
    return history


def by_trainer(nets, loader, epochs):
    class GAN(Trainer):
        def update(self, window):
            ((real,),) = window
            ones = torch.ones(len(real), 1)
            fake = self.model.G(torch.randn(len(real), 16, 1, 1))
            loss_D = bce(self.model.D(real), ones) + bce(self.model.D(fake.detach()), 0 * ones)
            self.minimize(loss_D, "D")
            self.minimize(bce(self.model.D(fake), ones), "G")

    trainer = GAN(nets, {"D": adam(nets.D), "G": adam(nets.G)}, console=False)
    return trainer.fit(loader, epochs=epochs).history


def test_dcgan_gives_what_its_plain_loop_gives():
    plain, loader = start()
    told = by_hand(plain, loader, 3)
    nets, loader = start()
    assert_near_history(by_trainer(nets, loader, 3), told)
    assert_same_weights(nets, plain)


def test_dcgan_is_no_longer_than_its_plain_loop():
    assert_no_longer([by_trainer], [by_hand])
