"""Metrics: functions of (output, target), objects with `update, compute, reset`, and numbers derived from numbers."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any
from warnings import warn

import torch
from torch import Tensor

from trainwright.core.checks import check_form, check_whole, is_dict, is_number
from trainwright.core.errors import CheckpointError, SettingError, message
from trainwright.core.records import SumLoss
from trainwright.core.rng import unmoved
from trainwright.core.suggestions import check_name, did_you_mean
from trainwright.core.trees import detached, tensors_in
from trainwright.metrics.totals import Reading, Total, read_totals
from trainwright.protocols import Metric
from trainwright.update.losses import shapes_of

if TYPE_CHECKING:
    from trainwright.distributed.world import World

__all__ = ["Derived", "Meters", "MetricFunction", "Reading", "Total", "accuracy", "top_k"]

MetricFunction = Callable[[Any, Any], Any]
"""`fn(output, target)` returns a mean over rows, one value per row, `MeanLoss(value, count)` or
`SumLoss(total, count)`."""

IGNORED = -100
"""The class number of targets that do not count, as in torch's cross entropy."""

_NO_NUMBERS: Mapping[str, float] = {}


def accuracy(output: Tensor, target: Tensor) -> SumLoss:
    """Return hits and counted targets, as a `SumLoss`: the share of right classes.

    `output` (N, C) or (N, C, d...) holds a score per class, `target` (N) or (N, d...) class numbers; targets of -100
    are not counted. The largest score is the guess. With one class, `output` (N), (N, 1) or (N, 1, d...) is a logit,
    positive where the guess is yes, and `target`, of the same number of elements, is yes above 0.5; all are counted.
    """
    if output.dim() == 1 or output.shape[1] == 1:
        if output.numel() != target.numel():
            raise _misfit("accuracy", output, target)
        hits = (output > 0).flatten() == (target > 0.5).flatten()
        return SumLoss(hits if len(hits) == len(output) else hits.count_nonzero(), len(hits))
    _check_classes("accuracy", output, target)
    return _counted(output.argmax(1) == target, target)


def top_k(k: int) -> Callable[[Tensor, Tensor], SumLoss]:
    """Return a metric: the share of targets that are among the `k` largest scores; shapes and -100 as in `accuracy`."""
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
class Derived:
    """A number of the other numbers, e.g. `Derived(lambda n: math.exp(n["loss"]))` for perplexity.

    `fn` gets all numbers of the same evaluation, and those derived before it, under their names without prefix.
    An overflow gives infinity.
    """

    fn: Callable[[Mapping[str, float]], float]

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise SettingError(f"Derived({self.fn!r})", fix='Derived(lambda numbers: math.exp(numbers["loss"]))')


