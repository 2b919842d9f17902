"""Tries the techniques of efficient training on the user's own model and data, and says what each of them gives."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from trainwright.core.checks import check_number
from trainwright.core.errors import first_line
from trainwright.core.suggestions import suggests
from trainwright.tools.advice import Advice, Effect, Noise, agreed, effect_of, noise_of
from trainwright.tools.batching import compact
from trainwright.tools.findings import findings
from trainwright.tools.loading import loader_techniques
from trainwright.tools.measuring import Block, Way, most_taken, run_block
from trainwright.tools.phases import Phases, measure_phases
from trainwright.tools.trainer_snapshot import TrainerSnapshot
from trainwright.tools.trial import check_trainer, data_kept, open_afresh, ready, traceless
from trainwright.tools.ways import Technique, as_it_is, techniques
from trainwright.trainer import Trainer

if TYPE_CHECKING:
    from trainwright.tools.cpu import Setting

ROUNDS = 15
"""Ratios of one technique at most."""
BLOCK = 0.15
"""Seconds of one block of updates, where the budget allows for it."""
WARM = 2
"""Updates before the clock is read."""
WARM_SLOWLY = 8
"""The same where something is compiled first."""
PLANNED = 0.9
"""Share of the seconds that trials are planned for: what has begun is finished, and the last word takes time."""
ENOUGH = 120.0
"""Seconds of the whole that all techniques have their turns in."""
SHARE = 3
"""Time is reserved for what starts slowly where the whole is so many times as long as that takes."""
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
) -> Advice:
    """Try techniques of efficient training on this trainer and these data; return what each gives, for printing.

    Short trials of real updates, by turns with the trainer as it is, and without a trace in it, in the data or in the
    process: speed-up (median and quartiles of the ratios), memory, and how far the loss of the same updates differs.
    In each turn the trainer as it is is also tried against itself: a speed-up counts only beyond the ratios found
    there. Updates of ready batches on a CPU are timed by the CPU time of the process, everything else by the clock.
    `train`, `val`, `batch_size`: as for `fit`. `seconds`: about how long all of it may take; what cannot begin within
    that is listed as not tried. Settings of the process, such as threads and memory allocators, are listed in words.

    Raises SettingError in a group of processes, and DataError for a stream that cannot be read afresh: give a list
    of ready batches.
    """
    check_trainer(trainer, "advise")
    check_number(seconds, f"advise(seconds={seconds!r})", above=0, what="seconds,", fix="seconds=60")
    budget = Budget(seconds)
    with traceless(trainer) as before, data_kept(train):
        source = open_afresh(train, batch_size=batch_size)
        trial = _Trial(trainer, before, budget)
        first = ready(trainer, train, updates=2, batch_size=batch_size)
        trial.calibrate(as_it_is(open_afresh(first)))
        drawn = ready(trainer, train, updates=trial.updates + WARM, batch_size=batch_size)
        batches = [compact(batch) for batch in drawn]
        found = findings(trainer, batches, val=val, batch_size=batch_size)
        before.restore()
        phases = measure_phases(trainer, before, source, updates=trial.updates, warm=1)
        row = trial.seconds_per_row
        wanted = techniques(trainer, batches)
        patience = min(0.1 * seconds, budget.left)
        wanted += loader_techniques(trainer, train, seconds_per_row=_reading(phases, row), patience=patience)
        bases = {"ready": as_it_is(open_afresh(batches)), "loader": as_it_is(source)}
        memory, noise, tried = trial.all(wanted, bases)
        whole = run_block(trainer, before, bases["loader"], updates=trial.updates, warm=1)
    found = [*([] if phases.finding is None else [phases.finding]), *found]
    return Advice(
        tried=tuple(sorted(tried, key=lambda one: -(one.speedup or 0.0))),
        noise=noise,
        phases=phases,
        findings=tuple(agreed(one, tried) for one in found),
        settings=_settings(),
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
class _Pairs:
    """The pairs of blocks of one technique: without it and with it."""

    technique: Technique
    base: Way
    ratios: list[float] = field(default_factory=list)
    """Of the time that is judged: CPU time, or that of the clock."""
    wall: list[float] = field(default_factory=list)
    """Of the time by the clock."""
    drifts: list[float] = field(default_factory=list)
    memory: float | None = None
    why_not: str = ""
    seconds: float = 0.0
    """What one turn takes."""


class _Trial:
    """Runs blocks of updates of one trainer by turns, within a budget."""

    def __init__(self, trainer: Trainer[Any], before: TrainerSnapshot, budget: Budget) -> None:
        self._trainer, self._before, self._budget = trainer, before, budget
        self.updates = 1
        """Updates of one block."""
        self.seconds_per_row = 0.0
        """Of the trainer as it is, on ready batches."""

    def calibrate(self, way: Way) -> None:
        """Find how many updates a block may have."""
        block = run_block(self._trainer, self._before, way, updates=2, warm=1)
        block = run_block(self._trainer, self._before, way, updates=2, warm=1)
        each = 1 / block.updates_per_second
        self.seconds_per_row = block.seconds[0]
        length = min(BLOCK, self._budget.seconds / 400)
        self.updates = max(1, min(READY - WARM, round(length / each)))

    def all(self, wanted: Sequence[Technique], bases: dict[str, Way]) -> tuple[int, dict[str, Noise], list[Effect]]:
        """Try all of them in turns until the budget is spent; memory of an update, noise, and the effect of each."""
        found = [_Pairs(one, bases[one.against], why_not=one.why_not) for one in wanted]
        able = [one for one in found if one.technique.way is not None]
        controls = {name: _control(name, bases[name]) for name in dict.fromkeys(one.technique.against for one in able)}
        quick, slow = ([one for one in able if bool(one.technique.start) is late] for late in (False, True))
        memory = self._measure_memory(quick, bases["ready"])
        quick = [*controls.values(), *quick]
        reserve = self._reserve(slow)
        for turn in range(ROUNDS):
            start = turn % max(1, len(quick))
            able_now = [one for one in quick[start:] + quick[:start] if not one.why_not]
            for one in able_now:
                if self._budget.left - reserve > 2 * one.seconds:
                    self._take_turn(one, technique_first=turn % 2 == 1)
            if self._budget.left - reserve <= 2 * min((one.seconds for one in able_now), default=0.0):
                break
        for one in slow:
            self._start_slowly(one)
        for one in able:
            one.why_not = one.why_not or "the time was over before its turn; give more seconds"
        noise = {name: self._noise(one) for name, one in controls.items()}
        return memory, noise, [self._effect(one, noise) for one in found]

    def _noise(self, control: _Pairs) -> Noise:
        return noise_of(control.ratios, wall=control.wall, clock=self._clock(control))

    def _effect(self, one: _Pairs, noise: dict[str, Noise]) -> Effect:
        of = one.technique
        effect = Effect(name=of.name, how=of.how, for_memory=of.for_memory, reads=of.against == "loader")
        if not one.ratios:
            return replace(effect, why_not=one.why_not)
        drift = max(one.drifts, default=None) if of.same_numbers else None
        effect = replace(effect, memory=one.memory, drift=drift)
        return effect_of(effect, one.ratios, wall=one.wall, noise=noise[of.against])

    def _clock(self, one: _Pairs) -> str:
        """By which time it is judged: waiting for data, and for a device, takes no CPU time."""
        on_cpu = self._trainer.device.type == "cpu" and one.technique.against == "ready"
        return "CPU time" if on_cpu else "wall clock"

    def _reserve(self, slow: Sequence[_Pairs]) -> float:
        """Seconds reserved for techniques that start slowly."""
        starts = [one.technique.start for one in slow]
        return 1.5 * sum(start for start in starts if SHARE * start <= self._budget.seconds)

    def _take_turn(self, one: _Pairs, *, technique_first: bool) -> None:
        """One block without and one with the technique; which comes first alternates: the second finds warm caches."""
        begun = time.perf_counter()
        block = self._block(one) if technique_first else None
        if one.why_not:
            return
        base = run_block(self._trainer, self._before, one.base, updates=self.updates, warm=WARM)
        block = block or self._block(one)
        one.seconds = time.perf_counter() - begun
        if block is not None:
            self._note(one, base, block)

    def _start_slowly(self, one: _Pairs) -> None:
        """One block for all, where the first update takes long; of the time that is left, if it is enough."""
        start = one.technique.start
        if self._budget.left < start:
            one.why_not = f"it may take {start:.0f} s to begin with; give seconds={ENOUGH:.0f} or more"
            return
        base = run_block(self._trainer, self._before, one.base, updates=self.updates, warm=WARM_SLOWLY, segments=5)
        block = self._block(one, segments=5, warm=WARM_SLOWLY)
        if block is not None:
            self._note(one, base, block)

    def _block(self, one: _Pairs, *, segments: int = 1, warm: int = WARM) -> Block | None:
        """The block of a technique; None where it raises, which is then the reason why it is not tried."""
        assert one.technique.way is not None
        how = {"updates": self.updates, "warm": warm, "segments": segments}
        try:
            return run_block(self._trainer, self._before, one.technique.way, **how)
        except Exception as error:
            one.why_not = first_line(error, 160)
            one.ratios.clear()
            return None

    def _note(self, one: _Pairs, base: Block, block: Block) -> None:
        wall = [a / b for a, b in zip(base.seconds, block.seconds, strict=True)]
        one.wall += wall
        by_cpu = self._clock(one) == "CPU time"
        one.ratios += [a / b for a, b in zip(base.cpu, block.cpu, strict=True)] if by_cpu else wall
        if base.loss is not None and block.loss is not None:
            one.drifts.append(abs(block.loss - base.loss) / max(abs(base.loss), 1e-12))
        if base.peak and block.peak is not None:
            one.memory = block.peak / base.peak

    def _measure_memory(self, quick: Sequence[_Pairs], base: Way) -> int:
        """What an update takes as it is; of techniques by the same count, where the device tells nothing."""
        if self._trainer.device.type == "cuda":
            return run_block(self._trainer, self._before, base, updates=1, warm=1).peak or 0
        whole = most_taken(self._trainer, self._before, base)
        for one in quick:
            if one.technique.against == "ready" and one.technique.way is not None:
                try:
                    one.memory = most_taken(self._trainer, self._before, one.technique.way) / max(1, whole)
                except Exception as error:
                    one.why_not = first_line(error, 160)
        return whole


def _reading(phases: Phases, row: float) -> float:
    """Seconds in which a row is read, as far as the waiting of the run tells."""
    return row * phases.data / max(phases.total - phases.data, 1e-9)


def _control(against: str, base: Way) -> _Pairs:
    """The trainer as it is, tried against itself: the A/A trial that shows the noise."""
    return _Pairs(Technique(name=f"as it is ({against})", how="", way=base, against=against), base)


def _settings() -> tuple[Setting, ...]:
    from trainwright.tools.cpu import settings_to_try

    return tuple(settings_to_try())


def _device(trainer: Trainer[Any]) -> str:
    import torch

    if trainer.device.type == "cpu":
        threads = torch.get_num_threads()
        return f"cpu, {threads} thread{'s' if threads > 1 else ''}"
    return torch.cuda.get_device_name(trainer.device) if trainer.device.type == "cuda" else str(trainer.device)
