"""The pool of processes: answers by rank, errors with their traceback, nothing left hanging."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distributed.pool import Pool, RankFailed


def add_ranks() -> tuple[int, float]:
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return dist.get_rank(), total.item()


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"wrong on {rank}")


def leave() -> None:
    if dist.get_rank() == 1:
        os._exit(3)


def give_what_cannot_be_sent() -> Any:
    return lambda: None


def process_id() -> int:
    return os.getpid()


def test_answers_come_by_rank_and_the_ranks_share_a_group(ranks2: Pool) -> None:
    assert ranks2.run(add_ranks) == [(0, 1.0), (1, 1.0)]


def test_processes_stay_between_calls_and_after_errors(ranks2: Pool) -> None:
    before = ranks2.run(process_id)
    with pytest.raises(RankFailed, match=r"(?s)rank 1 of 2.*in fail_on.*ValueError: wrong on 1"):
        ranks2.run(fail_on, 1)
    with pytest.raises(RankFailed, match=r"(?s)rank .*pickle.*rank .*pickle"):
        ranks2.run(give_what_cannot_be_sent)
    assert ranks2.run(process_id) == before


def test_hung_and_dead_ranks_are_ended_and_replaced() -> None:
    own = Pool(2)  # not the session's, which keeps its processes
    try:
        with pytest.raises(TimeoutError, match=r"ranks \[0, 1\] of 2 gave no answer for 0.5 s"):
            own.run(time.sleep, 60, seconds=0.5)
        with pytest.raises(RankFailed, match=r"rank 1 of 2:\nthe process has ended with exit code 3"):
            own.run(leave)
        assert [total for _, total in own.run(add_ranks)] == [1.0, 1.0]
    finally:
        own.close()
