"""Updates of users' own and their plain loops: SAM, LBFGS and GANs, shared by the tests of custom updates."""

from __future__ import annotations

import copy
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from records import Records
from trainwright import MixedPrecision, Trainer
from trainwright.precision import LossScaler, Precision

from .models import assert_equal
from .window_cases import UNEVEN, draw

RADIUS = 0.05


def numbers():
    """Uneven batches of inputs and targets that are numbers."""
    return draw(UNEVEN, "numbers")


class Scaled(Precision):
    """A precision that only scales the loss, by a power of two: exact."""

    def __init__(self, init_scale=2.0**11):
        self.init_scale = init_scale
        self.scalers = []

    def loss_scale(self, device_type):
        self.scalers.append(LossScaler(MixedPrecision("fp16", init_scale=self.init_scale, growth_interval=4)))
        return self.scalers[-1]


class Sharp(Trainer):
    """Sharpness-aware minimization: the gradient is that a little way up the hill."""

    def update(self, window):
        loss = self.compute_gradients(window)
        before = climb(self.model)
        self.compute_gradients(window)
        restore(self.model, before)
        self.apply_gradients()
        return loss


class Closed(Trainer):
    """An optimizer that evaluates loss and gradient itself."""

    def update(self, window):
        self.apply_gradients(closure=lambda: self.compute_gradients(window))


def climb(model):
    """Move the weights up the gradient, where that is finite; return what they were."""
    weights = [p for p in model.parameters() if p.grad is not None]
    before = [p.detach().clone() for p in weights]
    norm = nn.utils.get_total_norm([p.grad for p in weights])
    if norm.isfinite():
        with torch.no_grad():
            for p in weights:
                p.add_(p.grad / norm, alpha=RADIUS)
    return before


def restore(model, before):
    with torch.no_grad():
        for p, value in zip([p for p in model.parameters() if p.grad is not None], before, strict=True):
            p.copy_(value)


def sharp_by_hand(model, optimizer, loss_of, data, *, clip=None, schedule=None, cast=None):
    """SAM as a plain loop over whole batches; returns the losses."""
    losses = []
    for x, y in data:
        for climbing in (True, False):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=cast == "bf16"):
                loss = loss_of(model(x), y)
            loss.backward()
            if climbing:
                losses.append(loss.item())
                before = climb(model)
            else:
                restore(model, before)
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return losses


def closed_by_hand(model, optimizer, loss_of, data, *, clip=None, schedule=None):
    """LBFGS as a plain loop over whole batches; returns the losses before each step."""

    def closure(x, y):
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        return loss.detach()  # LBFGS of torch 2.8 warns of a loss with a graph

    losses = []
    for batch in data:
        losses.append(float(optimizer.step(partial(closure, *batch))))
        if schedule is not None:
            schedule.step()
    return losses


class Pair(nn.Module):
    """A generator of points in the plane from 3 numbers, and their critic, with BatchNorm where that is asked for."""

    def __init__(self, *, norm=False):
        super().__init__()
        self.G = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8) if norm else nn.Tanh(), nn.Linear(8, 2))
        self.D = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))


def pairs(*, norm=False, dtype=torch.float64):
    """Two equal generators with critics, each with its two optimizers by name."""
    torch.manual_seed(7)
    first = Pair(norm=norm).to(dtype)
    return [(model, named_optimizers(model)) for model in (first, copy.deepcopy(first))]


def named_optimizers(model):
    return {
        "G": torch.optim.Adam(model.G.parameters(), lr=0.02, betas=(0.5, 0.999)),
        "D": torch.optim.Adam(model.D.parameters(), lr=0.01, betas=(0.5, 0.999)),
    }


def points(sizes=(4, 1, 6, 2, 3, 5, 2), dtype=torch.float64):
    """Uneven batches of points on a circle."""
    turns = torch.rand(sum(sizes), generator=torch.Generator().manual_seed(3), dtype=dtype) * 6.28
    return list(torch.stack([turns.cos(), turns.sin()], 1).split(list(sizes)))


def noise(real):
    return torch.randn(len(real), 3, dtype=real.dtype)


def critic_loss(model, real, fake):
    real, fake = model.D(real), model.D(fake.detach())
    return F.softplus(-real).mean() + F.softplus(fake).mean()


def generator_loss(model, fake):
    return F.softplus(-model.D(fake)).mean()


class GAN(Trainer):
    """Two optimizers, one after the other."""

    def update(self, window):
        real = torch.cat([*window])
        fake = self.model.G(noise(real))
        self.minimize(critic_loss(self.model, real, fake), "D")
        self.minimize(generator_loss(self.model, fake), "G")


def gan_by_hand(model, optimizers, data, *, clip=None, schedules=(), scaler=None):
    """The GAN as a plain loop over whole batches; returns (loss_D, loss_G, norm_D) of each."""
    reported = []
    for real in data:
        fake = model.G(noise(real))
        seen = {}
        for name, loss_of in (("D", critic_loss), ("G", generator_loss)):
            optimizers[name].zero_grad()
            loss = loss_of(model, real, fake) if name == "D" else loss_of(model, fake)
            seen[name] = loss.item()
            (loss if scaler is None else scaler.scale(loss)).backward()
            if name == "D" and clip is not None:
                seen["norm"] = nn.utils.clip_grad_norm_(model.D.parameters(), clip).item()
            optimizers[name].step() if scaler is None else scaler.step(optimizers[name])
        if scaler is not None:
            scaler.update()
        for schedule in schedules:
            schedule.step()
        reported.append(seen)
    return reported


def joined_rows(data, k):
    """Batches joined as windows of k join them."""
    return [torch.cat(data[i : i + k]) for i in range(0, len(data), k)]


def assert_pairs(ours, theirs):
    """Two models with named optimizers agree bit for bit, their optimizers' state too."""
    (model, optimizers), (model2, optimizers2) = ours, theirs
    assert_equal(dict(model.state_dict()), dict(model2.state_dict()), "model")
    for name, optimizer in optimizers.items():
        assert_equal(optimizer.state_dict()["state"], optimizers2[name].state_dict()["state"], name)


def run(trainer, pair, data, *, epochs=1, loss=None, **settings):
    """Fit, and return the trainer, its result and every `Update`."""
    seen = Records()
    made = trainer(*pair, loss, console=False, observers=[seen], **settings)
    result = made.fit(data, epochs=epochs)
    return made, result, seen.updates
