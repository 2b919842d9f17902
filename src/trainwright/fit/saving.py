"""When a run saves, what goes into a checkpoint, and who hears that it is whole."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from trainwright.checkpointing import state
from trainwright.checkpointing.checkpoint import Keeping
from trainwright.core.errors import SettingError, message
from trainwright.core.records import Saved
from trainwright.fit.due import Bell
from trainwright.fit.per_rank_state import PROCESSES, own_state
from trainwright.fit.run import Run
from trainwright.fit.setup import digest, settings_of
from trainwright.protocols import Tree, listeners
from trainwright.update.owner import listening


class Saves:
    """The checkpoints of one `fit`; there may be no slot for them."""

    def __init__(self, run: Run, *, keeper: Keeping | None) -> None:
        self.run, self.owner, self.counters, self.keeper = run, run.owner, run.counters, keeper
        self.asked = False
        """Whether `save()` was called on this process."""
        self.wanted = False
        """Whether a checkpoint is written at the coming boundary: all processes have heard of one that has asked."""
        self._saved_at: Any = None
        self._saved: list[Saved] = []
        """What a keeper that writes at once has said, until it is told."""
        self._expects = hasattr(keeper, "expect")
        self._bell: Bell | None = None
        self._on_save: list[Any] = []
        if hasattr(keeper, "news"):
            cast(Any, keeper).news = run.wake
        self._told = {"settings": digest(settings_of(run.owner))} if hasattr(keeper, "written") else {}

    def start(self) -> None:
        """Set the bell going, after loading."""
        if self.keeper is None:
            return
        every = self.keeper.settings.every
        self._bell = None if isinstance(every, str) else Bell(every, self.counters, of="every")
        self._on_save = listeners(listening(self.owner), "on_save")

    def are_due(self, *, keep: bool, validated: bool, epoch_ended: bool) -> bool:
        """Whether to save now: the span has passed, it is among the best, it was asked for, or the run ends.

        `validated`: whether there was a validation, or where there is none an epoch's end.
        """
        if self.keeper is None:
            return False
        rings = validated if self._bell is None else self._bell.rings(self.counters, epoch_ended=epoch_ended)
        return rings or keep or bool(self.counters.stopped) or self.wanted

    def save(self, *, instead: Mapping[str, Tree] | None = None) -> None:
        """Have a checkpoint of the whole state written; `instead`: states to take in the place of some parts'."""
        assert self.keeper is not None
        self.wanted = False
        counters = self.counters
        update = counters.earlier_updates + counters.updates
        measured: dict[str, float] = {}
        for row in self.owner.history[-2:]:  # a validation and the epoch's end may meet at one update
            measured |= row if row["update"] == update else {}
        self.run.ledger.merge(self.owner.world)
        own = self._of_each_process()  # before the averaged weights are shown, which have other statistics
        with self.run.signals.held(), self.run.shown.evaluated():
            saved = self.keeper.save(
                self._tree() | own | dict(instead or {}),
                update=update,
                epoch=counters.earlier_epochs + counters.epoch,
                metrics=measured,
                **self._told,
            )
        self._saved += [] if saved is None else [saved]
        self._saved_at = self._place

    def _tree(self) -> dict[str, Tree]:
        """The state of all parts, and beside it the parameters that the optimizers' state belongs to."""
        parts = self.owner.parts()
        return state.gather(parts) | {state.PARAMETERS: state.parameters_of_optimizers(parts)}

    def _of_each_process(self) -> dict[str, Tree]:
        """What only the processes themselves know, of all of them: nothing for one, whose parts hold everything."""
        owner, run = self.owner, self.run
        if owner.world.size == 1:
            return {}
        return {PROCESSES: owner.world.gather(own_state(owner, run.source, run.random.state_dict()["now"]))}

    def hear(self, *, wait: bool = False) -> None:
        """Tell the observers of the checkpoints that have become whole; what went wrong with one is raised here."""
        self.tell(self.written(wait=wait))

    def written(self, *, wait: bool = False, alone: bool = False) -> list[Saved]:
        """The checkpoints that have become whole since this was last asked; what went wrong with one is raised here.

        `alone`: of several processes only this one asks.
        """
        keeper: Any = self.keeper
        saved, self._saved = self._saved, []
        how = {"alone": True} if alone else {}
        with self.run.signals.held():
            return saved + (keeper.written(wait=wait, **how) if hasattr(keeper, "written") else [])

    def tell(self, saved: list[Saved]) -> None:
        """Tell the observers of checkpoints that are whole."""
        for one in saved:
            for notify in self._on_save:
                notify(one)

    def arrive(self) -> None:
        """Hear of saves, and once have room made for the state: after the first update, it has its whole size."""
        self.hear()
        if self._expects and self.counters.updates:
            self._expects = False
            average = self.run.shown.average
            if average is None or not average.will_need_statistics:  # else to show it takes a pass over the data
                with self.run.shown.evaluated():
                    cast(Any, self.keeper).expect(self._tree())

    def request(self) -> None:
        """Have the loop pause and save at the coming boundary."""
        if self.keeper is None:
            raise SettingError(message("save() without a checkpoint slot", fix='checkpoint=Checkpoint("runs/x")'))
        self.asked, self.wanted = True, self.wanted or self.run.agreement is None
        self.run.wake()

    def next_due(self) -> float:
        """The update at which the loop must pause for a save."""
        first = self.counters.updates + 1 if self._expects else math.inf
        return first if self._bell is None else min(first, self._bell.next_update(self.counters))

    @property
    def are_done(self) -> bool:
        """Whether the state of this very boundary was saved already."""
        return bool(self._saved_at == self._place)

    @property
    def _place(self) -> tuple[Any, ...]:
        counters = self.counters
        return (counters.epoch, counters.batch, counters.updates, counters.paused, counters.pause)
