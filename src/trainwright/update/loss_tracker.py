"""Takes down the numbers of one loop: what steps, updates, probes and users give, with what each is a mean over."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from trainwright.core import host_reads
from trainwright.core.errors import SettingError, message
from trainwright.core.host_reads import host_number
from trainwright.core.records import Count, StepOutput, SumLoss
from trainwright.core.suggestions import check_name
from trainwright.core.torch_private import nll_total_weight, version_of
from trainwright.metrics.metric_set import MetricSet
from trainwright.precision.base import LossScale
from trainwright.update.hooks import Hooks
from trainwright.update.losses import CountObserver, StepLoss, read_step_loss
from trainwright.update.numbers import Numbers, Told, mean_of, number
from trainwright.update.window import Window, find_rows, inverse, rows_of, weighed

MANY = 64
"""Root gradients that are kept for reuse."""

Roots = tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]
"""The arguments of `torch.autograd.backward`: losses, and the root gradient of each."""


class Ledger(Numbers):
    """Takes down what the steps and updates of a loop give, each number with its count."""

    must_feed = False
    """Whether training steps are the only ones that can feed the metrics: then one that does not is refused."""
    noted = False
    """Whether a loss of the window in hand was taken down."""
    _within = False
    """Whether an epoch is in hand, so that a number that is logged has one to belong to."""
    count_source: CountObserver | None = None
    """What finds the count of a mean in an evaluation, where no gradient holds it."""

    def __init__(self, meters: MetricSet | None = None, hooks: Hooks | None = None) -> None:
        super().__init__(meters)
        self.window: Window | None = None
        """The window in hand in training; None in an evaluation."""
        self.batch: Any = None
        """The host batch in hand in an evaluation."""
        self._counter = None if hooks is None else hooks.count
        self._trusts_counter = hooks is not None and hooks.counts_itself
        self._rows_of = rows_of if hooks is None else hooks.rows
        self.told_by_torch = nll_total_weight
        """What finds the count in a loss that torch has made."""
        self.noting = True
        """Whether what steps return is taken down: not in a second pass over the same window."""
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
        if self._entries:  # what `after_update` has logged and no record has told
            self.close()
        self.window, self._within = window, True
        self.noted = False
        self.loss = math.nan
        if self.values or self._probed:
            self.values, self._earlier, self._probed = self._probed, {}, {}
        self.noting = True

    def begin_again(self) -> None:
        """Start a further pass over the window; only the first one is recorded (SAM and LBFGS run several)."""
        assert self.window is not None
        self.window.begin()
        self.noting = False

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
        """Record what a training step returned; return its loss and the root gradient for `backward`."""
        window = self.window
        assert window is not None
        if window.is_lone and type(returned) is Tensor and returned.ndim == 0 and not self.must_feed:
            window.position += 1
            if self.noting:
                found = None if self._trusts_counter else self.told_by_torch(returned)
                count = self._default_count() if found is None else found
                self._entries.append(("loss", returned, count, False))
                self.noted = True
            if self.sums_losses:
                self.window_loss = returned
            return (returned,), (None if self._scaler is None else self.root_gradient(returned, 1.0),)
        step_loss = self.record(returned)
        return (step_loss.loss,), (self.root_gradient(step_loss.loss, step_loss.weight),)

    def record(self, returned: Any) -> StepLoss:
        """Record the return of the training step of the next micro-batch; return its loss, with count and weight."""
        window = self.window
        assert window is not None
        window.position = position = window.position + 1
        if type(returned) is StepOutput:
            if self.meters is not None and self.noting:
                self.meters.update(returned.output, returned.target, window.rows[position])
            returned = returned.loss
        elif self.must_feed:
            self.check_fed(returned)
        step_loss = read_step_loss(returned)
        count = step_loss.count
        if count is None and not step_loss.is_sum:
            count = self._count_in_training(step_loss.loss)
        self._note(step_loss, window.rows[position] if count is None else count)
        from_step = window.counts is None or count is not window.counts[position]
        step_loss.count = None if count is None else host_number(count)
        step_loss.weight = window.weight(step_loss.count, is_sum=step_loss.is_sum, from_step=from_step)
        if self.sums_losses:
            value = weighed(step_loss.loss, step_loss.weight)
            self.window_loss = self.window_loss + value if position else value
        return step_loss

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
            if self.meters is not None and not stands_in:  # one batch of the window, perhaps
                own = find_rows(returned.output)
                self.meters.update(returned.output, returned.target, rows if own is None else own)
            returned = returned.loss
        step_loss = read_step_loss(returned)
        given = rows if step_loss.count is None or stands_in else step_loss.count
        if step_loss.named is not None:
            self._entries += [(name, value, given, step_loss.is_sum) for name, value in self._claimed(step_loss.named)]
        if step_loss.count is not None and step_loss.is_sum:
            step_loss.weight = inverse(host_number(step_loss.count))
        if stands_in or not step_loss.is_sum:
            step_loss.count = given
        return step_loss

    def check_fed(self, returned: Any) -> None:
        """Refuse what a step returned where metrics read outputs and it holds none."""
        fed = type(returned) is StepOutput and returned.output is not None
        if not fed and self.meters is not None and self.meters.reads_output:
            fix = "return StepOutput(loss, output, target) from the step"
            raise self._unfed(f"the step returned {type(returned).__name__}", fix=fix)

    def note(self, returned: Any) -> None:
        """Take down what an evaluation step returned for the batch in hand."""
        if not self.noting:
            return
        if type(returned) is StepOutput:
            if self.meters is not None:
                self.meters.update(returned.output, returned.target, self._rows_of(self.batch))
            returned = returned.loss
            if returned is None:
                return
        if type(returned) is SumLoss and type(returned.count) is int:  # what the default step returns, nearly always
            step_loss = StepLoss(returned.total, returned.count, True)
        else:
            step_loss = read_step_loss(returned)
        loss, count = step_loss.loss, step_loss.count
        if count is None:
            count = self._rows_of(self.batch) if step_loss.is_sum else self._count_of(loss)
        if step_loss.named is None and type(count) is int and count > 0 and loss.is_cpu and loss.ndim == 0:
            value = host_reads.host_value(loss)  # there is nothing to wait for, and the next loss gets its memory
            self._sums["loss"] = self._sums.get("loss", 0.0) + (value if step_loss.is_sum else value * count)
            self._counts["loss"] = self._counts.get("loss", 0.0) + count
        else:
            self._note(step_loss, count)

    def note_returned(self, returned: Any) -> None:
        """Take down what an `update` returned: a loss where no step of this window gave one, and other numbers."""
        rows = 0 if self.window is None else sum(self.window.rows)
        for name, value in (returned if isinstance(returned, dict) else {"loss": returned}).items():
            if name != "loss":
                check_name(name, "returned")
            if name != "loss" or not self.noted:
                self._entries.append((name, number(name, value), rows, False))
            self.noted = self.noted or name == "loss"

    def note_told(self, name: str, told: list[Told]) -> None:
        """Take down the losses that `minimize` was given under one name."""
        self._entries += [(name, *one) for one in told]

    def note_sum(self, told: list[list[Told]]) -> None:
        """Take down the sum of the losses of several names as the window's loss, where no step gave one."""
        if self.noted:
            return
        self.noted = True
        if len(told) == 1:
            self.note_told("loss", told[0])
            return
        assert self.window is not None
        self.note_told("loss", [(sum(mean_of(each) for each in told), sum(self.window.rows), False)])

    def note_probed(self, numbers: Any, what: str) -> None:
        """Take down what a probe returned: a dict of numbers, or nothing."""
        if numbers is None:
            return
        if not isinstance(numbers, dict):
            have = f"a {type(numbers).__name__}"
            raise SettingError(message(f"{what} returned {have}", want="a dict of numbers, or None", where=False))
        for name in numbers:
            check_name(name, "probed")
            self._claim(name, "probed number")
        read = dict(
            zip(numbers, host_reads.read([number(name, value) for name, value in numbers.items()]), strict=True)
        )
        self._probed |= read
        self._entries += [(name, value, 1, False) for name, value in read.items()]

    def log(self, name: str, value: float | Tensor, count: Count | None) -> None:
        """Take down a number of the user's own; `count` defaults to that of the batch in hand."""
        check_name(name, "logged")
        self._claim(name, "logged number")
        if not self._within and self.batch is None:
            fix = f"self.log({name!r}, ...) in after_update(self), or self.print(...) here"
            raise SettingError(message(f"log({name!r}, ...) outside a step", want="a call from a step", fix=fix))
        if self.noting:
            self._entries.append((name, number(name, value), self.count if count is None else count, False))

    def means(self, prefix: str = "") -> dict[str, float]:
        """Return every mean since the last `reset`, metrics and derived numbers included; NaN over nothing.

        Metrics that only the steps of validation feed are left out of training's numbers.
        """
        self.close()
        means = {name: (self._sums.get(name, 0.0) / n if n else math.nan) for name, n in self._counts.items()}
        if self.meters is None or (self.window is not None and not self.meters.fed):
            if self.must_feed and self.meters is not None:
                fix = "self.minimize(StepOutput(loss, output, target)), or self.compute_gradients(window)"
                raise self._unfed("no update gave an output and a target", fix=fix)
            return {prefix + name: value for name, value in means.items()}
        return {prefix + name: value for name, value in means.items()} | self.meters.compute(prefix, means)

    def begin_at(self, tree: dict[str, Any]) -> None:
        """Go back to saved sums, and forget what was noted since."""
        self._entries, self._probed, self._earlier = [], {}, {}
        self.load_state_dict(tree)

    def reset(self) -> None:
        """Start new sums, of an epoch to come."""
        self._within = False
        super().reset()

    def state_dict(self) -> dict[str, Any]:
        """The running sums, and what probes have returned for the record of the update to come."""
        return super().state_dict() | {"probed": dict(self._probed)}

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        """Take over what was saved."""
        super().load_state_dict(tree)
        self._probed = dict(tree.get("probed", {}))

    def _unfed(self, why: str, *, fix: str) -> SettingError:
        names = [] if self.meters is None else list(self.meters.names)
        unfed = f"the metrics {', '.join(names)} are" if len(names) > 1 else f"metric {''.join(map(repr, names))} is"
        want = f"the output and target that the metric{'s read' if len(names) > 1 else ' reads'}"
        return SettingError(message(f"{unfed} never fed: {why}", want=want, fix=fix, where=False))

    def _count_in_training(self, loss: Tensor) -> Count:
        """Return the count of a mean: what torch divided by, else what `count` says, or rows."""
        found = None if self._trusts_counter else self.told_by_torch(loss)
        return self._default_count() if found is None else host_number(found)

    def _default_count(self) -> Count:
        window = self.window
        assert window is not None
        position = window.position
        if window.counts is not None:
            return window.counts[position]
        return window.rows[position] if self._counter is None else self._counter(window.batches[position])

    def _count_of(self, loss: Tensor) -> Count:
        """What a mean is over that did not tell: as in training, what torch divided by, else `count`."""
        found = None if self.count_source is None else self.count_source.count_of(loss)
        return self.count if found is None else found

    def _note(self, step_loss: StepLoss, count: Count) -> None:
        if not self.noting:
            return
        self._entries.append(("loss", step_loss.loss.detach(), count, step_loss.is_sum))
        self.noted = True
        if step_loss.named is not None:
            self._entries += [(name, value, count, step_loss.is_sum) for name, value in self._claimed(step_loss.named)]
