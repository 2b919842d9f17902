"""The Numbers law in early stopping: it follows its definition, and one standard error is over rows."""

from __future__ import annotations

import math
import random

import pytest
import torch
import torch.nn.functional as F

from trainwright import EarlyStopping, SettingError

from .numbers_runs import UNEVEN, close, cut, linear, rows_of_data, run_planned, trainer


def stops_at(values, patience, min_delta, mode):
    """The definition, by hand: (epochs run, epoch of the best)."""
    best, best_epoch, waited = None, None, 0
    for epoch, value in enumerate(values, 1):
        sign = 1 if mode == "min" else -1
        if not math.isnan(value) and (
            best is None or sign * value < sign * best - (min_delta if best is not None else 0)
        ):
            best, best_epoch, waited = value, epoch, 0
        else:
            waited += 1
        if waited == patience:
            return epoch, best_epoch
    return len(values), best_epoch


def test_early_stopping_follows_its_definition_through_random_runs(rounds=40):
    rng = random.Random(0)
    for _ in range(rounds):
        length, patience = rng.randint(1, 10), rng.randint(1, 4)
        min_delta, mode = rng.choice([0.0, 0.1]), rng.choice(["min", "max"])
        sign = -1 if mode == "min" else 1
        values = [
            math.nan if rng.random() < 0.25 else 2 + sign * 0.04 * i * rng.choice([-1, 1, 1]) for i in range(length)
        ]
        epochs, best = stops_at(values, patience, min_delta, mode)
        result = run_planned(values, patience, min_delta, mode)
        assert result.epochs == epochs, (values, patience, min_delta, mode)
        assert (result.best.epoch if result.best else None) == best
        if epochs < length:
            assert "did not improve" in result.stopped or "never a finite number" in result.stopped


def test_min_delta_is_cumulative():
    """A gain of 0.04 an epoch beats the best by 0.1 every third epoch, so three epochs of patience never run out."""
    steady = [1.0 - 0.04 * i for i in range(12)]
    result = run_planned(steady, 3, 0.1, "min")
    assert (result.epochs, result.best.epoch) == (12, 10)
    assert run_planned(steady, 2, 0.1, "min").epochs == 3


def test_one_standard_error_is_taken_over_the_rows_of_the_validation():
    x, y = rows_of_data()
    model = linear()
    early = EarlyStopping("val_loss", min_delta="1se")
    made = trainer(model, early_stopping=early)
    made.evaluate(cut(x, y, UNEVEN))
    with torch.no_grad():
        losses = F.cross_entropy(model(x).double(), y, reduction="none")
    close(made._record.evaluation.errors["val_loss"], losses.std(correction=0).item() / math.sqrt(len(x)))


def test_one_standard_error_of_a_loss_without_rows_is_refused_before_the_first_update():
    x, y = rows_of_data()
    early = EarlyStopping("val_loss", min_delta="1se")

    def unknown(output, target):
        return F.cross_entropy(output, target)

    made = trainer(loss=unknown, early_stopping=early)
    before = made.model.weight.clone()
    with pytest.raises(SettingError, match="one value per row"):
        made.fit(cut(x, y, UNEVEN), cut(x, y, UNEVEN), epochs=1)
    assert torch.equal(before, made.model.weight)
