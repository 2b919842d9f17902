"""The accumulator of one metric of a pass: base class, functions of (output, target), and `over_all` functions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from itertools import zip_longest
from numbers import Real
from typing import Any
from warnings import warn

import torch
from torch import Tensor

from trainwright.core.errors import SettingError, message
from trainwright.core.records import MeanLoss, SumLoss
from trainwright.core.rng import rng_preserved
from trainwright.core.trees import shapes_of
from trainwright.metrics.metrics import MetricFunction
from trainwright.metrics.totals import Total, form_of


class PassMetric:
    """Base class of accumulators: updated batch by batch, read at the end, saved, and merged over the ranks."""

    device: torch.device | None = None
    """The device of the outputs that a metric object has read; None before, and for other kinds."""

    def __init__(self, name: str) -> None:
        self.name = name

    def update(self, output: Any, target: Any, rows: int) -> None:
        """Add one batch of `rows` rows of detached tensors."""
        raise NotImplementedError

    def totals(self) -> dict[str, Total]:
        """Return the numbers of the pass by full name. Called only if there were rows."""
        raise NotImplementedError

    def reset(self) -> None:
        """Reset to the state without rows."""
        raise NotImplementedError

    def merge(self, state: Any) -> None:
        """Add the `state_dict` of another rank's metric of the same name."""
        raise NotImplementedError

    def state_dict(self, *, has_rows: bool) -> Any:
        """Return a copy of the state; `has_rows`: whether there were rows."""
        raise NotImplementedError

    def load_state_dict(self, state: Any) -> None:
        """Load a saved state."""
        raise NotImplementedError

    def check_mergeable(self) -> None:
        """Raise SettingError if the state cannot be merged over ranks. No-op except for metric objects."""

    def full_name(self, key: str) -> str:
        """Return the name of a number: that of the metric, followed by the key if the metric returns a dict."""
        return f"{self.name}_{key}" if key else self.name


class FunctionMetric(PassMetric):
    """A function of (output, target); its results are averaged, weighted by their counts."""

    def __init__(
        self, name: str, function: MetricFunction, *, names: Mapping[str, Any], checked: set[str], spread: bool
    ) -> None:
        """Initialize. `names`: all metrics by name. `checked`: the metrics whose first result was already checked."""
        super().__init__(name)
        self._function, self._names, self._checked, self._spread = function, names, checked, spread
        self._totals: dict[str, Total] = {}
        """By the keys of the dict that the function returns, or by "" for one number."""

    def update(self, output: Any, target: Any, rows: int) -> None:
        """Call the function and add its result."""
        result = self._function(output, target)
        results = result if isinstance(result, dict) else {"": result}
        if results.keys() != self._totals.keys():
            self._check_keys(results)
            self._totals = {key: self._total(key) for key in results}
        if self.name not in self._checked and not isinstance(result, SumLoss | MeanLoss):
            self._checked.add(self.name)
            _warn_of_batch_values(self.name, self._function)
            _warn_of_count(self.name, self._function, result, output, target)
        for key, value in results.items():
            self._totals[key].take(value, rows)

    def totals(self) -> dict[str, Total]:
        """Return the totals by full name."""
        return {self.full_name(key): total for key, total in self._totals.items()}

    def reset(self) -> None:
        """Reset to the state without rows, in the same memory."""
        for total in self._totals.values():
            total.reset()

    def merge(self, state: Mapping[str, list[Tensor]]) -> None:
        """Add the totals of another rank."""
        for key, saved in state.items():
            other = Total()
            other.load_state_dict(saved)
            self._totals.setdefault(key, self._total(key)).merge(other)

    def state_dict(self, *, has_rows: bool) -> dict[str, list[Tensor]]:
        """Return the state of each total, by key."""
        return {key: total.state_dict() for key, total in self._totals.items()}

    def load_state_dict(self, state: Mapping[str, list[Tensor]]) -> None:
        """Load saved totals."""
        self._totals = {key: self._total(key) for key in state}
        for key, total in self._totals.items():
            total.load_state_dict(state[key])

    def _total(self, key: str) -> Total:
        label = f"metric {self.name!r}"
        return Total(f"{label}, key {key!r}," if key else label, spread=self._spread)

    def _check_keys(self, results: Mapping[Any, Any]) -> None:
        """Raise SettingError for keys that are no strings, collide with names, or differ from earlier batches."""
        if self._totals:
            raise SettingError(
                f"metric {self.name!r} returned {_keys(results)}",
                have=f"{_keys(self._totals)} from the batches before",
                want="the same keys for every batch: each is averaged over the batches",
            )
        for key in results:
            if not isinstance(key, str) or self.full_name(key) in self._names.keys() - {self.name}:
                raise SettingError(
                    f"metric {self.name!r} returned {_keys(results)}",
                    want=f"strings, none of which makes the name of another metric: {self.name}_<key>",
                )


