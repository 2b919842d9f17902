"""The page on scaling shows what the simulator prints, and the simulator's formulas are those of their sources."""

from __future__ import annotations

import math
import pickle
import re
from pathlib import Path

import pytest
import scaling_model as model
from scaling_measured import SIZES, fitted
from scaling_model import GPUS, LARGE, SMALL, Link

from trainwright.core.rng import random_state

PAGE = (Path(__file__).parents[2] / "docs" / "development" / "scaling.md").read_text(encoding="utf-8")
LINK = Link(1e-5, 1e9)


@pytest.mark.parametrize("make", model.TABLES, ids=lambda make: make.__name__)
def test_the_page_has_the_table_that_the_simulator_prints(make):
    assert make() in PAGE, make()


def test_the_page_names_every_source():
    for letter, title in re.findall(r"^\[(\w)\] .*?: (.*?),", model.__doc__, re.M):
        assert title in PAGE, letter


def test_the_page_says_every_number_that_is_put_in():
    for said in (
        "360 GB/s",
        "40 GB/s",
        "1 GB/s",
        "3 us",
        "10 us",
        "30 us",
        "25 MB",
        "16,384 tokens",
        "2 GB/s",
        "100 GB/s",
    ):
        assert said in PAGE, said


def steps_of_a_ring(n, size):
    """Count it: n - 1 steps of reduce-scatter and as many of all-gather, a part of 1/n each time."""
    return sum(LINK.alpha + size / n / LINK.bandwidth for _ in range(2 * (n - 1)))


@pytest.mark.parametrize("n", [2, 3, 8, 1024])
def test_a_ring_takes_the_time_of_its_steps_counted_one_by_one(n):
    assert model.ring(n, 1e6, LINK) == pytest.approx(steps_of_a_ring(n, 1e6))


@pytest.mark.parametrize("n", [2, 8, 1024])
def test_halving_and_doubling_takes_the_time_of_its_steps_counted_one_by_one(n):
    parts = [1e6 / 2 ** (k + 1) for k in range(int(math.log2(n)))]
    counted = 2 * sum(LINK.alpha + part / LINK.bandwidth for part in parts)
    assert model.tree(n, 1e6, LINK) == pytest.approx(counted)


def test_backward_hides_all_but_the_last_bucket_and_no_more_than_it_lasts():
    assert model.exposed(5.0, 1.0, 10.0) == 1.0
    assert model.exposed(15.0, 1.0, 10.0) == 5.0


def test_no_other_interval_of_saves_loses_less():
    """Young's interval is where the first-order cost is least; found here by trying."""
    stop, between = model.blocked(1024, LARGE, sharded=False), model.ASSUMED.mtbf / 1024
    best = model.interval(1024, LARGE, sharded=False)
    assert best > model.written(1024, LARGE, sharded=False), "else it is not Young's"

    def cost(every):
        return stop / every + every / 2 / between

    assert all(cost(best) <= cost(best * factor) for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0))


def test_failures_are_those_of_the_run_that_they_were_taken_from():
    assert model.failures_per_day(16384) == pytest.approx(419 / 54)


def test_a_fit_finds_the_link_that_times_were_made_with():
    link = fitted({size: model.ring(2, size, LINK) for size in SIZES})
    assert link.alpha == pytest.approx(LINK.alpha) and link.bandwidth == pytest.approx(LINK.bandwidth)


def test_what_a_process_adds_to_a_checkpoint_is_about_what_the_model_says():
    assert len(pickle.dumps(random_state())) == pytest.approx(model.OWN_STATE, rel=0.25)


def test_a_larger_machine_never_costs_less():
    for cost in (model.agreed, model.counted, model.beats, model.searched, model.noticed, model.failures_per_day):
        values = [cost(n) for n in GPUS]
        assert values == sorted(values), cost.__name__
    assert all(model.lost(n, SMALL, sharded=False) < model.lost(2 * n, SMALL, sharded=False) for n in GPUS)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0123, "12 ms"), (1.0, "1.0 s"), (119.0, "119 s"), (120.0, "2.0 min"), (0.000163, "163 us"), (90000.0, "25 h")],
)
def test_times_are_shown_in_two_digits(value, shown):
    assert model.seconds(value) == shown
