"""WGAN-GP: a critic whose gradient is penalized, stepped at each batch, and a generator at each fifth."""

from __future__ import annotations

import torch
from plain_scripts import assert_near_history, assert_no_longer, assert_same_weights
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainwright import Trainer


class Nets(nn.Module):
    """A generator of 64 numbers from 8, and a critic."""

    def __init__(self):
        super().__init__()
        self.G = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64))
        self.D = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))


def start():
    torch.manual_seed(0)
    images = torch.tensor(load_digits().data[:200], dtype=torch.float64) / 8 - 1
    return Nets().double(), DataLoader(TensorDataset(images), 16, shuffle=True)


def adam(net):
    return torch.optim.Adam(net.parameters(), lr=1e-3, betas=(0.0, 0.9))


def noise(real):
    return torch.randn(len(real), 8, dtype=real.dtype)


def penalty(critic, real, fake):
    """How far the critic's slope between real and generated points is from 1."""
    share = torch.rand(len(real), 1, dtype=real.dtype)
    between = (share * real + (1 - share) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


def by_hand(nets, loader, epochs):
    optimizer_D, optimizer_G = adam(nets.D), adam(nets.G)
    history, step = [], 0
    for _ in range(epochs):
        total, gaps, rows = 0.0, 0.0, 0
        for (real,) in loader:
            fake = nets.G(noise(real)).detach()
            gap = nets.D(real).mean() - nets.D(fake).mean()
            loss = 10 * penalty(nets.D, real, fake) - gap
            optimizer_D.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(nets.D.parameters(), 5.0)
            optimizer_D.step()
            total += loss.item() * len(real)
            gaps += gap.item() * len(real)
            rows += len(real)
            step += 1
            if step % 5 == 0:
                loss_G = -nets.D(nets.G(noise(real))).mean()
                optimizer_G.zero_grad()
                loss_G.backward()
                optimizer_G.step()
        history.append({"loss_D": total / rows, "gap": gaps / rows})
    return history


def by_trainer(nets, loader, epochs):
    class Wasserstein(Trainer):
        def update(self, window):
            ((real,),) = window
            fake = self.model.G(noise(real)).detach()
            gap = self.model.D(real).mean() - self.model.D(fake).mean()
            self.log("gap", gap)
            self.minimize(10 * penalty(self.model.D, real, fake) - gap, "D")
            if self.progress.updates % 5 == 4:
                self.minimize(-self.model.D(self.model.G(noise(real))).mean(), "G")

    optimizers = {"D": adam(nets.D), "G": adam(nets.G)}
    trainer = Wasserstein(nets, optimizers, clip={"D": 5.0}, console=False)
    return trainer.fit(loader, epochs=epochs).history


def test_wgan_gp_gives_what_its_plain_loop_gives():
    plain, loader = start()
    told = by_hand(plain, loader, 3)
    nets, loader = start()
    assert_near_history(by_trainer(nets, loader, 3), told)
    assert_same_weights(nets, plain)


def test_wgan_gp_is_no_longer_than_its_plain_loop():
    assert_no_longer([by_trainer], [by_hand])
