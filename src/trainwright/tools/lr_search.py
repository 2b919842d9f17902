"""Learning-rate range test: trains with a rising rate, and suggests a rate by the losses."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from torch import Tensor

from trainwright.core.checks import check_whole
from trainwright.core.errors import SettingError
from trainwright.core.records import Update
from trainwright.core.rng import rng_preserved
from trainwright.core.suggestions import suggests
from trainwright.optim.named import CLEARED, ONLY, has_scheduler
from trainwright.protocols import Observer
from trainwright.tools.trial import check_trainer, data_state_restored, open_afresh, traceless, variant
from trainwright.trainer import Trainer

FEWEST = 16
"""Minimum number of updates of a curve."""
CLEAR = 3.0
"""Minimum fall of the loss, as a multiple of its noise. It must also be 1 % of the loss."""
DIVERGES = 4.0
"""The sweep ends if the running mean of the loss exceeds this multiple of its best, and its first value."""
SLACK = 3.0
"""Minimum ratio of the rate with the lowest loss to the suggestion."""
_RULE = "where the smoothed loss falls fastest, but at most a third of the rate where it is lowest"


@dataclass(frozen=True, slots=True, kw_only=True)
class LRRange:
    """The result of `find_lr`: the curve of the range test, and the suggested rate."""

    rates: tuple[float, ...]
    """The rate of the first parameter group at each update. Other groups are in proportion to it."""
    losses: tuple[float, ...]
    """The loss of each update's window, before its step."""
    smoothed: tuple[float, ...]
    """The smoothed loss at each rate: the least-squares line through the losses around it."""
    suggestion: float | None
    """The suggested rate, constant or the maximum of a schedule. None if the curve suggests none."""
    rule: str
    """The rule of the suggestion, or the reason if there is none."""
    steepest: float | None
    """The rate with the steepest fall of the smoothed loss, before its minimum."""
    tenth: float | None
    """A tenth of the rate with the lowest smoothed loss: another common rule, more conservative."""
    stopped: str
    """The reason for the end of the sweep."""
    notes: tuple[str, ...] = ()
    """Further remarks on the curve, one line each."""

    def __str__(self) -> str:
        found = "no suggestion" if self.suggestion is None else f"suggested rate {self.suggestion:.3g}"
        swept = f"{len(self.rates)} updates from {self.rates[0]:.3g} to {self.rates[-1]:.3g}" if self.rates else "none"
        return "\n".join([f"{found}: {self.rule}", f"swept {swept}: {self.stopped}", *self.notes])

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return asdict(self)

    def plot(self, path: str | Path | None = None) -> Any:
        """Plot losses over rates with the suggestion; return a matplotlib Figure, saved if `path` is given."""
        from trainwright.core.figures import lr_range_figure

        marks = {"suggestion": self.suggestion, "steepest": self.steepest, "a tenth of the lowest": self.tenth}
        known = {name: rate for name, rate in marks.items() if rate is not None}
        return lr_range_figure(self.rates, self.losses, self.smoothed, marks=known, path=path)


