"""What `advise` has found, as records: techniques with what each gave, phases, findings; as text, markdown and plot."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.tools.findings import Finding
from trainwright.tools.phases import Phases

if TYPE_CHECKING:
    from trainwright.tools.cpu import Setting

FEWEST = 3
"""Pairs of blocks, of a technique and of the trainer against itself, below which nothing is said."""
SEVERAL = 6
"""Pairs from which on `CLEAR` is enough: noise alone then passes all three conditions in less than 1 of 100 trials,
for ratios that are lognormal with a deviation of 0.3, one of six of them an outlier of another 1.0 (simulated)."""
CLEAR = 1.03
"""From this speed-up on a technique is worth a switch, where the noise is smaller and the lower quartile above 1."""
CLEAR_OF_FEW = 1.2
"""The same for fewer pairs."""
DRIFT = 1e-2
"""Relative difference of the mean loss from which on a technique is said to change numbers."""
WAITS = 0.1
"""Share of waiting for data from which on it is said that most speed-ups leave the waiting out."""
SAVES = 0.8
"""Share of the memory below which a technique is said to save it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """The trainer as it is against itself: how far ratios are from 1 where nothing differs."""

    trials: int
    clock: str
    """"CPU time" of the process, or "wall clock"."""
    floor: float | None
    """Nine of ten ratios lie between 1 / floor and floor; None for too few of them."""
    wall_floor: float | None
    """The same by the clock."""


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
    """Pairs of blocks."""
    floor: float | None = None
    """The noise that the speed-up has to exceed; None where it is not known, and nothing is clear."""
    wall: float | None = None
    """The speed-up by the clock, where the other is one in CPU time: its median."""
    wall_floor: float | None = None
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
        elif self.is_slower:
            told.append("slower")
        elif self.trials < FEWEST:
            told.append("too few trials")
        elif not told:
            told.append("no clear difference")
        if self.drift is not None and not self.drift <= DRIFT:
            told.append(f"changes the loss by {self.drift:.0%}" if math.isfinite(self.drift) else "loss not finite")
        return ", ".join(told)

    @property
    def is_worth_it(self) -> bool:
        """Whether it is clearly faster, beyond the noise: in CPU time, and then not clearly slower by the clock."""
        clear = self._clear
        if clear is None or self.speedup is None or self.spread is None or self._is_slower_by_the_clock:
            return False
        return self.speedup >= clear and self.spread[0] > 1

    @property
    def is_slower(self) -> bool:
        """Whether it is clearly slower, beyond the noise, in CPU time or by the clock."""
        clear = self._clear
        if clear is None or self.speedup is None or self.spread is None:
            return False
        return (self.speedup <= 1 / clear and self.spread[1] < 1) or self._is_slower_by_the_clock

    @property
    def _is_slower_by_the_clock(self) -> bool:
        """Less CPU time may take longer: work that several threads shared, and that one of them does now."""
        if self._clear is None or self.wall is None or self.wall_floor is None:
            return False
        return self.wall <= 1 / max(self._least, self.wall_floor)

    @property
    def _least(self) -> float:
        return CLEAR if self.trials >= SEVERAL else CLEAR_OF_FEW

    @property
    def _clear(self) -> float | None:
        """The speed-up that counts; None where there are too few trials for any."""
        return None if self.floor is None or self.trials < FEWEST else max(self._least, self.floor)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, the verdict among it."""
        return {**asdict(self), "verdict": self.verdict}


def noise_of(ratios: Sequence[float], *, wall: Sequence[float], clock: str) -> Noise:
    """The noise in the ratios of the trainer as it is to itself, by the time that is judged and by the clock."""
    return Noise(trials=len(ratios), clock=clock, floor=_floor(ratios), wall_floor=_floor(wall))


def _floor(ratios: Sequence[float]) -> float | None:
    """The distance from 1, as a ratio, that nine of ten keep within; None for fewer than `FEWEST`."""
    if len(ratios) < FEWEST:
        return None
    return statistics.quantiles([max(one, 1 / one) for one in ratios], n=10, method="inclusive")[-1]


def effect_of(effect: Effect, ratios: Sequence[float], *, wall: Sequence[float], noise: Noise) -> Effect:
    """The effect with the ratios of its pairs: without the technique to with it, by the time that is judged."""
    few = len(ratios) < 2
    quartiles = (ratios[0],) * 3 if few else statistics.quantiles(ratios, n=4, method="inclusive")
    by_clock = noise.clock == "wall clock"
    return replace(
        effect,
        speedup=statistics.median(ratios),
        spread=(quartiles[0], quartiles[2]),
        trials=len(ratios),
        floor=noise.floor,
        wall=None if by_clock else statistics.median(wall),
        wall_floor=None if by_clock else noise.wall_floor,
    )


_PHASE_CURES = {
    "transfer": ("pinned memory",),
    **dict.fromkeys(("forward", "backward"), ("bf16", "fp16", "tf32", "compile", "channels-last")),
    "update": ("fused optimizer", "foreach optimizer", "batch size x2"),
    "rest": ("batch size x2",),
}
"""The techniques that the reading of the phases names."""


def agreed(finding: Finding, tried: Sequence[Effect]) -> Finding:
    """Return a slow loader with the best measured cure as its fix, or with the word that the trials disagree."""
    if finding.name != "slow loader":
        return finding
    cures = [one for one in tried if one.speedup is not None and one.reads]
    pays = [one for one in cures if one.is_worth_it]
    if pays:
        best = max(pays, key=lambda one: one.speedup or 0.0)
        return replace(finding, fix=f"{best.how}  # measured here: x{best.speedup:.2f}")
    if any(one.trials >= FEWEST for one in cures):
        disagree = f"the trials disagree: no cure that was tried pays here ({_measured(cures)})"
        fix = "less work for each row in __getitem__ and collate_fn: a profile of the loader shows where"
        return replace(finding, why=f"{finding.why}; {disagree}", fix=fix, level="note")
    if any(one.name == "in memory" and one.why_not == "it is on" for one in tried):
        return replace(finding, fix="batches of more rows: these lie in memory already, and a batch is one gather")
    return finding


def _measured(effects: Sequence[Effect]) -> str:
    return ", ".join(f"{one.name} x{one.speedup:.2f} {one.verdict}" for one in effects)


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What `advise` has found; printed as a table."""

    tried: tuple[Effect, ...]
    """Every technique: the fastest first, those that were not tried last."""
    noise: Mapping[str, Noise]
    """Of the trainer against itself: on "ready" batches, and with the "loader"."""
    phases: Phases
    findings: tuple[Finding, ...]
    """Each with the cure that was measured as the best, or with the word that the trials disagree with it."""
    settings: tuple[Setting, ...]
    """Settings of the process that may be worth a try: not measured."""
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

    @property
    def reading(self) -> str:
        """The largest phase, what may make it shorter, and what the trials of that gave."""
        name = max(self.phases.shares, key=lambda one: self.phases.shares[one])
        names = _PHASE_CURES.get(name, ())
        cures = [
            one
            for one in self.tried
            if one.speedup is not None and (one.reads if name == "data" else one.name in names)
        ]
        return f"{self.phases.reading}; measured: {_measured(cures)}" if cures else self.phases.reading

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as for JSON."""
        return {
            "tried": [one.to_dict() for one in self.tried],
            "noise": {name: asdict(one) for name, one in self.noise.items()},
            "phases": self.phases.to_dict(),
            "findings": [one.to_dict() for one in self.findings],
            "settings": [asdict(one) for one in self.settings],
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
        head_line = f"{self.rows_per_second:,.0f} rows/s on {self.device}; {shares}; {self.reading}."
        settings = [f"- not measured: {one.name}: `{one.how}` {one.note}".rstrip() for one in self.settings]
        noise = [f"Noise: {one}." for one in self._noise()]
        return "\n\n".join(["\n".join(one) for one in ([head_line], lines, noise, found, settings) if one])

    def plot(self, path: str | Path | None = None) -> Any:
        """Draw the phases and the speed-ups; a matplotlib figure, saved where `path` is given."""
        from trainwright.core.figures import advice_figure

        ratios = [(one.name, one.speedup, one.spread) for one in self.tried if one.speedup and one.spread]
        return advice_figure(self.phases.shares, ratios, path=path)

    def __str__(self) -> str:
        lines = [f" advice    {self.rows_per_second:,.0f} rows/s on {self.device}, in {self.seconds:.0f} s of trials"]
        bar, told = self.phases.bar().splitlines()
        lines += [f" time      {bar}", f"           {told}", f"           {self.reading}"]
        if all(one.level == "note" for one in self.findings):
            lines.append(" found     none of the known mistakes")
        for one in self.findings:
            label = "found" if one.level == "problem" else "note "
            lines += [f" {label}     {one.name}: {one.what}", f"           {one.why}", f"           fix: {one.fix}"]
        table = _table([one for one in self.tried if one.speedup is not None])
        noise = [f" noise     {one}" for one in self._noise()]
        return "\n".join([*lines, "", *table, "", *noise, *self._ready(), *self._rest()])

    def _noise(self) -> list[str]:
        """How far the trainer is from itself, by each of the clocks that verdicts go by."""
        lines = []
        for name, one in self.noise.items():
            pairs = f"{one.trials} pair{'' if one.trials == 1 else 's'} of the trainer against itself"
            of = f"{'updates of ready batches' if name == 'ready' else 'updates that read the data'}, by {one.clock}"
            if one.floor is None:
                lines.append(f"{of}: {pairs}, too few for a verdict; give more seconds")
            else:
                lines.append(f"{of}: x{1 / one.floor:.2f} to x{one.floor:.2f} in {pairs}: no smaller difference counts")
        return lines

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
        lines += [f" not tried {one.name}: {one.why_not}  [{one.how}]" for one in others]
        return lines + [f" by hand   {one.name}: {one.how}  {one.note}".rstrip() for one in self.settings]


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
    quartiles = f"{one.spread[0]:.2f}-{one.spread[1]:.2f}" if one.trials > 1 else "one pair"
    memory = "" if one.memory is None else f"x{one.memory:.2f}"
    drift = "" if one.drift is None else ("0" if one.drift == 0 else f"{one.drift:.0e}")
    return [one.name, f"x{one.speedup:.2f}", quartiles, memory, drift]
