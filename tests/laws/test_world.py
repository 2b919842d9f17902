"""World: n processes compute what one does; against a loop of one process, with 2 and 3 processes over gloo."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from distributed.pool import pool

from .world_runs import Case, apart, by_hand, by_trainer, by_trainer_each

SIZES = (2, 3)
EXACT = 1e-12
CASES = [
    Case(rows, accumulate, clip, counts)
    for rows, accumulate, clip, counts in product((1, 7, 51, 64), (1, 3), (0.05, None), ("rows", "tokens"))
]
CASES += [Case(17, accumulate, None, counts) for accumulate, counts in product((1, 3), ("rows", "tokens"))]
"""The last batch has one row, beside others in its window or alone."""
SINGLE = [
    Case(51, accumulate, clip, counts, torch.float32)
    for accumulate, clip, counts in product((1, 3), (0.05, None), ("rows", "tokens"))
]


@cache
def outcomes(size: int) -> list[dict[Case, dict[str, Any]]]:
    """What each process has at the end of each case: all of them in one call."""
    cases = [*CASES, *SINGLE]
    return [dict(zip(cases, done, strict=True)) for done in pool(size).run(by_trainer_each, cases)]


def check_case(run: Any, case: Case) -> None:
    """Weights and history of all processes are those of the plain loop."""
    for outcome in run(by_trainer, case):
        assert apart(outcome, one_process(case)) <= EXACT


@cache
def one_process(case: Case) -> dict[str, Any]:
    return by_hand(case)


@pytest.mark.sample(12)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_weights_and_history_are_those_of_one_process(case: Case, size: int) -> None:
    for outcome in outcomes(size):
        assert outcome[case]["size"] == size
        assert apart(outcome[case], one_process(case)) <= EXACT


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", SINGLE, ids=str)
def test_in_float32_they_are_to_a_millionth(case: Case, size: int) -> None:
    for outcome in outcomes(size):
        assert apart(outcome[case], one_process(case)) <= 1e-6


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", [*CASES, *SINGLE], ids=str)
def test_every_process_has_the_very_same_bits(case: Case, size: int) -> None:
    first, *others = outcomes(size)
    assert all(other[case] == first[case] for other in others)
