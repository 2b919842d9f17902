"""Durations of training: `Updates(500)`, `Epochs(1)`, `Seconds(60)`."""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.core.checks import check_number, check_whole
from trainwright.core.errors import SettingError


@dataclass(frozen=True, slots=True)
class Updates:
    """A duration in applied optimizer updates."""

    n: int

    def __post_init__(self) -> None:
        check_whole(self.n, f"Updates({self.n!r})", what="a whole number of updates")


@dataclass(frozen=True, slots=True)
class Epochs:
    """A duration in passes over the training data."""

    n: float

    def __post_init__(self) -> None:
        check_number(self.n, f"Epochs({self.n!r})", above=0, what="a number of epochs")


@dataclass(frozen=True, slots=True)
class Seconds:
    """A duration of wall-clock time."""

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
