"""Numbers of a loop with their counts, read late and all at once: sums, exact means, and whose name each is."""

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
from trainwright.metrics.metric_set import MetricSet
from trainwright.update.window import zero_if_uncounted

if TYPE_CHECKING:
    from trainwright.distributed.world import World

Entry = tuple[str, float | Tensor, Count, bool]
"""(name, value, count, whether the value is a sum already)."""

Told = tuple[float, float, bool]
"""(value, count, whether the value is a sum already) of a loss that was read."""


class Numbers:
    """Holds every number of a loop with its count, and gives back exact count-weighted means.

    Values stay tensors until `close` reads all of them in one go, together with whatever else is asked for.
    """

    counted = 0.0
    """What the loss that was closed last is a mean over."""
    window: Any = None

    def __init__(self, meters: MetricSet | None = None) -> None:
        self.meters = meters
        self.loss = math.nan
        """The loss of what was closed last, in the user's own scale."""
        self.values: dict[str, float] = {}
        """Named losses and logged numbers of what was closed last."""
        self._entries: list[Entry] = []
        self._sums, self._counts = dict[str, float](), dict[str, float]()
        self._earlier: dict[str, tuple[float, float]] = {}
        """Sum and count of what was closed in this update: each of several steps closes what came before it."""
        self._kinds: dict[str, str] = {} if meters is None else dict.fromkeys(meters.names, "metric")
        """Whose each name is: a metric's, a named loss's, or a logged number's."""

    def close(self, *more: float | Tensor) -> list[float]:
        """Read all numbers noted since the last call, and `more`, in one go; return `more` as floats."""
        if not self._entries and not more:
            return []
        entries, self._entries = self._entries, []
        if len(entries) == 1:
            numbers = host_reads.read([entries[0][1], entries[0][2], *more])
        else:
            numbers = host_reads.read([*[entry[1] for entry in entries], *[entry[2] for entry in entries], *more])
        if entries:
            self.take(entries, numbers)
        return numbers[2 * len(entries) :]

    def collect(self) -> list[Entry]:
        """Hand over what was noted since the last call, unread."""
        entries, self._entries = self._entries, []
        return entries

    def take(self, entries: list[Entry], numbers: list[float]) -> None:
        """Add up what was noted, by its `numbers` as they were read: all values, then all counts."""
        if len(entries) > 1 or entries[0][0] != "loss":
            self._add_all(entries, numbers)
            return
        summed, read, counted = entries[0][3], numbers[0], numbers[1]  # the common case: the loss stays bit for bit
        self.loss = (read / counted if counted else math.nan) if summed else read
        self.counted = counted
        if counted:
            self._sums["loss"] = self._sums.get("loss", 0.0) + (read if summed else read * counted)
        self._counts["loss"] = self._counts.get("loss", 0.0) + counted

    def take_for(self, entries: list[Entry], numbers: list[float], values: dict[str, float]) -> None:
        """Add up what was noted in an earlier update, whose own numbers begin with `values`."""
        self.loss, self.counted, self.values, self._earlier = math.nan, 0.0, values, {}
        if entries:
            self.take(entries, numbers)

    def counted_values(self, *, with_loss: bool) -> dict[str, tuple[float, float]]:
        """Sum and count of each number of the update in hand, its loss too where that is this process's alone."""
        loss = {"loss": (self.loss * self.counted, self.counted)} if with_loss and self.counted else {}
        return self._earlier | loss

    @property
    def losses(self) -> list[Tensor]:
        """Numbers that are finite where the loss of what was noted since the last call of `close` is.

        As in `take`: one that counts nothing is left out of several, unless all of them do.
        """
        noted = [entry[1:] for entry in self._entries if entry[0] == "loss"]
        losses = [(value, count, summed) for value, count, summed in noted if isinstance(value, Tensor)]
        if len(losses) == 1:
            [(loss, count, summed)] = losses
            return [loss / _beside(loss, count) if summed else loss]
        told = [zero_if_uncounted(loss, _beside(loss, count)) for loss, count, _ in losses]
        whole = sum(_beside(losses[0][0], count) for _, count, _ in losses)
        if isinstance(whole, Tensor):
            return [*told, whole / whole]  # NaN, where all count nothing
        return told if whole or not losses else [losses[0][0] * math.nan]

    @property
    def waiting(self) -> bool:
        """Whether numbers were noted that are not read yet."""
        return bool(self._entries)

    def reset(self) -> None:
        """Start new sums."""
        self._entries, self._sums, self._counts = [], {}, {}
        if self.meters is not None:
            self.meters.reset()

    def merge(self, world: World) -> None:
        """Add the sums of all processes up into the first one's; the others' are nothing from then on.

        For all processes alike, in one gathering. What the first one holds then is the whole: merged again, or saved
        and loaded by it alone, nothing counts twice. Sums are added by rank. What a probe has returned is the same
        everywhere, and the first one's counts.
        """
        if world.size == 1:
            return
        from trainwright.metrics.reduce import Sums, reduce_to_rank0

        self.close()
        sums = Sums()
        for name, count in self._counts.items():
            if world.is_main or self._kinds.get(name) != "probed number":
                sums.add(name, self._sums.get(name, 0.0), count)
        reduce_to_rank0(
            world,
            [sums] if self.meters is None else [sums, self.meters],
            device=None if self.meters is None else self.meters.device,
        )
        self._sums, self._counts = sums.sums, sums.counts

    def state_dict(self) -> dict[str, Any]:
        """The running sums, so that a mean goes on after a resume inside an epoch."""
        self.close()  # what was logged since the last update was judged
        meters = None if self.meters is None else self.meters.state_dict()
        return {"sums": dict(self._sums), "counts": dict(self._counts), "meters": meters}

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        """Take over saved sums."""
        check_form(tree, sums=is_numbers, counts=is_numbers, meters=lambda meters: True)
        if negative := [name for name, number in tree["counts"].items() if number < 0]:
            raise FormError(f"the count of {negative[0]!r} is negative")
        self._sums, self._counts = dict(tree["sums"]), dict(tree["counts"])
        if self.meters is not None and tree["meters"] is not None:
            self.meters.load_state_dict(tree["meters"])

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

    def _add_all(self, entries: list[Entry], numbers: list[float]) -> None:
        sums: dict[str, float] = {}
        counts: dict[str, float] = {}
        alone: dict[str, float | None] = {}
        size = len(entries)
        for (name, _, _, summed), value, count in zip(entries, numbers, numbers[size:], strict=False):
            alone[name] = None if summed or name in alone else value
            # A number over nothing is NaN, or a sum of 0: neither belongs in the mean of the others.
            sums[name] = sums.get(name, 0.0) + ((value if summed else value * count) if count else 0.0)
            counts[name] = counts.get(name, 0.0) + count
        for name, count in counts.items():
            self._sums[name] = self._sums.get(name, 0.0) + sums[name]
            self._counts[name] = self._counts.get(name, 0.0) + count
        means = {name: (sums[name] / n if n else math.nan) for name, n in counts.items()}
        means |= {name: value for name, value in alone.items() if value is not None}  # bit for bit what was given
        if "loss" in means:
            self.loss, self.counted = means.pop("loss"), counts["loss"]
        for name in means if self.window is not None else ():
            total, n = self._earlier.get(name, (0.0, 0.0))
            if n:
                means[name] = (total + sums[name]) / (n + counts[name])
            self._earlier[name] = (total + sums[name], n + counts[name])
        self.values |= means


def mean_of(told: list[Told]) -> float:
    """The mean of losses by what they count; NaN over nothing."""
    if len(told) == 1 and not told[0][2]:
        return told[0][0]  # bit for bit
    counted = sum(count for _, count, _ in told)
    total = sum(value if summed else value * count for value, count, summed in told if count)
    return total / counted if counted else math.nan


def number(name: str, value: Any) -> float | Tensor:
    """A number as it may be kept; SettingError for what is none."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach().clone()  # it may be changed in place later
    if isinstance(value, Real) or getattr(value, "shape", None) == ():
        return cast(float, value)
    kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise SettingError(message(f"{name!r} is {kind}", want="a number, or a tensor with one", fix="its mean, say"))


def _beside(loss: Tensor, count: Count) -> Count:
    """The count, on the device of the loss."""
    return count.to(loss.device, non_blocking=count.is_cpu) if isinstance(count, Tensor) else count
