"""Cross-validation over several processes gives each of them what one process gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from distributed.pool import pool
from trainwright import Trainer, accuracy
from trainwright.tools import CrossValidation, cross_validate

x = torch.randn(45, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
y = (x.sum(1) > 0.5).long()


def validated(seed: int) -> CrossValidation:
    """Five folds of nine rows, on whatever processes there are."""

    def make() -> Trainer[Any]:
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return Trainer(model, optimizer, nn.CrossEntropyLoss(), metrics={"accuracy": accuracy}, console=False)

    return cross_validate(make, (x, y), 5, batch_size=8, epochs=2, seed=seed)


def by_each(seed: int) -> tuple[dict[str, Any], Any]:
    """What a rank finds."""
    found = validated(seed)
    return {
        "mean": found.mean,
        "std": found.std,
        "rows": [fold.rows.tolist() for fold in found.folds],
    }, found.predictions


def test_every_rank_gets_the_result_of_one_process() -> None:
    expected, outputs = by_each(3)
    for result, predictions in pool(2).run(by_each, 3):
        assert result["rows"] == expected["rows"]
        assert result["mean"] == pytest.approx(expected["mean"]) and result["std"] == pytest.approx(expected["std"])
        torch.testing.assert_close(predictions, outputs)
