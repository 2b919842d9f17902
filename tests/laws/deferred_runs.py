"""Runs with the deferred check on the CPU, where every number can be looked at."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from trainwright import Observer, Trainer
from trainwright.update import deferred_check

ROWS, SIZE = 22, 4


def defer_on_cpu(patch: pytest.MonkeyPatch) -> None:
    """Defer the check of updates on the CPU too."""
    patch.setattr(deferred_check, "ASYNC_DEVICES", {"cpu", "meta", "cuda"})


def data(seed: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of four rows; the last one is short."""
    torch.manual_seed(seed)
    x, y = torch.randn(ROWS, 5), torch.randint(0, 3, (ROWS,))
    return list(zip(x.split(SIZE), y.split(SIZE), strict=True))


def net(*, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    # A bias before a BatchNorm has gradients of rounding alone, which Adam would make steps of full length.
    return nn.Sequential(nn.Linear(5, 8, bias=not norm), nn.BatchNorm1d(8) if norm else nn.Tanh(), nn.Linear(8, 3))


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
}


class Watches(Observer):
    """Keeps the record of every update, and the count of updates when it arrived."""

    wants = ("grad_norm",)

    def __init__(self) -> None:
        self.records: list[Any] = []
        self.at: list[int] = []
        self.trainer: Any = None

    def on_update(self, update: Any) -> None:
        self.records.append(update)
        self.at.append(self.trainer.progress.updates)


def trained(
    batches: Any,
    *,
    model: nn.Module | None = None,
    optimizer: Any = "adamw",
    loss: Any = None,
    cls: Any = Trainer,
    epochs: int = 3,
    **slots: Any,
) -> tuple[Any, Watches, Exception | None]:
    """A trainer after a fit, its observer, and the error that ended it."""
    model, watches = net() if model is None else model, Watches()
    made = OPTIMIZERS.get(optimizer, optimizer)(model.parameters())
    loss = nn.CrossEntropyLoss() if loss is None else loss
    trainer = cls(model, made, loss, console=False, observers=[watches], **slots)
    watches.trainer = trainer
    error = None
    try:
        trainer.fit(batches, epochs=epochs)
    except Exception as raised:
        error = raised
    return trainer, watches, error


def state(trainer: Trainer[Any]) -> Any:
    """Weights, buffers and optimizer state, copied."""
    [optimizer] = trainer.optimizers.values()
    return copy.deepcopy((trainer.model.state_dict(), optimizer.state_dict()["state"]))


def same(a: Any, b: Any) -> bool:
    """Whether two nested states are equal bit for bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)
