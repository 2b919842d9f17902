"""What the processes of a run agree on: the update at which all of them hear what each has asked for."""

from __future__ import annotations

import time
from typing import NamedTuple

from trainwright.run.owner import Owner

SECONDS = 1.0
"""How often about the processes hear of each other."""
MOST = 4
"""How many times longer than the last stretch of updates the next may be: the pace may change."""


class Asked(NamedTuple):
    """What one process tells the others."""

    stop: str = ""
    """Why it wants to stop."""
    signal: int = 0
    """A signal that it was given."""
    save: bool = False
    """Whether it wants a checkpoint."""
    seconds: float = 0.0
    """How long the stage has taken by its clock."""
    next: int = 0
    """The update at which all hear of each other again, as far as it is concerned."""


class Agreement:
    """Joins what the processes ask for, about once a second, at an update that all of them know.

    No update pays for it: between two of these points nothing is exchanged. The first process has the clock.
    """

    def __init__(self, owner: Owner) -> None:
        self._world, self._counters = owner.world, owner.counters
        self.asks = ""
        """Why this process wants to stop, until all have heard it."""
        self.at = 0.0
        """The applied updates at which they hear of each other next."""
        self._stretch = 1
        self._last = (0, time.perf_counter())

    def start(self) -> None:
        """Begin, after loading."""
        self._last, self._stretch = (self._counters.updates, time.perf_counter()), 1
        self.at = self._counters.updates + 1

    def join(self, *, signal: int = 0, save: bool = False) -> Asked:
        """Hear what all have asked for, and fix when to ask again; every process comes here at the same boundary."""
        counters = self._counters
        own = Asked(self.asks, signal, save, counters.seconds, self._next())
        everybody = self._world.gather(own)
        first = everybody[0]
        self.asks, self.at = "", first.next
        return Asked(
            stop=next((one.stop for one in everybody if one.stop), ""),
            signal=max(one.signal for one in everybody),
            save=any(one.save for one in everybody),
            seconds=first.seconds,
            next=first.next,
        )

    def _next(self) -> int:
        """The update about `SECONDS` from now, by the pace since the last time."""
        updates, now = self._counters.updates, time.perf_counter()
        before, then = self._last
        made, took = updates - before, max(now - then, 1e-6)
        if made:
            pace = int(SECONDS * made / took)
            self._stretch = max(1, min(pace, MOST * self._stretch))
            self._last = (updates, now)
        return updates + self._stretch
