"""What the tests of schedules share: a parameter, an optimizer of it, its rate, and a rate that falls to 0."""

from __future__ import annotations

import torch
from torch.optim import SGD


def parameter():
    return torch.nn.Parameter(torch.zeros(1))


def sgd(**settings):
    return SGD([parameter()], lr=0.1, **settings)


def rate(optimizer, group=0):
    return optimizer.param_groups[group]["lr"]


def linear(update, total):
    return 1 - update / total
