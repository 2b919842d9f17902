"""Tries the techniques of efficient training on the user's own model and data, and says what each of them gives."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainwright.base.checks import check_number
from trainwright.base.errors import first_line
from trainwright.base.names import suggests
from trainwright.tools.advice import Advice, Effect
from trainwright.tools.batching import compact
from trainwright.tools.findings import findings
from trainwright.tools.loading import loader_techniques
from trainwright.tools.measuring import Block, Way, most_taken, run_block
from trainwright.tools.phases import Phases, measure_phases
from trainwright.tools.trial import Kept, check_trainer, data_kept, open_afresh, ready, traceless
from trainwright.tools.ways import Technique, as_it_is, techniques
from trainwright.trainer import Trainer

ROUNDS = 15
"""Ratios of one technique at most."""
BLOCK = 0.15
"""Seconds of one block of updates, where the budget allows for it."""
WARM = 2
"""Updates before the clock is read."""
WARM_SLOWLY = 8
"""The same where something is compiled or recorded first."""
PLANNED = 0.9
"""Share of the seconds that trials are planned for: what has begun is finished, and the last word takes time."""
ENOUGH = 120.0
"""Seconds of the whole that all techniques have their turns in."""
SHARE = 3
"""Time is kept for what starts slowly where the whole is so many times as long as that takes."""
READY = 24
"""Updates for which ready batches are drawn at most."""


@suggests
def advise(
    trainer: Trainer[Any],
    train: Any,
    val: Any = None,
    *,
    seconds: float = 60,
    batch_size: int | None = None,
    script: str | Path | None = None,
) -> Advice:
    """Try techniques of efficient training on this trainer and these data; return what each gives, for printing.

    Short trials of real updates, by turns with the trainer as it is, and without a trace in it, in the data or in the
    process: speed-up (median and quartiles of the ratios), memory, and how far the loss of the same updates differs.
    `train`, `val`, `batch_size`: as for `fit`. `seconds`: about how long all of it may take; what cannot begin within
    that is listed as not tried. `script`: a file that is run in processes of its own with other settings of the
    process: threads between operators, variables of the environment, memory allocators.

    Raises SettingError in a group of processes, and DataError for a stream that cannot be read afresh: give a list
    of ready batches.
    """
    check_trainer(trainer, "advise")
    check_number(seconds, f"advise(seconds={seconds!r})", above=0, what="seconds,", fix="seconds=60")
    budget = Budget(seconds)
    with traceless(trainer) as kept, data_kept(train):
        source = open_afresh(train, batch_size=batch_size)
        trial = _Trial(trainer, kept, budget)
        first = ready(trainer, train, updates=2, batch_size=batch_size)
        trial.calibrate(as_it_is(trainer, open_afresh(first)))
        drawn = ready(trainer, train, updates=trial.updates + WARM, batch_size=batch_size)
        batches = [compact(batch) for batch in drawn]
        found = findings(trainer, batches, train=train, val=val, batch_size=batch_size)
        kept.put_back()
        phases = measure_phases(trainer, kept, source, updates=trial.updates, warm=1)
        row = trial.seconds_per_row
        wanted = techniques(trainer, batches)
        patience = min(0.1 * seconds, budget.left)
        wanted += loader_techniques(trainer, train, seconds_per_row=_reading(phases, row), patience=patience)
        bases = {"ready": as_it_is(trainer, open_afresh(batches)), "loader": as_it_is(trainer, source)}
        memory, tried = trial.all(wanted, bases)
        whole = run_block(trainer, kept, bases["loader"], updates=trial.updates, warm=1)
    tried += _of_process(script, budget)
    return Advice(
        tried=tuple(sorted(tried, key=lambda one: -(one.speedup or 0.0))),
        phases=phases,
        findings=(*([] if phases.finding is None else [phases.finding]), *found),
        rows_per_second=1 / whole.seconds[0],
        memory=memory,
        seconds=budget.spent,
        device=_device(trainer),
    )


class Budget:
    """Seconds that are to be spent."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self._begun = seconds, time.perf_counter()

    @property
    def spent(self) -> float:
        """Seconds since it was made."""
        return time.perf_counter() - self._begun

    @property
    def left(self) -> float:
        """Seconds that are left for trials; below 0 where they are over."""
        return PLANNED * self.seconds - self.spent


@dataclass(slots=True)
class _Ratios:
    """What was measured of one technique."""

    technique: Technique
    base: Way
    ratios: list[float] = field(default_factory=list)
    drifts: list[float] = field(default_factory=list)
    memory: float | None = None
    why_not: str = ""
    seconds: float = 0.0
    """What one turn takes."""

    def told(self) -> Effect:
        """The record of it."""
        one = self.technique
        if not self.ratios:
            reads = one.against == "loader"
            return Effect(name=one.name, how=one.how, why_not=self.why_not, for_memory=one.for_memory, reads=reads)
        few = len(self.ratios) < 2
        quartiles = (self.ratios[0],) * 3 if few else statistics.quantiles(self.ratios, n=4, method="inclusive")
        return Effect(
            name=one.name,
            how=one.how,
            speedup=statistics.median(self.ratios),
            spread=(quartiles[0], quartiles[2]),
            trials=len(self.ratios),
            memory=self.memory,
            drift=max(self.drifts, default=None) if one.same_numbers else None,
            for_memory=one.for_memory,
            reads=one.against == "loader",
        )


