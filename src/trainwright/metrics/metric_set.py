"""The metrics of one pass: updated batch by batch, read once, saved, and merged over the ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from trainwright.core.errors import CheckpointError, SettingError
from trainwright.core.suggestions import check_name, did_you_mean
from trainwright.core.trees import detached
from trainwright.metrics.kinds import AllRows, FunctionMetric, PassMetric
from trainwright.metrics.metrics import Derived, OverAll, check_takes_two
from trainwright.metrics.totals import Total, read_totals

_NO_NUMBERS: Mapping[str, float] = {}


def check_metrics(metrics: Mapping[str, Any]) -> None:
    """Raise SettingError for reserved names, and for objects that are no metrics."""
    for name, metric in metrics.items():
        check_name(name)
        if isinstance(metric, type):
            raise SettingError(
                f"metric {name!r} is the class {metric.__name__}",
                want="a function of (output, target), or an object",
                fix=f"{metric.__name__}()",
            )
        if isinstance(metric, OverAll | Derived) or _is_object(metric):
            continue
        if not callable(metric):
            raise SettingError(
                f"metric {name!r} is {metric!r}",
                want="a function of (output, target), an object with update, compute and reset, over_all(fn), "
                "or Derived(fn)",
                fix='metrics={"accuracy": accuracy}',
            )
        check_takes_two(metric, f"metric {name!r}")


class MetricSet:
    """The metrics of one pass: a list of accumulators, and `Derived` numbers of their results.

    Sums stay on the device of the outputs; only `compute` and `errors` read them. Each set has its own copies of metric
    objects. With `training=True`, `over_all` functions are left out. With `spread=True`, squares are summed too, for
    `errors`.
    """

    def __init__(
        self,
        metrics: Mapping[str, Any],
        *,
        training: bool = False,
        complete: bool = True,
        spread: bool = False,
        checked: set[str] | None = None,
    ) -> None:
        """Make an accumulator for each metric, which `check_metrics` must accept.

        `complete`: whether the pass covers all data; otherwise `over_all` functions are not called and give NaN.
        `checked`: the functions whose first result was already checked for a count.
        """
        self._rows = 0
        self._metrics: list[PassMetric] = []
        self._derived: dict[str, Derived] = {}
        self._left_out = {name for name, metric in metrics.items() if training and isinstance(metric, OverAll)}
        self.names = tuple(name for name in metrics if name not in self._left_out)
        """The names of the metrics, without those left out."""
        checked = set(metrics) if checked is None else checked
        for name, metric in metrics.items():
            if isinstance(metric, Derived):
                self._derived[name] = metric
            elif isinstance(metric, OverAll):
                self._metrics += [] if training else [AllRows(name, metric.fn, complete=complete)]
            elif _is_object(metric):
                from trainwright.metrics.objects import ObjectMetric  # imported only if used

                self._metrics.append(ObjectMetric(name, metric))
            else:
                self._metrics.append(FunctionMetric(name, metric, names=metrics, checked=checked, spread=spread))
        self.reads_output = len(self._metrics) > 0
        """Whether any metric reads outputs and targets."""

    @property
    def can_compute(self) -> bool:
        """Whether results exist: there were rows since the last `reset`, or no metric reads rows."""
        return self._rows > 0 or not self.reads_output

    @property
    def device(self) -> torch.device | None:
        """The device of the outputs that metric objects have read; None before."""
        return next((metric.device for metric in self._metrics if metric.device is not None), None)

    def update(self, output: Any, target: Any, rows: int) -> None:
        """Add one batch of `rows` rows, without a read from the device; no-op for 0 rows.

        Metrics get detached tensors: otherwise an object that stores them would keep the graph of every batch.
        """
        if not rows or not self.reads_output:
            return
        if output is None or target is None:
            raise self.missing_output(f"the step gave no {'output' if output is None else 'target'}")
        if torch.is_grad_enabled():  # in training only: this check is cheaper than the context
            with torch.no_grad():
                self.update(output, target, rows)
            return
        output = output if type(output) is Tensor and not output.requires_grad else detached(output)
        target = target if type(target) is Tensor and not target.requires_grad else detached(target)
        self._rows += rows
        for metric in self._metrics:
            metric.update(output, target, rows)

    def missing_output(
        self, why: str, *, fix: str = "return StepOutput(loss, output, target) from the step"
    ) -> SettingError:
        """Return the error for metrics that read outputs and targets but do not get them."""
        several, names = len(self.names) > 1, ", ".join(map(repr, self.names))
        what = f"metrics {names} are never fed: {why}" if several else f"metric {names} is never fed: {why}"
        want = f"the output and target that the metric{'s read' if several else ' reads'}"
        return SettingError(what, want=want, fix=fix, where=False)

    def compute(self, prefix: str = "", numbers: Mapping[str, float] = _NO_NUMBERS) -> dict[str, float]:
        """Return the value of every metric by `prefix` + name, with one read from the device; derived numbers last.

        A metric that returns a dict gives `name_key` for each key. `numbers`: the other numbers of the pass, by name
        without prefix, for `Derived`.
        """
        readings = read_totals(self._totals())
        if taken := readings.keys() & numbers.keys():
            raise SettingError(f"two numbers are called {min(taken)!r}", want="one metric or logged number of a name")
        values = {name: reading.value for name, reading in readings.items()}
        if self._derived:
            values |= _derive(self._derived, {**numbers, **values}, self._left_out)
        return {prefix + name: value for name, value in values.items()}

    def errors(self, prefix: str = "") -> dict[str, float]:
        """Return the standard error of each metric with one value per row; empty without `spread`."""
        totals: dict[str, Total] = {}
        for metric in self._metrics:
            if type(metric) is FunctionMetric:
                totals |= metric.totals()
        readings = read_totals(totals)
        return {prefix + name: reading.error for name, reading in readings.items() if reading.error is not None}

    def reset(self) -> None:
        """Reset to the state without rows."""
        self._rows = 0
        for metric in self._metrics:
            metric.reset()

    def check_mergeable(self) -> None:
        """Raise SettingError, before any row is added, for an object whose state cannot be merged over ranks."""
        for metric in self._metrics:
            metric.check_mergeable()

    def merge(self, state: Mapping[str, Any]) -> None:
        """Add the `state_dict` of another rank's set of the same metrics."""
        if not state["rows"]:
            return
        self._rows += state["rows"]
        for metric in self._metrics:
            metric.merge(state["metrics"][metric.name])

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all metrics; for an object without a `state_dict`, its attributes."""
        has_rows = self._rows > 0
        states = {metric.name: metric.state_dict(has_rows=has_rows) for metric in self._metrics}
        return {"rows": self._rows, "metrics": states}

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Load saved states of the same metrics; CheckpointError if the names differ."""
        saved, names = tree["metrics"], {metric.name for metric in self._metrics}
        if saved.keys() != names:
            raise CheckpointError(
                "the checkpoint holds sums of other metrics",
                have=", ".join(sorted(saved)),
                want=", ".join(sorted(names)),
            )
        self._rows = int(tree["rows"])
        for metric in self._metrics:
            metric.load_state_dict(saved[metric.name])

    def _totals(self) -> dict[str, Total]:
        """Return the numbers of all metrics by full name; all NaN without rows."""
        totals: dict[str, Total] = {}
        for metric in self._metrics:
            totals |= metric.totals() if self._rows else {metric.name: Total()}
        return totals


