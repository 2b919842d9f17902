"""The rendezvous of the ranks in a store: the ranks that are missing, the part of a shared store, calls with a limit.

A launcher's store outlives the processes that it restarts; every wait for a rank in it has a limit, and is reported.
"""

from __future__ import annotations

import atexit
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from trainwright.distributed.environment import Place, variables

PAUSE = 0.02
"""Seconds between two looks of rank 0 for the others."""
REPORT_AFTER = 10.0
"""Seconds of waiting before it is reported; many processes that import torch take some to start."""
LAST_WAIT = 10.0
"""Seconds that the end of the program waits for threads that have not returned."""
_SHOWN = 8
"""Ranks that a report names."""

_threads: list[threading.Thread] = []
"""Threads that have not returned in time."""


def share_store() -> bool:
    """Whether the store is the launcher's, and stays when it starts the processes again."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def own_part(
    dist: Any, store: Any, *, rank: int, size: int, seconds: float, look: Callable[[Sequence[int]], None] | None = None
) -> Any:
    """Return the part of a shared store that belongs to the processes of this attempt; all of them call this.

    The launcher's store holds the keys of earlier attempts, and a group that read them would wait for dead processes
    (torch's own groups do, when torchrun restarts them). The number of restarts does not tell attempts apart: the
    launchers of several machines count for themselves. So each rank asks with a random word, and rank 0, which answers
    only while it lives, names the part. `look` is called with the ranks that have not come yet, again and again.

    Raises torch's DistStoreError where the others do not come in time.
    """
    word = secrets.token_hex(8)
    rendezvous = dist.PrefixStore("trainwright/rendezvous", store)
    if rank:
        rendezvous.set(f"asks/{rank}", word)
        word = rendezvous.get(f"answer/{word}").decode()
        rendezvous.set(f"joined/{word}/{rank}", "")
    else:
        _answer(dist, rendezvous, word, size=size, seconds=seconds, look=look)
    return dist.PrefixStore(f"trainwright/{word}", store)


def _answer(
    dist: Any, rendezvous: Any, word: str, *, size: int, seconds: float, look: Callable[[Sequence[int]], None] | None
) -> None:
    """Answer each question, those of dead processes too, until all ranks have joined."""
    answered: dict[int, str] = {}
    missing, end = list(range(1, size)), time.monotonic() + seconds
    while missing:
        for rank in missing:
            if rendezvous.check([f"asks/{rank}"]):
                asked = rendezvous.get(f"asks/{rank}").decode()
                if asked != answered.get(rank):
                    rendezvous.set(f"answer/{asked}", word)
                    answered[rank] = asked
        missing = [rank for rank in missing if not rendezvous.check([f"joined/{word}/{rank}"])]
        if time.monotonic() > end:
            raise dist.DistStoreError(f"rank {missing[0]} has not joined within {seconds:g} s")
        if missing:
            if look is not None:
                look(missing)
            time.sleep(PAUSE)


class WaitReport:
    """Reports once, on stderr, that this rank waits for others to start."""

    def __init__(self, place: Place) -> None:
        self._place, self._begin, self._reported = place, time.monotonic(), False

    @contextmanager
    def of_rank0(self) -> Iterator[None]:
        """A wait of another rank for rank 0 inside, in calls of torch that cannot be interrupted."""
        if not self._place.rank:
            yield
            return
        timer = threading.Timer(REPORT_AFTER, self._report, [f"rank 0 of {self._place.size} processes does not answer"])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    @property
    def is_due(self) -> bool:
        """Whether the wait is to be reported now."""
        return not self._reported and time.monotonic() >= self._begin + REPORT_AFTER

    def look(self, missing: Sequence[int]) -> None:
        """Report the ranks that have not come, if it is due."""
        if self.is_due and missing:
            named = ", ".join(map(str, missing[:_SHOWN])) + (", ..." if len(missing) > _SHOWN else "")
            size = self._place.size
            self._report(f"{size - len(missing)} of {size} processes have joined; missing: rank {named}")

    def _report(self, what: str) -> None:
        self._reported = True
        place = self._place
        text = f"rank {place.rank} waits at {place.address}: {what} (set: {variables()}; parallel=None is alone)\n"
        os.write(2, text.encode())  # in one piece: other ranks may write too


def wait_for(thread: threading.Thread, seconds: float) -> None:
    """Wait for a daemon thread that calls torch; one that is late is waited for again at the end of the program.

    A thread that returns from C++ after the interpreter has ended would abort the process (`terminate called without
    an active exception`).
    """
    thread.join(seconds)
    if not thread.is_alive():
        return
    if not _threads:
        atexit.register(_wait_once_more)
    _threads.append(thread)


def _wait_once_more() -> None:
    for thread in _threads:
        thread.join(LAST_WAIT / len(_threads))
