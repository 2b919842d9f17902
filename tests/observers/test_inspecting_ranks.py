"""Profiles and statistics of several processes: all pause alike, the first one tells, and who has others is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from distributed.pool import pool
from trainwright import Observer, SettingError, Trainer, Updates, batches
from trainwright.distributed.ddp import DDP
from trainwright.observers import ModelStatistics, Profile, Statistics


class Told(Observer):
    def __init__(self) -> None:
        self.seen: list[ModelStatistics] = []

    def on_statistics(self, statistics: ModelStatistics) -> None:
        self.seen.append(statistics)


def run(directory: Path, only_first: bool, parallel: Any) -> list[Any]:
    torch.manual_seed(0)
    model, told = nn.Linear(4, 3), Told()
    asked = [Statistics(every=Updates(3)), Profile(directory, after=4, updates=2, rows=0)]
    has_them = not only_first or torch.distributed.get_rank() == 0
    trainer = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        nn.CrossEntropyLoss(),
        console=False,
        parallel=parallel,
        observers=[*(asked if has_them else []), told],
    )
    x = torch.randn(50, 4, generator=torch.Generator().manual_seed(1))
    try:
        trainer.fit(batches((x, torch.arange(50) % 3), 8), epochs=2)
    except SettingError as error:
        return [str(error)]
    return [(one.update, one.parameters["weight"].grad_norm, one.parameters["weight"].update_norm) for one in told.seen]


def test_the_first_process_tells_what_one_process_would(tmp_path: Path) -> None:
    first, second = pool(2).run(run, tmp_path, False, DDP())
    alone, _ = pool(2).run(run, tmp_path / "alone", False, None)
    assert second == []
    assert [one[0] for one in first] == [3, 6, 9, 12]
    for together, one in zip(first, alone, strict=True):
        assert together == pytest.approx(one, rel=1e-5)
    assert [one.name for one in tmp_path.iterdir() if one.is_file()] == ["updates-5-6.json.gz"]


def test_observers_that_only_some_processes_have_are_refused(tmp_path: Path) -> None:
    for told in pool(2).run(run, tmp_path, True, DDP()):
        assert "the processes of this run were not given the same probes" in told[0] and "Statistics(every=" in told[0]
