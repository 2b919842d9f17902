"""Says which path the updates of a trainer take, and why."""

from __future__ import annotations

from collections.abc import Sequence

from trainwright.run.judging import LATE, why_judged_at_once
from trainwright.run.owner import Owner
from trainwright.runtime.lagging import AHEAD
from trainwright.slots.precision import LossScaler


def fast_path(owner: Owner) -> str:
    """Name the path of the updates, with its cost on this device."""
    why = owner.between.judged_at_once
    if why is None:  # no run yet, and so no schedule that is bound
        scaler = LossScaler() if getattr(owner.precision, "kind", "") == "fp16" else None
        why = why_judged_at_once(owner, checks=owner.nonfinite != "ignore" or scaler is not None, scaler=scaler)
    reads = "one read per update, of loss, flag and norm together: " + "; ".join(why)
    if not why:
        reads = f"nothing is read before its time, which is up to {AHEAD} updates later"
    elif owner.device.type not in LATE:
        reads = "its numbers are read at once, which waits for nothing"
    compiled, graphs = owner.between.compiled, owner.between.graphs
    how = "eager" if compiled is None else f"compiled ({compiled})"
    beside = "" if graphs is None else f"; {graphs}"
    beside += "" if owner.between.splits is None else f"; {owner.between.splits}"
    return f"{_level(owner, why)}, {how} on {owner.device.type}: {reads}{beside}{_together(owner)}"


def _level(owner: Owner, why: Sequence[str]) -> str:
    """L3 and L2 for updates that are replayed, L1 for silent ones, L0 for those that are read before their step."""
    level = str(getattr(owner.between.graphs, "level", "L1"))
    return "L0" if why and level == "L1" else level


def _together(owner: Owner) -> str:
    """How gradients of several processes become one, and what is sent beside them; nothing for one process."""
    size, hooks, settings = owner.world.size, owner.hooks, owner.parallel
    if size == 1:
        return ""
    beside = " and one small sum more"
    if settings.shards:
        return f"; gradients of {size} processes are reduced to shards during backward{beside}"
    if hooks.updates_itself or hooks.computes_itself:
        return f"; gradients of {size} processes are averaged after backward: an `update` of your own reads them"
    return f"; gradients of {size} processes are averaged during backward{beside if settings.compress else ''}"
