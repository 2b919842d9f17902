"""Metric objects of any library: their state for a checkpoint, and the merge of states over ranks."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from trainwright.core.errors import CheckpointError, SettingError
from trainwright.core.trees import tensors_in
from trainwright.distributed.world import packed
from trainwright.metrics.kinds import PassMetric, totals_of
from trainwright.metrics.totals import Total
from trainwright.protocols import Stateful


class ObjectMetric(PassMetric):
    """A copy of a metric object with `update`, `compute` and `reset`, moved to the device of the outputs."""

    def __init__(self, name: str, metric: Any) -> None:
        super().__init__(name)
        self.metric = copy.deepcopy(metric)
        self._is_placed = False
        _stop_syncing(self.metric)
        self.metric.reset()

    def update(self, output: Any, target: Any, rows: int) -> None:
        """Update the object, after a move to the device of the first output."""
        if not self._is_placed:
            self._place(output)
        self.metric.update(output, target)

    def totals(self) -> dict[str, Total]:
        """Return the result of the object as totals by full name."""
        return totals_of(self, self.metric.compute())

    def reset(self) -> None:
        """Reset the object."""
        self.metric.reset()

    def merge(self, state: Any) -> None:
        """Add the saved state of another rank's object."""
        own, other = self.metric, copy.deepcopy(self.metric)
        _load(other, state)
        if callable(getattr(own, "merge", None)):
            own.merge(other)
        elif is_torchmetrics(own):
            _merge_torchmetrics(own, other)
        else:
            own.merge_state([other])

    def state_dict(self, *, has_rows: bool) -> Any:
        """Return a copy of the object's state: its state dict (None without rows), or else its attributes.

        CheckpointError if it has neither.
        """
        if _has_state_dict(self.metric):
            if not has_rows:
                return None
            if callable(getattr(self.metric, "persistent", None)):
                self.metric.persistent(True)  # by default, torchmetrics leaves its sums out of the state dict
            return copy.deepcopy(self.metric.state_dict())
        if hasattr(self.metric, "__dict__"):
            return copy.deepcopy(vars(self.metric))  # without rows too, to find attributes that cannot be copied
        kind = type(self.metric).__name__
        what = f"metric {self.name!r} cannot be saved: {kind} has neither attributes nor a state_dict"
        raise CheckpointError(what, fix="give it state_dict() and load_state_dict(tree)")

    def load_state_dict(self, state: Any) -> None:
        """Load a saved state into the object."""
        _load(self.metric, state)

    def check_mergeable(self) -> None:
        """Raise SettingError if the object's state cannot be merged over ranks or sent to another rank.

        The error names the method to add.
        """
        metric, what = self.metric, f"metric {self.name!r}: "
        kind = type(metric).__name__
        if not callable(getattr(metric, "merge", None)) and not _is_torchevals(metric):
            if not is_torchmetrics(metric):
                what += f"each rank has rows of its own, and {kind} has no `merge`"
                raise _unmergeable(what, metric)
            if flaw := _flaw(metric):
                raise _unmergeable(f"{what}{kind} {flaw}, which cannot be merged exactly over ranks", metric)
        try:
            packed(self.state_dict(has_rows=False))
        except (pickle.PicklingError, TypeError, AttributeError, CheckpointError) as error:
            fix = "give it state_dict() and load_state_dict(tree), of plain data and tensors"
            what += f"{kind} cannot be sent to another rank: {str(error).splitlines()[0]}"
            raise SettingError(what, fix=fix) from error

    def _place(self, output: Any) -> None:
        self._is_placed = True
        tensor = next(tensors_in(output), None)
        if tensor is None:
            return
        self.device = tensor.device
        if callable(getattr(self.metric, "to", None)):
            moved = self.metric.to(tensor.device)
            self.metric = self.metric if moved is None else moved


def is_torchmetrics(metric: Any) -> bool:
    """Return whether an object declares the reduction of each of its states over ranks, as torchmetrics does."""
    return hasattr(metric, "sync_on_compute") and isinstance(getattr(metric, "_reductions", None), Mapping)


def _has_state_dict(metric: Any) -> bool:
    return isinstance(metric, Stateful)


def _load(metric: Any, saved: Any) -> None:
    """Load a saved state into an object; None is the state without rows."""
    metric.reset()
    if saved is not None and _has_state_dict(metric):
        metric.load_state_dict(saved)
    elif saved is not None:
        vars(metric).clear()
        vars(metric).update(copy.deepcopy(saved))


def _stop_syncing(metric: Any) -> None:
    """Disable the reduction over ranks in `compute` of torchmetrics: otherwise rows would be counted twice."""
    modules = metric.modules() if callable(getattr(metric, "modules", None)) else (metric,)
    for inner in modules:
        if is_torchmetrics(inner):
            inner.sync_on_compute = inner._to_sync = False


def _is_torchevals(metric: Any) -> bool:
    bases = type(metric).__mro__
    return any(base.__module__.startswith("torcheval.") for base in bases) and hasattr(metric, "merge_state")


def _flaw(metric: Any) -> str:
    """Return why a torchmetrics object cannot be merged exactly; "" if it can."""
    if any(map(is_torchmetrics, getattr(metric, "children", tuple)())):
        return "is made of other metrics"
    if not metric._reductions:
        return "has no states"
    for name, how in metric._reductions.items():
        rule, listed = getattr(how, "__name__", how), isinstance(getattr(metric, name), list)
        if not (rule in _REDUCTIONS or (listed and rule is None)) or (listed and rule not in ("dim_zero_cat", None)):
            return f"has the state {name!r} of dist_reduce_fx={_short(rule)}"
    return ""


def _merge_torchmetrics(metric: Any, other: Any) -> None:
    for name, reduction in metric._reductions.items():
        values = [getattr(metric, name), getattr(other, name)]
        if any(isinstance(value, list) for value in values):
            merged: Any = [entry for value in values for entry in (value if isinstance(value, list) else [value])]
        else:
            merged = _REDUCTIONS[reduction.__name__](values[0], values[1].to(values[0].device))
        setattr(metric, name, merged)
    metric._update_count = getattr(metric, "_update_count", 0) + 1  # otherwise it warns that it was never updated
    metric._computed = None  # the cached result


_REDUCTIONS: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    "dim_zero_sum": torch.add,
    "dim_zero_max": torch.maximum,
    "dim_zero_min": torch.minimum,
    "dim_zero_cat": lambda own, other: torch.cat([own, other]),
}
"""The reductions of torchmetrics that can be applied rank by rank."""


def _short(rule: Any) -> str:
    return repr(rule.removeprefix("dim_zero_")) if isinstance(rule, str) else repr(rule)


def _unmergeable(what: str, metric: Any) -> SettingError:
    attributes = vars(metric) if hasattr(metric, "__dict__") else {}
    kinds = (int, float, Tensor, list)
    names = [name for name, value in attributes.items() if isinstance(value, kinds) and not isinstance(value, bool)]
    names = [] if is_torchmetrics(metric) else names[:3]
    body = "; ".join(f"self.{name} += other.{name}" for name in names) or "..."
    want = "a method that adds the state of another object of its class"
    return SettingError(what, want=want, fix=f"def merge(self, other): {body}")
