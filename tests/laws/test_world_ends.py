"""World: what is not finite, early stopping, an asked stop and the clock are one decision of all processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from distributed.pool import pool
from trainwright import Cosine, DataError, EarlyStopping, Epochs, NonFiniteError, StepLR, Trainer

from .own_updates import Scaled
from .world_runs import flat, perceptron, rows_of_classes

BATCH = 8
SIZES = (2, 3)


def start(dtype: torch.dtype = torch.float64, rate: float = 0.2) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(2)
    model = nn.Sequential(*perceptron(5, 3)).to(dtype)
    return model, torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)


def data(rows: int = 27, seed: int = 0, spoiled: float | None = None, dtype: Any = torch.float64) -> list[Any]:
    """Batches; the last row of the second, which is never the first process's, may be spoiled."""
    x, y = rows_of_classes(rows, seed=seed)
    if spoiled is not None:
        x[2 * BATCH - 1] = spoiled
    return list(zip(x.to(dtype).split(BATCH), y.split(BATCH), strict=True))


def apart(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def ended(trainer: Trainer[Any], *given: Any, **ends: Any) -> dict[str, Any]:
    """Fit, and tell what is left: the error, too."""
    try:
        trainer.fit(*given, **ends)
        error = ""
    except NonFiniteError as raised:
        error = str(raised)
    result = trainer.result
    assert result is not None
    reported = {"updates": result.updates, "skipped": result.skipped, "stopped": result.stopped}
    return reported | {"weights": flat(trainer.model), "error": error, "history": result.history}


# What is not finite.


def spoil(policy: str) -> dict[str, Any]:
    trainer = Trainer(*start(), nn.CrossEntropyLoss(), on_nonfinite=policy, console=False)
    return ended(trainer, data(spoiled=torch.nan), epochs=2)


def plain(batches: list[Any], left_out: int | None = None, epochs: int = 1) -> list[float]:
    model, optimizer = start()
    for _ in range(epochs):
        for index, (x, y) in enumerate(batches):
            if index != left_out:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
    return flat(model)


@pytest.mark.parametrize("size", SIZES)
def test_a_nan_in_the_rows_of_one_process_has_all_leave_the_update_out(size: int) -> None:
    outcomes = pool(size).run(spoil, "skip")
    for outcome in outcomes:
        assert (outcome["updates"], outcome["skipped"]) == (6, 2)
        assert apart(outcome["weights"], plain(data(), 1, epochs=2)) <= 1e-12


def test_a_nan_in_the_rows_of_one_process_ends_all_with_the_same_error() -> None:
    first, *others = pool(3).run(spoil, "raise")
    assert "update 2: the loss is not finite" in first["error"]
    assert apart(first["weights"], plain(data()[:1])) <= 1e-12
    for other in others:
        # the rank whose rows hold the NaN names them
        assert other["error"].splitlines()[0] == first["error"].splitlines()[0]
        assert other["weights"] == first["weights"]


def scale() -> dict[str, Any]:
    model, optimizer = start(torch.float32)
    trainer = Trainer(model, optimizer, rows_loss, precision=Scaled(2.0**40), console=False)
    return ended(trainer, loud(), epochs=3)


def rows_loss(output: Tensor, target: Tensor) -> Tensor:
    """Its gradient is large where the target is, but not itself."""
    return ((output[:, 0] - output[:, 0].detach()) * target).mean()


def loud() -> list[tuple[Tensor, Tensor]]:
    """Batches with numbers as targets; one of them overflows where the loss is scaled, in the last process's rows."""
    batches = [(x, y.float() + 1) for x, y in data(dtype=torch.float32)]
    batches[1][1][-1] = 1e36
    return batches


def test_an_overflow_in_the_rows_of_one_process_is_one_of_all() -> None:
    model, optimizer = start(torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=4)
    steps = 0
    for _ in range(3):
        for x, y in loud():
            optimizer.zero_grad()
            scaler.scale(rows_loss(model(x), y)).backward()
            before = flat(model)
            scaler.step(optimizer)
            scaler.update()
            steps += flat(model) != before
    outcomes = pool(2).run(scale)
    assert steps == 9
    for outcome in outcomes:
        assert (outcome["updates"], outcome["skipped"]) == (steps, 12 - steps)
        assert apart(outcome["weights"], flat(model)) <= 1e-5
        assert outcome["weights"] == outcomes[0]["weights"]


def far_loss(output: Tensor, target: Tensor) -> Tensor:
    """Its gradient is that of the output alone."""
    return output[:, 0].mean() + target.mean()


def steep_loss(output: Tensor, target: Tensor) -> Tensor:
    """Its gradient is as large as it is."""
    return (output[:, 0] * target).mean()


def far() -> list[tuple[Tensor, Tensor]]:
    """Batches with numbers as targets; one is so far in the last process's rows that the scaled loss overflows."""
    batches = [(x, y.float() + 1) for x, y in data(dtype=torch.float32)]
    batches[1][1][-1] = 1e32
    return batches


def scale_far(loss: Any) -> dict[str, Any]:
    model, optimizer = start(torch.float32)
    trainer = Trainer(model, optimizer, loss, precision=Scaled(2.0**40), console=False)
    return ended(trainer, far(), epochs=2)


@pytest.mark.parametrize(("loss", "skipped"), [(far_loss, 0), (steep_loss, 2)])
def test_a_loss_that_overflows_where_it_is_scaled_is_reported_and_judged_as_it_is(loss: Any, skipped: int) -> None:
    model, optimizer = start(torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=4)
    for _ in range(2):
        for x, y in far():
            optimizer.zero_grad()
            scaled = scaler.scale(loss(model(x), y))
            scaled.backward()
            scaler.step(optimizer)
            scaler.update()
    for outcome in pool(2).run(scale_far, loss):
        assert outcome["error"] == "" and (outcome["updates"], outcome["skipped"]) == (8 - skipped, skipped)
        assert apart(outcome["weights"], flat(model)) <= 1e-4
        assert all(1e28 < abs(row["loss"]) < 1e33 for row in outcome["history"])


# Ends.


def watched(patience: int) -> dict[str, Any]:
    stopping = EarlyStopping("val_loss", patience=patience)
    trainer = Trainer(*start(), nn.CrossEntropyLoss(), early_stopping=stopping, console=False)
    return ended(trainer, data(), data(13, seed=9), epochs=60)


def watched_by_hand(patience: int) -> tuple[list[float], list[float]]:
    """Weights at the best, and every validation loss up to the stop."""
    model, optimizer = start()
    x, y = map(torch.cat, zip(*data(13, seed=9), strict=True))
    losses: list[float] = []
    best = flat(model)
    while len(losses) - 1 - min(range(len(losses)), key=losses.__getitem__, default=-1) < patience or not losses:
        for a, b in data():
            optimizer.zero_grad()
            F.cross_entropy(model(a), b).backward()
            optimizer.step()
        with torch.no_grad():
            losses.append(F.cross_entropy(model(x), y).item())
        best = flat(model) if losses[-1] == min(losses) else best
    return best, losses


def check_early_stopping(run: Any, size: int) -> None:
    best, losses = watched_by_hand(2)
    assert 3 < len(losses) < 50
    for outcome in run(watched, 2):
        assert [row["val_loss"] for row in outcome["history"]] == pytest.approx(losses, abs=1e-12)
        assert apart(outcome["weights"], best) <= 1e-12


@pytest.mark.parametrize("size", SIZES)
def test_all_stop_early_at_the_epoch_of_one_process_with_its_best_weights(size: int) -> None:
    check_early_stopping(pool(size).run, size)


class Asking(Trainer[nn.Module]):
    """One process asks to stop."""

    def after_update(self) -> None:
        if self.world.rank == self.world.size - 1 and self.progress.updates == 3:
            self.stop("enough")


def asked() -> dict[str, Any]:
    return ended(Asking(*start(), nn.CrossEntropyLoss(), console=False), data(), epochs=5000)


def limited(ends: dict[str, Any]) -> dict[str, Any]:
    return ended(Trainer(*start(), nn.CrossEntropyLoss(), console=False), data(), **ends)


@pytest.mark.parametrize("ends", [{"max_updates": 6}, {"max_seconds": 0.5}], ids=str)
def test_an_end_is_reached_by_all_at_the_same_update(ends: dict[str, Any]) -> None:
    first, *others = pool(2).run(limited, ends)
    assert first["updates"] == ends.get("max_updates", first["updates"]) > 0
    assert first["stopped"].startswith(next(iter(ends)))
    assert all(other == first for other in others)


# Epochs of unequal length.


def unequal(kind: str) -> tuple[list[float], int, str]:
    """Rates by epoch, updates and error of a run whose second epoch is longer than its first."""
    schedule: Any = StepLR(Epochs(1), gamma=0.5) if kind == "counts" else Cosine()
    trainer = Trainer(*start(), nn.CrossEntropyLoss(), schedule=schedule, console=False)
    try:
        trainer.fit(lambda epoch: data(rows=27 if epoch == 1 else 14), epochs=3)
    except DataError as error:
        return [], trainer.progress.updates, str(error).splitlines()[0]
    return [row["lr"] for row in trainer.history], trainer.progress.updates, ""


@pytest.mark.slow
def test_all_processes_follow_epochs_of_unequal_length_or_refuse_them_at_one_update() -> None:
    for outcome in pool(2).run(unequal, "counts", seconds=90):
        assert outcome == ([0.2, 0.1, 0.05], 8, "") == unequal("counts")
    for outcome in pool(2).run(unequal, "plans", seconds=90):
        assert outcome == unequal("plans")
        assert outcome[1] == 2
        assert "epoch 2" in outcome[2]
