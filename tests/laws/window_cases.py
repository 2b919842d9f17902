"""Unequal micro-batches, what a step may return, and the big batch by hand: shared by the tests of the Window law."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from trainwright import MeanLoss, StepOutput, SumLoss, Trainer

from .models import OPTIMIZERS, Smooth

IGNORED = -100


@dataclass(frozen=True)
class Shape:
    """Micro-batches of one epoch: rows and length of each, k of them to an update."""

    sizes: tuple[int, ...]
    lengths: tuple[int, ...]
    k: int
    seed: int = 0
    clip: float | None = None
    stream: bool = False

    def grouped(self, data):
        return [data[i : i + self.k] for i in range(0, len(data), self.k)]

    @property
    def epochs(self):
        return math.ceil(50 / math.ceil(len(self.sizes) / self.k))


UNEVEN = Shape((4, 1, 6, 2, 3, 5, 2), (2, 4, 1, 3, 3, 1, 2), k=3)
"""Windows of 3, 3 and 1 micro-batches."""


class Positions(Smooth):
    """`Smooth` at every position of a sequence, with classes in dim 1."""

    def forward(self, x):
        return super().forward(x).transpose(1, -1)


def draw(shape, kind, dtype=torch.float64):
    """Micro-batches; some targets are ignored, those of whole micro-batches too, but never of a whole window."""
    generator = torch.Generator().manual_seed(shape.seed)
    data = []
    for index, (rows, length) in enumerate(zip(shape.sizes, shape.lengths, strict=True)):
        places = (rows, length) if kind == "tokens" else (rows,)
        x = torch.randn(*places, 5, generator=generator, dtype=dtype)
        if kind == "numbers":
            y = torch.randn(*places, 4, generator=generator, dtype=dtype)
        elif kind == "shares":
            y = torch.rand(*places, 4, generator=generator, dtype=dtype).softmax(-1)
        else:
            y = torch.randint(4, places, generator=generator)
            y[torch.rand(places, generator=generator) < 0.4] = IGNORED
            y[...] = IGNORED if torch.rand((), generator=generator) < 0.3 else y
            if index % shape.k == 0:
                y.view(-1)[0] = 1
        data.append((x, y))
    return data


def joined(group, places):
    """One big batch of the rows (or tokens) of a window."""
    return torch.cat([x.reshape(-1, 5) for x, _ in group]), torch.cat([y.reshape(-1, *places) for _, y in group])


def flat(parameters):
    return torch.cat([p.grad.flatten() for p in parameters])


def twins(optimizer="sgd", dtype=torch.float64, out=4):
    pairs = []
    for kind in (Smooth, Positions):
        torch.manual_seed(7)
        model = kind(out).to(dtype)
        pairs.append((model, OPTIMIZERS[optimizer](model.parameters())))
    return pairs


def by_hand(model, optimizer, loss_of, groups, clip=None, epochs=1):
    """The plain loop over big batches."""
    losses = []
    for _ in range(epochs):
        for group in groups:
            x, y = joined(group, group[0][1].shape[1:] if group[0][1].is_floating_point() else ())
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            losses.append(loss.item())
    return losses


def summed(output, y):
    return F.cross_entropy(output, y, ignore_index=IGNORED, reduction="sum")


def valid(y):
    return int((y != IGNORED).sum())


def masked(output, y):
    """A mean by hand, 0 over nothing."""
    return summed(output, y) / max(valid(y), 1)


def tensor_count(y):
    return (y != IGNORED).sum()


def named(output, y):
    return {"a": MeanLoss(masked(output, y), valid(y)), "b": MeanLoss(0.5 * masked(2 * output, y), valid(y))}


def named_by_hand(output, y):
    return masked(output, y) + 0.5 * masked(2 * output, y)


RETURNED = {
    "a mean by torch": (F.cross_entropy, F.cross_entropy),
    "a step": (lambda o, y: StepOutput(F.cross_entropy(o, y), o, y), F.cross_entropy),
    "a mean": (lambda o, y: MeanLoss(masked(o, y), valid(y)), masked),
    "a mean over a float": (lambda o, y: MeanLoss(masked(o, y), 0.3 * valid(y)), masked),
    "a mean over a tensor": (lambda o, y: MeanLoss(masked(o, y), tensor_count(y)), masked),
    "a sum": (lambda o, y: SumLoss(summed(o, y), valid(y)), masked),
    "a sum over a tensor": (lambda o, y: SumLoss(summed(o, y), tensor_count(y)), masked),
    "a sum over rows": (lambda o, y: SumLoss(summed(o, y), y.shape[0]), lambda o, y: summed(o, y) / y.shape[0]),
    "a mean over rows": (lambda o, y: summed(o, y) / y.shape[0], lambda o, y: summed(o, y) / y.shape[0]),
    "named losses": (named, named_by_hand),
    "named rows": (
        lambda o, y: {"a": o.square().sum(1).mean(), "b": o.abs().sum(1).mean()},
        lambda o, y: o.square().sum(1).mean() + o.abs().sum(1).mean(),
    ),
}


def stepping(returned, count=None):
    """A Trainer whose step returns that, with a count of its own."""

    class Own(Trainer):
        def training_step(self, batch):
            x, y = batch
            return returned(self.model(x), y)

    if count is not None:
        Own.count = lambda self, batch: count(batch[1])
    return Own
