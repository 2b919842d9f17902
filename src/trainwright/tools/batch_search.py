"""Finds the largest micro-batch that fits in memory; scales learning rates to other batch sizes."""

from __future__ import annotations

import math
import traceback
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from trainwright.core.checks import check_number, check_whole
from trainwright.core.device import is_out_of_memory, release_memory
from trainwright.core.errors import SettingError
from trainwright.core.rng import rng_preserved
from trainwright.core.suggestions import suggests
from trainwright.core.trees import tensors_in
from trainwright.data.sharding import slice_rows, sliceable_rows
from trainwright.modules.peak_memory import Peaks, peaks_of
from trainwright.observers.table import byte_size
from trainwright.tools.trainer_snapshot import TrainerSnapshot
from trainwright.tools.trial import check_trainer, joined, open_afresh, ready, traceless, variant
from trainwright.trainer import Trainer
from trainwright.update.trainer_like import networks_of

MOST_TRIALS = 4
MEMORY_FRACTION = 0.9
"""Maximum share of the available memory for the predicted size."""
LEAP = 16
"""Maximum extrapolation of the linear model, as a multiple of the largest measured size."""
LOOKED_AT = 8
"""Number of batches of the data, of which the largest is measured."""
LINEAR = ("SGD", "Lars", "LARS")
"""Optimizers whose learning rate scales linearly with the batch size."""
ROUND = 32
"""From this number of rows, sizes are multiples of 8, for tensor cores."""
ROOT = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Lamb", "LAMB")
"""Optimizers whose learning rate scales with the square root of the batch size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitting:
    """One trial: a few updates with micro-batches of `rows` rows."""

    rows: int
    bytes: int | None
    """Peak memory in bytes; None if memory ran out."""
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestBatch:
    """The result of `find_batch_size`."""

    rows: int
    """Rows of the largest micro-batch that was tried and fits in memory."""
    fixed: int | None
    """Bytes independent of the rows: weights, gradients, optimizer. None if only one size was measured."""
    per_row: float | None
    """Bytes per additional row; None if only one size was measured."""
    budget: int
    """Bytes available in total."""
    how: str
    """The measured quantity."""
    trials: tuple[Fitting, ...]
    why: str
    """The reason why it is not larger."""
    effective: int
    """Suggested rows per update: `micro_batch` times `accumulate`."""
    micro_batch: int
    accumulate: int
    lr_factor: float | None
    """The factor of the learning rate for these updates; None if no rule is known."""
    rule: str
    """The rule of that factor, and a line of code for the rate."""

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return asdict(self)

    def __str__(self) -> str:
        """Return the result, the trials and the code to write, in a few lines."""
        model = "" if self.fixed is None else f", {byte_size(self.fixed)} and {byte_size(self.per_row or 0)} a row"
        lines = [
            f"largest micro-batch: {self.rows:,} rows of {byte_size(self.budget)} that may be used{model} ({self.how})"
        ]
        for one in self.trials:
            used = "out of memory" if one.bytes is None else byte_size(one.bytes)
            lines.append(f"  tried {one.rows:>8,} rows   {used:>13}   {'fits' if one.fits else 'does not fit'}")
        lines.append(f"  why   {self.why}")
        accumulate = f"   Trainer(..., accumulate={self.accumulate})"
        lines.append(
            f"  write batches(data, {self.micro_batch}, ...){accumulate}   # {self.effective:,} rows an update"
        )
        return "\n".join([*lines, f"        {self.rule}"])


@suggests
def find_batch_size(
    trainer: Trainer[Any],
    train: Any,
    *,
    effective: int | None = None,
    budget: int | None = None,
    batch_size: int | None = None,
    most: int | None = None,
) -> LargestBatch:
    """Find the largest micro-batch that fits in memory, in at most four trials, without side effects.

    Measures two sizes: the rows of a batch of `train`, and twice as many. The model memory = fixed + per_row * rows
    predicts the largest size for 0.9 of the memory, which is then tried. A trial is two updates with the precision,
    clip and optimizer of the trainer. Larger batches repeat the rows of a batch. The learning rate is scaled from the
    current rows per update: linearly for SGD, by the square root for Adam.

    Args:
        trainer: The trainer.
        train: Training data, as for `fit`.
        effective: The wanted rows per update, in equal micro-batches.
        budget: Total bytes. None: the free memory of a CUDA device, half of it on a CPU.
        batch_size: As for `fit`.
        most: Maximum number of rows. None: the rows of the data.

    Raises:
        SettingError: If one row does not fit in memory, or if the available memory is unknown.
        DataError: For data that cannot be read again.
    """
    check_trainer(trainer, "find_batch_size")
    for name, value in {"effective": effective, "budget": budget, "most": most}.items():
        if value is not None:
            check_whole(value, f"find_batch_size({name}={value!r})", fix=f"{name}=1024")
    batch, rows = _largest_of(ready(trainer, train, updates=LOOKED_AT, batch_size=batch_size))
    with rng_preserved():  # data may be a function that draws random numbers
        of_data = open_afresh(train, batch_size=batch_size).rows
    limits = {"`most` rows": most, "the rows of an update": effective}
    limits |= {"all rows of the data": of_data if most is None else None}
    accumulated = max(k for _, k in trainer.accumulate)
    with traceless(trainer) as before:
        peaks = peaks_of(trainer.device, _known(trainer))
        available = peaks.left() if budget is None else budget
        if available is None:
            what = f"how much memory {trainer.device} has is not known"
            raise SettingError(what, fix="find_batch_size(..., budget=8 * 2**30)   # bytes")
        limit = available if budget is not None or not peaks.refuses else None
        # With accumulation the second micro-batch is added to the gradients of the first.
        k = 2 if effective is not None or accumulated > 1 else 1
        trials = _Trials(trainer, before, peaks, batch=(batch, rows), k=k, limit=limit)
        search = _SizeSearch(trials, allowed=available * MEMORY_FRACTION, limits=limits)
        room = f"the memory of {trainer.device}" if budget is None else f"a budget of {byte_size(budget)}"
        search.run(rows, room=room)
    return _result(trainer, search, before=rows * accumulated, effective=effective, budget=available)


class _Trials:
    """Runs a few updates with a given number of rows, and restores everything."""

    def __init__(
        self,
        trainer: Trainer[Any],
        before: TrainerSnapshot,
        peaks: Peaks,
        *,
        batch: tuple[Any, int],
        k: int,
        limit: int | None,
    ) -> None:
        self.trainer, self.peaks = trainer, peaks
        self._before, self._batch, self._k, self._limit = before, batch, k, limit
        self.made: list[Fitting] = []

    def fits(self, rows: int) -> bool:
        """Return whether updates with micro-batches of `rows` rows fit in memory."""
        found: int | None = None
        try:
            with self.peaks.watching():
                self._run(rows)
            found = self.peaks.peak
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            traceback.clear_frames(error.__traceback__)  # the frames hold the computed tensors
        self._before.restore()
        release_memory(self.trainer.device)
        fits = found is not None and (self._limit is None or found <= self._limit)
        self.made.append(Fitting(rows=rows, bytes=found, fits=fits))
        return fits

    @property
    def left(self) -> int:
        """The number of remaining trials."""
        return MOST_TRIALS - len(self.made)

    @property
    def measured(self) -> list[tuple[int, int]]:
        """(rows, bytes) of the successful trials, sorted by rows."""
        return sorted((one.rows, one.bytes) for one in self.made if one.bytes is not None)

    def _run(self, rows: int) -> None:
        batch, of = self._batch
        grown = joined([batch] * (rows // of) + ([slice_rows(batch, range(rows % of), of=of)] if rows % of else []))
        trainer = self.trainer
        kept: dict[str, Any] = {"average": trainer.average, "metrics": trainer.metrics or None}
        if not self.peaks.refuses:  # counting tensors needs eager mode
            kept["fast"] = replace(trainer.fast, compile=None)
        twin = variant(trainer, accumulate=self._k, on_oom=None, on_nonfinite="ignore", **kept)
        twin.fit([grown] * (2 * self._k), max_updates=2)


class _SizeSearch:
    """At most four trials, each chosen by the earlier results."""

    def __init__(self, trials: _Trials, *, allowed: float, limits: Mapping[str, int | None]) -> None:
        self.trials, self._allowed = trials, allowed
        known = {name: rows for name, rows in limits.items() if rows is not None}
        self._named = min(known, key=lambda name: known[name], default="")
        self._most: float = known.get(self._named, math.inf)
        self.rows, self._too_many = 0, math.inf
        """The largest tried size that fits, and the smallest that does not."""
        self.fixed: float | None = None
        self.per_row: float | None = None

    def run(self, rows: int, *, room: str) -> None:
        """Measure two sizes, `rows` and twice that, and try the predicted one. `room`: the memory, for messages."""
        first = int(min(rows, self._most))
        while not self._try(first):
            if first == 1 or not self.trials.left:
                what = f"micro-batches of {first} rows do not fit in {room}"
                raise SettingError(what, fix='a smaller batch_size, precision="bf16", checkpoint_activations()')
            first = max(1, first // 4)
        if self.trials.left and first < self._most:
            second = int(min(2 * first, self._most))
            second = second if second < self._too_many else first // 2
            if second:
                self._try(second)
        while self.trials.left:
            predicted = self._predicted()
            if predicted < (1.1 * self.rows if len(self.trials.made) > 2 else self.rows + 1):
                break
            self._try(predicted)
        self._reach()

    @property
    def why(self) -> str:
        """The reason why the size is not larger."""
        if self.rows >= self._most:
            return f"{self._named}: {self.rows:,}"
        if self._too_many < math.inf:
            return f"{int(self._too_many):,} rows do not fit"
        reach = self._reach()
        if reach > 1.1 * self.rows:
            return f"{MOST_TRIALS} trials were made; by them about {reach:,} rows may fit"
        return f"about {reach:,} rows fill the {byte_size(self._allowed)} that are planned for"

    def _try(self, rows: int) -> bool:
        fits = self.trials.fits(rows)
        if fits:
            self.rows = max(self.rows, rows)
        else:
            self._too_many = min(self._too_many, rows)
        return fits

    def _predicted(self) -> int:
        """Return the rows of the next trial: predicted by the two largest sizes, below those that do not fit."""
        reach = min(self._reach(), LEAP * self.rows)
        if reach >= self._too_many:  # the linear model does not include sizes that ran out of memory
            few, many = self.rows, int(self._too_many)
            reach = math.isqrt(few * many) if many > 4 * few else few + (many - few) * 3 // 4
        reach = int(min(reach, self._most))
        return reach if reach < ROUND or reach == self._most else reach - reach % 8

    def _reach(self) -> int:
        """Return the rows that fill the allowed memory by the linear model."""
        points = self.trials.measured[-2:]
        if len(points) < 2:
            return 2 * self.rows
        (n, low), (m, high) = points
        self.per_row = (high - low) / (m - n)
        self.fixed = max(0.0, low - self.per_row * n)
        if self.per_row <= 0:  # the memory per row is below the noise
            return LEAP * self.rows
        return int((self._allowed - self.fixed) / self.per_row)


def _result(
    trainer: Trainer[Any], search: _SizeSearch, *, before: int, effective: int | None, budget: int
) -> LargestBatch:
    """Return the result, with the settings for `effective` rows per update instead of `before`."""
    wanted = search.rows if effective is None else effective
    least = math.ceil(wanted / search.rows)
    accumulate = next((k for k in range(least, 2 * least + 1) if wanted % k == 0), least)
    micro_batch = math.ceil(wanted / accumulate)
    factor, rule = _scaled(trainer, before=before, to=micro_batch * accumulate)
    return LargestBatch(
        rows=search.rows,
        fixed=None if search.fixed is None else int(search.fixed),
        per_row=search.per_row,
        budget=budget,
        how=search.trials.peaks.what,
        trials=tuple(search.trials.made),
        why=search.why,
        effective=micro_batch * accumulate,
        micro_batch=micro_batch,
        accumulate=accumulate,
        lr_factor=factor,
        rule=rule,
    )


def _scaled(trainer: Trainer[Any], *, before: int, to: int) -> tuple[float | None, str]:
    """Return the factor of the learning rates, and a line of code with the rule."""
    kinds = {name: {one.__name__ for one in type(optimizer).__mro__} for name, optimizer in trainer.optimizers.items()}
    rules = {_rule(known) for known in kinds.values()}
    first = next(iter(trainer.optimizers.values()))
    if len(rules) > 1 or None in rules:
        names = ", ".join(sorted({type(one).__name__ for one in trainer.optimizers.values()}))
        return None, f"no rule is known for the rate of {names}: find_lr(trainer, train)"
    scaled = linear_scaled if rules == {"linear"} else sqrt_scaled
    factor, lr = scaled(1.0, batch=before, to=to), float(first.param_groups[0]["lr"])
    beside = ", of each group alike" if len(first.param_groups) > 1 or len(kinds) > 1 else ""
    beside += ", and of the schedule" if trainer.schedule is not None else ""
    made = f"lr={scaled.__name__}({lr:g}, batch={before}, to={to})   # {lr * factor:.4g}"
    return factor, f"{made}: the {'linear' if scaled is linear_scaled else 'square-root'} rule{beside}"


def _rule(names: Set[str]) -> str | None:
    """Return the rule for an optimizer, by the names of its classes."""
    if not names.isdisjoint(ROOT):
        return "root"
    return None if names.isdisjoint(LINEAR) else "linear"


def _largest_of(batches: Sequence[Any]) -> tuple[Any, int]:
    """Return the batch with the most elements per row, and its number of rows."""
    rows = [sliceable_rows(batch, "train") for batch in batches]
    sizes = [sum(one.numel() for one in tensors_in(batch)) / n for batch, n in zip(batches, rows, strict=True)]
    full = max(rows)
    chosen = max(range(len(batches)), key=lambda i: (sizes[i], rows[i]))
    largest = batches[chosen]
    if rows[chosen] < full:
        largest = joined([largest] * (full // rows[chosen] + 1))
        largest = slice_rows(largest, range(full), of=sliceable_rows(largest, "train"))
    return largest, full


def _known(trainer: Trainer[Any]) -> list[Tensor]:
    """Return the tensors that exist before a trial."""
    found: list[Tensor] = [tensor for root in networks_of(trainer) for tensor in (*root.parameters(), *root.buffers())]
    for optimizer in trainer.optimizers.values():
        found += [one for state in optimizer.state.values() for one in tensors_in(state)]
    return found


@suggests
def linear_scaled(lr: float, *, batch: int, to: int) -> float:
    """Return the learning rate for batches of `to` rows, scaled linearly from `lr` for `batch` rows: lr * to / batch.

    For SGD (Goyal et al. 2017, arXiv 1706.02677). Much larger batches need a warm-up, and the rule holds up to some
    batch size only. Rows are those of an update, over accumulation and all ranks.

    >>> from trainwright.tools import linear_scaled
    >>> linear_scaled(0.1, batch=32, to=128)
    0.4

    Args:
        lr: The learning rate for `batch` rows.
        batch: Rows per update for which `lr` was found.
        to: Rows per update of the new rate.
    """
    return _checked_rate("linear_scaled", lr, batch=batch, to=to) * to / batch


@suggests
def sqrt_scaled(lr: float, *, batch: int, to: int) -> float:
    """Return the learning rate for batches of `to` rows, scaled by the square root: lr * sqrt(to / batch).

    Preserves the variance of an update (Krizhevsky 2014, arXiv 1404.5997; Hoffer et al. 2017, arXiv 1705.08741). For
    Adam and RMSprop this is the rule of Malladi et al. 2022 (arXiv 2205.10287). With k = to / batch, that rule also
    multiplies 1 - beta by k for both betas, and divides eps by sqrt(k).

    >>> from trainwright.tools import sqrt_scaled
    >>> sqrt_scaled(0.001, batch=32, to=128)
    0.002

    Args:
        lr: The learning rate for `batch` rows.
        batch: Rows per update for which `lr` was found.
        to: Rows per update of the new rate.
    """
    return _checked_rate("sqrt_scaled", lr, batch=batch, to=to) * math.sqrt(to / batch)


def _checked_rate(name: str, lr: float, *, batch: int, to: int) -> float:
    check_number(lr, f"{name}({lr!r})", least=0, what="a rate of", fix=f"{name}(1e-3, ...)")
    for key, rows in (("batch", batch), ("to", to)):
        fix = f"{name}({lr!r}, batch=64, to=512)"
        check_whole(rows, f"{name}({key}={rows!r})", what="rows of an update", fix=fix)
    return lr
