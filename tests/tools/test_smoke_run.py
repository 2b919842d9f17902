"""A smoke run finds the mistakes that a long run would find late, lists what it ran, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from trainwright import (
    EMA,
    Checkpoint,
    CheckpointError,
    EarlyStopping,
    Observer,
    OneCycle,
    SettingError,
    Trainer,
    Updates,
    accuracy,
    batches,
)
from trainwright.schedules import WarmupStableDecay
from trainwright.tools import smoke_run

x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
y = torch.arange(40) % 3


def made(cls: Any = Trainer, **settings: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return cls(model, optimizer, nn.CrossEntropyLoss(), **{"console": False} | settings)


def data(size: int = 4) -> Any:
    return batches((x, y), size, shuffle=True, seed=0)


def test_everything_is_run_and_nothing_is_saved(tmp_path: Path) -> None:
    class Own(Trainer[Any]):
        called: ClassVar[list[str]] = []

        def begin_epoch(self, epoch: int) -> None:
            self.called.append("begin")

        def end_epoch(self, metrics: dict[str, float]) -> None:
            self.called.append("end")

        def after_update(self) -> None:
            self.called.append("update")
            self.state["seen"] = self.state.get("seen", 0) + 1

    trainer = made(
        Own,
        accumulate=2,
        clip=1.0,
        metrics={"accuracy": accuracy},
        schedule=OneCycle(0.1),
        average=EMA(0.9),
        early_stopping=EarlyStopping("val_loss", patience=2),
        checkpoint=Checkpoint(tmp_path / "kept"),
    )
    reported = smoke_run(trainer, data(), data(20))
    assert Own.called == ["begin", "update", "update", "update", "end"]
    assert reported.updates == 3 and len(reported.losses) == 3 and not reported.skipped
    assert {"loss", "accuracy", "val_loss", "val_accuracy", "lr"} <= set(reported.numbers)
    shown = str(reported)
    for what in ("2 micro-batches per update", "schedule", "average", "early stopping", "metrics accuracy"):
        assert what in shown
    assert "validation of 2 batches" in shown and "up to its file: model, " in shown
    assert "hooks begin_epoch, end_epoch, after_update" in shown
    assert not reported.left_out
    assert not (tmp_path / "kept").exists() or not list((tmp_path / "kept").rglob("update-*"))


def test_a_mistake_at_the_end_of_an_epoch_shows_at_once() -> None:
    class Wrong(Trainer[Any]):
        def end_epoch(self, metrics: dict[str, float]) -> None:
            raise KeyError("after an epoch of many hours")

    with pytest.raises(KeyError, match="many hours"):
        smoke_run(made(Wrong), data())


def test_state_that_no_checkpoint_can_hold_shows_at_once(tmp_path: Path) -> None:
    class Holds(Trainer[Any]):
        def after_update(self) -> None:
            self.state["lock"] = object()

    assert smoke_run(made(Holds), data()).updates == 3
    with pytest.raises(CheckpointError, match="lock"):
        smoke_run(made(Holds, checkpoint=Checkpoint(tmp_path)), data())


def test_what_needs_a_longer_run_is_reported_and_left_out() -> None:
    reported = smoke_run(made(schedule=WarmupStableDecay(warmup=Updates(100), decay=Updates(100))), data())
    assert reported.updates == 3
    assert reported.left_out[0].startswith("schedule, in so short a run: ")
    with pytest.raises(SettingError, match="val_los"):
        smoke_run(made(early_stopping=EarlyStopping("val_los", mode="min", patience=2)), data(), data())
    watches = smoke_run(made(early_stopping=EarlyStopping("val_loss", patience=2)), data())
    assert "early stopping: it watches val_loss" in watches.left_out


def test_several_sets_observers_and_what_is_missing_are_reported() -> None:
    class Mine(Observer):
        seen = 0

        def on_update(self, update: Any) -> None:
            self.seen += 1

    mine = Mine()
    reported = smoke_run(made(observers=[mine]), (x, y), {"a": data(20), "b": (x, y)}, batch_size=8, updates=2)
    assert "validation of 2 sets" in str(reported) and {"val_a_loss", "val_b_loss"} <= set(reported.numbers)
    assert reported.left_out == ("saving: there is no checkpoint slot", "observers Mine")
    assert not mine.seen and reported.updates == 2
    assert "validation: smoke_run(trainer, train, val) runs it" in smoke_run(made(), data()).left_out


def test_a_wrong_number_of_updates_is_refused() -> None:
    for updates in (0, 1.5, True):
        with pytest.raises(SettingError, match="a whole number, at least 1"):
            smoke_run(made(), data(), updates=updates)
