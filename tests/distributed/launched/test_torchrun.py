"""Processes that somebody else has started find each other: torchrun, several agents, srun, a group that is there."""

from __future__ import annotations

import random
import secrets
import sys

import pytest

from distributed.launched.programs_run import PROGRAM, by_environment, how_it_ends, started_by_environment, torchrun
from distributed.launched.programs_run import ended as run_all


def printed(ended) -> list[str]:
    assert [process.code for process in ended] == [0] * len(ended), ended
    return sorted(line for process in ended for line in process.out.splitlines())


def test_two_processes_of_torchrun_are_one_world() -> None:
    assert printed(torchrun(str(PROGRAM), "total")) == ["rank 0 local 0 of 2 sum 3.0", "rank 1 local 1 of 2 sum 3.0"]


def test_two_agents_are_one_world() -> None:
    ended = torchrun(str(PROGRAM), "total", agents=2)
    assert printed(ended) == ["rank 0 local 0 of 2 sum 3.0", "rank 1 local 0 of 2 sum 3.0"]


def test_tasks_of_srun_are_one_world() -> None:
    """SLURM_NTASKS may be the whole job's. Local ranks are agreed on where no variable has them."""
    of_all = {"SLURM_NTASKS": "9", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "3", "SLURM_NODELIST": "localhost"}
    of_all["SLURM_JOB_ID"] = str(random.SystemRandom().randrange(10_000))
    tasks = [{**of_all, "SLURM_PROCID": str(rank)} for rank in range(2)]
    ended = run_all([[sys.executable, str(PROGRAM), "total"]] * 2, tasks, seconds=60)
    assert printed(ended) == ["rank 0 local 0 of 2 sum 3.0", "rank 1 local 1 of 2 sum 3.0"]


@pytest.mark.slow
def test_processes_of_mpirun_are_one_world() -> None:
    """Rank, size and the job's name are all that they share."""
    job = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": secrets.token_hex(8)}
    tasks = [{**job, "OMPI_COMM_WORLD_RANK": str(rank)} for rank in range(2)]
    ended = run_all([[sys.executable, str(PROGRAM), "total"]] * 2, tasks, seconds=60)
    assert printed(ended) == ["rank 0 local 0 of 2 sum 3.0", "rank 1 local 1 of 2 sum 3.0"]


def test_an_initialized_group_is_used_and_not_destroyed() -> None:
    ended = by_environment("group-total")
    assert printed(ended) == [
        "rank 0 local 0 of 2 sum 3.0",
        "rank 1 local 1 of 2 sum 3.0",
        "taken down by its owner",
        "taken down by its owner",
    ]


def test_a_rank_ends_where_another_is_stopped_and_the_group_never_times_out() -> None:
    """Nobody is there to end it: the group is somebody else's, and its time-out is long."""
    with started_by_environment("group-stop", "timeout=1.5") as [first, _]:
        end = how_it_ends(first, seconds=40)
    assert end.code == 1
    lines = end.err.splitlines()
    begin = lines.index("rank 0 ends: rank 1 does not answer")
    assert "rank 1 on " in lines[begin + 1] and ", at update 3, programs.py:" in lines[begin + 1]
