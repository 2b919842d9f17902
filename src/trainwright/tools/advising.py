"""`advise`: measures techniques of efficient training on the user's model and data, in alternating trials.

`Effect` holds the verdict on a technique, `Advice` the printed report. `techniques` defines the techniques and measures
blocks of updates; `findings` finds mistakes in a few updates.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from trainwright.core.checks import check_number
from trainwright.core.errors import first_line
from trainwright.core.suggestions import suggests
from trainwright.observers.table import aligned
from trainwright.tools.findings import Finding, findings
from trainwright.tools.techniques import (
    Block,
    Phases,
    Technique,
    measure_phases,
    peak_memory,
    process_settings,
    run_block,
    techniques,
)
from trainwright.tools.trainer_snapshot import TrainerSnapshot
from trainwright.tools.trial import check_trainer, compact, data_state_restored, open_afresh, ready, traceless
from trainwright.trainer import Trainer

ROUNDS = 15
"""Maximum number of pairs of blocks per technique."""
BLOCK = 0.15
"""Seconds of one block of updates; less for a small budget."""
WARM = 2
"""Warm-up updates before the clock starts."""
WARM_COMPILED = 8
"""Warm-up updates of compiled models."""
PLANNED = 0.9
"""Share of the budget in which new blocks may start. The last block may exceed it."""
START_FACTOR = 3
"""Minimum ratio of budget to start-up time for techniques with a slow start, such as compilation."""
READY = 24
"""Maximum number of updates with ready batches in memory."""
FEWEST = 3
"""Minimum number of pairs, of a technique and of A/A trials, for a verdict."""
SEVERAL = 6
"""Minimum number of pairs for `CLEAR`. Noise alone passes all three conditions (median, noise, lower quartile) in less
than 1 of 100 trials. Simulated: lognormal ratios with deviation 0.3, one in six an outlier with a further 1.0."""
CLEAR = 1.03
"""Minimum speed-up of a useful technique. It must also exceed the noise, with a lower quartile above 1."""
CLEAR_OF_FEW = 1.2
"""The same with fewer pairs."""
DRIFT = 1e-2
"""Minimum relative change of the mean loss that is reported."""
WAITS = 0.2
"""Minimum share of time spent waiting for data that is reported as a finding."""
SAVES = 0.8
"""Maximum relative memory of a technique that is reported to save memory."""

_PHASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "data": ("waiting for data: workers, rows in memory, or less work for each row", ()),
    "forward": ("in the model's forward pass", ("bf16", "compile", "channels-last")),
    "backward": ("in the loss, the backward pass and the loop", ("bf16", "compile", "channels-last", "batch size x2")),
    "optimizer": ("in the optimizer's step", ("fused optimizer", "batch size x2")),
}
"""Phase -> (its meaning, the techniques that shorten it)."""


@suggests
def advise(
    trainer: Trainer[Any], train: Any, val: Any = None, *, seconds: float = 60, batch_size: int | None = None
) -> Advice:
    """Measure techniques of efficient training on this trainer and data; return the effect of each as a report.

    Runs short trials of real updates, alternating with the unchanged trainer, and restores trainer, data and process.
    Measures speed-up (median and quartiles of the ratios), memory, and the change of the loss of equal updates. A/A
    trials time the trainer against itself: a speed-up counts only above this noise. On a CPU, updates on ready batches
    are timed by CPU time of the process; all others by the wall clock. Settings of the process, such as threads and
    memory allocators, are listed and not measured.

    Args:
        trainer: The trainer.
        train: Training data, as for `fit`.
        val: Validation data, as for `fit`.
        seconds: Approximate budget. Techniques that do not start within it are listed as not tried.
        batch_size: As for `fit`.

    Raises:
        SettingError: With several ranks.
        DataError: For a stream that cannot be read again: pass a list of ready batches.
    """
    check_trainer(trainer, "advise")
    check_number(seconds, f"advise(seconds={seconds!r})", above=0, what="seconds,", fix="seconds=60")
    with traceless(trainer) as before, data_state_restored(train):
        source = open_afresh(train, batch_size=batch_size)
        trials = _TrialRunner(trainer, before, seconds=seconds)
        trials.calibrate(open_afresh(ready(trainer, train, updates=2, batch_size=batch_size)))
        drawn = ready(trainer, train, updates=trials.updates + WARM, batch_size=batch_size)
        batches = [compact(batch) for batch in drawn]
        found = findings(trainer, batches, val=val, batch_size=batch_size)
        before.restore()
        phases = measure_phases(trainer, before, source, updates=trials.updates)
        row = trials.seconds_per_row * phases.data / max(phases.total - phases.data, 1e-9)
        wanted = techniques(trainer, train, batches, seconds_per_row=row, patience=min(0.1 * seconds, trials.left))
        memory, noise, tried = trials.run(wanted, {"ready": open_afresh(batches), "loader": source})
        total = run_block(trainer, before, Technique(name="as it is", data=source), updates=trials.updates, warm=1)
    return Advice(
        tried=tuple(sorted(tried, key=lambda one: -(one.speedup or 0.0))),
        noise=noise,
        phases=phases,
        findings=(*slow_loader(phases, tried), *found),
        settings=tuple(process_settings(trainer.device)),
        rows_per_second=1 / total.seconds[0],
        memory=memory,
        seconds=trials.spent,
        device=torch.cuda.get_device_name(trainer.device) if trainer.device.type == "cuda" else str(trainer.device),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The result of `advise`. `print` shows a table."""

    tried: tuple[Effect, ...]
    """All techniques, the fastest first, untried ones last."""
    noise: Mapping[str, Noise]
    """The noise of trials on "ready" batches and of trials with the "loader"."""
    phases: Phases
    findings: tuple[Finding, ...]
    settings: tuple[str, ...]
    """Settings of the process that may help, as lines of code. Not measured."""
    rows_per_second: float
    """Rows per second of the unchanged trainer on the user's data."""
    memory: int
    """Peak bytes of the tensors that an update adds; on CUDA measured by the allocator."""
    seconds: float
    """Total seconds of the trials."""
    device: str

    @property
    def best(self) -> tuple[Effect, ...]:
        """Clearly faster techniques, the fastest first."""
        return tuple(one for one in self.tried if one.is_worth_it)

    @property
    def reading(self) -> str:
        """One line: the largest phase, and the measured effects of techniques that shorten it."""
        name, share = max(self.phases.shares.items(), key=lambda item: item[1])
        text, names = _PHASES[name]
        tried = [one for one in self.tried if one.speedup is not None]
        cures = [one for one in tried if (one.reads if name == "data" else one.name in names)]
        return f"{share:.0%} {text}" + (f"; measured: {_measured(cures)}" if cures else "")

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        tried = [{**asdict(one), "verdict": one.verdict} for one in self.tried]
        return {**asdict(self), "tried": tried, "shares": self.phases.shares, "reading": self.reading}

    def _repr_html_(self) -> str:
        """Return findings, techniques and settings as tables, for a notebook."""
        from trainwright.core.figures import html_pairs, html_table

        found = [(one.name, one.what, one.fix) for one in self.findings]
        tried = [one.cells() for one in self.tried if one.speedup is not None]
        head = ["technique", "speed-up", "quartiles", "memory", "drift", "verdict", "how"]
        facts = {"rows/s": self.rows_per_second, "device": self.device, "time": self.reading, "by hand": self.settings}
        findings = html_table(found, head=["found", "what", "fix"]) if found else ""
        return html_pairs(facts) + findings + html_table(tried, head=head)

    def __str__(self) -> str:
        """Return the report: time, findings, table of techniques, noise, untried techniques."""
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
        lines += ["", *(f" {line}" for line in aligned(rows, left=len(head))), "", *self._noise()]
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """The effect of one technique, or the reason why it was not tried."""

    name: str
    how: str
    """The line of code that applies the technique."""
    speedup: float | None = None
    """Median ratio of rows per second; None if not tried."""
    spread: tuple[float, float] | None = None
    """The quartiles of the ratios."""
    trials: int = 0
    """Number of pairs of blocks."""
    floor: float | None = None
    """The noise that a clear speed-up exceeds; None with too few trials: then no speed-up is clear."""
    wall: float | None = None
    """The speed-up by the wall clock, if `speedup` is in CPU time."""
    wall_floor: float | None = None
    memory: float | None = None
    """Peak memory, relative to the unchanged trainer."""
    drift: float | None = None
    """Relative change of the mean loss of equal updates; None if the updates differ."""
    why_not: str = ""
    """The reason why it was not tried; empty if it was."""
    reads: bool = False
    """Whether it was timed on updates that read the data; else on ready batches."""

    @property
    def verdict(self) -> str:
        """The verdict: "use it", "no clear difference", "slower", "saves memory", or `why_not`."""
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
        """Whether it is faster than the noise explains, and not slower by the wall clock."""
        return self._direction > 0

    @property
    def is_slower(self) -> bool:
        """Whether it is slower than the noise explains, or slower by the wall clock."""
        return self._direction < 0

    @property
    def _direction(self) -> int:
        """1 for faster, -1 for slower, 0 if noise explains the difference."""
        if self.speedup is None or self.spread is None or self.floor is None or self.trials < FEWEST:
            return 0
        least = CLEAR if self.trials >= SEVERAL else CLEAR_OF_FEW
        limit = max(least, self.floor)
        if self.wall is not None and self.wall_floor is not None and 1 / self.wall >= max(least, self.wall_floor):
            return -1  # less CPU time but more wall time: one thread does the work of several
        if self.speedup <= 1 / limit and self.spread[1] < 1:
            return -1
        return int(self.speedup >= limit and self.spread[0] > 1)

    def cells(self) -> list[str]:
        """Return the cells of its row in the printed table."""
        quartiles = "" if self.spread is None else f"{self.spread[0]:.2f}-{self.spread[1]:.2f}"
        memory = "" if self.memory is None else f"x{self.memory:.2f}"
        drift = "" if self.drift is None else f"{self.drift:.0e}" if self.drift else "0"
        return [self.name, f"x{self.speedup:.2f}", quartiles, memory, drift, self.verdict, self.how]


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """The noise of A/A trials, in which the trainer is timed against itself."""

    trials: int
    clock: str
    """"CPU time" of the process, or "wall clock"."""
    floor: float | None
    """Nine of ten ratios are between 1 / floor and floor; None with too few ratios."""
    wall_floor: float | None
    """The same by the wall clock."""


