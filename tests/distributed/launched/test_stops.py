"""Early ends, last saves and signals outside the loop, on two ranks: all end alike, and a resume is exact."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from distributed.pool import Pool
from trainwright import (
    Checkpoint,
    CheckpointError,
    EarlyStopping,
    Epochs,
    Observer,
    Plateau,
    Result,
    Stopped,
    Trainer,
    Updates,
    batches,
    latest_checkpoint,
)

pytestmark = pytest.mark.slow


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def data(rows: int = 40) -> Any:
    drawn = torch.Generator().manual_seed(1)
    return batches((torch.randn(rows, 4, generator=drawn), torch.randint(3, (rows,), generator=drawn)), 8)


class Stops(Trainer[nn.Module]):
    """Stopped by the second rank, at the next exchange of the ranks."""

    at = -1

    def after_update(self) -> None:
        if not self.is_main and self.progress.updates == self.at:
            self.stop("enough")


def trained(directory: str, at: int = -1, resume: str | None = None) -> tuple[Any, ...]:
    trainer = Stops(
        model(),
        sgd,
        nn.CrossEntropyLoss(),
        schedule=Plateau("val_loss", patience=0, factor=0.5),
        early_stopping=EarlyStopping("val_loss", patience=50),
        checkpoint=Checkpoint(directory, best="val_loss", every=Updates(1000)),
        console=False,
    )
    trainer.at = at
    result = trainer.fit(data(), data(16), epochs=800, max_updates=4000, validate=Epochs(1), resume=resume)
    weights = [value.tolist() for value in trainer.model.state_dict().values()]
    best = None if result.best is None else (result.best.value, result.best.update)
    return weights, result.history, result.updates, result.stopped, best, result.final_validation


def fill_the_disk(directory: str) -> tuple[str, str, int]:
    fsync = os.fsync

    class Fills(Trainer[nn.Module]):
        def end_epoch(self, metrics: dict[str, float]) -> None:
            if self.progress.epoch == 2 and self.is_main:

                def refuse(file: int) -> None:
                    raise OSError(28, "No space left on device")

                os.fsync = refuse

    slot = Checkpoint(directory, async_save=False)
    trainer = Fills(model(), sgd, nn.CrossEntropyLoss(), checkpoint=slot, console=False)
    text = ""
    try:
        trainer.fit(data(), epochs=2)
    except CheckpointError as error:
        text = str(error)
    finally:
        os.fsync = fsync
    assert trainer.result is not None
    return text, trainer.result.stopped, trainer.result.updates


class SignalledAtFirst(Trainer[nn.Module]):
    def begin_epoch(self, epoch: int) -> None:
        if epoch == 0 and not self.is_main:
            os.kill(os.getpid(), signal.SIGTERM)


def signal_the_second_at_first() -> tuple[int, str, int]:
    return ended(SignalledAtFirst(model(), sgd, nn.CrossEntropyLoss(), console=False), epochs=5000)


class Last(Observer):
    def on_fit_end(self, result: Result) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


def signal_the_first_in_its_observer() -> tuple[int, str, int]:
    return ended(Trainer(model(), sgd, nn.CrossEntropyLoss(), console=False, observers=[Last()]), epochs=2)


def ended(trainer: Trainer[nn.Module], **ends: int) -> tuple[int, str, int]:
    code = 0
    try:
        trainer.fit(data(), **ends)
    except Stopped as stopped:
        code = int(str(stopped.code))
    assert trainer.result is not None
    return code, trainer.result.stopped, trainer.result.updates


def test_a_run_that_one_rank_stopped_and_that_is_resumed_is_the_run_that_never_stopped(
    ranks2: Pool, tmp_path: Path
) -> None:
    whole, other = ranks2.run(trained, str(tmp_path / "whole"), seconds=90)
    assert whole == other
    first, second = ranks2.run(trained, str(tmp_path / "cut"), 3, seconds=90)
    assert first == second and first[3] == "enough" and 3 <= first[2] < 4000
    assert (first[5] is None) == (first[2] % 5 == 0)  # inside an epoch it is measured apart
    resumed, again = ranks2.run(trained, str(tmp_path / "cut"), -1, "auto", seconds=90)
    assert resumed == again == whole


def test_a_last_save_that_fails_is_an_error_of_all_ranks(ranks2: Pool, tmp_path: Path) -> None:
    (first, *ends), second = ranks2.run(fill_the_disk, str(tmp_path), seconds=90)
    newest = latest_checkpoint(tmp_path)
    assert newest is not None and f"the newest complete checkpoint is {newest}" in first and "disk is full" in first
    assert ends == ["epochs=2 reached", 10] and second == (first, *ends)


def test_a_signal_of_one_rank_before_the_first_window_ends_all_of_them(ranks2: Pool) -> None:
    first, second = ranks2.run(signal_the_second_at_first, seconds=90)
    assert first == second and first[:2] == (143, "SIGTERM") and first[2] < 25000


def test_a_signal_that_comes_to_one_rank_after_the_end_is_not_lost(ranks2: Pool) -> None:
    assert ranks2.run(signal_the_first_in_its_observer, seconds=90) == [
        (143, "SIGTERM", 10),
        (0, "epochs=2 reached", 10),
    ]
