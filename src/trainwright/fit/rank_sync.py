"""What the processes of a run agree on: the update at which all of them hear what each has asked for."""

from __future__ import annotations

import time
from typing import NamedTuple

from trainwright.fit.signals import ENDING
from trainwright.update.owner import Owner

SECONDS = 1.0
"""How often about the processes hear of each other."""
MOST = 4
"""How many times longer than the last stretch of updates the next may be: the pace may change."""


class Asked(NamedTuple):
    """What all processes together ask for."""

    stop: str
    """Why one of them wants to stop; empty where none does."""
    signal: int
    """A signal that one of them was given; 0 where none was."""
    save: bool
    """Whether one of them wants a checkpoint."""
    seconds: float
    """How long the stage has taken, by the first one's clock."""


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
        """Hear what all have asked for, and fix when to ask again; every process comes here at the same boundary.

        One sum of a few numbers; the reason for a stop is gathered only where there is one.
        """
        main = self._world.is_main
        signals = [float(signal == number) for number in ENDING]
        clock = (self._counters.seconds, float(self._next())) if main else (0.0, 0.0)
        stops, saves, seconds, self.at, *given = self._world.total(float(self.asks != ""), save, *clock, *signals)
        stop = next((reason for reason in self._world.gather(self.asks) if reason), "") if stops else ""
        self.asks = ""
        number = next((number for number, times in zip(ENDING, given, strict=True) if times), 0)
        return Asked(stop=stop, signal=number, save=bool(saves), seconds=seconds)

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
