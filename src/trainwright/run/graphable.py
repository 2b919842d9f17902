"""Says what stands against recording updates, and what a recording would have baked in."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from trainwright.base.contracts import Observer
from trainwright.base.errors import SettingError, first_line, message
from trainwright.run.judging import why_made_by_the_host
from trainwright.run.recorded import Unfit
from trainwright.runtime import facts
from trainwright.runtime.fused import why_not_masked
from trainwright.runtime.graphs import RECORDERS
from trainwright.slots.device_side import DeviceScale
from trainwright.slots.precision import LossScaler
from trainwright.slots.rates import TableRates

if TYPE_CHECKING:
    from trainwright.run.owner import Owner
    from trainwright.run.run import Run

_MOVING = frozenset(
    {
        *("history", "result", "counters", "ledger", "between", "hooks", "_run", "_pauses", "optimizers"),
        *("metrics", "observers", "schedule", "average", "early_stopping", "checkpoint"),
    }
)
"""Attributes of every trainer that move by themselves, or that no step reads."""


def why_not(run: Run) -> Iterator[str]:
    """Why no update of a run can be recorded, as far as its settings tell."""
    owner = run.owner
    if owner.device.type not in RECORDERS:
        yield f"there are none on {owner.device.type}"
    yield from why_made_by_the_host(owner)
    if run.scaler is not None and not isinstance(run.scaler, LossScaler | DeviceScale):
        yield "a loss scale of your own"
    if owner.on_oom is not None:
        yield f"on_oom={owner.on_oom!r} may run an update again, in other micro-batches"
    if torch.is_anomaly_enabled():
        yield "anomaly mode looks at every gradient while backward runs"
    if owner.hooks.counts_itself:
        yield "a `count` of your own reads each batch"
    if owner.state:
        yield "`self.state` may be read and written by a step"
    yield from facts.hooks_of_others(owner.model)
    activations = sys.modules.get("trainwright.runtime.activations")  # who uses it has imported it
    if activations is not None and any(map(activations.is_recomputed, owner.model.modules())):
        yield "blocks are recomputed, for which torch reads the random state of the device"


def why_not_whole(run: Run) -> Iterator[str]:
    """Why updates can be recorded up to their gradients alone."""
    if run.behind is None:
        yield from run.owner.between.judged_at_once or ()
    elif isinstance(run.rates, TableRates) and run.rates.cycles:
        yield "the schedule cycles momentum"
    elif run.rates is not None and not isinstance(run.rates, TableRates):
        yield "the schedule keeps a state of its own"
    for optimizer in run.owner.optimizers.values():
        why = why_not_masked(optimizer)
        if why:
            yield why


def why_failed(error: BaseException) -> tuple[str, bool]:
    """Say why a recording has failed, and whether one of less may not: by the first of errors that followed each other.

    Torch says of a broken recording only that it is one.
    """
    while error.__context__ is not None and not isinstance(error, Unfit):
        error = error.__context__
    if isinstance(error, Unfit):
        return str(error), False
    return first_line(error), True


def not_possible(why: tuple[str, ...]) -> SettingError:
    """Refuse what `Fast(cuda_graphs="require")` asks for."""
    have = "\n        ".join(why)
    what = 'Fast(cuda_graphs="require"), and updates cannot be recorded'
    return SettingError(message(what, have=have, fix='Fast(cuda_graphs="auto"), which does without', where=False))


def read_by_steps(owner: Owner) -> list[tuple[str, Any]]:
    """What a step may read attributes of."""
    own = {name: value for name, value in vars(owner).items() if name not in _MOVING}
    each: list[tuple[str, Any]] = [("model", owner.model), ("loss", owner.loss)]
    each += [(f"frozen[{name!r}]", module) for name, module in owner.frozen.items()]
    return [*each, (type(owner).__name__, own), ("methods", type(owner))]


def watches(observer: Observer) -> bool:
    """Whether an observer of the user's own is told of updates, and so may change anything after each."""
    return (
        type(observer).on_update is not Observer.on_update
        and type(observer).__module__.partition(".")[0] != "trainwright"
    )
