"""Says, once, that a process waits for the others to start: how many have come, where, and who told it of them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from trainwright.distributed.environment import Place, variables

AFTER = 10.0
"""Seconds without a word; a start of many processes that import torch takes some."""
_SHOWN = 8
"""Ranks that are named one by one."""


class Waiting:
    """How long this process has waited, and whether it has said so; the first process speaks once it is there."""

    def __init__(self, place: Place) -> None:
        self._place, self._begun, self._said = place, time.monotonic(), False

    @contextmanager
    def for_the_first(self) -> Iterator[None]:
        """Wait for the first process inside, in calls that cannot be looked into; it waits for nobody so."""
        if not self._place.rank:
            yield
            return
        nobody = f"nobody answers for rank 0 of {self._place.size} processes"
        timer = threading.Timer(AFTER, self._say, [nobody])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    @property
    def is_due(self) -> bool:
        """Whether it is time to say something."""
        return not self._said and time.monotonic() >= self._begun + AFTER

    def look(self, missing: Sequence[int]) -> None:
        """Say how many have come, where it is time to; `missing` are the ranks of those that have not."""
        if self.is_due and missing:
            named = ", ".join(map(str, missing[:_SHOWN])) + (", ..." if len(missing) > _SHOWN else "")
            size = self._place.size
            self._say(f"{size - len(missing)} of {size} processes have come; missing: rank {named}")

    def _say(self, what: str) -> None:
        self._said = True
        place = self._place
        text = f"rank {place.rank} waits at {place.address}: {what} (told by {variables()}; parallel=None is alone)\n"
        os.write(2, text.encode())  # in one piece: others may write too
