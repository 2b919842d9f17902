"""Metric objects of several processes become one: by their `merge`, or as torchmetrics and torcheval add up theirs."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainwright.core.errors import CheckpointError, SettingError
from trainwright.distributed.packing import packed


def check_mergeable(name: str, metric: Any, state: Callable[[], Any]) -> None:
    """Refuse an object that no known way adds up over processes, or whose `state` cannot be sent.

    SettingError with the member to write.
    """
    if not callable(getattr(metric, "merge", None)) and not _is_torchevals(metric):
        if not is_torchmetrics(metric):
            what = f"metric {name!r}: several processes take in their own rows, and {_kind(metric)} has no `merge`"
            raise _unmergeable(what, metric)
        if flaw := _flaw(metric):
            what = f"metric {name!r}: {_kind(metric)} {flaw}, which does not add up exactly over processes"
            raise _unmergeable(what, metric)
    try:
        packed(state())
    except (pickle.PicklingError, TypeError, AttributeError, CheckpointError) as error:
        fix = "give it state_dict() and load_state_dict(tree), of plain data and tensors"
        what = f"metric {name!r}: {_kind(metric)} cannot be sent to another process: {str(error).splitlines()[0]}"
        raise SettingError(what, fix=fix) from error


def merge_objects(mine: Any, others: Sequence[Any]) -> None:
    """Have an object take in what others of its kind have taken in, in their order."""
    if callable(getattr(mine, "merge", None)):
        for other in others:
            mine.merge(other)
    elif is_torchmetrics(mine):
        _merge_torchmetrics(mine, others)
    elif others:
        mine.merge_state(others)


def keep_to_itself(metric: Any) -> None:
    """Keep an object of torchmetrics from adding up over processes in `compute`: then all would count twice."""
    modules = metric.modules() if callable(getattr(metric, "modules", None)) else (metric,)
    for inner in modules:
        if is_torchmetrics(inner):
            inner.sync_on_compute = inner._to_sync = False


def is_torchmetrics(metric: Any) -> bool:
    """Whether an object tells, as those of torchmetrics do, how each of its states adds up over processes."""
    return hasattr(metric, "sync_on_compute") and isinstance(getattr(metric, "_reductions", None), Mapping)


def _is_torchevals(metric: Any) -> bool:
    bases = type(metric).__mro__
    return any(base.__module__.startswith("torcheval.") for base in bases) and hasattr(metric, "merge_state")


def _flaw(metric: Any) -> str:
    """What an object of torchmetrics has that nobody can merge exactly; "" where it has nothing of it."""
    if any(map(is_torchmetrics, getattr(metric, "children", tuple)())):
        return "is made of other metrics"
    if not metric._reductions:
        return "has no states"
    for name, how in metric._reductions.items():
        rule, listed = getattr(how, "__name__", how), isinstance(getattr(metric, name), list)
        if not (rule in _RULES or (listed and rule is None)) or (listed and rule not in ("dim_zero_cat", None)):
            return f"has the state {name!r} of dist_reduce_fx={_short(rule)}"
    return ""


def _merge_torchmetrics(mine: Any, others: Sequence[Any]) -> None:
    for name, how in mine._reductions.items():
        values = [getattr(each, name) for each in (mine, *others)]
        if any(isinstance(value, list) for value in values):
            merged: Any = [entry for value in values for entry in (value if isinstance(value, list) else [value])]
        else:
            merged = _RULES[how.__name__](values)
        setattr(mine, name, merged)
    mine._update_count = getattr(mine, "_update_count", 0) + len(others)  # else it warns that it has seen nothing
    mine._computed = None  # what it has computed before, and would give again


def _summed(values: list[Tensor]) -> Tensor:
    total = values[0]
    for value in values[1:]:
        total = total + value.to(total.device)
    return total


def _folded(values: list[Tensor], fold: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    found = values[0]
    for value in values[1:]:
        found = fold(found, value.to(found.device))
    return found


_RULES: dict[Any, Callable[[list[Tensor]], Tensor]] = {
    "dim_zero_sum": _summed,
    "dim_zero_max": lambda values: _folded(values, torch.maximum),
    "dim_zero_min": lambda values: _folded(values, torch.minimum),
    "dim_zero_cat": lambda values: torch.cat([value.to(values[0].device) for value in values]),
}
"""How torchmetrics adds a state up over processes, where adding parts up one after the other gives the same."""


def _short(rule: Any) -> str:
    return repr(rule.removeprefix("dim_zero_")) if isinstance(rule, str) else repr(rule)


def _kind(metric: Any) -> str:
    return type(metric).__name__


def _unmergeable(what: str, metric: Any) -> SettingError:
    attributes = vars(metric) if hasattr(metric, "__dict__") else {}
    kinds = (int, float, Tensor, list)
    names = [name for name, value in attributes.items() if isinstance(value, kinds) and not isinstance(value, bool)]
    names = [] if is_torchmetrics(metric) else names[:3]
    body = "; ".join(f"self.{name} += other.{name}" for name in names) or "..."
    want = "a member that takes in what another one of its class has taken in"
    return SettingError(what, want=want, fix=f"def merge(self, other): {body}")
