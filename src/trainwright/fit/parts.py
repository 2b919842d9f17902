"""The parts of a run that have state, by the names of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from trainwright.checkpointing.parts import CallbackPart
from trainwright.core.device import devices_of, move
from trainwright.core.trees import NamedParts
from trainwright.fit.describe import settings_of
from trainwright.optim.named import ONLY
from trainwright.protocols import Stateful

if TYPE_CHECKING:
    from trainwright.fit.between_updates import BetweenUpdates
    from trainwright.fit.run import Run
    from trainwright.update.owner import Owner


def parts_of(run: Run, between: BetweenUpdates) -> dict[str, Stateful]:
    """Return every part of a run that has state, by the names of a checkpoint."""
    owner = run.owner
    named: dict[str, Any] = {
        "model": owner.model,
        "loss": owner.loss if isinstance(owner.loss, nn.Module) and owner.loss.state_dict() else None,
        "optimizer": NamedParts(owner.optimizers) if run.optimizer_steps.named else owner.optimizers[ONLY],
        "precision": run.scaler,
        "schedule": NamedParts(run.rates) if isinstance(owner.schedule, Mapping) else run.rates.get(ONLY),
        "average": run.weights if run.weights.differs else None,
        "early_stopping": between.watch,
        "checkpoint": between.manager,
        "progress": RunProgress(run),
        "totals": run.tracker,
        "data": run.source,
        "state": CallbackPart(lambda: owner.state, lambda tree: _load_state(owner, tree)),
        "random": run.random,
    }
    return {name: part for name, part in named.items() if part is not None}


class RunProgress:
    """Part `progress`: counters, history, finished stages, the settings it was saved under, and lengths of epochs."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def state_dict(self) -> dict[str, Any]:
        """Plain data."""
        run, owner = self._run, self._run.owner
        record = owner._record
        limit = None if record.splits is None else record.splits.limit
        return {
            "counters": owner._counters.state_dict(),
            "history": owner.history,
            "final": record.final_validation,
            "asked": run.stop_reason,
            "stages": record.stages,
            "settings": settings_of(owner),
            **({} if limit is None else {"split_at": limit}),  # a resumed run splits from the start
            **run.optimizer_steps.used_rates(),
            "epochs": run.lengths.state_dict(),
        }

    def load_state_dict(self, tree: Mapping[str, Any]) -> None:
        """Take over the saved progress."""
        run, owner = self._run, self._run.owner
        record = owner._record
        run.optimizer_steps.load_used_rates(tree)
        epochs, counters = tree.get("epochs", []), tree["counters"]
        if sum(one[0] for one in epochs) > counters["earlier_epochs"] + counters["epoch"] + 1:
            raise RuntimeError("'epochs' are more than the counters say")  # before a list of that length is made
        run.lengths.load_state_dict(epochs)
        if record.splits is not None:
            record.splits.limit = tree.get("split_at")
        owner._counters.load_state_dict(counters)
        owner.history[:] = tree["history"]
        record.stages = list(tree["stages"])
        # A reason given to `stop()` counts only where the validation and the save that it asked for are still due.
        due = owner._counters.pause or owner._counters.paused < owner._counters.updates
        record.final_validation, run.stop_reason = tree["final"], tree["asked"] if due else ""


def _load_state(owner: Owner, tree: Mapping[str, Any]) -> None:
    """Fill the user's state dict, on the device of the run; with several devices each tensor stays where it lay."""
    owner.state.clear()
    if tree:
        owner.state.update(tree if len(devices_of(owner.model)) > 1 else move(tree, owner.device))
