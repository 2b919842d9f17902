"""Small models that repeat a block, and a training of them, for the tests of what is compiled."""

from __future__ import annotations

import torch
from torch import nn

from trainwright import Fast, Trainer, batches

BACKEND = "aot_eager"
"""Compiles as torch's default does, but for the kernels: those are the eager ones."""


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)

    def forward(self, x):
        return x + torch.relu(self.norm(self.linear(x)))


class Net(nn.Module):
    """Three blocks between two layers; `depth=1` repeats nothing."""

    def __init__(self, depth=3, width=6):
        super().__init__()
        self.stem, self.head = nn.Linear(4, width), nn.Linear(width, 3)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def by(regions="regional", **options):
    return Fast(compile={"backend": BACKEND, "regions": regions, **options})


def data(rows=40, *, size=8, seed=0, shuffle=True):
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(rows, 4, generator=generator), torch.randint(0, 3, (rows,), generator=generator)
    return batches((x, y), size, shuffle=shuffle, seed=1 if shuffle else None)


def build(fast=None, *, model=Net, trainer=Trainer, optimizer=torch.optim.AdamW, **settings):
    """A Trainer with a model that is the same each time."""
    torch.manual_seed(3)
    model = model()
    settings = {"loss": nn.CrossEntropyLoss(), "console": False} | settings
    return trainer(model, optimizer(model.parameters(), lr=0.01), fast=fast, **settings)


def leftovers(model):
    """What is left of compiling in the modules of a model."""
    return [name for name, module in model.named_modules() if module._compiled_call_impl is not None]


def weights(model):
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
