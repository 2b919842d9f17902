"""Metric objects of any make: their state for a checkpoint, others like them, and what they may not compute."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from trainwright.checkpointing.tree import flatten
from trainwright.core.errors import CheckpointError, SettingError


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


def peers(metric: Any, states: Sequence[Any]) -> list[Any]:
    """Objects like one that is given, each with a state of its own."""
    fresh = copy.deepcopy(metric)
    fresh.reset()
    peers = [copy.deepcopy(fresh) for _ in states]
    for peer, state in zip(peers, states, strict=True):
        load_object(peer, state)
    return peers


def several(name: str, metric: Any, result: Any) -> SettingError:
    """Build the error for an object that computes something else than one number."""
    shown, fix = f"a {type(result).__name__}", ""
    if isinstance(result, Tensor):
        shown = f"a tensor of shape {tuple(result.shape)}"
    elif isinstance(result, Mapping) and result:
        shown += f" of {', '.join(map(repr, result))}"
        fix = f"def compute(self): return super().compute()[{next(iter(result))!r}]"
        fix += f"   # in a subclass of {type(metric).__name__}, one for each number"
    want = "one number, or a tensor of one element"
    return SettingError(f"metric {name!r}: compute() gave {shown}", want=want, fix=fix)
