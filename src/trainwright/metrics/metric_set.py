"""The metrics of one pass: fed batch by batch, read once, saved, and merged over the ranks."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from functools import partial
from itertools import zip_longest
from numbers import Real
from typing import Any
from warnings import warn

import torch
from torch import Tensor

from trainwright.core.checks import check_form, is_dict, is_number
from trainwright.core.errors import CheckpointError, SettingError, message
from trainwright.core.rng import unmoved
from trainwright.core.suggestions import check_name, did_you_mean
from trainwright.core.trees import detached, shapes_of, tensors_in
from trainwright.metrics.metrics import Derived, MetricFunction, OverAll, check_takes_two
from trainwright.metrics.totals import Total, read_totals
from trainwright.protocols import Metric

_NO_NUMBERS: Mapping[str, float] = {}


class MetricSet:
    """The metrics of one pass: their sums on the output's device, read only by `compute` and `errors`.

    Four kinds: functions of (output, target), whose results are averaged by their counts; objects with `update`,
    `compute` and `reset`, each a copy of this set's own; `over_all` functions of all rows, left out with
    `training=True`; and `Derived` numbers. With `spread=True` squares are summed too, for `errors`.
    """

    def __init__(
        self,
        metrics: Mapping[str, MetricFunction | Metric | OverAll | Derived],
        *,
        training: bool = False,
        complete: bool = True,
        spread: bool = False,
        checked: set[str] | None = None,
    ) -> None:
        """Sort `metrics` by kind.

        `complete=False` is for a pass that ends before the data do: `over_all` functions are not called and give NaN.
        `checked`: the functions whose first result was checked for a count already.
        """
        self._complete = complete
        self._checked = set(metrics) if checked is None else checked
        self._spread = spread
        self._functions: list[tuple[str, MetricFunction]] = []
        self._totals: dict[str, dict[str, Total]] = {}
        """The totals of each function, by the key of its dict, or by "" where it returns one number."""
        self._objects: dict[str, Any] = {}
        self._over_all: dict[str, _AllRows] = {}
        self._derived: dict[str, Derived] = {}
        self._rows = 0
        self._placed = False
        self.device: torch.device | None = None
        """The device of the outputs that objects have read; None before."""
        for name, metric in metrics.items():
            check_name(name)
            self._add(name, metric, training=training)
        self._labels = {name: f"metric {name!r}" for name in metrics}
        left_out = [name for name, metric in metrics.items() if training and isinstance(metric, OverAll)]
        self._left_out = frozenset(left_out)
        self.names: tuple[str, ...] = tuple(name for name in metrics if name not in self._left_out)
        """The names, as given."""
        self.reads_output = bool(self._functions or self._objects or self._over_all)
        """Whether any metric reads outputs and targets."""
        self.reset()

    @property
    def fed(self) -> bool:
        """Whether there is something to compute: rows since the last `reset`, or no metric that reads rows."""
        return self._rows > 0 or not self.reads_output

    def update(self, output: Any, target: Any, rows: int) -> None:
        """Add one batch of `rows` rows; nothing is read from a device, and a batch without rows is a no-op.

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
        """Return every metric as `prefix` + name, in the order given, with one read from the device.

        A metric that returns a dict gives `name_key` for each of its keys. `numbers` are the other numbers of the
        pass, by name without prefix; only `Derived` reads them.
        """
        whole = {**self._objects, **self._over_all}
        computed = {name: self._computed(name, metric) for name, metric in whole.items()}
        totals = self._totals_of_functions() | computed
        readings = read_totals(_flat(totals))
        known = _Numbers(numbers, absent=self._left_out)
        for name, reading in readings.items():
            if name in numbers:
                raise SettingError(f"two numbers are called {name!r}", want="one metric or logged number of a name")
            known[name] = reading.value
        names = {name: list(_flat({name: keys})) for name, keys in totals.items()}
        for name, derived in self._derived.items():
            try:
                known[name] = _derive(name, derived, known)
                names[name] = [name]
            except _LeftOutOfTrainingError:
                names[name] = []
        return {prefix + full: known[full] for name in self.names for full in names[name]}

    def errors(self, prefix: str = "") -> dict[str, float]:
        """Return the standard error of each metric that gave one value per row; empty without `spread`."""
        readings = read_totals(_flat(self._totals_of_functions()))
        return {prefix + name: reading.error for name, reading in readings.items() if reading.error is not None}

    def reset(self) -> None:
        """Start again without rows."""
        self._rows = 0
        for totals in self._totals.values():
            for total in totals.values():
                total.reset()
        for metric in self._objects.values():
            metric.reset()
        for rows in self._over_all.values():
            rows.reset()

    def check_mergeable(self) -> None:
        """Refuse an object whose state cannot be merged over the ranks: SettingError, before any row is added."""
        from trainwright.metrics.objects import check_mergeable

        for name, metric in self._objects.items():
            check_mergeable(name, metric, partial(self._object_state, name))

    def merge(self, state: Mapping[str, Any]) -> None:
        """Add the `state_dict` of another rank's set of the same metrics."""
        if not state["rows"]:
            return
        from trainwright.metrics.objects import merge_state

        self._rows += state["rows"]
        for name, totals in state["totals"].items():
            for key, saved in totals.items():
                other = Total()
                other.load_state_dict(saved)
                self._total(name, key).merge(other)
        for name, metric in self._objects.items():
            merge_state(metric, state["objects"][name])
        for name, rows in self._over_all.items():
            rows.merge(state["over_all"][name])

    def state_dict(self) -> dict[str, Any]:
        """Return the sums; of an object without a `state_dict` its attributes."""
        return {
            "rows": self._rows,
            "totals": {
                name: {key: total.state_dict() for key, total in totals.items()}
                for name, totals in self._totals.items()
            },
            "objects": {name: self._object_state(name) for name in self._objects},
            "over_all": {name: rows.state_dict() for name, rows in self._over_all.items()},
        }

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Load saved sums of the same metrics."""
        check_form(tree, rows=is_number, totals=is_dict, objects=is_dict, over_all=is_dict)
        own = (set(self._totals), set(self._objects), set(self._over_all))
        saved = (set(tree["totals"]), set(tree["objects"]), set(tree["over_all"]))
        if own != saved:
            raise CheckpointError(
                "the checkpoint holds sums of other metrics",
                have=", ".join(sorted(set().union(*saved))),
                want=", ".join(sorted(set().union(*own))),
            )
        from trainwright.metrics.objects import load_object

        self._rows = tree["rows"]
        for name in self._totals:
            self._totals[name] = {}
            for key, state in tree["totals"][name].items():
                self._total(name, key).load_state_dict(state)
        for name, metric in self._objects.items():
            load_object(metric, tree["objects"][name])
        for name, rows in self._over_all.items():
            rows.load_state_dict(tree["over_all"][name])

    def _add(self, name: str, metric: Any, *, training: bool) -> None:
        """Sort one metric by its kind; SettingError for anything else."""
        if isinstance(metric, Derived):
            self._derived[name] = metric
        elif isinstance(metric, OverAll):
            if not training:
                self._over_all[name] = _AllRows(name, metric.fn)
        elif _is_object(name, metric):
            from trainwright.metrics.objects import stop_syncing

            self._objects[name] = copy.deepcopy(metric)
            stop_syncing(self._objects[name])
        else:
            if not callable(metric):
                raise SettingError(
                    f"metric {name!r} is {metric!r}",
                    want="a function of (output, target), an object with update, compute and reset, over_all(fn), "
                    "or Derived(fn)",
                    fix='metrics={"accuracy": accuracy}',
                )
            check_takes_two(metric, f"metric {name!r}")
            self._functions.append((name, metric))
            self._totals[name] = {}

    def _update(self, output: Any, target: Any, rows: int) -> None:
        if self._objects and not self._placed:
            self._place(output)
        self._rows += rows
        for name, function in self._functions:
            result = function(output, target)
            if name not in self._checked:
                self._checked.add(name)
                _warn_of_count(name, function, result, output, target)
            if isinstance(result, dict):
                self._take_dict(name, result, rows)
            else:
                total = self._totals[name].get("") or self._first_total(name)
                total.take(result, rows, self._labels[name])
        for name, metric in self._objects.items():  # noqa: B007  (the note of an error reads `name` from this frame)
            metric.update(output, target)
        for name, all_rows in self._over_all.items():  # noqa: B007
            all_rows.update(output, target)

    def _place(self, output: Any) -> None:
        """Move the objects to the device of the outputs."""
        self._placed = True
        tensor = next(tensors_in(output), None)
        self.device = None if tensor is None else tensor.device
        for name, metric in self._objects.items():
            if tensor is not None and callable(getattr(metric, "to", None)):
                moved = metric.to(tensor.device)
                self._objects[name] = metric if moved is None else moved

    def _take_dict(self, name: str, result: Mapping[str, Any], rows: int) -> None:
        """Add a dict of numbers that a function has returned."""
        self._check_keys(name, result)
        for key, value in result.items():
            self._total(name, key).take(value, rows, f"{self._labels[name]}, key {key!r},")

    def _first_total(self, name: str) -> Total:
        """Return the total of a function that returns one number; SettingError where it has returned a dict."""
        self._check_keys(name, {"": None})
        return self._total(name, "")

    def _total(self, name: str, key: str) -> Total:
        """Return the total of a function's number, created at its first result."""
        totals = self._totals[name]
        if key not in totals:
            totals[key] = Total(spread=self._spread)
        return totals[key]

    def _check_keys(self, name: str, result: Mapping[Any, Any]) -> None:
        """Refuse a dict of numbers whose keys are no names, taken ones, or others than those of the batches before."""
        totals = self._totals[name]
        if totals.keys() == result.keys():
            return
        if totals:
            raise SettingError(
                f"metric {name!r} returned {_keys(result)}",
                have=f"{_keys(totals)} from the batches before",
                want="the same keys for every batch: each is averaged over the batches",
            )
        for key in result:
            if not isinstance(key, str) or _full(name, key) in self._labels.keys() - {name}:
                raise SettingError(
                    f"metric {name!r} returned {_keys(result)}",
                    want=f"strings, none of which makes the name of another metric: {name}_<key>",
                )

    def _totals_of_functions(self) -> dict[str, dict[str, Total]]:
        """Return the totals of each function by key; one over nothing where it has returned nothing."""
        return {name: totals or {"": Total()} for name, totals in self._totals.items()}

    def _computed(self, name: str, metric: Any) -> dict[str, Total]:
        """Return the numbers of an object or of `over_all` as totals by key; NaN without rows."""
        computes = self._rows and (self._complete or name not in self._over_all)
        result = metric.compute() if computes else math.nan
        results = result if isinstance(result, Mapping) else {"": result}
        totals = {}
        for key, value in results.items():
            total = totals[key] = Total()
            if not isinstance(value, Real) and not (isinstance(value, Tensor) and value.numel() == 1):
                raise SettingError(
                    f"metric {name!r} computed {_shown(value)}{f' for {key!r}' if key else ''}",
                    want="one number, a tensor of one element, or a dict of these",
                )
            total.add(value if isinstance(value, Tensor) else float(value), 1)
        return totals

    def _object_state(self, name: str) -> Any:
        from trainwright.metrics.objects import state_of

        return state_of(name, self._objects[name], fed=self._rows > 0)

    def _unfed(self, missing: str) -> SettingError:
        names = [name for name in self.names if name not in self._derived]
        return SettingError(
            f"metrics {', '.join(map(repr, names))} read an output and a target, and the step gave no {missing}",
            fix="return StepOutput(loss, output, target)   # from training_step or validation_step",
        )


