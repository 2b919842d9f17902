"""The checkpoints of a run: when they are due, their state, and the observers of complete ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainwright.checkpointing.manager import CheckpointManager
from trainwright.checkpointing.parts import gather
from trainwright.core.records import Saved
from trainwright.core.triggers import Trigger
from trainwright.fit.describe import digest, settings_of
from trainwright.fit.run import Run
from trainwright.protocols import Tree, listeners
from trainwright.update.owner import active_observers
from trainwright.update.per_rank_state import PROCESSES, rank_state


class RunCheckpoints:
    """Gives the state of one `fit` to the manager when a save is due; made after loading."""

    def __init__(self, run: Run, manager: CheckpointManager) -> None:
        self.run, self.owner, self.counters, self.manager = run, run.owner, run.counters, manager
        every = manager.settings.every
        self.triggers = [] if isinstance(every, str) else [Trigger(every, self.counters, of="every")]
        """The trigger of `every`; none for "auto", which saves after each validation."""
        self._saved_at: Any = None
        self._reserves = True
        """Whether memory for a copy of the state is still to be reserved."""
        self._on_save = listeners(active_observers(self.owner), "on_save")
        self._settings = digest(settings_of(self.owner))
        manager.on_result = run.wake

    def arrive(self) -> None:
        """Report saves; once after the first update, when the state has its full size, reserve memory for a copy."""
        self.report()
        if self._reserves and self.counters.updates:
            self._reserves = False
            self._reserve()

    def _reserve(self) -> None:
        average = self.run.weights.average
        if average is None or not average.will_need_statistics:  # else the averaged weights take a pass over the data
            with self.run.weights.evaluated():
                self.manager.reserve(gather(self.owner.parts()))

    def is_due(self, *, validated: bool, epoch_ended: bool) -> bool:
        """Whether `every` is due. `validated`: there was a validation, or without validation data an epoch's end."""
        fired = [one.fires(self.counters, epoch_ended=epoch_ended) for one in self.triggers]
        return any(fired) if fired else validated

    def save(self, *, instead: Mapping[str, Tree] | None = None) -> None:
        """Gather the state of all parts and hand it to the manager; `instead`: states in place of some parts'."""
        owner, counters = self.owner, self.counters
        update = counters.earlier_updates + counters.updates
        measured: dict[str, float] = {}
        for row in owner.history[-2:]:  # a validation and the epoch's end may have the same update
            measured |= row if row["update"] == update else {}
        self.run.tracker.merge(owner.world)
        replaced = dict(instead or {})
        if owner.world.size > 1:  # before the evaluation weights are in the model, which have other statistics
            own = rank_state(owner, self.run.source, self.run.random.state_dict()["now"])
            replaced[PROCESSES] = owner.world.gather(own)
        with self.run.signals.held(), self.run.weights.evaluated():
            self.manager.save(
                gather(owner.parts()) | replaced,
                update=update,
                epoch=counters.earlier_epochs + counters.epoch,
                metrics=measured,
                settings=self._settings,
            )
        self._saved_at = self._boundary

    def report(self, *, wait: bool = False) -> None:
        """Report new complete checkpoints to the observers; CheckpointError where a save has failed."""
        with self.run.signals.held():
            saved = self.manager.completed(wait=wait)
        self.notify(saved)

    def notify(self, saved: list[Saved]) -> None:
        """Report complete checkpoints to the observers."""
        for one in saved:
            for notify in self._on_save:
                notify(one)

    @property
    def has_current_state(self) -> bool:
        """Whether the state of this very boundary was saved already."""
        return bool(self._saved_at == self._boundary)

    @property
    def _boundary(self) -> tuple[Any, ...]:
        counters = self.counters
        return (counters.epoch, counters.batch, counters.updates, counters.paused, counters.pause)
