"""What one of several processes asks for, or is told, holds for all of them, whenever it comes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainwright import Checkpoint, Stopped, Trainer, Updates, batches
from world.pool import Pool


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def data() -> Any:
    rows = torch.Generator().manual_seed(1)
    return batches((torch.randn(24, 4, generator=rows), torch.randint(3, (24,), generator=rows)), 8)


class SavesOnTheFirst(Trainer[nn.Module]):
    def end_epoch(self, metrics: dict[str, float]) -> None:
        if self.is_main:
            self.save()


def save_on_the_first(directory: str) -> list[str]:
    slot = Checkpoint(directory, every=Updates(1000), keep=9)
    SavesOnTheFirst(model(), sgd, nn.CrossEntropyLoss(), checkpoint=slot, console=False).fit(data(), epochs=3)
    return sorted(path.name for path in Path(directory).iterdir() if path.is_dir())


class SignalledAtTheEnd(Trainer[nn.Module]):
    def end_epoch(self, metrics: dict[str, float]) -> None:
        if self.progress.epoch == 2 and not self.is_main:
            os.kill(os.getpid(), signal.SIGTERM)


def signal_the_second_at_the_end() -> tuple[int, str]:
    trainer = SignalledAtTheEnd(model(), sgd, nn.CrossEntropyLoss(), console=False)
    code = 0
    try:
        trainer.fit(data(), epochs=2)
    except Stopped as stopped:
        code = int(str(stopped.code))
    assert trainer.result is not None
    return code, trainer.result.stopped


def test_a_save_that_one_process_asks_for_at_an_epochs_end_is_made_by_all(ranks2: Pool, tmp_path: Path) -> None:
    kept = ranks2.run(save_on_the_first, str(tmp_path / "run"), seconds=30)
    assert len(kept[0]) == 3, kept


def test_a_signal_after_the_last_agreement_ends_all_processes(ranks2: Pool) -> None:
    assert ranks2.run(signal_the_second_at_the_end, seconds=30) == 2 * [(128 + signal.SIGTERM, "SIGTERM")]