class _AllRows:
    """The rows of a pass for one `over_all` function, as copies on the host, batch by batch of each rank."""

    def __init__(self, name: str, fn: MetricFunction) -> None:
        self._name, self._fn = name, fn
        self.reset()

    def update(self, output: Any, target: Any) -> None:
        """Copy the rows of one batch; whoever gives the batches may write the next one into the same memory."""
        if not (isinstance(output, Tensor) and isinstance(target, Tensor) and output.dim() and target.dim()):
            raise SettingError(
                f"metric {self._name!r}: over_all joins the rows of all batches",
                have=f"output {_shown(output)}, target {_shown(target)}",
                want="two tensors with a row for each row of the batch",
                fix="return StepOutput(loss, output, target) with two tensors",
            )
        if self._own and any(
            one.shape[1:] != new.shape[1:] for one, new in zip(self._own[0], (output, target), strict=True)
        ):
            raise SettingError(
                f"metric {self._name!r}: over_all joins the rows of all batches, and their shapes differ",
                have=f"{shapes_of(output, target)}, after {shapes_of(*self._own[0])}",
                want="rows of one shape",
                fix="return StepOutput(loss, output.flatten(0, 1), target.flatten())   # a row for each position",
            )
        self._own.append((output.to("cpu", copy=True), target.to("cpu", copy=True)))

    def compute(self) -> Any:
        """Return what the function gives for all rows, in the order of the data."""
        batches = [pair for each in zip_longest(*self._ranks) for pair in each if pair is not None]
        outputs, targets = (torch.cat([pair[place] for pair in batches]) for place in (0, 1))
        try:
            return self._fn(outputs, targets)
        except Exception as error:
            error.add_note(f"trainwright: in metric {self._name!r}, over all {len(outputs)} rows")
            raise

    def reset(self) -> None:
        """Drop all rows."""
        self._own: list[tuple[Tensor, Tensor]] = []
        self._ranks = [self._own]

    def merge(self, state: list[tuple[Tensor, Tensor]]) -> None:
        """Add the rows of the next rank, which has run its slice of each batch."""
        self._ranks.append(state)

    def state_dict(self) -> list[tuple[Tensor, Tensor]]:
        """Return the rows of this rank."""
        return list(self._own)

    def load_state_dict(self, state: list[tuple[Tensor, Tensor]]) -> None:
        """Load the rows of this rank."""
        self.reset()
        self._own += state


