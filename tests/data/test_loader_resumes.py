"""A user's own loader resumes exactly inside an epoch: the same rows and the same augmentation, nothing read past."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import passes
import pytest
import torch
from passes import ORDERS, WORKERS, alike, opened, rest, resumed, trained
from sources import seeded

from trainwright.core.errors import DataError

CUTS = [(0, 1), (0, 3), (1, 2), (2, 0), (2, 4)]
CASES = [(order, workers) for order in ORDERS for workers in ("0", "2 persistent")]
CASES += [
    (order, workers) for order in ("shuffle", "generator") for workers in WORKERS if (order, workers) not in CASES
]


@pytest.mark.sample(10)
@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker")
@pytest.mark.parametrize(("order", "workers"), CASES)
def test_a_loader_resumes_with_the_same_rows_and_the_same_augmentation(order: str, workers: str) -> None:
    seeded()
    table, saved = trained(opened(order, workers), CUTS)
    for at in CUTS[:: 1 if workers == "0" or order == "shuffle" else 2]:
        torch.rand(7)
        given = resumed(opened(order, workers), saved[at], *at)
        assert alike(given, rest(table, *at)), at


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker")
def test_the_random_state_of_the_process_is_the_same_after_a_resume() -> None:
    for workers in ("0", "2", "2 persistent"):
        seeded()
        table, saved = trained(opened("shuffle", workers), [(1, 2)])
        after = torch.get_rng_state()
        assert alike(resumed(opened("shuffle", workers), saved[1, 2], 1, 2), rest(table, 1, 2))
        assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker")
def test_a_new_process_goes_on_with_what_was_written(tmp_path: Path) -> None:
    cases, expected = [], []
    for order, workers, at in (
        ("shuffle", "0", (1, 2)),
        ("python", "2", (0, 3)),
        ("generator", "3 persistent", (1, 4)),
        ("numpy", "2 persistent", (2, 0)),
        ("stateful", "1", (2, 1)),
    ):
        seeded()
        table, saved = trained(opened(order, workers), [at])
        cases.append({"loader": [order, workers], "saved": saved[at], "at": at})
        expected.append(rest(table, *at))
    passes.save(tmp_path / "cases", cases)
    subprocess.run([sys.executable, passes.__file__, str(tmp_path / "cases")], check=True)
    given = json.loads((tmp_path / "cases.given").read_text())
    assert [alike(one, other) for one, other in zip(given, expected, strict=True)] == [True] * len(cases)


@pytest.mark.parametrize("workers", ["1", "2", "3 persistent"])
@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker")
def test_a_run_that_ends_inside_a_window_goes_back_to_its_start(workers: str) -> None:
    seeded()
    table, saved = trained(opened("shuffle", workers), [(1, 3), (1, 4)], window=3)
    # Batch 4 was yielded after the last commit, at batch 3: the position saved then is that of batch 3.
    inside = {**saved[1, 4], "now": saved[1, 3]["now"]}
    assert alike(resumed(opened("shuffle", workers), inside, 1, 3), rest(table, 1, 3))
    with pytest.raises(DataError, match=r"after 4 batches of the epoch(.|\n)*after 3 batches"):
        resumed(opened("shuffle", workers), saved[1, 4], 1, 4)
