"""Small models and trainers with a planted problem, or none, for the tests of findings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainwright import Trainer
from trainwright.tools.finding import Finding
from trainwright.tools.findings import findings
from trainwright.tools.trial import traceless

CLASSES = 3


def rows(number: int = 32, *shape: int, batches: int = 3) -> list[tuple[Tensor, Tensor]]:
    """Ready batches of normal numbers with classes."""
    torch.manual_seed(0)
    shape = shape or (6,)
    return [(torch.randn(number, *shape), torch.arange(number) % CLASSES) for _ in range(batches)]


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, CLASSES))


def convolutional(*, bias: bool = False) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=bias),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * 36, CLASSES),
    )


def trainer_of(model: nn.Module, loss: Any = None, kind: type[Trainer[Any]] = Trainer, **settings: Any) -> Trainer[Any]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    return kind(model, optimizer, loss or nn.CrossEntropyLoss(), console=False, **settings)


def found(trainer: Trainer[Any], batches: Sequence[Any], **data: Any) -> dict[str, Finding]:
    """What is found, by name; each name once."""
    with traceless(trainer):
        each = findings(trainer, batches, **data)
    named = {one.name: one for one in each}
    assert len(named) == len(each)
    for one in each:
        assert one.what and one.why and one.fix and "\n" not in one.fix
    return named
