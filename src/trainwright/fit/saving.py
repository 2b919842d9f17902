"""When a run saves, which state goes into a checkpoint, and which observers learn that it is complete."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trainwright.checkpointing.manager import CheckpointManager
from trainwright.checkpointing.optimizer_state import PARAMETERS, parameters_of_optimizers
from trainwright.checkpointing.parts import gather
from trainwright.core.errors import SettingError
from trainwright.core.records import Saved
from trainwright.core.triggers import Trigger
from trainwright.fit.run import Run
from trainwright.fit.setup import digest, settings_of
from trainwright.protocols import Tree, listeners
from trainwright.update.owner import listening
from trainwright.update.per_rank_state import PROCESSES, rank_state


class RunCheckpoints:
    """The checkpoints of one `fit`; without a manager, the slot being empty, none is ever due."""

    def __init__(self, run: Run, *, manager: CheckpointManager | None) -> None:
        self.run, self.owner, self.counters, self.manager = run, run.owner, run.counters, manager
        self.requested_here = False
        """Whether `save()` was called on this rank."""
        self.requested = False
        """Whether a checkpoint is written at the next boundary: all ranks know of a request."""
        self._saved_at: Any = None
        self._reserves = manager is not None
        """Whether memory for a copy of the state is still to be reserved."""
        self._trigger: Trigger | None = None
        self._on_save: list[Any] = []
        self._settings = "" if manager is None else digest(settings_of(run.owner))
        if manager is not None:
            manager.on_result = run.wake

    def start(self) -> None:
        """Start the trigger, after loading."""
        if self.manager is None:
            return
        every = self.manager.settings.every
        self._trigger = None if isinstance(every, str) else Trigger(every, self.counters, of="every")
        self._on_save = listeners(listening(self.owner), "on_save")

    def are_due(self, *, keep: bool, validated: bool, epoch_ended: bool) -> bool:
        """Return whether to save now: `every` is due, it is among the best, it was requested, or the run ends.

        `validated`: whether there was a validation, or without validation data an epoch's end.
        """
        if self.manager is None:
            return False
        due = validated if self._trigger is None else self._trigger.fires(self.counters, epoch_ended=epoch_ended)
        return due or keep or bool(self.counters.stopped) or self.requested

    def save(self, *, instead: Mapping[str, Tree] | None = None) -> None:
        """Gather the state of all parts and hand it to the manager; `instead`: states in place of some parts'."""
        assert self.manager is not None
        self.requested = False
        counters = self.counters
        update = counters.earlier_updates + counters.updates
        measured: dict[str, float] = {}
        for row in self.owner.history[-2:]:  # a validation and the epoch's end may have the same update
            measured |= row if row["update"] == update else {}
        self.run.tracker.merge(self.owner.world)
        per_rank = self._per_rank_state()  # before the averaged weights are shown, which have other statistics
        with self.run.signals.held(), self.run.weights.evaluated():
            self.manager.save(
                self._tree() | per_rank | dict(instead or {}),
                update=update,
                epoch=counters.earlier_epochs + counters.epoch,
                metrics=measured,
                settings=self._settings,
            )
        self._saved_at = self._boundary

    def _tree(self) -> dict[str, Tree]:
        """Return the state of all parts, and the names of the parameters that the optimizers' state belongs to."""
        parts = self.owner.parts()
        return gather(parts) | {PARAMETERS: parameters_of_optimizers(parts)}

    def _per_rank_state(self) -> dict[str, Tree]:
        """Return the state that each rank has of its own, of all of them; none for one, whose parts hold everything."""
        owner, run = self.owner, self.run
        if owner.world.size == 1:
            return {}
        return {PROCESSES: owner.world.gather(rank_state(owner, run.source, run.random.state_dict()["now"]))}

    def report(self, *, wait: bool = False) -> None:
        """Notify the observers of new complete checkpoints; CheckpointError where a save has failed."""
        self.notify(self.completed(wait=wait))

    def completed(self, *, wait: bool = False, alone: bool = False) -> list[Saved]:
        """Return the new complete checkpoints; CheckpointError where a save has failed.

        `alone`: without asking the other ranks.
        """
        if self.manager is None:
            return []
        with self.run.signals.held():
            return self.manager.completed(wait=wait, alone=alone)

    def notify(self, saved: list[Saved]) -> None:
        """Notify the observers of complete checkpoints."""
        for one in saved:
            for notify in self._on_save:
                notify(one)

    def arrive(self) -> None:
        """Report saves; once after the first update, when the state has its full size, reserve memory for a copy."""
        self.report()
        if self.manager is not None and self._reserves and self.counters.updates:
            self._reserves = False
            average = self.run.weights.average
            if average is None or not average.will_need_statistics:  # else to show it takes a pass over the data
                with self.run.weights.evaluated():
                    self.manager.reserve(self._tree())

    def request(self) -> None:
        """Have the loop save after the update in progress."""
        if self.manager is None:
            raise SettingError("save() without a checkpoint slot", fix='checkpoint=Checkpoint("runs/x")')
        self.requested_here, self.requested = True, self.requested or self.run.rank_sync is None
        self.run.wake()

    def next_due(self) -> float:
        """Return the update at which the loop must come back for a save."""
        first = self.counters.updates + 1 if self._reserves else math.inf
        return first if self._trigger is None else min(first, self._trigger.next_update(self.counters))

    @property
    def are_done(self) -> bool:
        """Whether the state of this very boundary was saved already."""
        return bool(self._saved_at == self._boundary)

    @property
    def _boundary(self) -> tuple[Any, ...]:
        counters = self.counters
        return (counters.epoch, counters.batch, counters.updates, counters.paused, counters.pause)
