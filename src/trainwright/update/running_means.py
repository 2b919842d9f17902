"""`RunningMeans`: exact count-weighted means of the numbers of a loop, read together and summed in float64."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from torch import Tensor

from trainwright.core import host_reads
from trainwright.core.checks import FormError, check_form, is_numbers
from trainwright.core.errors import SettingError, message
from trainwright.core.records import Count
from trainwright.core.suggestions import check_name
from trainwright.metrics.metric_set import MetricSet
from trainwright.metrics.reduce import Sums, reduce_to_rank0
from trainwright.update.window import Window, zero_if_uncounted

if TYPE_CHECKING:
    from trainwright.distributed.world import World

PROBED = "probed number"

Entry = tuple[str, float | Tensor, Count, bool]
"""A recorded number: (name, value, count, whether the value is a sum)."""

Term = tuple[float, float, bool]
"""A number that was read: (value, count, whether the value is a sum)."""

Terms = dict[str, list[Term]]
"""The numbers of one update, by name."""


class RunningMeans:
    """The numbers of a loop by name, with their counts: those of the current update, and sums over the epoch.

    A number is recorded in `unread`, as a tensor. `read` reads all recorded numbers at once and adds them to the
    numbers of the update and to the sums of the epoch; `means` returns the means of these sums. Checkpoints hold the
    sums, and ranks merge them.
    """

    must_feed = False
    """Whether only training steps can provide outputs for the metrics, so that a step without one raises an error."""
    loss = math.nan
    """The loss of the current update, without loss scaling."""
    window: Window | None = None
    """The current window of training; None in an evaluation."""
    _epoch_begun = False
    """Whether an epoch has begun, so that numbers can be logged."""

    def __init__(self, metrics: MetricSet | None) -> None:
        self.metrics = metrics
        self.unread: list[Entry] = []
        """Recorded numbers that are not read yet."""
        self.terms: Terms = {}
        """Numbers of the current update that were read; an update with several steps reads several times."""
        self._probed: Terms = {}
        """The numbers of probes since the last update, for the record of the next update."""
        self._sums = Sums()
        """Sum and count of each number since the last `reset`."""
        self._kinds: dict[str, str] = {} if metrics is None else dict.fromkeys(metrics.names, "metric")
        """The kind of each name: metric, named loss, logged number or probed number."""

    @property
    def values(self) -> dict[str, float]:
        """Named losses, logged and probed numbers of the current update that were read so far."""
        return values_of(self.terms)

    @property
    def counted(self) -> float:
        """The count of the loss of the current update."""
        return count_of(self.terms)

    def record_probe(self, numbers: Any, what: str) -> None:
        """Record the return of a probe: a dict of numbers, or None."""
        if numbers is None:
            return
        if not isinstance(numbers, dict):
            have = f"a {type(numbers).__name__}"
            raise SettingError(message(f"{what} returned {have}", want="a dict of numbers, or None", where=False))
        for name in numbers:
            check_name(name, "probed")
            self._claim(name, PROBED)
        values = host_reads.read([number(name, value) for name, value in numbers.items()])
        for name, value in zip(numbers, values, strict=True):
            self._probed[name] = [(value, 1, False)]
            self.unread.append((name, value, 1, False))

    def read(self, *more: float | Tensor) -> list[float]:
        """Read all recorded numbers and `more` at once; return `more` as floats."""
        entries, self.unread = self.unread, []
        if not entries:
            return host_reads.read(more)
        names, values, counts, _ = zip(*entries, strict=True)
        numbers = host_reads.read([*values, *counts, *more])
        self.add_read(entries, numbers, None if self.window is None else self.terms)
        if "loss" in names and self.window is not None:
            terms = self.terms["loss"]
            self.loss = terms[0][0] if len(terms) == 1 and not terms[0][2] else mean_of(terms)
        return numbers[2 * len(entries) :]

    def add_read(self, entries: list[Entry], numbers: list[float], terms: Terms | None) -> None:
        """Add recorded numbers to the sums and to the terms of their update; `numbers`: all values, then all counts.

        A NaN is added like any number, also that of a skipped update, so that the mean of the epoch shows it.
        """
        for (name, _, _, is_sum), value, count in zip(entries, numbers, numbers[len(entries) :], strict=False):
            self._sums.add(name, value if is_sum else value * count, count)
            if terms is not None:
                terms.setdefault(name, []).append((value, count, is_sum))

    def pop_unread(self) -> list[Entry]:
        """Remove and return the recorded numbers without a read."""
        entries, self.unread = self.unread, []
        return entries

    def counted_values(self, *, with_loss: bool) -> Sums:
        """Return sum and count of each number of this update; `with_loss`: whether the loss is of this rank only."""
        sums = Sums()
        for name, terms in self.terms.items():
            if with_loss if name == "loss" else self._kinds.get(name) != PROBED:  # probes are the same on all ranks
                for value, count, is_sum in terms:
                    sums.add(name, value if is_sum else value * count, count)
        return sums

    @property
    def losses(self) -> list[Tensor]:
        """Tensors that are all finite if and only if the unread loss is finite.

        As in `mean_of`, terms with a count of 0 are ignored, unless all counts are 0.
        """
        recorded = [entry[1:] for entry in self.unread if entry[0] == "loss"]
        losses = [(value, count, is_sum) for value, count, is_sum in recorded if isinstance(value, Tensor)]
        if len(losses) == 1:
            [(loss, count, is_sum)] = losses
            return [loss / _beside(loss, count) if is_sum else loss]
        values = [zero_if_uncounted(loss, _beside(loss, count)) for loss, count, _ in losses]
        total = sum(_beside(losses[0][0], count) for _, count, _ in losses)
        if isinstance(total, Tensor):
            return [*values, total / total]  # NaN if all counts are 0
        return values if total or not losses else [losses[0][0] * math.nan]

    def means(self, prefix: str = "") -> dict[str, float]:
        """Return every mean since the last `reset`, including metrics and derived numbers; NaN for a count of 0.

        Metrics without outputs in training (only validation steps return them) are left out there.
        """
        self.read()
        means = self._sums.means()
        numbers = {prefix + name: value for name, value in means.items()}
        if self.metrics is not None and (self.metrics.can_compute or self.window is None):
            numbers |= self.metrics.compute(prefix, means)
        elif self.must_feed and self.metrics is not None:
            fix = "self.minimize(StepOutput(loss, output, target)), or self.compute_gradients(window)"
            raise self.metrics.missing_output("no update gave an output and a target", fix=fix)
        return numbers

    def restore_sums(self, tree: dict[str, Any]) -> None:
        """Restore saved sums; drop numbers recorded since then."""
        self.unread = []
        self.load_state_dict(tree)

    def merge(self, world: World) -> None:
        """Merge the sums of all ranks on rank 0 and reset those of the others. A collective, with one gather."""
        if world.size > 1:
            self._merge(world)

    def _merge(self, world: World) -> None:
        self.read()
        if not world.is_main:  # probed numbers are the same on all ranks: only those of rank 0 are used
            self._sums.drop(name for name, kind in self._kinds.items() if kind == PROBED)
        if self.metrics is None:
            reduce_to_rank0(world, [self._sums])
        else:
            reduce_to_rank0(world, [self._sums, self.metrics], device=self.metrics.device)

    def reset(self) -> None:
        """Reset the sums, for the next epoch."""
        self._epoch_begun, self.unread = False, []
        self._sums.reset()
        if self.metrics is not None:
            self.metrics.reset()

    def state_dict(self) -> dict[str, Any]:
        """Return the sums, and the numbers of probes for the record of the next update."""
        self.read()  # numbers logged since the check of the last update
        metrics = None if self.metrics is None else self.metrics.state_dict()
        return {**self._sums.state_dict(), "metrics": metrics, "probed": values_of(self._probed)}

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        """Load saved sums; FormError for an invalid state."""
        check_form(tree, sums=is_numbers, counts=is_numbers, probed=is_numbers)
        if negative := [name for name, number in tree["counts"].items() if number < 0]:
            raise FormError(f"the count of {negative[0]!r} is negative")
        self._sums.load_state_dict(tree)
        if self.metrics is not None and tree["metrics"] is not None:
            self.metrics.load_state_dict(tree["metrics"])
        self._probed = {name: [(value, 1, False)] for name, value in tree["probed"].items()}

    def _claimed(self, named: Mapping[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
        for name in named:
            self._claim(name, "named loss")
        return named.items()

    def _claim(self, name: str, kind: str) -> None:
        """Raise SettingError for a name of two kinds of numbers: one would be averaged with the other, or hide it."""
        other = self._kinds.setdefault(name, kind)
        if other != kind:
            what = f"log({name!r}, ...)" if kind == "logged number" else f"the {kind} {name!r}"
            fix = f'log("my_{name}", ...)' if kind == "logged number" else f'"{name}_loss"'
            raise SettingError(message(f"{what}: a {other} has this name", fix=fix))


def mean_of(terms: list[Term]) -> float:
    """Return the count-weighted mean of numbers; NaN if all counts are 0."""
    if len(terms) == 1 and not terms[0][2]:
        return terms[0][0]  # exact, without a multiplication and a division
    counted = sum(count for _, count, _ in terms)
    # Numbers with a count of 0 are NaN, or a sum of 0, and are ignored.
    total = sum(value if is_sum else value * count for value, count, is_sum in terms if count)
    return total / counted if counted else math.nan


def values_of(terms: Terms) -> dict[str, float]:
    """Return the mean of each number of an update, except the loss."""
    return {name: mean_of(each) for name, each in terms.items() if name != "loss"}


def count_of(terms: Terms) -> float:
    """Return the count of the loss of an update."""
    return sum(count for _, count, _ in terms.get("loss", ()))


def number(name: str, value: Any) -> float | Tensor:
    """Return a number in a form that can be stored; SettingError for anything else."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach().clone()  # user code may change the original in place
    if isinstance(value, Real | np.generic) or (isinstance(value, np.ndarray) and not value.ndim):
        return cast(float, value)
    kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    in_metrics = f'Trainer(..., metrics={{"{name}": ...}}), and return StepOutput(loss, output, target)'
    fix = in_metrics if callable(value) or hasattr(value, "compute") else "its mean, say"
    raise SettingError(message(f"{name!r} is {kind}", want="a number, or a tensor with one", fix=fix))


def _beside(loss: Tensor, count: Count) -> Count:
    """Return the count, on the device of the loss."""
    return count.to(loss.device, non_blocking=count.is_cpu) if isinstance(count, Tensor) else count
