"""Tiny models, their data, and what the laws compare: shared by the law tests, without a line of the library's loop."""

from __future__ import annotations

import torch
from torch import nn


class MLP(nn.Module):
    """Rows of 6 numbers to 4 classes, with dropout."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4))

    def forward(self, x):
        return self.layers(x)


class CNN(nn.Module):
    """Pictures of 1 x 6 x 6 to 4 classes, with BatchNorm."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


class Tied(nn.Module):
    """Tokens (rows, length) to the next of 11 tokens (rows, 11, length); embedding and head share one weight."""

    def __init__(self, sparse=False):
        super().__init__()
        self.embedding = nn.Embedding(11, 8, sparse=sparse)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        if not sparse:
            self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(torch.tanh(self.mix(self.embedding(x)))).transpose(1, -1)


class Smooth(nn.Module):
    """Rows of 5 numbers to `out` numbers, without noise and without kinks."""

    def __init__(self, out=4):
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, out)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


MODELS = {"mlp": MLP, "cnn": CNN, "tied": Tied}
SHAPES = {"mlp": (6,), "cnn": (1, 6, 6)}
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


def build(kind, optimizer="sgd", *, dtype=torch.float32, **options):
    """The model of that kind and its optimizer, the same at each call."""
    torch.manual_seed(11)
    model = (MODELS[kind] if isinstance(kind, str) else kind)(**options).to(dtype)
    return model, OPTIMIZERS[optimizer](model.parameters())


def tensors(kind, rows, *, seed=5, dtype=torch.float32):
    """Inputs and targets of `rows` rows for a model of that kind."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "tied":
        tokens = torch.randint(11, (rows, 6), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]
    x = torch.randn(rows, *SHAPES[kind], generator=generator, dtype=dtype)
    return x, torch.randint(4, (rows,), generator=generator)


def ready(kind, rows=41, size=7, **options):
    """A list of batches of at most `size` rows, the last one short."""
    x, y = tensors(kind, rows, **options)
    return list(zip(x.split(size), y.split(size), strict=True))


def assert_equal(ours, theirs, where=""):
    """Two trees of tensors and numbers are equal bit for bit."""
    assert type(ours) is type(theirs), where
    if isinstance(ours, dict):
        assert list(ours) == list(theirs), where
        for key in ours:
            assert_equal(ours[key], theirs[key], f"{where}.{key}")
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs), where
        for index, pair in enumerate(zip(ours, theirs, strict=True)):
            assert_equal(*pair, f"{where}[{index}]")
    elif isinstance(ours, torch.Tensor):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), where
    else:
        assert ours == theirs, where


def assert_twins(ours, theirs):
    """Two (model, optimizer) pairs agree bit for bit: parameters, buffers, modes, optimizer state."""
    (model, optimizer), (model2, optimizer2) = ours, theirs
    assert_equal(dict(model.state_dict()), dict(model2.state_dict()), "model")
    assert_equal(optimizer.state_dict(), optimizer2.state_dict(), "optimizer")
    modes = [(name, module.training) for name, module in model.named_modules()]
    assert modes == [(name, module.training) for name, module in model2.named_modules()]


def distance(ours, theirs):
    """Largest difference between the parameters of two models, over their largest value."""
    pairs = list(zip(ours.parameters(), theirs.parameters(), strict=True))
    most = max(float(theirs.detach().abs().max()) for _, theirs in pairs)
    return max(float((a - b).detach().abs().max()) for a, b in pairs) / most
