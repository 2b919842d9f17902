"""The results of `advise` as records and as text: the effect of each technique beside the noise, phases, findings."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from trainwright.tools.findings import Finding
from trainwright.tools.timing import Phases

FEWEST = 3
"""Pairs of blocks, of a technique and of the trainer against itself, below which there is no verdict."""
SEVERAL = 6
"""Pairs from which on `CLEAR` is enough: noise alone then passes all three conditions in less than 1 of 100 trials,
for ratios that are lognormal with a deviation of 0.3, one of six of them an outlier of another 1.0 (simulated)."""
CLEAR = 1.03
"""From this speed-up on a technique is worth a switch, where the noise is smaller and the lower quartile above 1."""
CLEAR_OF_FEW = 1.2
"""The same for fewer pairs."""
DRIFT = 1e-2
"""Relative difference of the mean loss from which on a technique is said to change numbers."""
WAITS = 0.2
"""Share of waiting for data from which on the loader is a finding."""
SAVES = 0.8
"""Share of the memory below which a technique is said to save it."""

_PHASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "data": ("waiting for data: workers, rows in memory, or less work for each row", ()),
    "forward": ("in the model's forward pass", ("bf16", "compile", "channels-last")),
    "backward": ("in the loss, the backward pass and the loop", ("bf16", "compile", "channels-last", "batch size x2")),
    "optimizer": ("in the optimizer's step", ("fused optimizer", "batch size x2")),
}
"""The meaning of a phase, and the techniques that shorten it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """The trainer against itself (A/A): the ratios where nothing differs."""

    trials: int
    clock: str
    """"CPU time" of the process, or "wall clock"."""
    floor: float | None
    """Nine of ten ratios lie between 1 / floor and floor; None for too few of them."""
    wall_floor: float | None
    """The same by the wall clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """The effect of one technique, or the reason why it was not tried."""

    name: str
    how: str
    """The line that switches it on."""
    speedup: float | None = None
    """Median of the ratios: how many times as many rows per second. None where it was not tried."""
    spread: tuple[float, float] | None = None
    """The quartiles of the ratios."""
    trials: int = 0
    """Pairs of blocks."""
    floor: float | None = None
    """The noise that the speed-up has to exceed; None where it is not known, and nothing is clear."""
    wall: float | None = None
    """The speed-up by the wall clock, where the other is one in CPU time."""
    wall_floor: float | None = None
    memory: float | None = None
    """Times as much memory."""
    drift: float | None = None
    """Relative difference of the mean loss of the same updates from the same state; None for other updates."""
    why_not: str = ""
    """Why it was not tried."""
    reads: bool = False
    """Whether the ratio is of updates that read the data; otherwise of updates whose batches are ready."""

    @property
    def verdict(self) -> str:
        """The judgment: "use it", "no clear difference", "slower", "saves memory", or why it was not tried."""
        if self.speedup is None:
            return f"not tried: {self.why_not}"
        saves = self.memory is not None and self.memory <= SAVES
        words = ["saves memory"] if saves else []
        if self.is_worth_it or self.is_slower:
            words.append("use it" if self.is_worth_it else "slower")
        elif self.trials < FEWEST:
            words.append("too few trials")
        elif not saves:
            words.append("no clear difference")
        if self.drift is not None and not self.drift <= DRIFT:
            words.append(f"changes the loss by {self.drift:.0%}" if math.isfinite(self.drift) else "loss not finite")
        return ", ".join(words)

    @property
    def is_worth_it(self) -> bool:
        """Whether it is faster beyond the noise, and not slower by the wall clock."""
        return self._direction > 0

    @property
    def is_slower(self) -> bool:
        """Whether it is slower beyond the noise, or by the wall clock."""
        return self._direction < 0

    @property
    def _direction(self) -> int:
        """1 for faster, -1 for slower, 0 where noise explains the difference."""
        if self.speedup is None or self.spread is None or self.floor is None or self.trials < FEWEST:
            return 0
        least = CLEAR if self.trials >= SEVERAL else CLEAR_OF_FEW
        limit = max(least, self.floor)
        if self.wall is not None and self.wall_floor is not None and 1 / self.wall >= max(least, self.wall_floor):
            return -1  # less CPU time, but longer: work of several threads that one of them does now
        if self.speedup <= 1 / limit and self.spread[1] < 1:
            return -1
        return int(self.speedup >= limit and self.spread[0] > 1)

    def cells(self) -> list[str]:
        """Return the cells of its line in the printed table."""
        quartiles = "" if self.spread is None else f"{self.spread[0]:.2f}-{self.spread[1]:.2f}"
        memory = "" if self.memory is None else f"x{self.memory:.2f}"
        drift = "" if self.drift is None else f"{self.drift:.0e}" if self.drift else "0"
        return [self.name, f"x{self.speedup:.2f}", quartiles, memory, drift, self.verdict, self.how]


def noise_of(ratios: Sequence[float], *, wall: Sequence[float], clock: str) -> Noise:
    """Return the noise in the ratios of the trainer to itself, by the clock that judges and by the wall clock."""
    return Noise(trials=len(ratios), clock=clock, floor=_floor(ratios), wall_floor=_floor(wall))


def _floor(ratios: Sequence[float]) -> float | None:
    if len(ratios) < FEWEST:
        return None
    return statistics.quantiles([max(one, 1 / one) for one in ratios], n=10, method="inclusive")[-1]


def effect_of(effect: Effect, ratios: Sequence[float], *, wall: Sequence[float], noise: Noise) -> Effect:
    """Return the effect with the ratios of its pairs: time without the technique over time with it."""
    quartiles = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else [ratios[0]] * 3
    return replace(
        effect,
        speedup=statistics.median(ratios),
        spread=(quartiles[0], quartiles[2]),
        trials=len(ratios),
        floor=noise.floor,
        wall=statistics.median(wall) if noise.clock == "CPU time" else None,
        wall_floor=noise.wall_floor,
    )


def slow_loader(phases: Phases, tried: Sequence[Effect]) -> list[Finding]:
    """Find a loader that training waits for, with the measured cure, or with the trials that disagree."""
    share = phases.shares["data"]
    if share < WAITS:
        return []
    finding = Finding(
        "slow loader",
        f"{share:.0%} of an update is spent waiting for data, {1000 * phases.data:.3g} ms of it",
        "the model stands still meanwhile",
        "DataLoader(..., num_workers=2), or batches(data_set, 64, in_memory=True) where the rows fit",
    )
    cures = [one for one in tried if one.speedup is not None and one.reads]
    best = max((one for one in cures if one.is_worth_it), key=lambda one: one.speedup or 0.0, default=None)
    if best is not None:
        return [replace(finding, fix=f"{best.how}  # measured here: x{best.speedup:.2f}")]
    if any(one.trials >= FEWEST for one in cures):
        why = f"{finding.why}; the trials disagree: no cure that was tried pays here ({_measured(cures)})"
        fix = "less work for each row in __getitem__ and collate_fn: a profile of the loader shows where"
        return [replace(finding, why=why, fix=fix, level="note")]
    if any(one.name == "in memory" and one.why_not == "it is on" for one in tried):
        return [replace(finding, fix="batches of more rows: these lie in memory already, and a batch is one gather")]
    return [finding]


def _measured(effects: Sequence[Effect]) -> str:
    return ", ".join(f"{one.name} x{one.speedup:.2f} {one.verdict}" for one in effects)


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The results of `advise`; printed, a table."""

    tried: tuple[Effect, ...]
    """Every technique: the fastest first, those that were not tried last."""
    noise: Mapping[str, Noise]
    """Of the trainer against itself: on "ready" batches, and with the "loader"."""
    phases: Phases
    findings: tuple[Finding, ...]
    settings: tuple[str, ...]
    """Lines of settings of the process that may pay: not measured."""
    rows_per_second: float
    """Of the trainer as it is, on the user's own data."""
    memory: int
    """Most bytes of tensors alive in an update beside those before it; on CUDA the peak of the allocator."""
    seconds: float
    """How long it took."""
    device: str

    @property
    def best(self) -> tuple[Effect, ...]:
        """The techniques that are clearly faster, the fastest first."""
        return tuple(one for one in self.tried if one.is_worth_it)

    @property
    def reading(self) -> str:
        """The largest phase, and what the techniques that shorten it gave."""
        name, share = max(self.phases.shares.items(), key=lambda item: item[1])
        text, names = _PHASES[name]
        tried = [one for one in self.tried if one.speedup is not None]
        cures = [one for one in tried if (one.reads if name == "data" else one.name in names)]
        return f"{share:.0%} {text}" + (f"; measured: {_measured(cures)}" if cures else "")

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, as for JSON."""
        tried = [{**asdict(one), "verdict": one.verdict} for one in self.tried]
        return {**asdict(self), "tried": tried, "shares": self.phases.shares, "reading": self.reading}

    def __str__(self) -> str:
        """Return the report: time, findings, the table of techniques, noise, and what was not tried."""
        shares = "  ".join(f"{name} {share:.0%}" for name, share in self.phases.shares.items() if share >= 0.005)
        lines = [f" advice    {self.rows_per_second:,.0f} rows/s on {self.device}, in {self.seconds:.0f} s of trials"]
        lines += [f" time      {shares}", f"           {self.reading}"]
        if not any(one.level == "problem" for one in self.findings):
            lines.append(" found     none of the known mistakes")
        for one in self.findings:
            label = "found" if one.level == "problem" else "note "
            lines += [f" {label}     {one.name}: {one.what}", f"           {one.why}", f"           fix: {one.fix}"]
        head = ["technique", "speed-up", "quartiles", "memory", "drift", "verdict", "how"]
        rows = [head, *(one.cells() for one in self.tried if one.speedup is not None)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = ("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)
        lines += ["", *(f" {line}".rstrip() for line in table), "", *self._noise()]
        reading = ", ".join(one.name for one in self.tried if one.reads and one.speedup is not None)
        if reading:
            lines.append(f" of what   {reading}: updates that read the data; the others: updates on ready batches")
        lines += [f" not tried {one.name}: {one.why_not}  [{one.how}]" for one in self.tried if one.speedup is None]
        return "\n".join([*lines, *(f" by hand   {one}" for one in self.settings)])

    def _noise(self) -> list[str]:
        lines = []
        for name, one in self.noise.items():
            updates = "updates on ready batches" if name == "ready" else "updates that read the data"
            limits = "too few for a verdict; give more seconds"
            if one.floor is not None:
                limits = f"x{1 / one.floor:.2f} to x{one.floor:.2f}: no smaller difference counts"
            lines.append(
                f" noise     {updates}, by {one.clock}: {one.trials} pairs of the trainer against itself: {limits}"
            )
        return lines
