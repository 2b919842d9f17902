"""Durations of training (`Updates(500)`, `Epochs(1)`, `Seconds(60)`), and the triggers that fire after each."""

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
        n: The number of updates, a whole number.
    """

    n: int

    def __post_init__(self) -> None:
        check_whole(self.n, f"Updates({self.n!r})", what="a whole number of updates")


@dataclass(frozen=True, slots=True)
class Epochs:
    """A duration in passes over the training data.

    Args:
        n: The number of passes. Some settings accept fractions.
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
    """Refuse an interval that cannot end between two updates; `of` is the name of the setting, in a `call`."""
    given = call.format(f"{of}={duration!r}")
    if isinstance(duration, Epochs) and duration.n != int(duration.n):
        raise SettingError(given, want="whole epochs, or a duration that falls inside an epoch", fix="Updates(500)")
    if not isinstance(duration, Epochs | Updates | Seconds):
        fix = f"{of}=Updates({duration})" if type(duration) is int and duration > 0 else f"{of}=Epochs(1)"
        raise SettingError(given, want="Updates(n), Epochs(n) or Seconds(n)", fix=fix)


class Trigger:
    """Fires each time its duration has passed; checked only between two updates."""

    def __init__(self, duration: Duration, counters: Counters, *, of: str) -> None:
        check_duration(duration, of)
        self.duration = duration
        self._updates = counters.last_boundary  # work that fell due after the last boundary still fires
        self._seconds = counters.seconds

    def fires(self, counters: Counters, *, epoch_ended: bool) -> bool:
        """Return whether the duration has passed since it last fired."""
        if isinstance(self.duration, Epochs):
            return epoch_ended and counters.epoch % int(self.duration.n) == 0
        if isinstance(self.duration, Updates):
            return self.fires_at(counters.updates)
        if counters.seconds - self._seconds < self.duration.n:
            return False
        self._seconds = counters.seconds
        return True

    def fires_at(self, updates: int) -> bool:
        """Return whether the duration, in updates, has passed at an update that is reported late."""
        assert isinstance(self.duration, Updates)
        passed = updates // self.duration.n > self._updates // self.duration.n
        self._updates = updates
        return passed

    def next_update(self, counters: Counters) -> float:
        """Return the update after which to check next; infinite where only ends of epochs matter."""
        if isinstance(self.duration, Epochs):
            return math.inf
        if isinstance(self.duration, Updates):
            return (counters.updates // self.duration.n + 1) * self.duration.n
        return counters.updates  # skipped updates take time too


class TimeTrigger:
    """Fires each time so many seconds have passed by the clock: `Counters.seconds` is written less often."""

    def __init__(self, duration: Seconds) -> None:
        self._seconds = duration.n
        self._last = time.perf_counter()

    def fires_at(self, updates: int) -> bool:
        """Return whether the time has passed, when an update is reported late."""
        return self.fires(None, epoch_ended=False)

    def fires(self, counters: Counters | None, *, epoch_ended: bool) -> bool:
        """Return whether the time has passed since it last fired."""
        now = time.perf_counter()
        if now - self._last < self._seconds:
            return False
        self._last = now
        return True