def noise_of(ratios: Sequence[float], *, wall: Sequence[float], clock: str) -> Noise:
    """Return the noise of A/A trials from their ratios by `clock` and by the wall clock."""
    return Noise(trials=len(ratios), clock=clock, floor=_floor(ratios), wall_floor=_floor(wall))


def _floor(ratios: Sequence[float]) -> float | None:
    if len(ratios) < FEWEST:
        return None
    return statistics.quantiles([max(one, 1 / one) for one in ratios], n=10, method="inclusive")[-1]


def effect_of(effect: Effect, ratios: Sequence[float], *, wall: Sequence[float], noise: Noise) -> Effect:
    """Return the effect with the statistics of its ratios: time without the technique / time with it."""
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
    """Return a finding if training waits for the loader. The fix is the best measured technique, if one helped."""
    share = phases.shares["data"]
    if share < WAITS:
        return []
    finding = Finding(
        "slow loader",
        f"{share:.0%} of an update is spent waiting for data, {1000 * phases.data:.3g} ms of it",
        "the model is idle meanwhile",
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
        return [replace(finding, fix="batches of more rows: these are in memory already, and a batch is one gather")]
    return [finding]


def _measured(effects: Sequence[Effect]) -> str:
    return ", ".join(f"{one.name} x{one.speedup:.2f} {one.verdict}" for one in effects)


@dataclass(slots=True)
class _Pairs:
    """The pairs of blocks of one technique: without and with it."""

    technique: Technique
    base: Technique
    clock: str
    ratios: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    drifts: list[float] = field(default_factory=list)
    memory: float | None = None
    why_not: str = ""
    seconds: float = 0.0
    """Seconds of the last pair."""

    def add(self, base: Block, block: Block) -> None:
        """Add the ratios of a pair."""
        wall = [without / with_ for without, with_ in zip(base.seconds, block.seconds, strict=True)]
        cpu = [without / with_ for without, with_ in zip(base.cpu, block.cpu, strict=True)]
        self.wall += wall
        self.ratios += cpu if self.clock == "CPU time" else wall
        if base.loss is not None and block.loss is not None and self.technique.same_numbers:
            self.drifts.append(abs(block.loss - base.loss) / max(abs(base.loss), 1e-12))

    def effect(self, noise: Noise) -> Effect:
        """Return the effect, compared with the noise."""
        one = self.technique
        effect = Effect(name=one.name, how=one.how, reads=one.reads)
        if not self.ratios:
            return replace(effect, why_not=self.why_not or "the time was over before its turn; give more seconds")
        drift = max(self.drifts, default=None)
        return effect_of(replace(effect, memory=self.memory, drift=drift), self.ratios, wall=self.wall, noise=noise)


class _TrialRunner:
    """Runs alternating blocks of updates of one trainer within a budget."""

    def __init__(self, trainer: Trainer[Any], before: TrainerSnapshot, *, seconds: float) -> None:
        self._trainer, self._before, self._seconds = trainer, before, seconds
        self._begun = time.perf_counter()
        self.updates = 1
        """Number of updates per block."""
        self.seconds_per_row = 0.0
        """Seconds per row of the unchanged trainer on ready batches."""

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._begun

    @property
    def left(self) -> float:
        """Remaining seconds for trials; negative after the budget."""
        return PLANNED * self._seconds - self.spent

    def calibrate(self, source: Any) -> None:
        """Set the number of updates per block by the speed of a second block; a first one warms up."""
        unchanged = Technique(name="as it is", data=source)
        run_block(self._trainer, self._before, unchanged, updates=2, warm=1)
        block = run_block(self._trainer, self._before, unchanged, updates=2, warm=1)
        self.seconds_per_row = block.seconds[0]
        length = min(BLOCK, self._seconds / 400)
        self.updates = max(1, min(READY - WARM, round(length * block.updates_per_second)))

    def run(self, wanted: Sequence[Technique], sources: dict[str, Any]) -> tuple[int, dict[str, Noise], list[Effect]]:
        """Try all techniques in turns within the budget; return (memory of an update, noise, effects)."""
        bases = {name: Technique(name="as it is", data=data, reads=name == "loader") for name, data in sources.items()}
        found = [self._pairs(one, bases["loader" if one.reads else "ready"]) for one in wanted]
        kinds = ["ready", *(["loader"] if any(one.reads and not one.why_not for one in wanted) else [])]
        controls = {name: self._pairs(bases[name], bases[name]) for name in kinds}
        memory = self._measure_memory(found, bases["ready"])
        for one in found:
            if one.technique.start and not one.why_not:
                self._start_slowly(one)
        self._take_turns([*controls.values(), *(one for one in found if not one.technique.start)])
        noise = {name: noise_of(one.ratios, wall=one.wall, clock=one.clock) for name, one in controls.items()}
        return memory, noise, [one.effect(noise[kinds[-1] if one.technique.reads else "ready"]) for one in found]

    def _pairs(self, technique: Technique, base: Technique) -> _Pairs:
        """Return the pairs of a technique, with its base and its clock. Waits take no CPU time."""
        by_cpu = self._trainer.device.type == "cpu" and not technique.reads
        clock = "CPU time" if by_cpu else "wall clock"
        return _Pairs(replace(technique, data=technique.data or base.data), base, clock, why_not=technique.why_not)

    def _take_turns(self, quick: Sequence[_Pairs]) -> None:
        for turn in range(ROUNDS):  # pairs alternate their order, since the second block finds warm caches
            start = turn % len(quick)
            able = [one for one in [*quick[start:], *quick[:start]] if not one.why_not]
            for one in able:
                if self.left > 2 * one.seconds:
                    self._time_pair(one, technique_first=turn % 2 == 1)
            if self.left <= 2 * min((one.seconds for one in able), default=0.0):
                break

    def _start_slowly(self, one: _Pairs) -> None:
        """Time a technique with a slow start in one block of several segments, if the budget allows."""
        if self._seconds < START_FACTOR * one.technique.start:
            start = one.technique.start
            one.why_not = f"it may take {start:.0f} s to start; give seconds={START_FACTOR * start:.0f} or more"
        else:
            self._time_pair(one, warm=WARM_COMPILED, segments=5)

    def _time_pair(self, one: _Pairs, *, technique_first: bool = False, warm: int = WARM, segments: int = 1) -> None:
        """Time a block without and one with the technique. An error becomes the reason for not trying it."""
        begun, blocks = time.perf_counter(), {}
        try:
            for with_technique in (technique_first, not technique_first):
                technique = one.technique if with_technique else one.base
                how = {"updates": self.updates, "warm": warm, "segments": segments}
                blocks[with_technique] = run_block(self._trainer, self._before, technique, **how)
        except Exception as error:
            one.why_not = first_line(error, 160)
            one.ratios.clear()
        else:
            one.add(blocks[False], blocks[True])
        one.seconds = time.perf_counter() - begun

    def _measure_memory(self, found: Sequence[_Pairs], base: Technique) -> int:
        """Return the memory of an unchanged update, and set the relative memory of quick techniques."""
        memory = peak_memory(self._trainer, self._before, base)
        for one in found:
            if not (one.why_not or one.technique.reads or one.technique.start):
                try:
                    one.memory = peak_memory(self._trainer, self._before, one.technique) / max(1, memory)
                except Exception as error:
                    one.why_not = first_line(error, 160)
        return memory