@suggests
def find_lr(
    trainer: Trainer[Any],
    train: Any,
    *,
    lowest: float = 1e-7,
    highest: float = 10.0,
    updates: int = 100,
    batch_size: int | None = None,
) -> LRRange:
    """Train with a rising learning rate until the loss diverges, restore everything, and suggest a rate (Smith 2015).

    The updates are those of `trainer.fit(train, batch_size=batch_size)`, with the precision, clipping and accumulation
    of the trainer. The rate of the first parameter group rises from `lowest` to `highest` by equal factors; other
    groups rise in proportion. The sweep ends early if the loss is not finite, or if its running mean exceeds 4 times
    its best and its first value. Model, optimizer, random states, data order, modes and counters are restored, also
    after an error. Warns with a UserWarning if the curve gives no suggestion.

    Args:
        trainer: The trainer.
        train: Training data, as for `fit`.
        lowest: The first rate.
        highest: The last rate.
        updates: The number of updates.
        batch_size: As for `fit`.

    Raises:
        SettingError: For settings that do not form a sweep, and with several ranks.
        DataError: For data that can be read only once.
    """
    check_trainer(trainer, "find_lr")
    _check(lowest, highest, updates=updates)
    _refuse_schedulers(trainer)
    own = _own_rate(trainer)

    def raised(update: int, _: int) -> float:
        rate: float = lowest * (highest / lowest) ** min(1.0, update / (updates - 1))
        return rate / own

    source = open_afresh(train, batch_size=batch_size)
    with traceless(trainer), data_state_restored(train), rng_preserved(source.generators):
        sweep = Sweep()
        twin = variant(
            trainer,
            schedule=_for_all(trainer, raised),
            observers=[sweep],
            on_nonfinite="ignore",  # a non-finite loss ends the sweep
            fast=replace(trainer.fast, compile=None),  # compilation does not pay in a short sweep
        )
        sweep.stop = twin.stop
        result = twin.fit(source.independent_copy(), max_updates=updates)
    ended = "the highest rate was reached" if len(sweep.rates) == updates else result.stopped
    found = read(sweep.rates, sweep.losses, stopped=sweep.diverged or ended)
    if found.suggestion is None:
        warnings.warn(f"find_lr suggests no rate: {found.rule}", stacklevel=3)
    return found