class Meters:
    """The metrics of one evaluation: their sums on the output's device, read back only by `compute` and `errors`.

    Metric objects run on a copy of their own. With `spread=True` squares are summed too, for `errors`.
    """

    def __init__(
        self,
        metrics: Mapping[str, MetricFunction | Metric | Derived],
        *,
        spread: bool = False,
        looked_at: set[str] | None = None,
    ) -> None:
        """`looked_at`: the metrics whose first batch is no longer looked at for a count in the place of a mean."""
        self._looked_at = set(metrics) if looked_at is None else looked_at
        self._functions: list[tuple[str, MetricFunction, Total]] = []
        self._objects: dict[str, Any] = {}
        self._derived: dict[str, Derived] = {}
        self._rows = 0
        self._placed = False
        self._mergeable = False
        self.device: torch.device | None = None
        """Where the outputs lie that objects have read; None before."""
        for name, metric in metrics.items():
            check_name(name)
            if isinstance(metric, Derived):
                self._derived[name] = metric
            elif _is_object(name, metric):
                self._objects[name] = copy.deepcopy(metric)
            else:
                self._functions.append((name, _checked_function(name, metric), Total(spread=spread)))
        self._labels = {name: f"metric {name!r}" for name in metrics}
        self.names: tuple[str, ...] = tuple(metrics)
        """The names, as given."""
        self.reads_output = bool(self._functions or self._objects)
        """Whether any metric reads outputs and targets."""
        self.reset()

    @property
    def fed(self) -> bool:
        """Whether there is something to compute: rows have been taken in since the last `reset`, or none are read."""
        return self._rows > 0 or not self.reads_output

    def update(self, output: Any, target: Any, rows: int) -> None:
        """Take in one batch of `rows` rows; nothing is read back, and a batch without rows is passed over.

        Metrics get detached tensors: an object that stores what it is given would hold the graph of every batch.
        """
        if not rows or not self.reads_output:
            return
        if output is None or target is None:
            raise self._unfed("output" if output is None else "target")
        if type(output) is not Tensor or output.requires_grad:
            output = detached(output)
        if type(target) is not Tensor or target.requires_grad:
            target = detached(target)
        if torch.is_grad_enabled():
            with torch.no_grad():
                self._update(output, target, rows)
        else:
            self._update(output, target, rows)

    def compute(self, prefix: str = "", numbers: Mapping[str, float] = _NO_NUMBERS) -> dict[str, float]:
        """Return every metric as `prefix` + name, in the order given; everything is read back at once.

        `numbers` are the other numbers of the evaluation, by name without prefix; only `Derived` reads them.
        """
        totals = {name: total for name, _, total in self._functions}
        readings = read_totals(totals | {name: self._computed(name) for name in self._objects})
        known = _Numbers(numbers)
        known.update((name, reading.value) for name, reading in readings.items())
        for name, derived in self._derived.items():
            known[name] = _derive(name, derived, known)
        return {prefix + name: known[name] for name in self.names}

    def errors(self, prefix: str = "") -> dict[str, float]:
        """Return the standard error of each metric that gave one value per row; empty without `spread`."""
        readings = read_totals({name: total for name, _, total in self._functions})
        return {prefix + name: reading.error for name, reading in readings.items() if reading.error is not None}

    def reset(self) -> None:
        """Forget every batch."""
        self._rows = 0
        for _, _, total in self._functions:
            total.reset()
        for metric in self._objects.values():
            metric.reset()

    def state_dict(self) -> dict[str, Any]:
        """The sums so far; of an object without a `state_dict` of its own its attributes."""
        totals = {name: total.state_dict() for name, _, total in self._functions}
        objects = {name: self._object_state(name) for name in self._objects}
        return {"rows": self._rows, "totals": totals, "objects": objects}

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Take over saved sums of the same metrics."""
        check_form(tree, rows=is_number, totals=is_dict, objects=is_dict)
        mine = ({name for name, _, _ in self._functions}, set(self._objects))
        saved = (set(tree["totals"]), set(tree["objects"]))
        if mine != saved:
            raise CheckpointError(
                "the checkpoint holds sums of other metrics",
                have=", ".join(sorted(saved[0] | saved[1])),
                want=", ".join(sorted(mine[0] | mine[1])),
            )
        from trainwright.metrics.objects import load_object

        self._rows = tree["rows"]
        for name, _, total in self._functions:
            total.load_state_dict(tree["totals"][name])
        for name, metric in self._objects.items():
            load_object(metric, tree["objects"][name])

    def make_mergeable(self) -> None:
        """Refuse, before anything is taken in, an object that does not add up over processes: SettingError.

        One that would do so by itself in `compute` does it no more.
        """
        from trainwright.metrics.reduce import check_mergeable, keep_to_itself

        for name, metric in self._objects.items():
            keep_to_itself(metric)
            check_mergeable(name, metric, partial(self._object_state, name))
        self._mergeable = True

    def sent(self) -> dict[str, Any]:
        """What the meters of another process need, to `take` it in."""
        if not self._mergeable:
            self.make_mergeable()
        return self.state_dict()

    def take(self, each: Sequence[Mapping[str, Any]]) -> None:
        """Take in, in their order, what other meters have `sent` of the same metrics."""
        from trainwright.metrics.objects import peers
        from trainwright.metrics.reduce import merge_objects

        each = [sent for sent in each if sent["rows"]]
        self._rows += sum(sent["rows"] for sent in each)
        for name, _, total in self._functions:
            for sent in each:
                other = Total()
                other.load_state_dict(sent["totals"][name])
                total.merge(other)
        for name, metric in self._objects.items() if each else ():
            merge_objects(metric, peers(metric, [sent["objects"][name] for sent in each]))

    def merge(self, world: World) -> None:
        """Add what all processes have taken in up into the first one's; the others' have nothing from then on.

        For all processes alike, in one gathering. The first one's `compute` then gives the numbers of all.
        """
        if world.size == 1:
            return
        from trainwright.distributed.packing import packed, unpacked

        each = world.gather(packed(self.sent()))
        if not world.is_main:
            self.reset()
            return
        self.take([unpacked(data, self.device) for data in each[1:]])

    def _update(self, output: Any, target: Any, rows: int) -> None:
        if self._objects and not self._placed:
            self._place(output)
        self._rows += rows
        for name, function, total in self._functions:
            result = function(output, target)
            if name not in self._looked_at:
                self._looked_at.add(name)
                _warn_of_count(name, function, result, output, target)
            total.take(result, rows, self._labels[name])
        for name, metric in self._objects.items():  # noqa: B007  (the note of an error reads `name` from this frame)
            metric.update(output, target)

    def _place(self, output: Any) -> None:
        """Move the objects to where the outputs lie."""
        self._placed = True
        tensor = next(tensors_in(output), None)
        self.device = None if tensor is None else tensor.device
        for name, metric in self._objects.items():
            if tensor is not None and callable(getattr(metric, "to", None)):
                moved = metric.to(tensor.device)
                self._objects[name] = metric if moved is None else moved

    def _computed(self, name: str) -> Total:
        """Return an object's number as a total; NaN where it has seen nothing."""
        total = Total()
        if self._rows:
            result = self._objects[name].compute()
            if not isinstance(result, Real) and not (isinstance(result, Tensor) and result.numel() == 1):
                from trainwright.metrics.objects import several

                raise several(name, self._objects[name], result)
            total.add(result if isinstance(result, Tensor) else float(result), 1)
        return total

    def _object_state(self, name: str) -> Any:
        from trainwright.metrics.objects import state_of

        return state_of(name, self._objects[name], fed=self._rows > 0)

    def _unfed(self, missing: str) -> SettingError:
        names = [name for name in self.names if name not in self._derived]
        return SettingError(
            f"metrics {', '.join(map(repr, names))} read an output and a target, and the step gave no {missing}",
            fix="return StepOutput(loss, output, target)   # from training_step or validation_step",
        )


