"""The Numbers law and NaN: it is never hidden, never the best, never an improvement."""

from __future__ import annotations

import math

import pytest

from records import Records

from .numbers_runs import UNEVEN, Errors, cut, distance, rows_of_data, run_planned, trainer


def test_a_nan_in_one_row_shows_in_every_number_of_the_evaluation():
    x, y = rows_of_data()
    x[13, 2] = math.nan
    made = trainer(metrics={"row": distance, "mean": lambda o, t: distance(o, t).mean(), "object": Errors()})
    numbers = made.evaluate(cut(x, y, UNEVEN))
    assert all(math.isnan(value) for value in numbers.values()), numbers


@pytest.mark.parametrize("policy", ["ignore", "skip"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_nan_in_one_training_row_shows_in_the_loss_of_the_epoch(policy, accumulate):
    x, y = rows_of_data()
    x[13, 2] = math.nan
    seen = Records()
    made = trainer(on_nonfinite=policy, accumulate=accumulate, observers=[seen])
    assert math.isnan(made.fit(cut(x, y, UNEVEN), epochs=1).history[0]["loss"])
    assert math.isnan(seen.updates[2 // accumulate].loss)


def test_a_nan_is_never_best_and_never_resets_patience():
    nan = math.nan
    assert run_planned([1.0, nan, nan, 0.5], 2, 0.0, "min").epochs == 3
    result = run_planned([nan, 1.0, 2.0, 3.0, 4.0], 2, 0.0, "min")
    assert (result.epochs, result.best.value, result.best.epoch) == (4, 1.0, 2)
    assert run_planned([nan, nan, 1.0], 2, 0.0, "max").epochs == 2
