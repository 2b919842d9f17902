"""`fit(None, max_updates=n)`: a step or an update of your own makes its own data, as in reinforcement learning."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainwright import (
    EMA,
    SWA,
    Checkpoint,
    Console,
    Cosine,
    DataError,
    Epochs,
    MeanLoss,
    NonFiniteError,
    Observer,
    SettingError,
    StepOutput,
    Trainer,
    Updates,
    batches,
)

X = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)


class Plays(Trainer[Any]):
    """Draws its data, and counts its calls in a part of a checkpoint."""

    seen: list[Any]

    def training_step(self, batch: Any) -> Any:
        if self.evaluating is not None:
            return super().training_step(batch)
        assert batch is None
        self.state["calls"] = self.state.get("calls", 0) + 1
        x = torch.randn(8, 3)
        output = self.model(x)
        return StepOutput(nn.functional.mse_loss(output, x.sum(1, keepdim=True)), output, x.sum(1, keepdim=True))


class Updates2(Trainer[Any]):
    """Makes an update of its own: two passes over data that it draws."""

    seen: list[Any]

    def update(self, window: Any) -> Any:
        self.seen.append((list(window), window.rows))
        x = torch.randn(8, 3)
        for _ in range(2):
            self.minimize(nn.functional.mse_loss(self.model(x), x.sum(1, keepdim=True)))
        return {"largest": float(x.max())}


def made(cls: Any = Plays, **slots: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    trainer = cls(model, sgd, nn.MSELoss(), **{"console": False} | slots)
    trainer.seen = []
    return trainer


def by_hand(updates: int, accumulate: int = 1) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    losses = []
    for _ in range(updates):
        sgd.zero_grad()
        for _ in range(accumulate):
            x = torch.randn(8, 3)
            loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
            (loss / accumulate).backward()
            losses.append(loss.item())
        sgd.step()
    return model, losses


@pytest.mark.parametrize("accumulate", [1, 4])
def test_it_is_the_plain_loop_that_draws_in_its_step(accumulate: int) -> None:
    trainer = made(accumulate=accumulate)
    result = trainer.fit(None, max_updates=7)
    model, losses = by_hand(7, accumulate)
    assert torch.equal(model.weight, trainer.model.weight)
    assert result.history[-1]["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    assert trainer.state["calls"] == 7 * accumulate
    assert (result.updates, result.epochs, result.stopped) == (7, 0, "max_updates=7 reached")


class Weighs(Plays):
    """Gives its loss a count: steps of one window, and rows of the history, are weighted by it."""

    def training_step(self, batch: Any) -> Any:
        rows = 2 + 3 * (self.state.setdefault("calls", 0) % 2)
        self.state["calls"] += 1
        x = torch.randn(rows, 3)
        return MeanLoss(nn.functional.mse_loss(self.model(x), x.sum(1, keepdim=True)), rows)


def test_counts_that_a_step_gives_weigh_the_steps_of_a_window() -> None:
    trainer = made(Weighs, accumulate=2)
    trainer.fit(None, max_updates=1)
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    x = torch.cat([torch.randn(2, 3), torch.randn(5, 3)])
    nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
    torch.optim.SGD(model.parameters(), lr=0.05).step()
    torch.testing.assert_close(model.weight, trainer.model.weight)


def test_an_update_of_your_own_gets_a_window_of_none() -> None:
    trainer = made(Updates2, accumulate=2)
    row = trainer.fit(None, max_updates=3).history[-1]
    assert trainer.seen == [([None, None], [1, 1])] * 3
    assert {"loss", "largest"} <= set(row)


def test_epochs_are_numbers_of_updates() -> None:
    result = made(schedule=Cosine(warmup=Epochs(1))).fit(None, (X, Y), epochs=3, epoch_updates=4)
    assert [(row["epoch"], row["update"]) for row in result.history] == [(1, 4), (2, 8), (3, 12)]
    assert all("val_loss" in row for row in result.history)


class Records(Observer):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_update(self, update: Any) -> None:
        self.seen.append(update)


def test_slots_validation_and_records_work_as_with_data() -> None:
    records, stream = Records(), io.StringIO()
    trainer = made(
        schedule=Cosine(),
        clip=1.0,
        average=EMA(0.9),
        metrics={"error": lambda output, target: (output - target).abs()[:, 0]},
        observers=[records],
        console=Console(stream, width=120),
    )
    result = trainer.fit(None, (X, Y), max_updates=10, validate=Updates(5))
    assert [row["update"] for row in result.history] == [5, 10]
    assert {"loss", "error", "val_loss", "val_error"} <= set(result.history[0])
    assert [update.rows for update in records.seen] == [1] * 10  # one for each call of the step
    assert "train data that the steps make · 10 updates in all" in stream.getvalue()


class Stops(Plays):
    """Is stopped, as a killed run is, at one update."""

    def after_update(self) -> None:
        if self.progress.updates == self.stops_at:
            raise KeyboardInterrupt

    stops_at = -1


@pytest.mark.parametrize("ends", [{"max_updates": 12}, {"epochs": 3, "epoch_updates": 4}])
@pytest.mark.parametrize("at", [1, 5, 8, 11])
def test_a_killed_run_is_resumed_bit_for_bit(at: int, ends: Any, tmp_path: Path) -> None:
    def run(**settings: Any) -> Any:
        checkpoint = Checkpoint(tmp_path / "run", every=Updates(2), async_save=False)
        return made(Stops, checkpoint=checkpoint, schedule=Cosine(), average=EMA(0.9), accumulate=2, **settings)

    whole = made(schedule=Cosine(), average=EMA(0.9), accumulate=2)
    complete = whole.fit(None, (X, Y), **ends)
    killed = run()
    killed.stops_at = at
    with pytest.raises(KeyboardInterrupt):
        killed.fit(None, (X, Y), **ends)
    torch.manual_seed(99)
    resumed = run()
    result = resumed.fit(None, (X, Y), **ends, resume="auto")
    assert torch.equal(resumed.model.weight, whole.model.weight)
    assert resumed.state["calls"] == 24
    assert result.history == complete.history


def test_a_run_with_data_is_not_resumed_without_and_the_other_way_round(tmp_path: Path) -> None:
    class Either(Plays):
        def training_step(self, batch: Any) -> Any:
            return super().training_step(batch) if batch is None else Trainer.training_step(self, batch)

    data = batches((X, Y), 4)
    for first, second, known in ((None, data, "data that the steps make"), (data, None, "data that the steps make")):
        directory = tmp_path / str(first is None)
        made(Either, checkpoint=Checkpoint(directory)).fit(first, max_updates=2)
        with pytest.raises(DataError, match="of another kind") as caught:
            made(Either, checkpoint=Checkpoint(directory)).fit(second, max_updates=4, resume="auto")
        assert known in str(caught.value)
        made(Either, checkpoint=Checkpoint(directory)).fit(second, max_updates=4, resume="auto", resume_data=False)


class MakesNan(Trainer[Any]):
    seen: list[Any]

    def training_step(self, batch: Any) -> Any:
        self.seen.append(1)
        return self.model(torch.full((2, 3), float("nan"))).mean()


def test_a_nan_is_named_and_the_step_does_not_run_again_for_it() -> None:
    trainer = made(MakesNan)
    with pytest.raises(NonFiniteError, match="update 1"):
        trainer.fit(None, max_updates=3)
    assert trainer.seen == [1]


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "no step of its own": (Trainer, {"max_updates": 3}, "no step makes its own"),
    "epochs": (Plays, {"epochs": 3}, r"fit\(None, max_updates=1000\), or fit\(None, epochs=3, epoch_updates=100\)"),
    "no end": (Plays, {}, r"fit\(\) without an end"),
    "a batch size": (Plays, {"max_updates": 3, "batch_size": 8}, "batch_size=8"),
    "a schedule without a total": (Plays, {"max_seconds": 9.0}, r"max_updates=10_000"),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_what_cannot_be_meant_is_refused_before_the_first_update(mistake: str) -> None:
    cls, ends, said = REFUSED[mistake]
    trainer = made(cls, schedule=Cosine())
    for call in (trainer.fit, trainer.plan):
        with pytest.raises(SettingError, match=said):
            call(None, **ends)
    assert trainer.progress.updates == 0


def test_slots_that_need_batches_are_refused() -> None:
    with pytest.raises(SettingError, match="no batch to split"):
        made(on_oom="split").fit(None, max_updates=3)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1))
    trainer = Plays(
        model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), average=SWA(start=0.5), console=False
    )
    with pytest.raises(SettingError, match="cannot be passed over again"):
        trainer.fit(None, max_updates=4)


def test_data_of_an_evaluation_are_still_needed() -> None:
    trainer = made()
    for call in (trainer.evaluate, trainer.predict, trainer.report):
        with pytest.raises(DataError, match="NoneType is no source of batches"):
            call(None)


def test_the_plan_says_how_many_updates() -> None:
    plan = made().plan(None, epochs=3, epoch_updates=4)
    assert (plan.updates, plan.train) == (12, "data that the steps make")