class AllRows(PassMetric):
    """The rows of a pass for one `over_all` function: copies on the host, by rank and batch."""

    def __init__(self, name: str, function: MetricFunction, *, complete: bool) -> None:
        """Initialize. `complete`: whether the pass covers all data; otherwise the result is NaN, without a call."""
        super().__init__(name)
        self._function, self._complete = function, complete
        self.reset()

    def update(self, output: Any, target: Any, rows: int) -> None:
        """Copy the rows of one batch; a copy, since the loader may reuse the memory for the next batch."""
        if not (isinstance(output, Tensor) and isinstance(target, Tensor) and output.dim() and target.dim()):
            raise SettingError(
                f"metric {self.name!r}: over_all joins the rows of all batches",
                have=f"output {form_of(output)}, target {form_of(target)}",
                want="two tensors with a row for each row of the batch",
                fix="return StepOutput(loss, output, target) with two tensors",
            )
        if self._own and any(
            first.shape[1:] != new.shape[1:] for first, new in zip(self._own[0], (output, target), strict=True)
        ):
            raise SettingError(
                f"metric {self.name!r}: over_all joins the rows of all batches, and their shapes differ",
                have=f"{shapes_of(output, target)}, after {shapes_of(*self._own[0])}",
                want="rows of one shape",
                fix="return StepOutput(loss, output.flatten(0, 1), target.flatten())   # a row for each position",
            )
        self._own.append((output.to("cpu", copy=True), target.to("cpu", copy=True)))

    def totals(self) -> dict[str, Total]:
        """Return the result of the function as totals by full name; NaN for an incomplete pass."""
        return totals_of(self, self.compute() if self._complete else math.nan)

    def compute(self) -> Any:
        """Return the result of the function for all rows, in the order of the data."""
        batches = [pair for each in zip_longest(*self._ranks) for pair in each if pair is not None]
        outputs, targets = (torch.cat([pair[place] for pair in batches]) for place in (0, 1))
        try:
            return self._function(outputs, targets)
        except Exception as error:
            error.add_note(f"trainwright: in metric {self.name!r}, over all {len(outputs)} rows")
            raise

    def reset(self) -> None:
        """Drop all rows."""
        self._own: list[tuple[Tensor, Tensor]] = []
        self._ranks = [self._own]

    def merge(self, state: list[tuple[Tensor, Tensor]]) -> None:
        """Add the rows of the next rank: its slice of each batch."""
        self._ranks.append(state)

    def state_dict(self, *, has_rows: bool) -> list[tuple[Tensor, Tensor]]:
        """Return the rows of this rank."""
        return list(self._own)

    def load_state_dict(self, state: list[tuple[Tensor, Tensor]]) -> None:
        """Load the rows of this rank."""
        self.reset()
        self._own += state


def totals_of(metric: PassMetric, result: Any) -> dict[str, Total]:
    """Return a computed number, or a dict of numbers, as totals by full name; SettingError for anything else."""
    totals = {}
    for key, value in (result if isinstance(result, Mapping) else {"": result}).items():
        if not isinstance(value, Real) and not (isinstance(value, Tensor) and value.numel() == 1):
            raise SettingError(
                f"metric {metric.name!r} computed {form_of(value)}{f' for {key!r}' if key else ''}",
                want="one number, a tensor of one element, or a dict of these",
            )
        total = totals[metric.full_name(key)] = Total()
        total.add(value if isinstance(value, Tensor) else float(value), 1)
    return totals


_NO_MEANS = frozenset(
    {
        *(
            "auroc",
            "average_precision_score",
            "balanced_accuracy_score",
            "cohen_kappa_score",
            "f1_score",
            "fbeta_score",
        ),
        *("jaccard_score", "matthews_corrcoef", "precision_score", "r2_score", "recall_score", "roc_auc_score"),
    }
)
"""Functions of scikit-learn and others whose value over all rows is not the mean of their values for batches."""


def _warn_of_batch_values(name: str, function: MetricFunction) -> None:
    """Warn if a metric is, or calls, one of `_NO_MEANS`."""
    inner = function.func if isinstance(function, partial) else function
    code = getattr(inner, "__code__", None)
    names = () if code is None else (*code.co_names, *code.co_freevars)
    called = {getattr(inner, "__name__", ""), *names} & _NO_MEANS
    if called:
        warn(
            message(
                f"metric {name!r} is no mean over rows: it calls {min(called)}",
                have="its value for each batch, and the mean of these values by rows",
                want="one call with the outputs and targets of all rows",
                fix=f"metrics={{{name!r}: over_all(...)}}, which counts in evaluations",
            ),
            stacklevel=2,
        )


def _warn_of_count(name: str, function: MetricFunction, result: Any, *given: Any) -> None:
    """Warn if a metric returns a count of a batch: an integer above 1 that is additive over its rows.

    A mean, such as a perplexity or an absolute error, may be an integer too, but is not additive.
    """
    value = _whole_number(result)
    if value is None or not all(isinstance(tensor, Tensor) and tensor.ndim and len(tensor) > 1 for tensor in given):
        return
    rows = len(given[0])
    if len(given[1]) != rows:
        return
    splits = [(slice(rows // 2), slice(rows // 2, None)), (slice(0, None, 2), slice(1, None, 2))]
    try:
        with rng_preserved():
            parts = [[float(function(*(tensor[part] for tensor in given))) for part in split] for split in splits]
    except Exception:  # a custom metric may require a complete batch, which is no mistake
        return
    # In one split, both parts must be above 0: a maximum would look additive if the other part were 0.
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
    """Return a result if it is one integer above 1, read from the device; None for any other result."""
    if isinstance(result, Tensor):
        if result.numel() != 1 or result.dtype is torch.bool or result.is_meta or result.is_complex():
            return None
    elif not isinstance(result, Real):
        return None
    value = float(result)
    return value if value > 1 and value.is_integer() else None


def _keys(numbers: Mapping[Any, Any]) -> str:
    return "one number" if list(numbers) == [""] else f"the keys {', '.join(map(repr, numbers)) or 'of an empty dict'}"
