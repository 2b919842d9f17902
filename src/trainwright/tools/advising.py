"""Tries techniques of efficient training on the user's own model and data, in turns, and measures what each gives."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from trainwright.core.checks import check_number
from trainwright.core.errors import first_line
from trainwright.core.suggestions import suggests
from trainwright.tools.advice import Advice, Effect, Noise, effect_of, noise_of, slow_loader
from trainwright.tools.batch_search import compact
from trainwright.tools.findings import findings
from trainwright.tools.techniques import Technique, process_settings, techniques
from trainwright.tools.timing import Block, measure_phases, peak_memory, run_block
from trainwright.tools.trainer_snapshot import TrainerSnapshot
from trainwright.tools.trial import check_trainer, data_kept, open_afresh, ready, traceless
from trainwright.trainer import Trainer

ROUNDS = 15
"""Ratios of one technique at most."""
BLOCK = 0.15
"""Seconds of one block of updates, where the budget allows for it."""
WARM = 2
"""Updates before the clock is read."""
WARM_COMPILED = 8
"""The same where something is compiled first."""
PLANNED = 0.9
"""Share of the seconds that trials are planned for: a block that has begun is finished."""
SHARE = 3
"""A technique that starts slowly is tried where the budget is so many times its start."""
READY = 24
"""Updates for which ready batches are drawn at most."""


@suggests
def advise(
    trainer: Trainer[Any], train: Any, val: Any = None, *, seconds: float = 60, batch_size: int | None = None
) -> Advice:
    """Try techniques of efficient training on this trainer and these data; return what each gives, for printing.

    Short trials of real updates, in turns with the trainer as it is, and without a trace in it, in the data or in the
    process: speed-up (median and quartiles of the ratios), memory, and how far the loss of the same updates differs.
    In each turn the trainer is also tried against itself: a speed-up counts only beyond the ratios found there.
    Updates on ready batches on a CPU are timed by the CPU time of the process, everything else by the clock.
    `train`, `val`, `batch_size`: as for `fit`. `seconds`: about how long all of it may take; what cannot begin within
    that is listed as not tried. Settings of the process, such as threads and memory allocators, are listed in words.

    Raises SettingError in a group of processes, and DataError for a stream that cannot be read afresh: give a list
    of ready batches.
    """
    check_trainer(trainer, "advise")
    check_number(seconds, f"advise(seconds={seconds!r})", above=0, what="seconds,", fix="seconds=60")
    with traceless(trainer) as before, data_kept(train):
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
    """Seconds of one turn."""

    def add(self, base: Block, block: Block) -> None:
        """Add the ratios of a pair."""
        wall = [without / with_ for without, with_ in zip(base.seconds, block.seconds, strict=True)]
        cpu = [without / with_ for without, with_ in zip(base.cpu, block.cpu, strict=True)]
        self.wall += wall
        self.ratios += cpu if self.clock == "CPU time" else wall
        if base.loss is not None and block.loss is not None and self.technique.same_numbers:
            self.drifts.append(abs(block.loss - base.loss) / max(abs(base.loss), 1e-12))

    def effect(self, noise: Noise) -> Effect:
        """Return the effect, judged beside the noise."""
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
        """Of the trainer as it is, on ready batches."""

    @property
    def spent(self) -> float:
        """Seconds since it was made."""
        return time.perf_counter() - self._begun

    @property
    def left(self) -> float:
        """Seconds left for trials; negative once they are over."""
        return PLANNED * self._seconds - self.spent

    def calibrate(self, source: Any) -> None:
        """Find how many updates a block may have; the first of two blocks warms up."""
        for _ in range(2):
            block = run_block(self._trainer, self._before, Technique(name="as it is", data=source), updates=2, warm=1)
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
        """Waiting for data, and for an accelerator, takes no CPU time: the clock judges those."""
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
        """Time one block of several segments, where the first update takes long, if the budget allows."""
        if self._seconds < SHARE * one.technique.start:
            start = one.technique.start
            one.why_not = f"it may take {start:.0f} s to begin with; give seconds={SHARE * start:.0f} or more"
        else:
            self._time_pair(one, warm=WARM_COMPILED, segments=5)

    def _time_pair(self, one: _Pairs, *, technique_first: bool = False, warm: int = WARM, segments: int = 1) -> None:
        """Time a block without and one with the technique; an error is the reason why it is not tried."""
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
