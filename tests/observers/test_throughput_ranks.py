"""The speed of several processes: rows of all, told on the first one, whoever of them asks for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from distributed.pool import pool
from trainwright import Observer, Trainer, Updates, batches
from trainwright.distributed.ddp import DDP
from trainwright.observers import Speed, Throughput


class Told(Observer):
    def __init__(self) -> None:
        self.speeds: list[Speed] = []

    def on_speed(self, speed: Speed) -> None:
        self.speeds.append(speed)


def run(only_first: bool) -> list[Any]:
    torch.manual_seed(0)
    model, told = nn.Linear(4, 3), Told()
    asked = [Throughput(every=Updates(3), peak=1e9), told]
    trainer = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        nn.CrossEntropyLoss(),
        console=False,
        parallel=DDP(),
        observers=asked if not only_first or torch.distributed.get_rank() == 0 else [],
    )
    trainer.fit(batches((torch.randn(50, 4), torch.arange(50) % 3), 8), epochs=2)
    return [(one.update, one.rows, one.flops_per_row, one.peak, one.note) for one in told.speeds]


@pytest.mark.slow
@pytest.mark.parametrize("only_first", [False, True])
def test_the_first_process_tells_the_rows_of_all(only_first: bool) -> None:
    first, second = pool(2).run(run, only_first)
    assert second == []
    assert first[-1][0] == 14 and sum(one[1] for one in first) == 100
    row = 2 * (2 * 4 * 3)  # the inputs need no gradient
    assert {one[2:] for one in first} == {(row, 2e9, "")}  # the peaks add up
