"""What a search gives back: each trial with its settings and how it ended, and the best of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from trainwright.observers.table import duration, number

WHY = "why"
"""What a trial's attribute is called that tells why it ended early."""


@dataclass(frozen=True, slots=True)
class Tried:
    """One trial of a search; printed, it is one line."""

    number: int
    settings: Mapping[str, Any]
    value: float | None
    """What the objective gave; None where it came to none."""
    ended: Literal["complete", "pruned", "infeasible", "failed"]
    """"failed": by an error, or with its process; such a trial is made again, under another number."""
    why: str
    """Why it ended before its time; empty where it did not."""
    seconds: float
    reports: Mapping[int, float] = field(repr=False)
    """What `Pruning` reported, by step."""

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        names = ("number", "value", "ended", "why", "seconds")
        plain = {name: getattr(self, name) for name in names}
        return {**plain, "settings": dict(self.settings), "reports": dict(self.reports)}

    def __str__(self) -> str:
        """Return the line."""
        shown = ", ".join(f"{name}={_short(value)}" for name, value in self.settings.items())
        ended = number(self.value) if self.value is not None else f"{self.ended}: {self.why}".removesuffix(": ")
        return f"trial {self.number:3}  {duration(self.seconds):>6}  {ended}  {shown}"


@dataclass(frozen=True, slots=True)
class Tuned:
    """The trials of a search; printed, they are a table with the best first."""

    mode: Literal["min", "max"]
    trials: tuple[Tried, ...] = field(repr=False)
    study: Any = field(repr=False)
    """The study of Optuna, for its plots and importances."""

    @property
    def best(self) -> Tried | None:
        """The best of the trials that came to their end within all constraints; None where there is none."""
        done = self._ranked()
        return done[0] if done else None

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        best = self.best
        return {
            "mode": self.mode,
            "best": None if best is None else best.to_dict(),
            "trials": [trial.to_dict() for trial in self.trials],
        }

    def __str__(self) -> str:
        """Return the table."""
        done = self._ranked()
        others = [trial for trial in self.trials if trial not in done]
        counts = {ended: sum(trial.ended == ended for trial in others) for ended in ("pruned", "infeasible", "failed")}
        told = [f"{len(done)} complete", *(f"{count} {ended}" for ended, count in counts.items() if count)]
        return "\n".join([f"{len(self.trials)} trials: {', '.join(told)}", *map(str, [*done, *others])])

    def _ranked(self) -> list[Tried]:
        """The complete trials, the best first; of equals the earlier."""
        sign = -1 if self.mode == "max" else 1
        done = [trial for trial in self.trials if trial.ended == "complete"]
        return sorted(done, key=lambda trial: sign * (trial.value or 0.0))


def tried_of(trial: Any) -> Tried:
    """What is known of a trial of Optuna's."""
    state = trial.state.name.lower()
    beyond = any(value > 0 for value in trial.constraints.values())
    ended = {"complete": "complete", "pruned": "pruned"}.get(state, "failed")
    return Tried(
        trial.number,
        dict(trial.params),
        trial.value if state == "complete" else None,
        "infeasible" if beyond and ended != "failed" else ended,  # type: ignore[arg-type]
        trial.user_attrs.get(WHY, ""),
        trial.duration.total_seconds() if trial.duration is not None else 0.0,
        dict(trial.intermediate_values),
    )


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
