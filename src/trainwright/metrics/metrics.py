"""The metrics `accuracy`, `top_k`, `over_all` (a function of all rows) and `Derived` (a function of other numbers)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trainwright.core.checks import check_whole, name_of
from trainwright.core.errors import SettingError
from trainwright.core.records import SumLoss
from trainwright.core.trees import shapes_of

MetricFunction = Callable[[Any, Any], Any]
"""`fn(output, target)` returns a mean over rows, one value per row, `MeanLoss(value, count)`, `SumLoss(total, count)`,
or a dict of these."""

IGNORED = -100
"""The class index of ignored targets, as in torch's cross entropy."""


def accuracy(output: Tensor, target: Tensor) -> SumLoss:
    """Accuracy: return the correct predictions and the counted targets of a batch, as a `SumLoss`.

    With several classes, the prediction is the class with the largest score. With one output, the prediction is
    positive if the logit is above 0, and the target is positive if it is above 0.5; all elements are counted.

    Args:
        output: Scores of shape (N, C) or (N, C, d...), or logits of shape (N), (N, 1) or (N, 1, d...).
        target: Class indices of shape (N) or (N, d...); -100 is ignored. For logits, as many elements as `output`.
    """
    if output.dim() == 1 or output.shape[1] == 1:
        if output.numel() != target.numel():
            raise _misfit("accuracy", output, target)
        hits = (output > 0).flatten() == (target > 0.5).flatten()
        return SumLoss(hits if len(hits) == len(output) else hits.count_nonzero(), len(hits))
    _check_classes("accuracy", output, target)
    return _counted(output.argmax(1) == target, target)


def top_k(k: int) -> Callable[[Tensor, Tensor], SumLoss]:
    """Return a metric: the fraction of targets that are among the `k` classes with the largest scores.

    Shapes are those of `accuracy` with several classes; the target -100 is ignored.

    Args:
        k: The number of classes.
    """
    check_whole(k, f"top_k({k!r})", what="a whole number of classes", fix="top_k(5)")

    def metric(output: Tensor, target: Tensor) -> SumLoss:
        _check_classes(metric.__name__, output, target)
        if k > output.shape[1]:
            raise SettingError(f"top_k({k}): the output scores {output.shape[1]} classes only", where=True)
        hits = (output.topk(k, dim=1, sorted=False).indices == target.unsqueeze(1)).any(1)
        return _counted(hits, target)

    metric.__name__ = f"top_{k}"
    return metric


@dataclass(frozen=True, slots=True)
class OverAll:
    """A metric computed from all rows of an evaluation at once, such as an area under a curve; made by `over_all`."""

    fn: MetricFunction

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise SettingError(f"over_all({self.fn!r})", fix="over_all(lambda outputs, targets: ...)")
        check_takes_two(self.fn, "over_all")


def over_all(fn: MetricFunction) -> OverAll:
    """Return a metric: the result of `fn(outputs, targets)`, called once per evaluation with CPU tensors of all rows.

    It is computed in evaluations only; training stores no rows. Outputs and targets of all batches are copied to the
    host. The copies take rows x (output + target) of memory during the pass, on rank 0 those of all ranks. With several
    processes, rank 0 calls `fn` and broadcasts the result. Rows are in the order of the data, so that the result does
    not depend on the number of processes.

    Args:
        fn: A function that returns a number or a dict of numbers.
    """
    return OverAll(fn)


@dataclass(frozen=True, slots=True)
class Derived:
    """A number computed from other numbers, such as `Derived(lambda n: math.exp(n["loss"]))` for the perplexity.

    An OverflowError gives infinity.

    Args:
        fn: A function of a dict with all numbers of the pass, including earlier derived ones, by name without prefix.
    """

    fn: Callable[[Mapping[str, float]], float]

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise SettingError(f"Derived({self.fn!r})", fix='Derived(lambda numbers: math.exp(numbers["loss"]))')


def check_takes_two(function: Any, name: str) -> None:
    """Raise SettingError for a function that cannot be called with (output, target)."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function in C without a signature
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        called = name_of(function)
        raise SettingError(
            f"{name}: {called}{signature} cannot be called with (output, target): {error}",
            want="a function of (output, target)",
            fix=f"call it, if it makes the metric: {called}(5)" if function is top_k else "lambda output, target: ...",
        ) from None


def _counted(hits: Tensor, target: Tensor) -> SumLoss:
    """Return hits and counted targets, per row if there is one target per row, else summed."""
    if hits.dim() > 1:
        return SumLoss(hits.count_nonzero(), (target != IGNORED).count_nonzero())
    return SumLoss(hits, target != IGNORED)


def _check_classes(name: str, output: Tensor, target: Tensor) -> None:
    if output.dim() == 2:  # the usual case
        fits = target.shape == output.shape[:1]
    else:
        fits = output.dim() > 1 and target.shape == output.shape[:1] + output.shape[2:]
    if not fits or target.is_floating_point():
        raise _misfit(name, output, target)


def _misfit(name: str, output: Tensor, target: Tensor) -> SettingError:
    fix = f"lambda output, target: {name}(...)   # bring them into these shapes"
    if output.shape == target.shape:
        fix = f"lambda output, target: {name}(output, target.argmax(1))   # where targets are one-hot or probabilities"
    elif output.dim() > 2 and target.shape == output.shape[:-1]:
        fix = f"lambda output, target: {name}(output.movedim(-1, 1), target)"
    return SettingError(
        f"{name} cannot compare these shapes",
        have=shapes_of(output, target),
        want="scores (N, C, d...) and class numbers (N, d...)",
        fix=fix,
    )
