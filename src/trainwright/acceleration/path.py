"""Says which path the updates of a trainer take, and why."""

from __future__ import annotations

from trainwright.update import finite_check
from trainwright.update.device_state import AHEAD
from trainwright.update.trainer_like import TrainerLike


def fast_path(trainer: TrainerLike) -> str:
    """Name the path of the updates, with its cost on this device: L1 for silent ones, L0 where each is read at once."""
    why = trainer._record.path.why_immediate
    if why is None:  # no run yet, and so no schedule that is bound
        scaler = None if trainer.precision is None else trainer.precision.loss_scale(trainer.device.type)
        checks = trainer.on_nonfinite != "ignore" or scaler is not None
        why = finite_check.why_immediate(trainer, checks=checks, scaler=scaler, schedules=None)
    reads = "one read per update, of loss, flag and norm together: " + "; ".join(why)
    if not why:
        reads = f"nothing is read before its time, which is up to {AHEAD} updates later"
    elif trainer.device.type not in finite_check.ASYNC_DEVICES:
        reads = "its numbers are read at once, which waits for nothing"
    compiled = trainer._record.path.compiled
    how = "eager" if compiled is None else f"compiled ({compiled})"
    beside = "" if trainer._record.path.splits is None else f"; {trainer._record.path.splits}"
    return f"{'L0' if why else 'L1'}, {how} on {trainer.device.type}: {reads}{beside}{_together(trainer)}"


def _together(trainer: TrainerLike) -> str:
    """How gradients of several processes become one, and what is sent beside them; nothing for one process."""
    from trainwright.distributed.ddp import DDP  # few runs need it

    size, hooks, settings = trainer.world.size, trainer._hooks, trainer.parallel
    if size == 1:
        return ""
    beside = " and one small sum more"
    if settings.shards:
        return f"; gradients of {size} processes are reduced to shards during backward{beside}"
    if hooks.overrides_update or hooks.overrides_compute_gradients:
        return f"; gradients of {size} processes are averaged after backward: an `update` of your own reads them"
    compresses = isinstance(settings, DDP) and settings.compress is not None
    return f"; gradients of {size} processes are averaged during backward{beside if compresses else ''}"