class _LeftOutOfTrainingError(Exception):
    """Raised if a derived number needs one that is computed in evaluations only."""


class _Numbers(dict[str, float]):
    """Numbers by name; an unknown name raises SettingError with a suggestion."""

    def __init__(self, numbers: Mapping[str, float], left_out: set[str]) -> None:
        super().__init__(numbers)
        self._left_out = left_out

    def __missing__(self, name: str) -> float:
        if name in self._left_out:
            raise _LeftOutOfTrainingError(name)
        raise SettingError(
            f"a derived metric asks for {name!r}.{did_you_mean(name, self)}", have=", ".join(self) or "no numbers"
        )


def _derive(metrics: Mapping[str, Derived], numbers: Mapping[str, float], left_out: set[str]) -> dict[str, float]:
    """Return the derived numbers in order, without those that need a number left out of training."""
    known = _Numbers(numbers, left_out)
    found: dict[str, float] = {}
    for name, derived in metrics.items():
        try:
            result = derived.fn(known)
        except OverflowError:
            result = math.inf
        except _LeftOutOfTrainingError:
            continue
        except Exception as error:
            error.add_note(f"trainwright: in the derived metric {name!r}, of {dict(known)}")
            raise
        if not isinstance(result, Real):
            raise SettingError(f"derived metric {name!r} gave {result!r}", want="one number")
        known[name] = found[name] = float(result)
    return found


def _is_object(metric: Any) -> bool:
    return all(callable(getattr(metric, method, None)) for method in ("update", "compute", "reset"))
