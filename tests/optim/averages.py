"""The models, the plain loop and the comparisons that the tests of averages share."""

from __future__ import annotations

import torch
from torch import nn

torch.manual_seed(0)
X = torch.randn(24, 4)


def normed():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 1))


def train(model, *, updates, first=1):
    """Yields after each update of a plain loop; its noise depends on the update alone."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for update in range(first, first + updates):
        torch.manual_seed(update)
        x = X[torch.randperm(24)[:8]].to(list(model.parameters())[-1].dtype)
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
        yield update


def values(model):
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


def same(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def weights(model):
    return [parameter.detach().clone() for parameter in model.parameters()]
