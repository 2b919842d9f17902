"""Durations of training (`Updates(500)`, `Epochs(1)`, `Seconds(60)`), and triggers that fire periodically."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from trainwright.core.checks import check_number, check_whole
from trainwright.core.errors import SettingError
from trainwright.core.progress import Counters


@dataclass(frozen=True, slots=True)
class Updates:
    """A duration in applied optimizer updates.

    Args:
        n: The number of updates, an integer.
    """

    n: int

    def __post_init__(self) -> None:
        check_whole(self.n, f"Updates({self.n!r})", what="a whole number of updates")


@dataclass(frozen=True, slots=True)
class Epochs:
    """A duration in passes over the training data.

    Args:
        n: The number of passes. Some settings accept a fraction.
    """

    n: float

    def __post_init__(self) -> None:
        check_number(self.n, f"Epochs({self.n!r})", above=0, what="a number of epochs")


@dataclass(frozen=True, slots=True)
class Seconds:
    """A duration of wall-clock time.

    Args:
        n: The number of seconds.
    """

    n: float

    def __post_init__(self) -> None:
        check_number(self.n, f"Seconds({self.n!r})", above=0, what="a number of seconds")


Duration = Updates | Epochs | Seconds


def check_duration(duration: Duration, of: str, *, call: str = "{}") -> None:
    """Raise SettingError for an interval that is no duration, or a fraction of an epoch.

    `of`: the name of the setting. `call`: the call it is given to, with {} for the setting.
    """
    given = call.format(f"{of}={duration!r}")
    if isinstance(duration, Epochs) and duration.n != int(duration.n):
        raise SettingError(given, want="whole epochs, or a duration that falls inside an epoch", fix="Updates(500)")
    if not isinstance(duration, Epochs | Updates | Seconds):
        fix = f"{of}=Updates({duration})" if type(duration) is int and duration > 0 else f"{of}=Epochs(1)"
        raise SettingError(given, want="Updates(n), Epochs(n) or Seconds(n)", fix=fix)


class Trigger:
    """Fires each time its duration has passed. Checked between two updates only."""

    def __init__(self, duration: Duration, counters: Counters, *, of: str) -> None:
        check_duration(duration, of)
        self.duration = duration
        self._updates = counters.last_boundary  # so that work due since the last boundary still fires after a resume
        self._seconds = counters.seconds

    def fires(self, counters: Counters, *, epoch_ended: bool) -> bool:
        """Return whether the duration has passed since the trigger last fired."""
        if isinstance(self.duration, Epochs):
            return epoch_ended and counters.epoch % int(self.duration.n) == 0
        if isinstance(self.duration, Updates):
            return self.fires_at(counters.updates)
        if counters.seconds - self._seconds < self.duration.n:
            return False
        self._seconds = counters.seconds
        return True

    def fires_at(self, updates: int) -> bool:
        """Return whether the duration, in updates, has passed at an update that is reported with a delay."""
        assert isinstance(self.duration, Updates)
        passed = updates // self.duration.n > self._updates // self.duration.n
        self._updates = updates
        return passed

    def next_update(self, counters: Counters) -> float:
        """Return the update after which to check next; infinity if the trigger only fires at ends of epochs."""
        if isinstance(self.duration, Epochs):
            return math.inf
        if isinstance(self.duration, Updates):
            return (counters.updates // self.duration.n + 1) * self.duration.n
        return counters.updates  # check after each update, also skipped ones: they take time


class TimeTrigger:
    """Fires each time its seconds have passed by the clock, since `Counters.seconds` is not updated often enough."""

    def __init__(self, duration: Seconds) -> None:
        self._seconds = duration.n
        self._last = time.perf_counter()

    def fires_at(self, updates: int) -> bool:
        """Return whether the time has passed, at an update that is reported with a delay."""
        return self.fires(None, epoch_ended=False)

    def fires(self, counters: Counters | None, *, epoch_ended: bool) -> bool:
        """Return whether the time has passed since the trigger last fired."""
        now = time.perf_counter()
        if now - self._last < self._seconds:
            return False
        self._last = now
        return True