class Sweep(Observer):
    """Records the loss at each rate; stops the run when it diverges."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.losses: list[float] = []
        self.diverged = ""
        """Text on the divergence; empty if there is none."""
        self.stop: Callable[[str], None] = lambda _: None
        self._best = math.inf
        self._mean = 0.0

    def on_update(self, update: Update) -> None:
        """Record the loss; stop if it diverges."""
        if update.skipped:  # by the fp16 loss scale: the next update has the same rate
            return
        if not math.isfinite(update.loss):
            self._end(f"the loss is {update.loss} at a rate of {update.lr:.3g}")
            return
        self.rates.append(update.lr)
        self.losses.append(update.loss)
        self._judge(update)

    def _judge(self, update: Update) -> None:
        done = len(self.losses)
        kept = min(0.9, 1 - 1 / done)  # the plain mean for the first ten updates
        self._mean = kept * self._mean + (1 - kept) * update.loss
        self._best = min(self._best, self._mean)
        too_high = self._best + (DIVERGES - 1) * abs(self._best)
        if done >= FEWEST and self._mean > max(too_high, self.losses[0]):
            times = f"more than {DIVERGES:g} times its best"
            self._end(f"the loss is {times}, {self._best:.3g}, at a rate of {update.lr:.3g}")

    def _end(self, reason: str) -> None:
        self.diverged = reason
        self.stop(reason)


def read(rates: Sequence[float], losses: Sequence[float], *, stopped: str) -> LRRange:
    """Return the result for losses at rising rates."""
    rates, losses = tuple(rates), tuple(losses)
    places = [math.log10(rate) for rate in rates]
    lines = _lines(places, losses, half=max(2, len(rates) // 16))
    smoothed = tuple(height for height, _ in lines)
    seen: dict[str, Any] = {"rates": rates, "losses": losses, "smoothed": smoothed, "stopped": stopped}
    if len(rates) < FEWEST:
        rule = f"the sweep saw {len(rates)} finite losses, of the {FEWEST} that a curve needs: begin lower, lowest=..."
        return LRRange(**seen, suggestion=None, rule=rule, steepest=None, tenth=None)
    low = smoothed.index(min(smoothed))
    noise = _noise(losses[: max(low + 1, FEWEST)])
    # Relative to the start of the sweep: a recovery after a divergence is not a fall.
    fall = max(0.0, min(max(smoothed[: low + 1]), losses[0] + 2 * noise) - smoothed[low])
    if fall <= max(CLEAR * noise, 0.01 * abs(losses[0])):
        rule = f"the loss falls by no more than {fall:.2g}, and its noise is {noise:.2g}: try other rates, or more rows"
        return LRRange(**seen, suggestion=None, rule=rule, steepest=None, tenth=None)
    slopes = [slope for _, slope in lines[: low + 1]]
    steep = slopes.index(min(slopes))
    suggestion = min(rates[steep], rates[low] / SLACK)
    return LRRange(
        **seen,
        suggestion=suggestion,
        rule=_RULE,
        steepest=rates[steep],
        tenth=rates[low] / 10,
        notes=_notes(rates, low=low, steep=steep),
    )


def _notes(rates: Sequence[float], *, low: int, steep: int) -> tuple[str, ...]:
    edge = max(2, len(rates) // 16)
    notes = []
    if steep < edge:
        notes.append(f"the loss falls fastest right at the lowest rate: begin lower, lowest={rates[0] / 100:.1g}")
    if low >= len(rates) - edge:
        notes.append(f"the loss still falls at the highest rate: raise it, highest={rates[-1] * 100:.1g}")
    return tuple(notes)


def _lines(places: Sequence[float], values: Sequence[float], *, half: int) -> list[tuple[float, float]]:
    """Return (height, slope) at each place of the least-squares line through `half` neighbors on either side.

    Savitzky and Golay 1964, order 1. Unlike a running mean, it does not lag.
    """
    found = []
    for index, place in enumerate(places):
        near = slice(max(0, index - half), index + half + 1)
        xs, ys = [x - place for x in places[near]], values[near]
        middle, height = sum(xs) / len(xs), sum(ys) / len(ys)
        spread = sum((x - middle) ** 2 for x in xs)
        slope = sum((x - middle) * (y - height) for x, y in zip(xs, ys, strict=True)) / spread if spread else 0.0
        found.append((height - slope * middle, slope))
    return found


def _noise(losses: Sequence[float]) -> float:
    """Return the standard deviation of losses around their trend, estimated by the median difference of neighbors."""
    steps = [after - before for before, after in pairwise(losses)]
    middle = median(steps)
    return 1.4826 * median(abs(step - middle) for step in steps) / math.sqrt(2)


def _refuse_schedulers(trainer: Trainer[Any]) -> None:
    if any(map(has_scheduler, trainer.optimizers.values())):
        what = "find_lr of an optimizer that a torch scheduler was built on: the sweep sets the rate itself"
        fix = f"find_lr before the scheduler is built; {CLEARED}"
        raise SettingError(what, want="an optimizer whose rate nothing else sets", fix=fix)


def _own_rate(trainer: Trainer[Any]) -> float:
    """Return the rate at which a schedule would start in the first parameter group."""
    groups = [group for optimizer in trainer.optimizers.values() for group in optimizer.param_groups]
    if not groups or not all(isinstance(group.get("lr"), float | int | Tensor) for group in groups):
        raise SettingError("find_lr of a trainer without an optimizer that has rates", want="lr in each group")
    own = float(groups[0].get("initial_lr", groups[0]["lr"]))
    if own <= 0:
        what = f"find_lr of a first parameter group whose rate is {own:g}"
        raise SettingError(what, want="a rate above 0: the others stay in proportion to it", fix="lr=1e-3")
    return own


def _for_all(trainer: Trainer[Any], schedule: Callable[[int, int], float]) -> Any:
    """Return the schedule; for several optimizers a dict with it for each."""
    names = list(trainer.optimizers)
    return schedule if names == [ONLY] else dict.fromkeys(names, schedule)


def _check(lowest: float, highest: float, *, updates: int) -> None:
    if not 0 < lowest < highest < math.inf:
        what = f"find_lr(lowest={lowest!r}, highest={highest!r})"
        raise SettingError(what, want="rates above 0, the highest above the lowest", fix="lowest=1e-7, highest=10")
    check_whole(updates, f"find_lr(updates={updates!r})", least=FEWEST)
