"""`advise`: tries techniques of efficient training on the user's own model and data, in turns, and judges each.

The verdicts are in `Effect`, the printed report in `Advice`. Two files serve it: `techniques` (what is tried,
and how a block of updates is measured) and `findings` (mistakes seen in a few updates).
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
"""The most pairs of blocks of one technique."""
BLOCK = 0.15
"""Seconds of one block of updates, or less for a small budget."""
WARM = 2
"""Updates before the clock is started."""
WARM_COMPILED = 8
"""The same for compiled models."""
PLANNED = 0.9
"""Share of the budget in which new blocks start; the last one may take longer."""
START_FACTOR = 3
"""A technique with a slow start, such as compiling, is tried if the budget is this multiple of its start-up time."""
READY = 24
"""The most updates for which batches are held ready."""
FEWEST = 3
"""Pairs of blocks, of a technique and of the trainer against itself, below which there is no verdict."""
SEVERAL = 6
"""With this many pairs `CLEAR` is enough: noise alone passes all three conditions (median, noise, lower quartile) in
less than 1 of 100 trials, for ratios that are lognormal with a deviation of 0.3, one in six an outlier with a further
1.0 (simulated)."""
CLEAR = 1.03
"""The least speed-up of a useful technique; the noise must also be smaller, and the lower quartile above 1."""
CLEAR_OF_FEW = 1.2
"""The same for fewer pairs."""
DRIFT = 1e-2
"""A technique that changes the mean loss by more than this share is reported to change it."""
WAITS = 0.2
"""The least share of waiting for data that makes the loader a finding."""
SAVES = 0.8
"""A technique that needs at most this share of the memory is reported to save it."""

_PHASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "data": ("waiting for data: workers, rows in memory, or less work for each row", ()),
    "forward": ("in the model's forward pass", ("bf16", "compile", "channels-last")),
    "backward": ("in the loss, the backward pass and the loop", ("bf16", "compile", "channels-last", "batch size x2")),
    "optimizer": ("in the optimizer's step", ("fused optimizer", "batch size x2")),
}
"""The meaning of a phase, and the techniques that shorten it."""


@suggests
def advise(
    trainer: Trainer[Any], train: Any, val: Any = None, *, seconds: float = 60, batch_size: int | None = None
) -> Advice:
    """Try techniques of efficient training on this trainer and these data; return the effect of each, for printing.

    Runs short trials of real updates, in turns with the unchanged trainer, and restores trainer, data and process.
    Measured are speed-up (median and quartiles of the ratios), memory, and the difference of the loss of equal updates.
    In each turn the trainer is also timed against itself: a speed-up counts only beyond the ratios found there. Updates
    on ready batches on a CPU are timed by the CPU time of the process, all others by the wall clock. Settings of the
    process, such as threads and memory allocators, are listed in words.

    Args:
        trainer: The trainer.
        train: Training data, as for `fit`.
        val: Validation data, as for `fit`.
        seconds: The approximate budget. Techniques that do not start within it are listed as not tried.
        batch_size: As for `fit`.

    Raises:
        SettingError: In a group of processes.
        DataError: For a stream that cannot be read afresh: give a list of ready batches.
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
    """The results of `advise`; printed, a table."""

    tried: tuple[Effect, ...]
    """Every technique: the fastest first, those that were not tried last."""
    noise: Mapping[str, Noise]
    """The noise of trials on "ready" batches, and of those with the "loader"."""
    phases: Phases
    findings: tuple[Finding, ...]
    settings: tuple[str, ...]
    """Settings of the process that may pay, as lines of code; not measured."""
    rows_per_second: float
    """Of the unchanged trainer, on the user's own data."""
    memory: int
    """Peak bytes of the tensors that an update adds to those before it; on CUDA the peak of the allocator."""
    seconds: float
    """Seconds of all trials."""
    device: str

    @property
    def best(self) -> tuple[Effect, ...]:
        """The techniques that are clearly faster, the fastest first."""
        return tuple(one for one in self.tried if one.is_worth_it)

    @property
    def reading(self) -> str:
        """The largest phase, and the measured effects of techniques that shorten it."""
        name, share = max(self.phases.shares.items(), key=lambda item: item[1])
        text, names = _PHASES[name]
        tried = [one for one in self.tried if one.speedup is not None]
        cures = [one for one in tried if (one.reads if name == "data" else one.name in names)]
        return f"{share:.0%} {text}" + (f"; measured: {_measured(cures)}" if cures else "")

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, as for JSON."""
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
    """The effect of one technique, or the reason that it was not tried."""

    name: str
    how: str
    """The line of code that switches it on."""
    speedup: float | None = None
    """Median of the ratios of rows per second; None where it was not tried."""
    spread: tuple[float, float] | None = None
    """The quartiles of the ratios."""
    trials: int = 0
    """Pairs of blocks."""
    floor: float | None = None
    """The noise that the speed-up has to exceed; None without enough trials, and then nothing is clear."""
    wall: float | None = None
    """The speed-up by the wall clock, where `speedup` is one in CPU time."""
    wall_floor: float | None = None
    memory: float | None = None
    """Peak memory, relative to the unchanged trainer."""
    drift: float | None = None
    """Relative difference of the mean loss of equal updates from equal states; None where updates differ."""
    why_not: str = ""
    """The reason that it was not tried."""
    reads: bool = False
    """Whether it was timed on updates that read the data, or else on ready batches."""

    @property
    def verdict(self) -> str:
        """The verdict: "use it", "no clear difference", "slower", "saves memory", or why it was not tried."""
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
            return -1  # less CPU time but more wall time: work of several threads is done by one
        if self.speedup <= 1 / limit and self.spread[1] < 1:
            return -1
        return int(self.speedup >= limit and self.spread[0] > 1)

    def cells(self) -> list[str]:
        """Return the cells of its line in the printed table."""
        quartiles = "" if self.spread is None else f"{self.spread[0]:.2f}-{self.spread[1]:.2f}"
        memory = "" if self.memory is None else f"x{self.memory:.2f}"
        drift = "" if self.drift is None else f"{self.drift:.0e}" if self.drift else "0"
        return [self.name, f"x{self.speedup:.2f}", quartiles, memory, drift, self.verdict, self.how]


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """The trainer against itself (A/A): the ratios where nothing differs."""

    trials: int
    clock: str
    """"CPU time" of the process, or "wall clock"."""
    floor: float | None
    """Nine of ten ratios are between 1 / floor and floor; None for too few of them."""
    wall_floor: float | None
    """The same by the wall clock."""


def noise_of(ratios: Sequence[float], *, wall: Sequence[float], clock: str) -> Noise:
    """Return the noise of the trainer against itself, from the ratios by `clock` and by the wall clock."""
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
    """Find a loader that training waits for; the fix is the best measured technique, if any helped."""
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
    """The pairs of blocks of one technique: without it and with it."""

    technique: Technique
    base: Technique
    clock: str
    ratios: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    drifts: list[float] = field(default_factory=list)
    memory: float | None = None
    why_not: str = ""
    seconds: float = 0.0
    """Seconds of the latest pair."""

    def add(self, base: Block, block: Block) -> None:
        """Add the ratios of a pair."""
        wall = [without / with_ for without, with_ in zip(base.seconds, block.seconds, strict=True)]
        cpu = [without / with_ for without, with_ in zip(base.cpu, block.cpu, strict=True)]
        self.wall += wall
        self.ratios += cpu if self.clock == "CPU time" else wall
        if base.loss is not None and block.loss is not None and self.technique.same_numbers:
            self.drifts.append(abs(block.loss - base.loss) / max(abs(base.loss), 1e-12))

    def effect(self, noise: Noise) -> Effect:
        """Return the effect, judged against the noise."""
        one = self.technique
        effect = Effect(name=one.name, how=one.how, reads=one.reads)
        if not self.ratios:
            return replace(effect, why_not=self.why_not or "the time was over before its turn; give more seconds")
        drift = max(self.drifts, default=None)
        return effect_of(replace(effect, memory=self.memory, drift=drift), self.ratios, wall=self.wall, noise=noise)


class _TrialRunner:
    """Runs blocks of updates of one trainer in turns, within a budget."""

    def __init__(self, trainer: Trainer[Any], before: TrainerSnapshot, *, seconds: float) -> None:
        self._trainer, self._before, self._seconds = trainer, before, seconds
        self._begun = time.perf_counter()
        self.updates = 1
        """Updates of one block."""
        self.seconds_per_row = 0.0
        """Of the unchanged trainer, on ready batches."""

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._begun

    @property
    def left(self) -> float:
        """Seconds left for trials; negative when the budget is spent."""
        return PLANNED * self._seconds - self.spent

    def calibrate(self, source: Any) -> None:
        """Set the number of updates of a block from the speed of the second of two blocks; the first one warms up."""
        unchanged = Technique(name="as it is", data=source)
        run_block(self._trainer, self._before, unchanged, updates=2, warm=1)
        block = run_block(self._trainer, self._before, unchanged, updates=2, warm=1)
        self.seconds_per_row = block.seconds[0]
        length = min(BLOCK, self._seconds / 400)
        self.updates = max(1, min(READY - WARM, round(length * block.updates_per_second)))

    def run(self, wanted: Sequence[Technique], sources: dict[str, Any]) -> tuple[int, dict[str, Noise], list[Effect]]:
        """Try all in turns until the budget is spent; return the memory of an update, the noise, and the effects."""
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
        """Return a technique with its base and its clock: waiting for data or an accelerator takes no CPU time."""
        by_cpu = self._trainer.device.type == "cpu" and not technique.reads
        clock = "CPU time" if by_cpu else "wall clock"
        return _Pairs(replace(technique, data=technique.data or base.data), base, clock, why_not=technique.why_not)

    def _take_turns(self, quick: Sequence[_Pairs]) -> None:
        for turn in range(ROUNDS):  # pairs alternate their order: the second block finds warm caches
            start = turn % len(quick)
            able = [one for one in [*quick[start:], *quick[:start]] if not one.why_not]
            for one in able:
                if self.left > 2 * one.seconds:
                    self._time_pair(one, technique_first=turn % 2 == 1)
            if self.left <= 2 * min((one.seconds for one in able), default=0.0):
                break

    def _start_slowly(self, one: _Pairs) -> None:
        """Time one block of several segments of a technique with a slow start, if the budget allows."""
        if self._seconds < START_FACTOR * one.technique.start:
            start = one.technique.start
            one.why_not = f"it may take {start:.0f} s to start; give seconds={START_FACTOR * start:.0f} or more"
        else:
            self._time_pair(one, warm=WARM_COMPILED, segments=5)

    def _time_pair(self, one: _Pairs, *, technique_first: bool = False, warm: int = WARM, segments: int = 1) -> None:
        """Time a block without and one with the technique; an error is recorded as the reason that it is not tried."""
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
        """Return the memory of an update as it is, and set that of quick techniques relative to it."""
        memory = peak_memory(self._trainer, self._before, base)
        for one in found:
            if not (one.why_not or one.technique.reads or one.technique.start):
                try:
                    one.memory = peak_memory(self._trainer, self._before, one.technique) / max(1, memory)
                except Exception as error:
                    one.why_not = first_line(error, 160)
        return memory