class _Trial:
    """Runs blocks of updates of one trainer by turns, within a budget."""

    def __init__(self, trainer: Trainer[Any], kept: Kept, budget: Budget) -> None:
        self._trainer, self._kept, self._budget = trainer, kept, budget
        self.updates = 1
        """Updates of one block."""
        self.seconds_per_row = 0.0
        """Of the trainer as it is, on ready batches."""

    def calibrate(self, way: Way) -> None:
        """Find how many updates a block may have."""
        block = run_block(self._trainer, self._kept, way, updates=2, warm=1)
        block = run_block(self._trainer, self._kept, way, updates=2, warm=1)
        each = 1 / block.updates_per_second
        self.seconds_per_row = block.seconds[0]
        length = min(BLOCK, self._budget.seconds / 400)
        self.updates = max(1, min(READY - WARM, round(length / each)))

    def all(self, wanted: Sequence[Technique], bases: dict[str, Way]) -> tuple[int, list[Effect]]:
        """Try all of them in turns until the budget is spent; what an update takes, and what each gave."""
        found = [_Ratios(one, bases[one.against], why_not=one.why_not) for one in wanted]
        able = [one for one in found if one.technique.way is not None]
        quick = [one for one in able if not one.technique.start]
        slow = [one for one in able if one.technique.start]
        memory = self._measure_memory(quick, bases["ready"])
        reserve = self._reserve(slow)
        for turn in range(ROUNDS):
            for one in quick[turn % len(quick) :] + quick[: turn % len(quick)]:
                if not one.why_not and self._budget.left - reserve > 2 * one.seconds:
                    self._take_turn(one)
            if self._budget.left <= reserve:
                break
        for one in slow:
            self._start_slowly(one)
        for one in able:
            one.why_not = one.why_not or "the time was over before its turn; give more seconds"
        return memory, [one.told() for one in found]

    def _reserve(self, slow: Sequence[_Ratios]) -> float:
        """Seconds that are kept for techniques that start slowly."""
        starts = [one.technique.start for one in slow]
        return 1.5 * sum(start for start in starts if SHARE * start <= self._budget.seconds)

    def _take_turn(self, one: _Ratios) -> None:
        """One block without and one with the technique."""
        begun = time.perf_counter()
        base = run_block(self._trainer, self._kept, one.base, updates=self.updates, warm=WARM)
        block = self._block(one)
        one.seconds = time.perf_counter() - begun
        if block is not None:
            self._note(one, base, block)

    def _start_slowly(self, one: _Ratios) -> None:
        """One block for all, where the first update takes long; of the time that is left, if it is enough."""
        start = one.technique.start
        if self._budget.left < start:
            one.why_not = f"it may take {start:.0f} s to begin with; give seconds={ENOUGH:.0f} or more"
            return
        base = run_block(self._trainer, self._kept, one.base, updates=self.updates, warm=WARM_SLOWLY, segments=5)
        block = self._block(one, segments=5, warm=WARM_SLOWLY)
        if block is not None:
            self._note(one, base, block)

    def _block(self, one: _Ratios, *, segments: int = 1, warm: int = WARM) -> Block | None:
        """The block of a technique; None where it raises, which is then the reason why it is not tried."""
        assert one.technique.way is not None
        how = {"updates": self.updates, "warm": warm, "segments": segments}
        try:
            return run_block(self._trainer, self._kept, one.technique.way, **how)
        except Exception as error:
            one.why_not = first_line(error, 160)
            one.ratios.clear()
            return None

    def _note(self, one: _Ratios, base: Block, block: Block) -> None:
        one.ratios += [a / b for a, b in zip(base.seconds, block.seconds, strict=True)]
        if base.loss is not None and block.loss is not None:
            one.drifts.append(abs(block.loss - base.loss) / max(abs(base.loss), 1e-12))
        if base.peak and block.peak is not None:
            one.memory = block.peak / base.peak

    def _measure_memory(self, quick: Sequence[_Ratios], base: Way) -> int:
        """What an update takes as it is; of techniques by the same count, where the device tells nothing."""
        if self._trainer.device.type == "cuda":
            return run_block(self._trainer, self._kept, base, updates=1, warm=1).peak or 0
        whole = most_taken(self._trainer, self._kept, base)
        for one in quick:
            if one.technique.against == "ready" and one.technique.way is not None:
                try:
                    one.memory = most_taken(self._trainer, self._kept, one.technique.way) / max(1, whole)
                except Exception as error:
                    one.why_not = first_line(error, 160)
        return whole


def _reading(phases: Phases, row: float) -> float:
    """Seconds in which a row is read, as far as the waiting of the run tells."""
    return row * phases.data / max(phases.total - phases.data, 1e-9)


def _of_process(script: str | Path | None, budget: Budget) -> list[Effect]:
    """Settings of the process, measured in processes that run the script, or listed."""
    from trainwright.tools.cpu import measure_settings, settings_to_try

    settings = settings_to_try()
    if script is None:
        later = 'set before a process begins: advise(..., script="train.py") tries it'
        return [Effect(name=one.name, how=one.how, why_not=one.why_not or later) for one in settings]
    return measure_settings(script, settings, seconds=max(budget.left, budget.seconds / 2))


def _device(trainer: Trainer[Any]) -> str:
    import torch

    if trainer.device.type == "cpu":
        threads = torch.get_num_threads()
        return f"cpu, {threads} thread{'s' if threads > 1 else ''}"
    return torch.cuda.get_device_name(trainer.device) if trainer.device.type == "cuda" else str(trainer.device)
