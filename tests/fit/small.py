"""A small trainer: one linear layer of 3 numbers to 1, squared errors and SGD, the same weights at each call."""

from __future__ import annotations

import torch
from torch import nn

from trainwright import Trainer

BATCHES = [(torch.ones(2, 3), torch.ones(2, 1))] * 4


def small(cls=Trainer, **settings):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return cls(model, optimizer, nn.MSELoss(), **{"console": False} | settings)
