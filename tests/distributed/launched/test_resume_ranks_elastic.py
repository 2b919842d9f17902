"""A run resumes on any number of ranks with the rows that come next."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.launched.resume_runs import Case, cut, train
from distributed.pool import Pool, pool
from trainwright import Epochs, Updates
from trainwright.core.errors import DataError

SECONDS = 90
NUMBERS = (1, 2, 3, 4)
PLAIN = Case(noise=False)
CASES = {"batches": PLAIN, "loader": Case(data="loader", noise=False, accumulate=3)}
AT = {"batches": 5, "loader": 2}
"""The update that a run is left after: inside an epoch."""


@pytest.fixture(scope="module")
def ranks4() -> Iterator[Pool]:
    """Four processes, for this file alone."""
    yield pool(4)
    pool(4).close()


@pytest.fixture
def on(request: pytest.FixtureRequest) -> Any:
    """`on(n, function, *args)`: what each of n processes returns; one process is this one, without a group."""

    def run(number: int, function: Any, *args: Any) -> list[Any]:
        if number == 1:
            return [function(*args)]
        ranks: Pool = request.getfixturevalue(f"ranks{number}")
        return ranks.run(function, *args, seconds=SECONDS)

    return run


def from_cut(case: Case, root: Path, update: int) -> dict[str, Any]:
    """The result of a run that is resumed after `update`."""
    return train(case, cut(root, update), resume="auto")


def rows_of(each: list[dict[str, Any]]) -> list[list[int]]:
    """The numbers of the rows of each update, those of all processes together."""
    traces = [one["trace"] for one in each]
    return [sorted(row for part in parts for row in part["numbers"]) for parts in zip(*traces, strict=True)]


@pytest.mark.parametrize("data", CASES)
def test_a_run_resumes_on_any_number_of_ranks_from_any(on: Any, tmp_path: Path, data: str) -> None:
    case, at = CASES[data], AT[data]
    alone = train(case, None)
    expected = rows_of([alone])
    for saved in NUMBERS:
        whole = on(saved, train, case, tmp_path / str(saved) / "whole")
        assert rows_of(whole) == expected, saved
        for number in NUMBERS:
            each = on(number, from_cut, case, moved(tmp_path, saved, number, at), at)
            where = f"from {saved} to {number}"
            assert rows_of(each) == expected[at:], where
            for one in each:
                assert_close(one["weights"], alone["weights"], where)
                for row, other in zip(one["history"], alone["history"], strict=True):
                    assert row == pytest.approx(other, rel=1e-12), where


def moved(root: Path, saved: int, number: int, at: int) -> Path:
    """A directory of its own for a pair of numbers, with what the first has saved."""
    pair = root / f"{saved} to {number} at {at}"
    pair.mkdir()
    (pair / "whole").symlink_to(root / str(saved) / "whole")
    return pair


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], where: str) -> None:
    for name, value in one.items():
        scale = float(other[name].abs().max())
        assert float((value - other[name]).abs().max()) <= 1e-12 * scale, (where, name)


def test_a_model_with_noise_resumes_with_the_same_rows_and_the_statistics_of_rank_0(on: Any, tmp_path: Path) -> None:
    case = Case(data="loader", workers=2)
    whole = on(2, train, case, tmp_path / "whole")
    for number in (1, 3):
        each = on(number, from_cut, case, moved_to(tmp_path, number), 9)
        assert rows_of(each) == rows_of(whole)[9:]
        for rank, one in enumerate(each):
            for lines in (one["notes"], one["warned"]):
                assert any("the random draws of workers are not" in line for line in lines) == (rank == 0), lines
    on_three = [one["trace"][0]["torch"] for one in each]
    assert len(set(on_three)) == 3, "each process draws numbers of its own"


def moved_to(root: Path, number: int) -> Path:
    directory = root / f"to {number}"
    directory.mkdir()
    (directory / "whole").symlink_to(root / "whole")
    return directory


def refused(case: Case, root: Path, update: int) -> str:
    """The error of a resume that cannot be."""
    with pytest.raises(DataError) as raised:
        from_cut(case, root, update)
    return str(raised.value)


def test_rows_per_rank_resume_on_the_same_number_of_ranks_only(on: Any, tmp_path: Path) -> None:
    case = Case(per_rank=True)
    on(2, train, case, tmp_path / "whole")
    for number in (1, 3):
        for error in on(number, refused, case, moved_to(tmp_path, number), 3):
            assert f"processes={number}" in error, error
            assert "want  batch_size=4, processes=2" in error, error


def test_a_stream_resumes_on_another_number_of_ranks_between_two_epochs_only(on: Any, tmp_path: Path) -> None:
    inside, between = (Case(data="stream", noise=False, saves=saves) for saves in (Updates(1), Epochs(1)))
    on(2, train, inside, tmp_path / "inside" / "whole")
    on(2, train, between, tmp_path / "between" / "whole")
    for number, trained in ((1, 26), (3, 24)):  # of 27; a lone row of each process is dropped
        for error in on(number, refused, inside, moved_to(tmp_path / "inside", number), 3):
            assert "which was saved inside an epoch" in error and "resume_data=False" in error, error
        each = on(number, from_cut, between, moved_to(tmp_path / "between", number), 7)
        rows = sorted(row for one in each for step in one["trace"] for row in step["numbers"])
        assert len(rows) == len(set(rows)) == trained, "each row of the second epoch once"