class _LeftOutOfTrainingError(Exception):
    """A derived number of training asks for one that counts in evaluation only."""


class _Numbers(dict[str, float]):
    """Numbers by name, with help for an unknown name."""

    def __init__(self, numbers: Mapping[str, float], *, absent: frozenset[str]) -> None:
        super().__init__(numbers)
        self._absent = absent

    def __missing__(self, name: str) -> float:
        if name in self._absent:
            raise _LeftOutOfTrainingError(name)
        raise SettingError(
            f"a derived metric asks for {name!r}.{did_you_mean(name, self)}", have=", ".join(self) or "no numbers"
        )


def _derive(name: str, derived: Derived, numbers: Mapping[str, float]) -> float:
    try:
        result = derived.fn(numbers)
    except OverflowError:
        return math.inf
    except _LeftOutOfTrainingError:
        raise
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


def _full(name: str, key: str) -> str:
    return f"{name}_{key}" if key else name


def _flat(totals: Mapping[str, Mapping[str, Total]]) -> dict[str, Total]:
    """Return totals by name and key as totals by full name."""
    return {_full(name, key): total for name, keys in totals.items() for key, total in keys.items()}


def _keys(numbers: Mapping[Any, Any]) -> str:
    return "one number" if list(numbers) == [""] else f"the keys {', '.join(map(repr, numbers)) or 'of an empty dict'}"


def _shown(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
