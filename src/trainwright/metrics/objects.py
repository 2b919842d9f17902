"""Metric objects of any library: their state for a checkpoint, and how states of several ranks become one."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from trainwright.checkpointing.tree import flatten
from trainwright.core.errors import CheckpointError, SettingError
from trainwright.distributed.packing import packed


def state_of(name: str, metric: Any, *, fed: bool) -> Any:
    """Return the state of an object, copied: its attributes where it cannot load one; None where it has seen nothing.

    CheckpointError where it has neither.
    """
    if not (hasattr(metric, "state_dict") and hasattr(metric, "load_state_dict")):
        if hasattr(metric, "__dict__"):
            state = copy.deepcopy(vars(metric))  # also before it is fed: what cannot be saved is found at once
            _check_attributes(name, metric, state)
            return state
        what = f"metric {name!r} cannot be saved: {type(metric).__name__} has neither attributes nor a state_dict"
        raise CheckpointError(what, fix="give it state_dict() and load_state_dict(tree)")
    if not fed:
        return None
    if callable(getattr(metric, "persistent", None)):
        metric.persistent(True)  # torchmetrics keeps its sums out of state_dict unless told
    return copy.deepcopy(metric.state_dict())


def _check_attributes(name: str, metric: Any, state: dict[str, Any]) -> None:
    """Refuse an attribute that no checkpoint can hold, such as a function, with the methods to write."""
    wrong = {attribute: why for attribute, value in state.items() if (why := _why_not_saved(attribute, value))}
    if not wrong:
        return
    kind = type(metric).__name__
    counted = ", ".join(f"{attribute!r}: self.{attribute}" for attribute in state if attribute not in wrong)
    raise CheckpointError(
        f"metric {name!r} cannot be saved with the run: its attribute {next(iter(wrong.values()))}",
        want=f"attributes that are plain data, or a {kind} with state_dict and load_state_dict",
        fix=f"in {kind}: def state_dict(self): return {{{counted}}}   # without {', '.join(wrong)}\n"
        "        and def load_state_dict(self, tree): vars(self).update(tree)",
    )


def _why_not_saved(attribute: str, value: Any) -> str:
    try:
        flatten({attribute: value})
    except CheckpointError as error:
        return str(error).partition("\n")[0].removesuffix(": it cannot be saved")
    return ""


def load_object(metric: Any, saved: Any) -> None:
    """Give an object a saved state; None is that of one that has seen nothing."""
    metric.reset()
    if saved is not None and hasattr(metric, "state_dict") and hasattr(metric, "load_state_dict"):
        metric.load_state_dict(saved)
    elif saved is not None:
        vars(metric).clear()
        vars(metric).update(copy.deepcopy(saved))


def merge_state(metric: Any, saved: Any) -> None:
    """Add the saved state of another object of the same class, such as another rank's."""
    other = copy.deepcopy(metric)
    load_object(other, saved)
    if callable(getattr(metric, "merge", None)):
        metric.merge(other)
    elif is_torchmetrics(metric):
        _merge_torchmetrics(metric, other)
    else:
        metric.merge_state([other])


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


def stop_syncing(metric: Any) -> None:
    """Switch off the reduction over ranks in `compute` of torchmetrics: numbers reduced twice would count twice."""
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
    metric._update_count = getattr(metric, "_update_count", 0) + 1  # else it warns that it was never updated
    metric._computed = None  # its cached result


_REDUCTIONS: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    "dim_zero_sum": torch.add,
    "dim_zero_max": torch.maximum,
    "dim_zero_min": torch.minimum,
    "dim_zero_cat": lambda own, other: torch.cat([own, other]),
}
"""The reductions of torchmetrics that give the same one rank after the other."""


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
