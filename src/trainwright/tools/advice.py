"""What `advise` has found, as records: techniques with what each gave, phases, findings; as text, markdown and plot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainwright.tools.finding import Finding
from trainwright.tools.phases import Phases

CLEAR = 1.03
"""From this speed-up on a technique is worth a switch, where the spread lies above 1 too."""
ALONE = 1.2
"""The same for a ratio that was measured once."""
DRIFT = 1e-2
"""Relative difference of the mean loss from which on a technique is said to change numbers."""
WAITS = 0.1
"""Share of waiting for data from which on it is said that most speed-ups leave the waiting out."""
SAVES = 0.8
"""Share of the memory below which a technique is said to save it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """One technique: what it gave, or why it was not tried."""

    name: str
    how: str
    """What to write to switch it on."""
    speedup: float | None = None
    """How many times as many rows per second; the median of the ratios. None where it was not tried."""
    spread: tuple[float, float] | None = None
    """The quartiles of the ratios."""
    trials: int = 0
    memory: float | None = None
    """Times as much memory."""
    drift: float | None = None
    """Relative difference of the mean loss of the same updates, from the same state; None for other updates."""
    why_not: str = ""
    """Why it was not tried."""
    for_memory: bool = False
    """Whether it is meant to save memory rather than time."""
    reads: bool = False
    """Whether the ratio is of updates that read the data; of others, it is of updates whose batches are ready."""

    @property
    def verdict(self) -> str:
        """In words: use it, no clear difference, slower, saves memory, or why it was not tried."""
        if self.speedup is None or self.spread is None:
            return f"not tried: {self.why_not}"
        told = []
        if self.memory is not None and self.memory <= SAVES:
            told.append("saves memory")
        if self.is_worth_it:
            told.append("use it")
        elif self.speedup <= 1 / self._clear and self.spread[1] < 1:
            told.append("slower")
        elif not told:
            told.append("no clear difference")
        if self.drift is not None and not self.drift <= DRIFT:
            told.append(f"changes the loss by {self.drift:.0%}" if math.isfinite(self.drift) else "loss not finite")
        return ", ".join(told)

    @property
    def is_worth_it(self) -> bool:
        """Whether it is clearly faster."""
        return (
            self.speedup is not None and self.spread is not None and self.speedup >= self._clear and self.spread[0] > 1
        )

    @property
    def _clear(self) -> float:
        return CLEAR if self.trials > 1 else ALONE

    def to_dict(self) -> dict[str, Any]:
        """Plain data, the verdict among it."""
        return {**asdict(self), "verdict": self.verdict}


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What `advise` has found; printed as a table."""

    tried: tuple[Effect, ...]
    """Every technique: the fastest first, those that were not tried last."""
    phases: Phases
    findings: tuple[Finding, ...]
    rows_per_second: float
    """Of the trainer as it is, on the user's own data."""
    memory: int
    """Bytes of tensors that an update has alive at most beside those before it; on CUDA what it allocates at most."""
    seconds: float
    """How long it took."""
    device: str

    @property
    def best(self) -> tuple[Effect, ...]:
        """The techniques that are clearly faster, the fastest first."""
        return tuple(one for one in self.tried if one.is_worth_it)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as for JSON."""
        return {
            "tried": [one.to_dict() for one in self.tried],
            "phases": self.phases.to_dict(),
            "findings": [one.to_dict() for one in self.findings],
            "rows_per_second": self.rows_per_second,
            "memory": self.memory,
            "seconds": self.seconds,
            "device": self.device,
        }

    def markdown(self) -> str:
        """The same as a page of Markdown."""
        head = ["technique", "speed-up", "quartiles", "memory", "drift", "verdict", "how"]
        rows = [[*_cells(one), one.verdict, f"`{one.how}`"] for one in self.tried]
        table = [head, ["---"] * len(head), *rows]
        lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in table]
        found = [f"- **{one.name}**: {one.what} {one.why} Fix: `{one.fix}`" for one in self.findings]
        shares = ", ".join(f"{name} {share:.0%}" for name, share in self.phases.shares.items())
        head_line = f"{self.rows_per_second:,.0f} rows/s on {self.device}; {shares}; {self.phases.reading}."
        return "\n\n".join(["\n".join(one) for one in ([head_line], lines, found) if one])

    def plot(self, path: str | Path | None = None) -> Any:
        """Draw the phases and the speed-ups; a matplotlib figure, saved where `path` is given."""
        from trainwright.base.figures import advice_figure

        ratios = [(one.name, one.speedup, one.spread) for one in self.tried if one.speedup and one.spread]
        return advice_figure(self.phases.shares, ratios, path=path)

    def __str__(self) -> str:
        lines = [f" advice    {self.rows_per_second:,.0f} rows/s on {self.device}, in {self.seconds:.0f} s of trials"]
        bar, told = self.phases.bar().splitlines()
        lines += [f" time      {bar}", f"           {told}", f"           {self.phases.reading}"]
        if all(one.level == "note" for one in self.findings):
            lines.append(" found     none of the known mistakes")
        for one in self.findings:
            label = "found" if one.level == "problem" else "note "
            lines += [f" {label}     {one.name}: {one.what}", f"           {one.why}", f"           fix: {one.fix}"]
        table = _table([one for one in self.tried if one.speedup is not None])
        return "\n".join([*lines, "", *table, *self._ready(), *self._rest()])

    def _ready(self) -> list[str]:
        """What the ratios are of, where updates wait for data: then they are not those of the run."""
        share = self.phases.shares["data"]
        if share < WAITS:
            return []
        reading = [one.name for one in self.tried if one.reads and one.speedup is not None]
        those = f"; {', '.join(reading)}: of whole updates" if reading else ""
        told = f"speed-ups are of updates whose batches are ready, without the {share:.0%} of waiting{those}"
        return ["", f" of what   {told}"]

    def _rest(self) -> list[str]:
        """The techniques that are on, and those that were not tried."""
        on = [one.name for one in self.tried if one.why_not.startswith("it is on")]
        others = [one for one in self.tried if one.speedup is None and one.name not in on]
        lines = ["", f" on        {', '.join(on)}"] if on else [""]
        return lines + [f" not tried {one.name}: {one.why_not}  [{one.how}]" for one in others]


def _table(tried: Sequence[Effect]) -> list[str]:
    """Lines of one width, the way to switch it on last."""
    head = ["technique", "speed-up", "quartiles", "memory", "drift", "verdict", "how"]
    rows = [[*_cells(one), one.verdict, one.how] for one in tried]
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = []
    for row in [head, *rows]:
        cells = [
            f"{cell:<{width}}" if i in (0, 5, 6) else f"{cell:>{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(f" {'  '.join(cells)}".rstrip())
    return lines


def _cells(one: Effect) -> list[str]:
    if one.speedup is None or one.spread is None:
        return [one.name, "", "", "", ""]
    quartiles = f"{one.spread[0]:.2f}-{one.spread[1]:.2f}" if one.trials > 1 else "measured once"
    memory = "" if one.memory is None else f"x{one.memory:.2f}"
    drift = "" if one.drift is None else ("0" if one.drift == 0 else f"{one.drift:.0e}")
    return [one.name, f"x{one.speedup:.2f}", quartiles, memory, drift]
