"""The default evaluation step with cross entropy: every way to count gives the loop's own sum over what is counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from trainwright import Trainer, batches

ROWS = 64
INPUTS = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(0))
TARGETS = torch.randint(4, (ROWS,), generator=torch.Generator().manual_seed(1)).where(torch.arange(ROWS) % 5 > 0, -100)
PAIRS = [(INPUTS[i : i + 20], TARGETS[i : i + 20]) for i in range(0, ROWS, 20)]
PAIRS_OF_16 = [(INPUTS[i : i + 16], TARGETS[i : i + 16]) for i in range(0, ROWS, 16)]
DATA: dict[str, Any] = {
    "in order": lambda: batches((INPUTS, TARGETS), 16),
    "shuffled": lambda: batches((INPUTS, TARGETS), 16, shuffle=True, seed=1),
    "a short last batch": lambda: batches((INPUTS, TARGETS), 20),
    "without the last batch": lambda: batches((INPUTS, TARGETS), 20, shuffle=True, seed=1, drop_last=True),
    "a loader": lambda: DataLoader(TensorDataset(INPUTS, TARGETS), 16),
    "a loader with a short last batch": lambda: DataLoader(TensorDataset(INPUTS, TARGETS), 20),
    "another loader": lambda: DataLoader([*zip(INPUTS, TARGETS, strict=True)], 16),
    "more batches than are read at once": lambda: batches((INPUTS.repeat(20, 1), TARGETS.repeat(20)), 8),
    "batches of more targets than are counted as a list": lambda: batches((INPUTS.repeat(3, 1), TARGETS.repeat(3)), 96),
    "ready batches": lambda: PAIRS,
}


def by_hand(model: nn.Module, data: Any) -> float:
    """The mean over what is counted, of a plain loop in float64 sums."""
    total, count = 0.0, 0
    with torch.no_grad():
        for inputs, target in data:
            total += F.cross_entropy(model(inputs), target, reduction="sum").item()
            count += int((target != -100).sum())
    return total / count


def model_of(dtype: torch.dtype = torch.float32) -> nn.Module:
    """A small model whose scores have this type."""
    torch.manual_seed(2)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).to(dtype)

    return Net()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("data", DATA)
def test_the_loss_is_the_loops_sum_over_the_targets_that_count(data: str, dtype: torch.dtype) -> None:
    model = model_of(dtype)
    trainer = Trainer(model, None, nn.CrossEntropyLoss(), console=False)
    given = DATA[data]()
    again = iter(DATA[data]())  # epoch 0, as evaluations read
    assert trainer.evaluate(given) == {"val_loss": by_hand(model, again)}


def test_a_metric_may_write_into_the_targets() -> None:
    model, seen = model_of(), []

    def spoils(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        seen.append(target.numel())
        target.fill_(-100)
        return output.new_zeros(len(output))

    trainer = Trainer(model, None, nn.CrossEntropyLoss(), metrics={"spoils": spoils}, console=False)
    assert trainer.evaluate(batches((INPUTS, TARGETS), 16))["val_loss"] == by_hand(model, PAIRS_OF_16)
    assert sum(seen) == ROWS


def test_a_step_that_an_object_was_given_is_called() -> None:
    trainer = Trainer(model_of(), None, nn.CrossEntropyLoss(), console=False)
    own: Any = trainer
    own.validation_step = lambda batch: torch.tensor(7.0)
    assert trainer.evaluate(batches((INPUTS, TARGETS), 16)) == {"val_loss": 7.0}
