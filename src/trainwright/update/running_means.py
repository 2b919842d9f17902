"""Exact count-weighted means of the numbers of a loop: recorded as tensors, read together, summed in float64."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any, cast

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
"""(name, value, count, whether the value is a sum) of a number that was recorded."""

Term = tuple[float, float, bool]
"""(value, count, whether the value is a sum) of a number that was read."""

Terms = dict[str, list[Term]]
"""The numbers of one update by name."""


class RunningMeans:
    """The numbers of a loop by name, each with its count: those of the update in progress, and those of the epoch.

    A number is recorded as a tensor in `unread`. `read` reads all of them at once, with whatever else is asked for, and
    adds them to the numbers of the update and to the sums of the epoch, of which `means` returns the means. The sums
    are what a checkpoint holds, and what the ranks merge.
    """

    must_feed = False
    """Whether training steps are the only ones that can feed the metrics: then one that does not is refused."""
    loss = math.nan
    """The loss of the update in progress, in the user's own scale."""
    window: Window | None = None
    """The current window of training; None in an evaluation."""
    _epoch_begun = False
    """Whether an epoch has begun, to which a logged number belongs."""

    def __init__(self, metrics: MetricSet | None) -> None:
        self.metrics = metrics
        self.unread: list[Entry] = []
        """Numbers whose values have not been read yet."""
        self.terms: Terms = {}
        """Numbers of the update in progress that were read: each of several steps reads."""
        self._probed: Terms = {}
        """The numbers of probes since the last update, for the record of the next."""
        self._sums = Sums()
        """Sum and count of each number since the last `reset`."""
        self._kinds: dict[str, str] = {} if metrics is None else dict.fromkeys(metrics.names, "metric")
        """The kind of number that each name belongs to: a metric, a named loss, or a logged number."""

    @property
    def values(self) -> dict[str, float]:
        """Named losses, logged and probed numbers of the update in progress, as far as they were read."""
        return values_of(self.terms)

    @property
    def counted(self) -> float:
        """The count of the loss of the update in progress."""
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
        """Read all numbers recorded since the last call, and `more`, at once; return `more` as floats."""
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
        """Add recorded numbers, given as they were read (all values, then all counts), to the terms of their update.

        A NaN is added like any number, also that of a skipped update: the mean of its epoch is NaN, so that it shows.
        """
        for (name, _, _, is_sum), value, count in zip(entries, numbers, numbers[len(entries) :], strict=False):
            self._sums.add(name, value if is_sum else value * count, count)
            if terms is not None:
                terms.setdefault(name, []).append((value, count, is_sum))

    def pop_unread(self) -> list[Entry]:
        """Return the numbers recorded since the last call, unread, and forget them."""
        entries, self.unread = self.unread, []
        return entries

    def counted_values(self, *, with_loss: bool) -> Sums:
        """Return sum and count of each value of this update, of the loss too where it is that of this rank alone."""
        sums = Sums()
        for name, terms in self.terms.items():
            if with_loss if name == "loss" else self._kinds.get(name) != PROBED:  # probes give the same on all ranks
                for value, count, is_sum in terms:
                    sums.add(name, value if is_sum else value * count, count)
        return sums

    @property
    def losses(self) -> list[Tensor]:
        """Numbers that are finite if the loss recorded since the last `read` is.

        As in `mean_of`: one that counts nothing is left out of several, unless all of them do.
        """
        recorded = [entry[1:] for entry in self.unread if entry[0] == "loss"]
        losses = [(value, count, is_sum) for value, count, is_sum in recorded if isinstance(value, Tensor)]
        if len(losses) == 1:
            [(loss, count, is_sum)] = losses
            return [loss / _beside(loss, count) if is_sum else loss]
        values = [zero_if_uncounted(loss, _beside(loss, count)) for loss, count, _ in losses]
        total = sum(_beside(losses[0][0], count) for _, count, _ in losses)
        if isinstance(total, Tensor):
            return [*values, total / total]  # NaN, where all count nothing
        return values if total or not losses else [losses[0][0] * math.nan]

    def means(self, prefix: str = "") -> dict[str, float]:
        """Return every mean since the last `reset`, metrics and derived numbers included; NaN over nothing.

        Metrics that only the steps of validation feed are left out of training's numbers.
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
        """Restore saved sums; numbers recorded since are dropped."""
        self.unread = []
        self.load_state_dict(tree)

    def merge(self, world: World) -> None:
        """Add the sums of all ranks up on rank 0 and reset the others'; a collective, with one gather."""
        if world.size > 1:
            self._merge(world)

    def _merge(self, world: World) -> None:
        self.read()
        if not world.is_main:  # the numbers of probes are the same on all ranks: those of rank 0 count
            self._sums.drop(name for name, kind in self._kinds.items() if kind == PROBED)
        if self.metrics is None:
            reduce_to_rank0(world, [self._sums])
        else:
            reduce_to_rank0(world, [self._sums, self.metrics], device=self.metrics.device)

    def reset(self) -> None:
        """Start new sums, those of the epoch to come."""
        self._epoch_begun, self.unread = False, []
        self._sums.reset()
        if self.metrics is not None:
            self.metrics.reset()

    def state_dict(self) -> dict[str, Any]:
        """Return the running sums, and the numbers of probes for the record of the next update."""
        self.read()  # numbers that were logged since the check of the last update
        metrics = None if self.metrics is None else self.metrics.state_dict()
        return {**self._sums.state_dict(), "metrics": metrics, "probed": values_of(self._probed)}

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        """Load saved sums."""
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
        """Refuse a name for two kinds of numbers: one would be averaged with the other, or hide it."""
        other = self._kinds.setdefault(name, kind)
        if other != kind:
            what = f"log({name!r}, ...)" if kind == "logged number" else f"the {kind} {name!r}"
            fix = f'log("my_{name}", ...)' if kind == "logged number" else f'"{name}_loss"'
            raise SettingError(message(f"{what}: a {other} has this name", fix=fix))


def mean_of(terms: list[Term]) -> float:
    """Return the mean of numbers by their counts; NaN for a count of zero."""
    if len(terms) == 1 and not terms[0][2]:
        return terms[0][0]  # bit for bit
    counted = sum(count for _, count, _ in terms)
    # A number over nothing is NaN, or a sum of 0: neither belongs in the mean of the others.
    total = sum(value if is_sum else value * count for value, count, is_sum in terms if count)
    return total / counted if counted else math.nan


def values_of(terms: Terms) -> dict[str, float]:
    """Return the mean of each number of an update but the loss."""
    return {name: mean_of(each) for name, each in terms.items() if name != "loss"}


def count_of(terms: Terms) -> float:
    """Return the count of the loss of an update."""
    return sum(count for _, count, _ in terms.get("loss", ()))


def number(name: str, value: Any) -> float | Tensor:
    """Return a number as it may be stored; SettingError for anything else."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach().clone()  # it may be changed in place later
    if isinstance(value, Real) or getattr(value, "shape", None) == ():
        return cast(float, value)
    kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise SettingError(message(f"{name!r} is {kind}", want="a number, or a tensor with one", fix="its mean, say"))


def _beside(loss: Tensor, count: Count) -> Count:
    """The count, on the device of the loss."""
    return count.to(loss.device, non_blocking=count.is_cpu) if isinstance(count, Tensor) else count
