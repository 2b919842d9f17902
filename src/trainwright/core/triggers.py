"""When something falls due: after so many updates, epochs or seconds."""

from __future__ import annotations

import math
import time

from trainwright.core.durations import Epochs, Seconds, Span, Updates, check_span
from trainwright.core.progress import Counters


class Trigger:
    """Fires each time its duration has passed; asked only between two updates."""

    def __init__(self, span: Span, counters: Counters, *, of: str) -> None:
        check_span(span, of)
        self.span = span
        self._updates = counters.paused  # work that fell due after the last time it was asked still fires
        self._seconds = counters.seconds

    def fires(self, counters: Counters, *, epoch_ended: bool) -> bool:
        """Whether the duration has passed since it last fired."""
        if isinstance(self.span, Epochs):
            return epoch_ended and counters.epoch % int(self.span.n) == 0
        if isinstance(self.span, Updates):
            return self.fires_at(counters.updates)
        if counters.seconds - self._seconds < self.span.n:
            return False
        self._seconds = counters.seconds
        return True

    def fires_at(self, updates: int) -> bool:
        """Whether the duration has passed at an update that is reported late; for a number of updates."""
        assert isinstance(self.span, Updates)
        passed = updates // self.span.n > self._updates // self.span.n
        self._updates = updates
        return passed

    def next_update(self, counters: Counters) -> float:
        """Return the update after which it must be asked next; infinite where only ends of epochs matter."""
        if isinstance(self.span, Epochs):
            return math.inf
        if isinstance(self.span, Updates):
            return (counters.updates // self.span.n + 1) * self.span.n
        return counters.updates  # time passes in skipped updates too


class TimeTrigger:
    """Fires each time so many seconds have passed by the clock: the counters are brought up to date less often."""

    def __init__(self, span: Seconds) -> None:
        self._seconds = span.n
        self._last = time.perf_counter()

    def fires_at(self, updates: int) -> bool:
        """Whether the time has passed, when an update is reported late."""
        return self.fires(None, epoch_ended=False)

    def fires(self, counters: Counters | None, *, epoch_ended: bool) -> bool:
        """Whether the time has passed since it last fired."""
        now = time.perf_counter()
        if now - self._last < self._seconds:
            return False
        self._last = now
        return True
