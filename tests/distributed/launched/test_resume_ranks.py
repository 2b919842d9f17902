"""Interrupted after any update and resumed on as many processes is never interrupted, on every one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.launched.resume_runs import Case, from_each
from distributed.pool import Pool

SECONDS = 120
UPDATES = 14
FEW = [1, 3, 6, 7, 8, 12]
"""The first; one with a validation; before, at and after the end of an epoch of 7; one in the second epoch."""
EXACT = {
    "batches": (Case(), list(range(1, UPDATES + 1))),
    "batches, accumulate 3, averaged": (Case(accumulate=3, average=True), [1, 2, 3, 4, 6]),
    "loader": (Case(data="loader", accumulate=3), [1, 2, 3, 5]),
    "loader of 2 workers": (Case(data="loader", workers=2), [2, 9]),
    "loader of 2 persistent workers": (Case(data="loader", workers=2, persistent=True, accumulate=3), [2, 3, 4]),
    "stream": (Case(data="stream", accumulate=3), [1, 2, 3, 4, 5]),
    "stream of 2 workers": (Case(data="stream", workers=2), [3, 10]),
}


def differences(whole: dict[str, Any], again: dict[str, Any], update: int, *, sums: bool = True) -> list[Any]:
    """What a resumed run has otherwise than the undisturbed one; `update` is where it went on.

    `sums`: also what comes of sums over processes, as weights and losses do.
    """
    found: list[Any] = []
    expected = whole["trace"][update:]
    if len(expected) != len(again["trace"]):
        found.append(f"{len(again['trace'])} updates of {len(expected)}")
    for one, other in zip(expected, again["trace"], strict=False):
        found += [(one["update"], name) for name in one if one[name] != other[name]]
    found += [name for name in whole["left"] if whole["left"][name] != again["left"][name]]
    if not sums:
        return [one for one in found if one not in ("weights", "optimizer") and one[-1] != "model"]
    return found + ([] if whole["history"] == again["history"] else [(whole["history"], again["history"])])


@pytest.mark.parametrize("name", EXACT)
def test_a_resume_on_two_ranks_is_the_undisturbed_run_bit_for_bit(ranks2: Pool, tmp_path: Path, name: str) -> None:
    case, updates = EXACT[name]
    each = ranks2.run(from_each, case, tmp_path, updates, seconds=SECONDS)
    for rank, ran in enumerate(each):
        assert ran["whole"]["trace"], rank
        for update, again in ran["again"].items():
            assert not differences(ran["whole"], again, update), (rank, update)
    one, other = (ran["whole"] for ran in each)
    assert one["history"] == other["history"] and one["left"]["weights"] == other["left"]["weights"]
    assert one["left"]["torch"] == other["left"]["torch"]
    noise = zip(one["trace"], other["trace"], strict=True)
    assert all(mine["torch"] != its["torch"] for mine, its in noise), "each process draws numbers of its own"


def close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether weights differ by rounding alone."""
    return all(torch.allclose(value, other[name], rtol=1e-12, atol=1e-13) for name, value in one.items())


@pytest.mark.parametrize("name", ["batches", "loader"])
def test_a_resume_on_three_ranks_is_the_undisturbed_run(ranks3: Pool, tmp_path: Path, name: str) -> None:
    """The first window after a start adds gradients up in another order than torch's DDP: three numbers then differ
    in their last bit, two never do. What is drawn and read has no sums, and is the same to the bit."""
    case, _ = EXACT[name]
    each = ranks3.run(from_each, case, tmp_path, FEW if name == "batches" else [2, 3, 4], seconds=SECONDS)
    for ran in each:
        whole = ran["whole"]
        for update, again in ran["again"].items():
            assert not differences(whole, again, update, sums=False), update
            assert close(whole["weights"], again["weights"]), update
            for row, other in zip(whole["history"], again["history"], strict=True):
                assert row == pytest.approx(other, rel=1e-12, nan_ok=True), update
