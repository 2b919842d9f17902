"""Says which path the updates of a trainer take, and why."""

from __future__ import annotations

from trainwright.run.judging import LATE, why_judged_at_once
from trainwright.run.owner import Owner
from trainwright.runtime.lagging import AHEAD


def fast_path(owner: Owner) -> str:
    """Name the path of the updates, with its cost on this device."""
    checks = owner.nonfinite != "ignore" or getattr(owner.precision, "kind", "") == "fp16"
    why = why_judged_at_once(owner, checks=checks)
    reads = "one read per update, of loss, flag and norm together: " + "; ".join(why)
    if not why:
        reads = f"nothing is read before its time, which is up to {AHEAD} updates later"
    elif owner.device.type not in LATE:
        reads = "its numbers are read at once, which waits for nothing"
    compiled, graphs = owner.between.compiled, "; CUDA graphs are not built yet" if owner.device.type == "cuda" else ""
    how = "eager" if compiled is None else f"compiled ({compiled})"
    return f"{how} on {owner.device.type}: {reads}{graphs}"
