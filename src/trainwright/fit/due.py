"""When something falls due: after so many updates, epochs or seconds."""

from __future__ import annotations

import math
import time

from trainwright.core.durations import Epochs, Seconds, Span, Updates, check_span
from trainwright.core.progress import Counters


class Bell:
    """Rings each time its span has passed; asked only between two updates."""

    def __init__(self, span: Span, counters: Counters, *, of: str) -> None:
        check_span(span, of)
        self.span = span
        self._updates = counters.paused  # what fell due after a pause that was missed still rings
        self._seconds = counters.seconds

    def rings(self, counters: Counters, *, epoch_ended: bool) -> bool:
        """Whether the span has passed since it last rang."""
        if isinstance(self.span, Epochs):
            return epoch_ended and counters.epoch % int(self.span.n) == 0
        if isinstance(self.span, Updates):
            return self.rings_at(counters.updates)
        if counters.seconds - self._seconds < self.span.n:
            return False
        self._seconds = counters.seconds
        return True

    def rings_at(self, updates: int) -> bool:
        """Whether the span has passed at an update that is told late; for a number of updates."""
        assert isinstance(self.span, Updates)
        passed = updates // self.span.n > self._updates // self.span.n
        self._updates = updates
        return passed

    def next_update(self, counters: Counters) -> float:
        """The update at which it must be asked next; infinite where only the end of an epoch matters."""
        if isinstance(self.span, Epochs):
            return math.inf
        if isinstance(self.span, Updates):
            return (counters.updates // self.span.n + 1) * self.span.n
        return counters.updates  # time passes in updates that are held back too


class Timer:
    """Rings each time so many seconds have passed, by the clock itself: the counters know the time of pauses alone."""

    def __init__(self, span: Seconds) -> None:
        self._seconds = span.n
        self._last = time.perf_counter()

    def rings_at(self, updates: int) -> bool:
        """Whether the time has passed, when an update is told late."""
        return self.rings(None, epoch_ended=False)

    def rings(self, counters: Counters | None, *, epoch_ended: bool) -> bool:
        """Whether the time has passed since it last rang."""
        now = time.perf_counter()
        if now - self._last < self._seconds:
            return False
        self._last = now
        return True
