"""Gives the processes of one attempt of a job a part of their own of the store that all its attempts share."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

PAUSE = 0.02
"""Seconds between two looks of the first process for the others."""


def share_store() -> bool:
    """Whether the store is the launcher's, and lives on when it starts the processes again."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def own_part(
    dist: Any, store: Any, *, rank: int, size: int, seconds: float, look: Callable[[Sequence[int]], None] | None = None
) -> Any:
    """Return the part of a shared store that belongs to the processes that live now; all of them call this.

    In the launcher's store lies what the processes of earlier attempts have written, and a group that read it would
    wait for the dead (torch's own groups do, when torchrun restarts them). How often it was restarted tells no
    attempt from another: the launchers of several machines count for themselves. So each process asks with a word
    that nobody has used, and the first one, which answers only while it lives, names the part.
    `look` is called there again and again with the ranks that have not come yet.

    Raises torch's DistStoreError where the others do not come in time.
    """
    word = secrets.token_hex(8)
    meeting = dist.PrefixStore("trainwright/meeting", store)
    if rank:
        meeting.set(f"asks/{rank}", word)
        word = meeting.get(f"answer/{word}").decode()
        meeting.set(f"heard/{word}/{rank}", "")
    else:
        _answer(dist, meeting, word, size=size, seconds=seconds, look=look)
    return dist.PrefixStore(f"trainwright/{word}", store)


def _answer(
    dist: Any, meeting: Any, word: str, *, size: int, seconds: float, look: Callable[[Sequence[int]], None] | None
) -> None:
    """Answer each process that asks, the dead ones' questions too, until all have heard."""
    answered: dict[int, str] = {}
    missing, end = list(range(1, size)), time.monotonic() + seconds
    while missing:
        for rank in missing:
            if meeting.check([f"asks/{rank}"]):
                asked = meeting.get(f"asks/{rank}").decode()
                if asked != answered.get(rank):
                    meeting.set(f"answer/{asked}", word)
                    answered[rank] = asked
        missing = [rank for rank in missing if not meeting.check([f"heard/{word}/{rank}"])]
        if time.monotonic() > end:
            raise dist.DistStoreError(f"rank {missing[0]} has not come within {seconds:g} s")
        if missing:
            if look is not None:
                look(missing)
            time.sleep(PAUSE)
