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
from trainwright.core.records import Count, MeanLoss, StepOutput, SumLoss
from trainwright.core.suggestions import check_name
from trainwright.core.torch_private import nll_total_weight, version_of
from trainwright.metrics.metric_set import MetricSet
from trainwright.metrics.reduce import Sums, reduce_to_rank0
from trainwright.precision.base import LossScale
from trainwright.update.hooks import Hooks
from trainwright.update.losses import CountObserver, StepLoss, read_step_loss
from trainwright.update.window import Window, find_rows, inverse, weighed, zero_if_uncounted

if TYPE_CHECKING:
    from trainwright.distributed.world import World

PROBED = "probed number"


MOST_ROOTS = 64
"""Root gradients that are stored for reuse."""

Roots = tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]
"""The arguments of `torch.autograd.backward`: losses, and the root gradient of each."""


Entry = tuple[str, float | Tensor, Count, bool]
"""(name, value, count, whether the value is a sum) of a number that was recorded."""

Term = tuple[float, float, bool]
"""(value, count, whether the value is a sum) of a number that was read."""

Terms = dict[str, list[Term]]
"""The numbers of one update by name."""


class LossTracker:
    """Tracks the numbers of one loop: returns of steps, updates and probes, and logged numbers, each with its count.

    Values stay tensors until `read` reads all of them at once, with whatever else is asked for. They are added up to
    exact count-weighted means: those of the update in progress, and those since the last `reset`. An evaluation has a
    tracker of its own, and the same path for the returns of its steps.
    """

    must_feed = False
    """Whether training steps are the only ones that can feed the metrics: then one that does not is refused."""
    has_loss = False
    """Whether a loss of the current window was recorded."""
    loss = math.nan
    """The loss of the update in progress, in the user's own scale."""
    recording = True
    """Whether returns of steps are recorded: not in a second pass over the same window."""
    window: Window | None = None
    """The current window of training; None in an evaluation."""
    batch: Any = None
    """The current host batch of an evaluation."""
    window_loss: Any = None
    """The sum of the weighed losses of this pass, where code of the user's own may read it."""
    count_source: CountObserver | None = None
    """Finds the count of a mean in an evaluation, where no gradient holds it."""
    _within = False
    """Whether an epoch has begun, to which a logged number belongs."""
    _scaler: LossScale | None = None

    def __init__(self, metrics: MetricSet | None, hooks: Hooks) -> None:
        self.metrics, self._hooks = metrics, hooks
        self.count_by_graph = nll_total_weight
        """Finds the count in the graph of a loss of torch's own."""
        self.unread: list[Entry] = []
        """Numbers whose values have not been read yet."""
        self.terms: Terms = {}
        """Numbers of the update in progress that were read: each of several steps reads."""
        self._probed: Terms = {}
        """The numbers of probes since the last update, for the record of the next."""
        self._epoch = Sums()
        """Sum and count of each number since the last `reset`."""
        self._kinds: dict[str, str] = {} if metrics is None else dict.fromkeys(metrics.names, "metric")
        """The kind of number that each name belongs to: a metric, a named loss, or a logged number."""
        self._sums_losses = hooks.updates_itself or hooks.computes_itself
        self._roots: dict[tuple[Any, ...], Tensor] = {}
        """Root gradients by weight, dtype and device."""

    def bind(self, scaler: LossScale | None) -> None:
        """Take the loss scale of a run: a factor of every root gradient."""
        self._scaler = scaler

    def begin(self, window: Window) -> None:
        """Start the update of a window."""
        if self.unread:  # logged by `after_update`, or probed
            self.read()
        self.window, self._within, self.recording = window, True, True
        self.has_loss, self.loss = False, math.nan
        self.terms, self._probed = self._probed, {}

    def begin_again(self) -> None:
        """Start a further pass over the window; only the first one is recorded (SAM and LBFGS run several)."""
        assert self.window is not None
        self.window.begin()
        self.recording = False

    @property
    def values(self) -> dict[str, float]:
        """Named losses, logged and probed numbers of the update in progress, as far as they were read."""
        return values_of(self.terms)

    @property
    def counted(self) -> float:
        """The count of the loss of the update in progress."""
        return count_of(self.terms)

    @property
    def count(self) -> Count:
        """The count of the micro-batch that is about to run, as the host knows it."""
        window, counter = self.window, self._hooks.count
        if window is None:
            return self._hooks.rows(self.batch) if counter is None else counter(self.batch)
        index = window.position + 1
        if not window.begun or index == len(window.batches):  # before the first micro-batch, or after the last
            return sum(window.rows)
        if window.counts is not None:
            return window.counts[index]
        return window.rows[index] if counter is None else counter(window.batches[index])

    def weigh(self, returned: Any) -> Roots:
        """Record the return of a training step; return the arguments of `backward`: its loss, and the root gradient."""
        window = self.window
        assert window is not None
        if not window.is_lone or type(returned) is not Tensor or returned.ndim or self.must_feed:
            step_loss = self.record(returned)
            assert step_loss is not None
            return (step_loss.loss,), (self.root_gradient(step_loss.loss, step_loss.weight),)
        if self.recording:  # the common case: the mean of a window's only micro-batch has no weight
            count = None if self._hooks.counts_itself else self.count_by_graph(returned)
            self.unread.append(("loss", returned, self.count if count is None else count, False))
            self.has_loss = True
        if self._sums_losses:
            self.window_loss = returned
        window.position += 1
        return (returned,), (None if self._scaler is None else self.root_gradient(returned, 1.0),)

    def record(self, returned: Any) -> StepLoss | None:
        """Record the return of the step of the next batch; in training return its loss, with its weight.

        The one path of training, evaluation and probes. A validation step may return no loss.
        """
        window = self.window
        if type(returned) is StepOutput:
            if self.metrics is not None and self.recording:
                rows = self._hooks.rows(self.batch) if window is None else window.rows[window.position + 1]
                self.metrics.update(returned.output, returned.target, rows)
            returned = returned.loss
        elif self.must_feed:
            self.check_fed(returned)
        if window is None and (returned is None or self._add_at_once(returned)):
            return None
        step_loss = returned if type(returned) is StepLoss else read_step_loss(returned)
        if step_loss.count is None and not step_loss.is_sum:
            step_loss.count = self._count_of_mean(step_loss.loss)
        if self.recording:
            self._add(step_loss)
        if window is not None:
            self._weigh(step_loss, window)
        return step_loss

    def _add_at_once(self, returned: Any) -> bool:
        """Read and add a loss of an evaluation on the CPU; return whether it was one.

        Such a read waits for nothing, and the next loss gets the memory of this one.
        """
        is_sum = type(returned) is SumLoss
        if is_sum:
            loss, count = returned.total, returned.count
        else:
            loss, count = (returned.loss, returned.count) if type(returned) is MeanLoss else (returned, None)
        if type(loss) is not Tensor or loss.ndim or not loss.is_cpu:
            return False
        if count is None:
            count = self._rows if is_sum else self._count_of_mean(loss)
        if isinstance(count, Tensor) or not count > 0:
            return False
        if self.recording:
            value = host_reads.host_value(loss)
            self._epoch.add("loss", value if is_sum else value * count, count)
        return True

    def _add(self, step_loss: StepLoss) -> None:
        """Add a loss and its named parts to the numbers; a plain sum counts the rows of its batch."""
        is_sum, count = step_loss.is_sum, self._rows if step_loss.count is None else step_loss.count
        self.has_loss = True
        self.unread.append(("loss", step_loss.loss.detach(), count, is_sum))
        if step_loss.named is not None:
            self.unread += [(name, value, count, is_sum) for name, value in self._claimed(step_loss.named)]

    def _weigh(self, step_loss: StepLoss, window: Window) -> None:
        """Set the weight of the loss of the next micro-batch, which has run."""
        window.position = position = window.position + 1
        from_step = window.counts is None or step_loss.count is not window.counts[position]
        step_loss.count = None if step_loss.count is None else host_number(step_loss.count)
        step_loss.weight = window.weight(step_loss.count, is_sum=step_loss.is_sum, from_step=from_step)
        if self._sums_losses:
            value = weighed(step_loss.loss, step_loss.weight)
            self.window_loss = self.window_loss + value if position else value

    @property
    def _rows(self) -> int:
        """The rows of the batch whose step has run, or is running."""
        window = self.window
        return self._hooks.rows(self.batch) if window is None else window.rows[window.position + 1]

    def _count_of_mean(self, loss: Tensor) -> Count:
        """Return the count of a mean: the divisor of torch, where that is known, else that of `count`, or rows."""
        if self.count_source is not None:
            found = self.count_source.count_of(loss)
        else:
            found = None if self._hooks.counts_itself else self.count_by_graph(loss)
        return self.count if found is None else found

    def root_gradient(self, loss: Tensor, weight: Count) -> Tensor | None:
        """Return weight times loss scale as a tensor like the loss; None for 1."""
        weight = weight if self._scaler is None else weight * self._scaler.root
        if isinstance(weight, Tensor):
            return weight.to(loss.device, loss.dtype)
        if weight == 1.0:
            return None
        root = self._roots.get((weight, loss.dtype, loss.device))
        if root is None or version_of(root):  # a hook may have written into it
            root = self._make_root(loss, weight)
        return root

    def _make_root(self, loss: Tensor, weight: float) -> Tensor:
        """Return a new root gradient, stored for reuse: its copy from the host is waited for."""
        root = torch.full_like(loss, weight)
        if len(self._roots) >= MOST_ROOTS:
            self._roots.clear()
        if type(loss) is Tensor:
            self._roots[weight, loss.dtype, loss.device] = root
        return root

    def record_minimized(self, returned: Any) -> StepLoss:
        """Record the loss that `minimize` was given; a mean without a count counts the rows."""
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
        """Refuse the return of a step that holds no output, where metrics read outputs."""
        fed = type(returned) is StepOutput and returned.output is not None
        if not fed and self.metrics is not None and self.metrics.reads_output:
            raise self.metrics.unfed(f"the step returned {type(returned).__name__}")

    def record_returned(self, returned: Any) -> None:
        """Record the return of an `update`: a loss if no step of this window gave one, and other numbers."""
        rows = 0 if self.window is None else sum(self.window.rows)
        for name, value in (returned if isinstance(returned, dict) else {"loss": returned}).items():
            if name != "loss":
                check_name(name, "returned")
            if name != "loss" or not self.has_loss:
                self.unread.append((name, number(name, value), rows, False))
            self.has_loss = self.has_loss or name == "loss"

    def record_losses(self, name: str, terms: list[Term]) -> None:
        """Record the losses that `minimize` was given under one name."""
        self.unread += [(name, *term) for term in terms]

    def record_sum(self, losses: list[list[Term]]) -> None:
        """Record the sum of the losses of several names as the window's loss, if no step gave one."""
        if self.has_loss:
            return
        self.has_loss = True
        if len(losses) == 1:
            self.record_losses("loss", losses[0])
            return
        assert self.window is not None
        self.record_losses("loss", [(sum(map(mean_of, losses)), sum(self.window.rows), False)])

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
        entries, self.unread = self.unread, []
        if not entries:
            return host_reads.read(more)
        names, values, counts, _ = zip(*entries, strict=True)
        numbers = host_reads.read([*values, *counts, *more])
        self.take(entries, numbers, None if self.window is None else self.terms)
        if "loss" in names and self.window is not None:
            terms = self.terms["loss"]
            self.loss = terms[0][0] if len(terms) == 1 and not terms[0][2] else mean_of(terms)
        return numbers[2 * len(entries) :]

    def take(self, entries: list[Entry], numbers: list[float], terms: Terms | None) -> None:
        """Add recorded numbers, given as they were read (all values, then all counts), to the terms of their update."""
        for (name, _, _, is_sum), value, count in zip(entries, numbers, numbers[len(entries) :], strict=False):
            self._epoch.add(name, value if is_sum else value * count, count)
            if terms is not None:
                terms.setdefault(name, []).append((value, count, is_sum))

    def collect(self) -> list[Entry]:
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
        means = self._epoch.means()
        numbers = {prefix + name: value for name, value in means.items()}
        if self.metrics is not None and (self.metrics.fed or self.window is None):
            numbers |= self.metrics.compute(prefix, means)
        elif self.must_feed and self.metrics is not None:
            fix = "self.minimize(StepOutput(loss, output, target)), or self.compute_gradients(window)"
            raise self.metrics.unfed("no update gave an output and a target", fix=fix)
        return numbers

    def begin_at(self, tree: dict[str, Any]) -> None:
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
            self._epoch.drop(name for name, kind in self._kinds.items() if kind == PROBED)
        if self.metrics is None:
            reduce_to_rank0(world, [self._epoch])
        else:
            reduce_to_rank0(world, [self._epoch, self.metrics], device=self.metrics.device)

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
        return {**self._epoch.state_dict(), "metrics": metrics, "probed": values_of(self._probed)}

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        """Load saved sums."""
        check_form(tree, sums=is_numbers, counts=is_numbers, probed=is_numbers)
        if negative := [name for name, number in tree["counts"].items() if number < 0]:
            raise FormError(f"the count of {negative[0]!r} is negative")
        self._epoch.load_state_dict(tree)
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
