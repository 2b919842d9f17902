"""In a store that outlives the attempts of a job, the processes of each have a part of their own."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from trainwright.distributed.environment import own_part


@pytest.fixture
def store() -> Any:
    """The launcher's store."""
    return dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))


def attempt(store: Any, size: int) -> list[Any]:
    """What each process of an attempt gets."""
    parts: dict[int, Any] = {}

    def come(rank: int) -> None:
        parts[rank] = own_part(dist, store.clone(), rank=rank, size=size, seconds=10)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in reversed(range(size))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return [parts[rank] for rank in range(size)]


def test_the_processes_of_an_attempt_share_a_part_and_those_of_the_next_find_nothing_of_it(store: Any) -> None:
    first = attempt(store, 3)
    first[2].set("address", "of a process that dies")
    assert first[0].get("address") == first[1].get("address") == b"of a process that dies"
    again = attempt(store, 3)
    assert not any(part.check(["address"]) for part in again)
    again[1].set("address", "of one that lives")
    assert again[0].get("address") == b"of one that lives"


def test_a_process_that_asked_and_died_is_not_taken_for_the_next_of_its_rank(store: Any) -> None:
    dist.PrefixStore("trainwright/rendezvous", store).set("asks/1", "word of the dead")
    parts = attempt(store, 2)
    parts[0].set("here", "yes")
    assert parts[1].get("here") == b"yes"


def test_one_that_does_not_come_is_an_error_that_names_it(store: Any) -> None:
    with pytest.raises(dist.DistStoreError, match="rank 1 has not joined"):
        own_part(dist, store, rank=0, size=2, seconds=0.1)
