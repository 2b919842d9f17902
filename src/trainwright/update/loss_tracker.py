"""Track the numbers of a loop: losses, logged numbers and metrics, each with its count, as exact means."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from trainwright.core import host_reads
from trainwright.core.checks import FormError, check_form, is_numbers
from trainwright.core.errors import SettingError, message
from trainwright.core.host_reads import host_number
from trainwright.core.records import Count, StepOutput, SumLoss
from trainwright.core.suggestions import check_name
from trainwright.core.torch_private import nll_total_weight, version_of
from trainwright.metrics.metric_set import MetricSet
from trainwright.metrics.reduce import Sums, reduce_to_rank0
from trainwright.precision.base import LossScale
from trainwright.update.hooks import Hooks
from trainwright.update.losses import CountObserver, StepLoss, read_step_loss
from trainwright.update.window import Window, find_rows, inverse, rows_of, weighed, zero_if_uncounted

if TYPE_CHECKING:
    from trainwright.distributed.world import World

PROBED = "probed number"


MANY = 64
"""Root gradients that are kept for reuse."""

Roots = tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]
"""The arguments of `torch.autograd.backward`: losses, and the root gradient of each."""


Entry = tuple[str, float | Tensor, Count, bool]
"""(name, value, count, whether the value is a sum already)."""

Told = tuple[float, float, bool]
"""(value, count, whether the value is a sum already) of a loss that was read."""


class LossTracker:
    """Tracks the numbers of one loop: what steps, updates, probes and `log` give, each with its count.

    Values stay tensors until `read` reads all of them at once, with whatever else is asked for. They are added up to
    exact count-weighted means: those of the update in progress, and those since the last `reset`. An evaluation has a
    tracker of its own, and the same path for what its steps return.
    """

    counted = 0.0
    """The count of the loss that was read last."""
    must_feed = False
    """Whether training steps are the only ones that can feed the metrics: then one that does not is refused."""
    has_loss = False
    """Whether a loss of the current window was recorded."""
    _within = False
    """Whether an epoch has begun, to which a logged number belongs."""
    count_source: CountObserver | None = None
    """What finds the count of a mean in an evaluation, where no gradient holds it."""

    def __init__(self, metrics: MetricSet | None = None, hooks: Hooks | None = None) -> None:
        self.metrics = metrics
        self.loss = math.nan
        """The loss of the update in progress, in the user's own scale."""
        self.values: dict[str, float] = {}
        """Named losses and logged numbers of the update in progress."""
        self.unread: list[Entry] = []
        """Numbers whose values have not been read yet."""
        self._epoch = Sums()
        """Sum and count of each number since the last `reset`."""
        self._earlier: dict[str, tuple[float, float]] = {}
        """Sum and count of the values of this update that were read before: each of several steps reads."""
        self._kinds: dict[str, str] = {} if metrics is None else dict.fromkeys(metrics.names, "metric")
        """The kind of number that each name belongs to: a metric, a named loss, or a logged number."""
        self.window: Window | None = None
        """The current window of training; None in an evaluation."""
        self.batch: Any = None
        """The current host batch of an evaluation."""
        self._counter = None if hooks is None else hooks.count
        self._trusts_counter = hooks is not None and hooks.counts_itself
        self._rows_of = rows_of if hooks is None else hooks.rows
        self.count_by_graph = nll_total_weight
        """What finds the count in a loss that torch has made."""
        self.recording = True
        """Whether returns of steps are recorded: not in a second pass over the same window."""
        self._scaler: LossScale | None = None
        self.sums_losses = hooks is not None and (hooks.updates_itself or hooks.computes_itself)
        """Whether code of the user's own may read the loss that `compute_gradients` returns."""
        self.window_loss: Any = None
        """The sum of the weighed losses of this pass, where such code may read it."""
        self._roots: dict[tuple[Any, ...], Tensor] = {}
        """Root gradients by weight, dtype and device."""
        self._probed: dict[str, float] = {}
        """What probes have returned since the last update, for the record of the next."""

    def bind(self, scaler: LossScale | None) -> None:
        """Take the loss scale of a run: a factor of every root gradient."""
        self._scaler = scaler

    def begin(self, window: Window) -> None:
        """Start the update of a window."""
        if self.unread:  # what `after_update` has logged and no record has told
            self.read()
        self.window, self._within = window, True
        self.has_loss = False
        self.loss = math.nan
        if self.values or self._probed:
            self.values, self._earlier, self._probed = self._probed, {}, {}
        self.recording = True

    def begin_again(self) -> None:
        """Start a further pass over the window; only the first one is recorded (SAM and LBFGS run several)."""
        assert self.window is not None
        self.window.begin()
        self.recording = False

    @property
    def count(self) -> Count:
        """The count of the micro-batch that is about to run, as the host knows it."""
        window = self.window
        if window is None:
            return self._rows_of(self.batch) if self._counter is None else self._counter(self.batch)
        index = window.position + 1
        if not window.begun or index == len(window.batches):  # none is in hand: before the first, or after the last
            return sum(window.rows)
        if window.counts is not None:
            return window.counts[index]
        return window.rows[index] if self._counter is None else self._counter(window.batches[index])

    def weigh(self, returned: Any) -> Roots:
        """Record what a training step returned; return the arguments of `backward`: its loss, and the root gradient."""
        window = self.window
        assert window is not None
        if window.is_lone and type(returned) is Tensor and returned.ndim == 0 and not self.must_feed:
            if self.recording:
                count = None if self._trusts_counter else self.count_by_graph(returned)
                self.unread.append(("loss", returned, self.count if count is None else count, False))
                self.has_loss = True
            if self.sums_losses:
                self.window_loss = returned
            window.position += 1
            return (returned,), (None if self._scaler is None else self.root_gradient(returned, 1.0),)
        step_loss = self.record(returned)
        assert step_loss is not None
        return (step_loss.loss,), (self.root_gradient(step_loss.loss, step_loss.weight),)

    def record(self, returned: Any) -> StepLoss | None:
        """Record what the step of the next batch returned; in training return its loss, with its weight.

        The one path of training, evaluation and probes. A validation step may return no loss.
        """
        window = self.window
        if type(returned) is StepOutput:
            if self.metrics is not None and self.recording:
                rows = self._rows_of(self.batch) if window is None else window.rows[window.position + 1]
                self.metrics.update(returned.output, returned.target, rows)
            returned = returned.loss
            if returned is None and window is None:
                return None
        elif self.must_feed:
            self.check_fed(returned)
        if type(returned) is SumLoss and type(returned.count) is int and returned.count > 0:  # of the default step
            loss, count = returned.total, returned.count
            if window is None and self.recording and loss.is_cpu and not loss.ndim:
                # A read on the CPU waits for nothing, and the next loss gets the memory of this one.
                self._epoch.add("loss", host_reads.host_value(loss), count)
                return None
        step_loss = read_step_loss(returned)
        if step_loss.count is None and not step_loss.is_sum:
            step_loss.count = self._count_of_mean(step_loss.loss)
        if self.recording:
            self._add(step_loss)
        if window is not None:
            self._weigh(step_loss, window)
        return step_loss

    def _weigh(self, step_loss: StepLoss, window: Window) -> None:
        """Set the weight of the loss of the next micro-batch, which has run."""
        window.position = position = window.position + 1
        from_step = window.counts is None or step_loss.count is not window.counts[position]
        step_loss.count = None if step_loss.count is None else host_number(step_loss.count)
        step_loss.weight = window.weight(step_loss.count, is_sum=step_loss.is_sum, from_step=from_step)
        if self.sums_losses:
            value = weighed(step_loss.loss, step_loss.weight)
            self.window_loss = self.window_loss + value if position else value

    def _add(self, step_loss: StepLoss) -> None:
        """Add a loss and its named parts to the numbers; a plain sum counts the rows of its batch."""
        loss, count, is_sum = step_loss.loss, step_loss.count, step_loss.is_sum
        count = self._rows if count is None else count
        self.has_loss = True
        self.unread.append(("loss", loss.detach(), count, is_sum))
        if step_loss.named is not None:
            self.unread += [(name, value, count, is_sum) for name, value in self._claimed(step_loss.named)]

    @property
    def _rows(self) -> int:
        """The rows of the batch whose step has run, or is running."""
        window = self.window
        return self._rows_of(self.batch) if window is None else window.rows[window.position + 1]

    def _count_of_mean(self, loss: Tensor) -> Count:
        """Return the count of a mean: what torch divided by, where that is known, else what `count` says, or rows."""
        if self.count_source is not None:
            found = self.count_source.count_of(loss)
        else:
            found = None if self._trusts_counter else self.count_by_graph(loss)
        return self.count if found is None else found

    def root_gradient(self, loss: Tensor, weight: Count) -> Tensor | None:
        """Return weight times loss scale as a tensor like the loss; None for 1.

        Made once for each value: a copy from the host would be waited for.
        """
        weight = weight if self._scaler is None else weight * self._scaler.root
        if isinstance(weight, Tensor):
            return weight.to(loss.device, loss.dtype)
        if weight == 1.0:
            return None
        key = weight, loss.dtype, loss.device
        root = self._roots.get(key)
        if root is None or version_of(root):  # a hook may have written into it
            root = torch.full_like(loss, weight)
            if len(self._roots) >= MANY:
                self._roots.clear()
            if type(loss) is Tensor:
                self._roots[key] = root
        return root

    def record_minimized(self, returned: Any) -> StepLoss:
        """Record what an `update` of the user's own passed to `minimize`; a mean without a count counts the rows."""
        assert self.window is not None
        rows = sum(self.window.rows)
        stands_in = not rows and self.window.all_rows > 0  # the other ranks have all of its rows
        if type(returned) is StepOutput:
            if self.metrics is not None and not stands_in:  # one batch of the window, perhaps
                own = find_rows(returned.output)
                self.metrics.update(returned.output, returned.target, rows if own is None else own)
            returned = returned.loss
        step_loss = read_step_loss(returned)
        given = rows if step_loss.count is None or stands_in else step_loss.count
        if step_loss.named is not None:
            self.unread += [(name, value, given, step_loss.is_sum) for name, value in self._claimed(step_loss.named)]
        if step_loss.count is not None and step_loss.is_sum:
            step_loss.weight = inverse(host_number(step_loss.count))
        if stands_in or not step_loss.is_sum:
            step_loss.count = given
        return step_loss

    def check_fed(self, returned: Any) -> None:
        """Refuse what a step returned where metrics read outputs and it holds none."""
        fed = type(returned) is StepOutput and returned.output is not None
        if not fed and self.metrics is not None and self.metrics.reads_output:
            fix = "return StepOutput(loss, output, target) from the step"
            raise self._unfed(f"the step returned {type(returned).__name__}", fix=fix)

    def record_returned(self, returned: Any) -> None:
        """Record what an `update` returned: a loss if no step of this window gave one, and other numbers."""
        rows = 0 if self.window is None else sum(self.window.rows)
        for name, value in (returned if isinstance(returned, dict) else {"loss": returned}).items():
            if name != "loss":
                check_name(name, "returned")
            if name != "loss" or not self.has_loss:
                self.unread.append((name, number(name, value), rows, False))
            self.has_loss = self.has_loss or name == "loss"

    def record_losses(self, name: str, told: list[Told]) -> None:
        """Record the losses that `minimize` was given under one name."""
        self.unread += [(name, *one) for one in told]

    def record_sum(self, told: list[list[Told]]) -> None:
        """Record the sum of the losses of several names as the window's loss, if no step gave one."""
        if self.has_loss:
            return
        self.has_loss = True
        if len(told) == 1:
            self.record_losses("loss", told[0])
            return
        assert self.window is not None
        self.record_losses("loss", [(sum(mean_of(each) for each in told), sum(self.window.rows), False)])

    def record_probe(self, numbers: Any, what: str) -> None:
        """Record what a probe returned: a dict of numbers, or None."""
        if numbers is None:
            return
        if not isinstance(numbers, dict):
            have = f"a {type(numbers).__name__}"
            raise SettingError(message(f"{what} returned {have}", want="a dict of numbers, or None", where=False))
        for name in numbers:
            check_name(name, "probed")
            self._claim(name, PROBED)
        read = dict(
            zip(numbers, host_reads.read([number(name, value) for name, value in numbers.items()]), strict=True)
        )
        self._probed |= read
        self.unread += [(name, value, 1, False) for name, value in read.items()]

    def log(self, name: str, value: float | Tensor, count: Count | None) -> None:
        """Record a number of the user's own; `count` defaults to that of the current batch."""
        check_name(name, "logged")
        self._claim(name, "logged number")
        if not self._within and self.batch is None:
            fix = f"self.log({name!r}, ...) in after_update(self), or self.print(...) here"
            raise SettingError(message(f"log({name!r}, ...) outside a step", want="a call from a step", fix=fix))
        if self.recording:
            self.unread.append((name, number(name, value), self.count if count is None else count, False))

    def read(self, *more: float | Tensor) -> list[float]:
        """Read all numbers recorded since the last call, and `more`, at once; return `more` as floats."""
        if not self.unread and not more:
            return []
        entries, self.unread = self.unread, []
        if len(entries) == 1:
            numbers = host_reads.read([entries[0][1], entries[0][2], *more])
        else:
            numbers = host_reads.read([*[entry[1] for entry in entries], *[entry[2] for entry in entries], *more])
        if entries:
            self.take(entries, numbers)
        return numbers[2 * len(entries) :]

    def collect(self) -> list[Entry]:
        """Return the numbers recorded since the last call, unread, and forget them."""
        entries, self.unread = self.unread, []
        return entries

    def take(self, entries: list[Entry], numbers: list[float]) -> None:
        """Add recorded numbers, given as they were read: all values, then all counts."""
        if len(entries) > 1 or entries[0][0] != "loss":
            self._add_all(entries, numbers)
            return
        summed, read, counted = entries[0][3], numbers[0], numbers[1]  # the common case: the loss stays bit for bit
        self.loss = (read / counted if counted else math.nan) if summed else read
        self.counted = counted
        self._epoch.add("loss", read if summed else read * counted, counted)

    def take_for(self, entries: list[Entry], numbers: list[float], values: dict[str, float]) -> None:
        """Add the numbers of an earlier update, whose values begin with `values`."""
        self.loss, self.counted, self.values, self._earlier = math.nan, 0.0, values, {}
        if entries:
            self.take(entries, numbers)

    def counted_values(self, *, with_loss: bool) -> Sums:
        """Return sum and count of each value of this update, of the loss too where it is that of this rank alone."""
        sums = Sums()
        for name, (total, count) in self._earlier.items():
            sums.add(name, total, count)
        if with_loss and self.counted:
            sums.add("loss", self.loss * self.counted, self.counted)
        return sums

    @property
    def losses(self) -> list[Tensor]:
        """Numbers that are finite if the loss recorded since the last `read` is.

        As in `take`: one that counts nothing is left out of several, unless all of them do.
        """
        noted = [entry[1:] for entry in self.unread if entry[0] == "loss"]
        losses = [(value, count, summed) for value, count, summed in noted if isinstance(value, Tensor)]
        if len(losses) == 1:
            [(loss, count, summed)] = losses
            return [loss / _beside(loss, count) if summed else loss]
        told = [zero_if_uncounted(loss, _beside(loss, count)) for loss, count, _ in losses]
        whole = sum(_beside(losses[0][0], count) for _, count, _ in losses)
        if isinstance(whole, Tensor):
            return [*told, whole / whole]  # NaN, where all count nothing
        return told if whole or not losses else [losses[0][0] * math.nan]

    def means(self, prefix: str = "") -> dict[str, float]:
        """Return every mean since the last `reset`, metrics and derived numbers included; NaN over nothing.

        Metrics that only the steps of validation feed are left out of training's numbers.
        """
        self.read()
        means = self._epoch.means()
        if self.metrics is None or (self.window is not None and not self.metrics.fed):
            if self.must_feed and self.metrics is not None:
                fix = "self.minimize(StepOutput(loss, output, target)), or self.compute_gradients(window)"
                raise self._unfed("no update gave an output and a target", fix=fix)
            return {prefix + name: value for name, value in means.items()}
        return {prefix + name: value for name, value in means.items()} | self.metrics.compute(prefix, means)

    def begin_at(self, tree: dict[str, Any]) -> None:
        """Restore saved sums; numbers recorded since are dropped."""
        self.unread, self._probed, self._earlier = [], {}, {}
        self.load_state_dict(tree)

    def merge(self, world: World) -> None:
        """Add the sums of all ranks up on rank 0 and reset the others'; a collective, with one gather.

        Numbers of probes are the same on all ranks: those of rank 0 count.
        """
        if world.size == 1:
            return
        self.read()
        epoch, metrics = self._epoch, self.metrics
        for name in () if world.is_main else [name for name in epoch.counts if self._kinds.get(name) == PROBED]:
            del epoch.counts[name]
        device = None if metrics is None else metrics.device
        reduce_to_rank0(world, [epoch] if metrics is None else [epoch, metrics], device=device)

    def reset(self) -> None:
        """Start new sums, those of the epoch to come."""
        self._within, self.unread = False, []
        self._epoch.reset()
        if self.metrics is not None:
            self.metrics.reset()

    def state_dict(self) -> dict[str, Any]:
        """Return the running sums, and the numbers of probes for the record of the next update."""
        self.read()  # numbers that were logged since the check of the last update
        metrics = None if self.metrics is None else self.metrics.state_dict()
        return {**self._epoch.state_dict(), "metrics": metrics, "probed": dict(self._probed)}

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        """Load saved sums."""
        check_form(tree, sums=is_numbers, counts=is_numbers, metrics=lambda metrics: True)
        if negative := [name for name, number in tree["counts"].items() if number < 0]:
            raise FormError(f"the count of {negative[0]!r} is negative")
        self._epoch.load_state_dict(tree)
        if self.metrics is not None and tree["metrics"] is not None:
            self.metrics.load_state_dict(tree["metrics"])
        self._probed = dict(tree.get("probed", {}))

    def _unfed(self, why: str, *, fix: str) -> SettingError:
        names = [] if self.metrics is None else list(self.metrics.names)
        unfed = f"the metrics {', '.join(names)} are" if len(names) > 1 else f"metric {''.join(map(repr, names))} is"
        want = f"the output and target that the metric{'s read' if len(names) > 1 else ' reads'}"
        return SettingError(message(f"{unfed} never fed: {why}", want=want, fix=fix, where=False))

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
            self._epoch.add(name, sums[name], count)
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
