"""Records which phase of the loop a run is in, and rolls an interrupted window back to its start.

Between two windows the state of the run is consistent. While the data of an epoch are opened, or a window is fetched,
only random states and the position in the data have changed. While a window is updated its forward passes change
buffers, totals and `state` too, and from the first optimizer step on the weights: then nothing can be rolled back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trainwright.core.rng import RngCheckpoint, random_state, set_random_state
from trainwright.core.trees import copy_tree
from trainwright.data.source import Source
from trainwright.protocols import Stateful, Tree
from trainwright.update.per_rank_state import epoch_batches
from trainwright.update.snapshot import Buffers, LossTotals, Snapshot, StateDicts, UserState
from trainwright.update.trainer_like import TrainerLike, trained_modules

BETWEEN, OPENING, FETCHING = "between", "opening", "fetching"
UPDATING, COUNTING, ENDED = "updating", "counting", "ended"
"""The phases: between two windows; opening the data of an epoch; fetching a window; updating by it; counting, averaging
and reporting the update; and after the loop, when the model may hold other weights than the trained ones."""


class LoopPhase:
    """The phase of a run. A run without a checkpoint slot saves nothing, and has nothing to roll back."""

    phase = BETWEEN

    def __init__(self, trainer: TrainerLike, source: Source) -> None:
        self._trainer, self._source = trainer, source

    def bind(self, user_parts: Mapping[str, Stateful]) -> None:
        """Add the user's own parts, which a window may change too. No-op here."""

    def refresh(self) -> None:
        """Find the buffers again: `begin_epoch` may have changed the layers. No-op here."""

    def open_epoch(self) -> Iterator[Any]:
        """Return the iterator of the current epoch, at its next batch."""
        self.phase = OPENING
        iterator = epoch_batches(self._trainer.world, self._source, self._trainer._counters.epoch)
        self.phase = BETWEEN
        return iterator

    def before_fetch(self) -> None:
        """Record that the next window is fetched."""
        self.phase = FETCHING

    def restore(self) -> dict[str, Tree]:
        """Roll back to the start of the window in progress. No-op here."""
        return {}

    def data_position(self) -> Tree:
        """Return the position in the data, behind the batches that were trained on."""
        self._source.commit()
        return self._source.position()


class Rollback(LoopPhase):
    """The phase of a run, and the state before the window in progress, from which an interrupted run is saved."""

    def __init__(self, trainer: TrainerLike, source: Source, random: RngCheckpoint) -> None:
        super().__init__(trainer, source)
        self._random = random
        saves_errors = trainer.on_error == "save" and trainer.world.size == 1  # several ranks save nothing for an error
        self._snapshot: Snapshot | None = None
        """What a window changes before its first step; None where an error inside a window is not saved."""
        if saves_errors:
            tracked = Buffers(lambda: trained_modules(trainer)), LossTotals(trainer._tracker), UserState(trainer)
            self._snapshot = Snapshot(*tracked)
        self._user_parts = StateDicts({})
        """The user's own parts: their states are not loaded back, but saved as they were."""
        self._captures_random = saves_errors or source.draws_global_rng
        self._before_opening: dict[str, Tree] = {}
        """The states of data and random numbers, while the data of an epoch are opened."""
        self._before_window: dict[str, Any] | None = None
        """The random state before the current window was fetched, where fetching or updating may draw."""

    def bind(self, user_parts: Mapping[str, Stateful]) -> None:
        """Add the user's own parts, which a window may change too."""
        if self._snapshot is not None:
            self._user_parts = StateDicts(user_parts)

    def refresh(self) -> None:
        """Find the buffers again: `begin_epoch` may have changed the layers."""
        if self._snapshot is not None:
            self._snapshot.refresh()

    def open_epoch(self) -> Iterator[Any]:
        """Return the iterator of the current epoch, at its next batch.

        After a resume: the random state of the epoch's start is set, the order is drawn again, `counters.batch` batches
        are left out, and the random state of the save is set.
        """
        counters, random = self._trainer._counters, self._random
        resumed = random.state_after_opening()
        now = resumed or random_state()
        start = random.epoch_start_state if resumed else {}
        data = copy_tree(self.data_position())
        self._before_opening = {"data": data, "random": {"epoch_start": start, "now": now}}
        # A signal may end the run at any line: before this one `random` holds the state, then `_before_opening` does.
        self.phase = OPENING
        random.resume_state, random.restored_before_opening = None, False
        if resumed is None:
            iterator = epoch_batches(self._trainer.world, self._source, counters.epoch)
            random.epoch_start_state = now
        else:
            set_random_state(random.epoch_start_state)
            iterator = epoch_batches(self._trainer.world, self._source, counters.epoch, skip=counters.batch)
            set_random_state(resumed)
        self.phase, self._before_opening = BETWEEN, {}
        return iterator

    def before_fetch(self) -> None:
        """Capture the state that is rolled back to: the next window is about to be fetched."""
        self._source.commit()
        self._before_window = random_state() if self._captures_random else None
        if self._snapshot is not None:
            self._snapshot.capture()
            self._user_parts.capture()
        self.phase = FETCHING  # last: a signal handler of the user's own may raise at any line before

    def restore(self) -> dict[str, Tree]:
        """Roll back to the start of the window in progress; return the states that other parts are saved with."""
        if self.phase == OPENING:
            return self._before_opening
        if self.phase not in (FETCHING, UPDATING):
            return {}
        drawn = self._before_window or random_state()
        states: dict[str, Tree] = {"random": {"epoch_start": self._random.epoch_start_state, "now": drawn}}
        if self.phase == FETCHING:
            return states
        assert self._snapshot is not None
        self._snapshot.restore()
        return states | self._user_parts.trees

    def data_position(self) -> Tree:
        """Return the position in the data, behind the batches that were trained on."""
        if self.phase == OPENING:
            return self._before_opening["data"]
        if self.phase not in (FETCHING, UPDATING):
            self._source.commit()
        return self._source.position()
