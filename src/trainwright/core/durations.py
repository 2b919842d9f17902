"""Lengths of training: `Updates(500)`, `Epochs(1)`, `Seconds(60)`."""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.core.checks import check_number, check_whole
from trainwright.core.errors import SettingError


@dataclass(frozen=True, slots=True)
class Updates:
    """A length in optimizer updates that were applied."""

    n: int

    def __post_init__(self) -> None:
        check_whole(self.n, f"Updates({self.n!r})", what="a whole number of updates")


@dataclass(frozen=True, slots=True)
class Epochs:
    """A length in passes over the training data."""

    n: float

    def __post_init__(self) -> None:
        check_number(self.n, f"Epochs({self.n!r})", above=0, what="a number of epochs")


@dataclass(frozen=True, slots=True)
class Seconds:
    """A length of wall-clock time."""

    n: float

    def __post_init__(self) -> None:
        check_number(self.n, f"Seconds({self.n!r})", above=0, what="a number of seconds")


Span = Updates | Epochs | Seconds


def check_span(span: Span, of: str, *, call: str = "{}") -> None:
    """Refuse what cannot fall due between two updates; `of` is the setting that it was given for, in a `call`."""
    given = call.format(f"{of}={span!r}")
    if isinstance(span, Epochs) and span.n != int(span.n):
        raise SettingError(given, want="whole epochs, or a span that falls inside an epoch", fix="Updates(500)")
    if not isinstance(span, Epochs | Updates | Seconds):
        fix = f"{of}=Updates({span})" if type(span) is int and span > 0 else f"{of}=Epochs(1)"
        raise SettingError(given, want="Updates(n), Epochs(n) or Seconds(n)", fix=fix)
