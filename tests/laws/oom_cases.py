"""Models that run out of memory above a number of rows, in forward or in backward: shared by the tests of splitting."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from .window_cases import Positions

FULL = "CUDA out of memory. Tried to allocate 2.00 GiB."


class _Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, most):
        ctx.is_full = x.shape[0] > most
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.is_full:
            raise torch.OutOfMemoryError(FULL)
        return gradient, None


class Scarce(nn.Module):
    """A model that has memory for `most` rows; notes how many it was given at each call."""

    def __init__(self, inner, most=2, *, where="forward", error=None):
        super().__init__()
        self.inner, self.most, self.where = inner, most, where
        self.error = error or (lambda: torch.OutOfMemoryError(FULL))
        self.calls = []

    def forward(self, *inputs):
        rows = inputs[0].shape[0]
        if self.training:
            self.calls.append(rows)
        if self.training and self.where == "forward" and rows > self.most:
            self.inner(*inputs)  # what a failed try has moved is to be put back
            raise self.error()
        output = self.inner(*inputs)
        if self.training and self.where == "backward":
            return _Back.apply(output, self.most)
        return output


class Noisy(nn.Module):
    """Rows of 5 numbers to 4, with dropout."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Dropout(0.4), nn.Linear(9, 4))

    def forward(self, x):
        return self.layers(x)


class Counting(nn.Module):
    """A linear layer that counts its calls, once in place and once by another tensor."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("rows", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        self.rows = self.rows + len(x)
        return self.layer(x)


def scarce(most=2, *, kind=Positions, lr=0.1, momentum=0.9, dtype=torch.float64, **how):
    """A model that is scarce of memory, and its optimizer; the same weights at each call."""
    torch.manual_seed(7)
    model = Scarce(kind().to(dtype), most, **how)
    return model, torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)


def numbers(rows=24, dtype=torch.float64):
    """Inputs and class numbers."""
    generator = torch.Generator().manual_seed(4)
    return torch.randn(rows, 5, generator=generator, dtype=dtype), torch.randint(4, (rows,), generator=generator)


def by_hand(model, optimizer, x, y, size, epochs=1):
    """The plain loop over batches of `size` rows, on a model with memory enough."""
    model, losses = model.inner if isinstance(model, Scarce) else model, []
    for _ in range(epochs):
        for inputs, target in zip(x.split(size), y.split(size), strict=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses
