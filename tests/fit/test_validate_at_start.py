"""`validate_at_start=True`: the weights before training are epoch 0; they may be the best, and use no patience."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainwright import EMA, Checkpoint, Console, EarlyStopping, Observer, Plateau, SettingError, Trainer, batches

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)


class Seen(Observer):
    def __init__(self) -> None:
        self.validations: list[Any] = []

    def on_validate(self, record: Any) -> None:
        self.validations.append(record)


def made(lr: float = 0.1, cls: Any = Trainer, **slots: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    return cls(model, torch.optim.SGD(model.parameters(), lr=lr), nn.MSELoss(), **{"console": False} | slots)


def data() -> Any:
    return batches((X, Y), 8, shuffle=True, seed=0), batches((X, Y), 16)


def test_the_history_begins_with_the_numbers_of_the_weights_before_training() -> None:
    before = made().evaluate(data()[1])
    seen = Seen()
    trainer = made(observers=[seen])
    result = trainer.fit(*data(), epochs=2, validate_at_start=True)
    assert result.history[0] == {"epoch": 0, "update": 0, **before}
    assert [(row["epoch"], row["update"]) for row in result.history] == [(0, 0), (1, 5), (2, 10)]
    start = seen.validations[0]
    assert (start.epoch, start.update, start.rows) == (0, 0, 0)
    plain = made()
    plain.fit(*data(), epochs=2)
    assert plain.history == result.history[1:]
    assert torch.equal(plain.model.weight, trainer.model.weight)


def test_the_console_shows_epoch_0() -> None:
    stream = io.StringIO()
    made(console=Console(stream, width=120)).fit(*data(), epochs=1, validate_at_start=True)
    rows = [line.split() for line in stream.getvalue().splitlines() if line.split()[:1] in (["0"], ["1"])]
    assert [row[0] for row in rows] == ["0", "1"]


def test_the_start_may_be_the_best_and_its_weights_come_back(tmp_path: Path) -> None:
    for slots in (
        {"early_stopping": EarlyStopping("val_loss", patience=9)},
        {"checkpoint": Checkpoint(tmp_path / "run", best="val_loss", restore_best=True)},
    ):
        trainer = made(lr=3.0, **slots)  # it diverges
        start = trainer.model.weight.detach().clone()
        result = trainer.fit(*data(), epochs=3, validate_at_start=True)
        assert result.best is not None and (result.best.epoch, result.best.update) == (0, 0)
        assert torch.equal(trainer.model.weight, start)


@pytest.mark.parametrize("patience", [1, 2])
def test_patience_counts_validations_after_the_start(patience: int) -> None:
    result = made(lr=3.0, early_stopping=EarlyStopping("val_loss", patience=patience)).fit(
        *data(), epochs=9, validate_at_start=True
    )
    assert result.epochs == patience


class NanAtStart(Trainer[Any]):
    def evaluate(self, data: Any, name: str = "val", **_: Any) -> dict[str, float]:
        return {f"{name}_loss": math.nan if not self.progress.updates else 1.0 / self.progress.updates}


def test_a_nan_at_the_start_uses_no_patience() -> None:
    stopping = EarlyStopping("val_loss", patience=1)
    result = made(cls=NanAtStart, early_stopping=stopping).fit(*data(), epochs=3, validate_at_start=True)
    assert result.epochs == 3 and math.isnan(result.history[0]["val_loss"])


def test_a_number_of_training_is_monitored_from_the_first_epoch_on() -> None:
    stopping = EarlyStopping("loss", patience=1)
    result = made(early_stopping=stopping).fit(*data(), epochs=2, validate_at_start=True)
    assert result.best is not None and result.best.epoch == 2


def test_a_plateau_does_not_see_the_start() -> None:
    def rates(**fit: Any) -> list[float]:
        trainer = made(lr=3.0, schedule=Plateau("val_loss", factor=0.5, patience=0))
        return [row["lr"] for row in trainer.fit(*data(), epochs=4, **fit).history if "lr" in row]

    assert rates(validate_at_start=True) == rates()


def test_each_stage_has_one_and_a_resume_has_none(tmp_path: Path) -> None:
    def stages(epochs: int) -> Any:
        trainer = made(checkpoint=Checkpoint(tmp_path / "run"), average=EMA(0.5))
        train, val = data()
        trainer.fit(train, val, epochs=1, validate_at_start=True, resume="auto")
        middle = trainer.model.weight.detach().clone()
        return trainer, trainer.fit(train, val, epochs=epochs, validate_at_start=True, resume="auto"), middle

    _, _, middle = stages(1)
    trainer, result, again = stages(2)
    assert torch.equal(middle, again)
    assert [(row["epoch"], row["update"], "loss" in row) for row in result.history] == [
        (0, 0, False),
        (1, 5, True),
        (1, 5, False),
        (2, 10, True),
        (3, 15, True),
    ]
    whole = made(average=EMA(0.5))
    train, val = data()
    whole.fit(train, val, epochs=1, validate_at_start=True)
    whole.fit(train, val, epochs=2, validate_at_start=True)
    assert whole.history == result.history
    assert torch.equal(whole.model.weight, trainer.model.weight)


@pytest.mark.parametrize("average", [None, EMA(0.5)])
def test_the_best_of_a_second_stage_may_be_its_start_where_no_average_is_in_that_checkpoint(
    tmp_path: Path, average: Any
) -> None:
    def run() -> Any:
        checkpoint = Checkpoint(tmp_path / "run", best="val_loss", restore_best=True)
        trainer = made(checkpoint=checkpoint, average=average)
        train, val = data()
        trainer.fit(train, val, epochs=2, resume="auto")
        first = trainer.model.weight.detach().clone()
        for group in trainer.optimizer.param_groups:
            group["lr"] = 30.0
        trainer.fit(train, val, epochs=2, validate_at_start=True, resume="auto")
        return first, trainer

    (first, trainer), (again, finished) = run(), run()
    assert (trainer.result.best.update == 10) == (average is None)
    assert torch.equal(first, again)
    assert torch.equal(trainer.model.weight, finished.model.weight)


def test_it_needs_validation_data_and_a_flag() -> None:
    with pytest.raises(SettingError, match=r"validate_at_start=True\) without validation data"):
        made().fit(data()[0], epochs=1, validate_at_start=True)
    with pytest.raises(SettingError, match="validate_at_start=1"):
        made().fit(*data(), epochs=1, validate_at_start=1)
