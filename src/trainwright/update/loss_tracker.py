"""`LossTracker`: records the return of each step, and computes the arguments of `backward`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from trainwright.core import host_reads
from trainwright.core.errors import SettingError, message
from trainwright.core.host_reads import as_count
from trainwright.core.records import Count, MeanLoss, StepOutput, SumLoss
from trainwright.core.suggestions import check_name
from trainwright.core.torch_private import nll_total_weight, version_of
from trainwright.metrics.metric_set import MetricSet
from trainwright.precision.base import LossScale
from trainwright.update.losses import CountObserver, StepLoss, read_step_loss
from trainwright.update.running_means import RunningMeans, Term, mean_of, number
from trainwright.update.trainer_like import Hooks
from trainwright.update.window import Window, find_rows, one_for_zero, weighted_value

MOST_GRAD_TENSORS = 64
"""The most weight tensors that are stored for reuse."""

BackwardArgs = tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]
"""The arguments of `torch.autograd.backward`: losses, and the `grad_tensors` that weight them."""


class LossTracker(RunningMeans):
    """Determines count and weight of each loss and records it, in training, evaluations and probes.

    In training: step -> `backward_args` -> `record` -> `Window.weight` -> `grad_tensor` (weight times loss scale).
    `record` takes the count of the loss from the step; else from an overridden `count(batch)`; else from torch's
    divisor in the graph of the loss; else from the rows. In the usual case, a plain tensor from the only micro-batch,
    the weight is 1, and `backward_args` calls neither `record` nor `Window.weight`. An evaluation uses a separate
    tracker, without weights.
    """

    has_loss = False
    """Whether a loss of the current window was recorded."""
    recording = True
    """Whether returns of steps are recorded; False in a second pass over a window, and for dummies."""
    batch: Any = None
    """The current host batch of an evaluation."""
    window_loss: Any = None
    """The sum of the weighted losses of this pass, if user code may read it."""
    count_source: CountObserver | None = None
    """Finds the count of a mean in an evaluation, where losses have no graph."""
    _scaler: LossScale | None = None

    def __init__(self, metrics: MetricSet | None, hooks: Hooks) -> None:
        super().__init__(metrics)
        self._hooks = hooks
        self.count_by_graph = nll_total_weight
        """Returns the count from the graph of a torch loss."""
        self._sums_losses = hooks.has_custom_update or hooks.overrides_compute_gradients
        self._grad_tensors: dict[tuple[Any, ...], Tensor] = {}
        """By weight, dtype and device."""

    def bind(self, scaler: LossScale | None) -> None:
        """Set the loss scale of a run: a factor of every weight."""
        self._scaler = scaler

    def begin(self, window: Window) -> None:
        """Start the update of a window."""
        if self.unread:  # logged in `after_update`, or probed
            self.read()
        self.window, self._epoch_begun, self.recording = window, True, True
        self.has_loss, self.loss = False, math.nan
        self.terms, self._probed = self._probed, {}

    def start_extra_pass(self) -> None:
        """Start another pass over the window, as SAM and LBFGS do; only the first pass is recorded."""
        assert self.window is not None
        self.window.restart()
        self.recording = False

    def backward_args(self, returned: Any) -> BackwardArgs:
        """Record the return of a training step; return the arguments of `backward`: the loss and its weight."""
        window = self.window
        assert window is not None
        if not window.is_single or type(returned) is not Tensor or returned.ndim or self.must_feed:
            step_loss = self.record(returned)
            assert step_loss is not None
            return (step_loss.loss,), (self.grad_tensor(step_loss.loss, step_loss.weight),)
        if self.recording:  # the usual case: the mean of the only micro-batch, with weight 1
            count = None if self._hooks.overrides_count else self.count_by_graph(returned)
            self.unread.append(("loss", returned, self.count if count is None else count, False))
            self.has_loss = True
        if self._sums_losses:
            self.window_loss = returned
        window.position += 1
        return (returned,), (None if self._scaler is None else self.grad_tensor(returned, 1.0),)

    def record(self, returned: Any) -> StepLoss | None:
        """Record the return of the step that has just run; return its loss, in training with its weight.

        Used in training, evaluations and probes. Returns None if a validation step has returned no loss, or if the loss
        was added directly.
        """
        window = self.window
        if type(returned) is StepOutput:
            if self.metrics is not None and self.recording:
                rows = self._hooks.rows(self.batch) if window is None else window.rows[window.position + 1]
                if window is not None and window.batches[window.position + 1] is None:  # fit(None): no batch has rows
                    rows = find_rows(returned.output) or rows
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
            self._set_weight(step_loss, window)
        return step_loss

    def _add_at_once(self, returned: Any) -> bool:
        """Read and add a CPU loss of an evaluation directly; return whether that was possible.

        The read does not wait, and the next loss can reuse the memory of this one.
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
            self._sums.add("loss", value if is_sum else value * count, count)
        return True

    def _add(self, step_loss: StepLoss) -> None:
        """Record a loss and its named parts; the count of a plain sum is the rows of its batch."""
        is_sum, count = step_loss.is_sum, self._rows if step_loss.count is None else step_loss.count
        self.has_loss = True
        self.unread.append(("loss", step_loss.loss.detach(), count, is_sum))
        if step_loss.named is not None:
            self.unread += [(name, value, count, is_sum) for name, value in self._claimed(step_loss.named)]

    def _set_weight(self, step_loss: StepLoss, window: Window) -> None:
        """Advance the window to the micro-batch whose step has just run, and set the weight of its loss."""
        window.position += 1
        step_loss.count = None if step_loss.count is None else as_count(step_loss.count)
        step_loss.weight = window.weight(step_loss.count, is_sum=step_loss.is_sum)
        if self._sums_losses:
            value = weighted_value(step_loss.loss, step_loss.weight)
            self.window_loss = self.window_loss + value if window.position else value

    def grad_tensor(self, loss: Tensor, weight: Count) -> Tensor | None:
        """Return weight times loss scale, for `backward`, as a tensor like the loss; None for 1."""
        weight = weight if self._scaler is None else weight * self._scaler.scale
        if isinstance(weight, Tensor):
            return weight.to(loss.device, loss.dtype)
        if weight == 1.0:
            return None
        made = self._grad_tensors.get((weight, loss.dtype, loss.device))
        if made is None or version_of(made):  # a hook may have written to it
            made = self._make_grad_tensor(loss, weight)
        return made

    def _make_grad_tensor(self, loss: Tensor, weight: float) -> Tensor:
        """Return a new weight tensor and store it for reuse, since its copy from the host blocks."""
        made = torch.full_like(loss, weight)
        if len(self._grad_tensors) >= MOST_GRAD_TENSORS:
            self._grad_tensors.clear()
        if type(loss) is Tensor:
            self._grad_tensors[weight, loss.dtype, loss.device] = made
        return made

    @property
    def count(self) -> Count:
        """The count on the host of the micro-batch at `position + 1`, which runs now or has just run.

        Before the first micro-batch and after the last one: the rows of the window.
        """
        window, counter = self.window, self._hooks.count
        if window is None:
            return self._hooks.rows(self.batch) if counter is None else counter(self.batch)
        index = window.position + 1
        if not window.begun or index == len(window.batches):  # before the first micro-batch, or after the last
            return sum(window.rows)
        if window.counts is not None:
            return window.counts[index]
        return window.rows[index] if counter is None else counter(window.batches[index])

    def _count_of_mean(self, loss: Tensor) -> Count:
        """Return the count of a mean: torch's divisor if it is known, else that of `count(batch)`, else the rows."""
        if self.count_source is not None:
            found = self.count_source.count_of(loss)
        else:
            found = None if self._hooks.overrides_count else self.count_by_graph(loss)
        return self.count if found is None else found

    @property
    def _rows(self) -> int:
        """The rows of the batch whose step runs now or has just run."""
        window = self.window
        return self._hooks.rows(self.batch) if window is None else window.rows[window.position + 1]

    def check_fed(self, returned: Any) -> None:
        """Raise SettingError for a step that returns no output although metrics read outputs."""
        has_output = type(returned) is StepOutput and returned.output is not None
        if not has_output and self.metrics is not None and self.metrics.reads_output:
            raise self.metrics.missing_output(f"the step returned {type(returned).__name__}")

    def log(self, name: str, value: float | Tensor, count: Count | None) -> None:
        """Record a number that user code logs; `count` defaults to that of the current batch."""
        check_name(name, "logged")
        self._claim(name, "logged number")
        if not self._epoch_begun and self.batch is None:
            fix = f"self.log({name!r}, ...) in after_update(self), or self.print(...) here"
            raise SettingError(message(f"log({name!r}, ...) outside a step", want="a call from a step", fix=fix))
        if self.recording:
            self.unread.append((name, number(name, value), self.count if count is None else count, False))

    def record_minimized(self, returned: Any) -> StepLoss:
        """Record a loss given to `minimize`; the count of a mean defaults to the rows of the window."""
        assert self.window is not None
        rows = sum(self.window.rows)
        is_dummy = not rows and self.window.all_rows > 0  # all rows of the window are on other ranks
        if type(returned) is StepOutput:
            if self.metrics is not None and not is_dummy:  # the output may be of one batch of the window
                own = find_rows(returned.output)
                self.metrics.update(returned.output, returned.target, rows if own is None else own)
            returned = returned.loss
        step_loss = read_step_loss(returned)
        given = rows if step_loss.count is None or is_dummy else step_loss.count
        if step_loss.named is not None:
            self.unread += [(name, value, given, step_loss.is_sum) for name, value in self._claimed(step_loss.named)]
        if step_loss.count is not None and step_loss.is_sum:
            step_loss.weight = 1.0 / one_for_zero(as_count(step_loss.count))
        if is_dummy or not step_loss.is_sum:
            step_loss.count = given
        return step_loss

    def record_returned(self, returned: Any) -> None:
        """Record the return of a custom `update`: its loss, if no step has returned one, and other numbers."""
        rows = 0 if self.window is None else sum(self.window.rows)
        for name, value in (returned if isinstance(returned, dict) else {"loss": returned}).items():
            if name != "loss":
                check_name(name, "returned")
            if name != "loss" or not self.has_loss:
                self.unread.append((name, number(name, value), rows, False))
            self.has_loss = self.has_loss or name == "loss"

    def record_losses(self, name: str, terms: list[Term]) -> None:
        """Record the losses given to `minimize` under one name."""
        self.unread += [(name, *term) for term in terms]

    def record_sum(self, losses: list[list[Term]]) -> None:
        """Record the sum of the losses of several names as the loss of the window, if no step has returned one."""
        if self.has_loss:
            return
        self.has_loss = True
        if len(losses) == 1:
            self.record_losses("loss", losses[0])
            return
        assert self.window is not None
        self.record_losses("loss", [(sum(map(mean_of, losses)), sum(self.window.rows), False)])