class _Numbers(dict[str, float]):
    """Numbers by name, with help for a name that is not there."""

    def __missing__(self, name: str) -> float:
        raise SettingError(
            f"a derived metric asks for {name!r}.{did_you_mean(name, self)}", have=", ".join(self) or "no numbers"
        )


def _derive(name: str, derived: Derived, numbers: Mapping[str, float]) -> float:
    try:
        result = derived.fn(numbers)
    except OverflowError:
        return math.inf
    except Exception as error:
        error.add_note(f"trainwright: in the derived metric {name!r}, of {dict(numbers)}")
        raise
    if not isinstance(result, Real):
        raise SettingError(f"derived metric {name!r} gave {result!r}", want="one number")
    return float(result)


def _is_object(name: str, metric: Any) -> bool:
    if isinstance(metric, type):
        raise SettingError(
            f"metric {name!r} is the class {metric.__name__}",
            want="a function of (output, target), or an object",
            fix=f"{metric.__name__}()",
        )
    return all(callable(getattr(metric, method, None)) for method in ("update", "compute", "reset"))


def _checked_function(name: str, metric: Any) -> MetricFunction:
    if not callable(metric):
        raise SettingError(
            f"metric {name!r} is {metric!r}",
            want="a function of (output, target), an object with update, compute and reset, or Derived(fn)",
            fix='metrics={"accuracy": accuracy}',
        )
    try:
        signature = inspect.signature(metric)
    except (TypeError, ValueError):  # a function in C that does not tell its arguments
        return metric  # type: ignore[no-any-return]
    try:
        signature.bind(None, None)
    except TypeError as error:
        called = getattr(metric, "__name__", type(metric).__name__)
        raise SettingError(
            f"metric {name!r}: {called}{signature} cannot be called with (output, target): {error}",
            want="a function of (output, target)",
            fix=f"call it, if it makes the metric: {called}(5)" if metric is top_k else "lambda output, target: ...",
        ) from None
    return metric  # type: ignore[no-any-return]


def _warn_of_count(name: str, function: MetricFunction, result: Any, *given: Any) -> None:
    """Warn of a metric that returns a count for a batch: a whole number above 1 that adds up over its rows.

    A mean, such as a perplexity or an absolute error, may be a whole number too; it does not add up.
    """
    value = _whole_number(result)
    if value is None or not all(isinstance(one, Tensor) and one.ndim and len(one) > 1 for one in given):
        return
    rows = len(given[0])
    if len(given[1]) != rows:
        return
    splits = [(slice(rows // 2), slice(rows // 2, None)), (slice(0, None, 2), slice(1, None, 2))]
    try:
        with unmoved():
            parts = [[float(function(*(one[part] for one in given))) for part in split] for split in splits]
    except Exception:  # a metric of the user's own may ask for the whole batch: that is no mistake
        return
    # Both parts count something in one split at least: a maximum would add up where the other part is 0.
    if all(sum(pair) == value for pair in parts) and any(min(pair) > 0 for pair in parts):
        warn(
            message(
                f"metric {name!r} returned {value:g} for a batch of {rows} rows: a count or a sum, not a mean",
                have="numbers that are averaged over the batches, by their rows",
                want="a mean over the rows, one value per row, MeanLoss(value, count) or SumLoss(total, count)",
                fix="return SumLoss(total, len(target)), or the mean",
            ),
            stacklevel=2,
        )


def _whole_number(result: Any) -> float | None:
    """A result of one number that is whole and above 1, read back; else None."""
    if isinstance(result, Tensor):
        if result.numel() != 1 or result.dtype is torch.bool or result.is_meta or result.is_complex():
            return None
    elif not isinstance(result, Real):
        return None
    value = float(result)
    return value if value > 1 and value.is_integer() else None


def _counted(hits: Tensor, target: Tensor) -> SumLoss:
    """Return hits and what counts, per row while there is one target per row."""
    if hits.dim() > 1:
        return SumLoss(hits.count_nonzero(), (target != IGNORED).count_nonzero())
    return SumLoss(hits, target != IGNORED)


def _check_classes(name: str, output: Tensor, target: Tensor) -> None:
    if output.dim() == 2:  # nearly always
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
