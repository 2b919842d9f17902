"""Copies the state before the window in progress, so that an interrupted run can save it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from trainwright.core.errors import CheckpointError, Stopped, first_line
from trainwright.core.rng import RngCheckpoint, random_state, set_random_state
from trainwright.core.signals import Interrupted
from trainwright.core.trees import copy_tree
from trainwright.data.source import Source
from trainwright.protocols import Stateful, Tree
from trainwright.update.per_rank_state import epoch_batches
from trainwright.update.snapshot import Buffers, LossTotals, Snapshot, StateDicts, UserState
from trainwright.update.trainer_like import TrainerLike, trained_modules

if TYPE_CHECKING:
    from trainwright.fit.boundary import Boundary


BETWEEN, OPENING, FETCHING = "between", "opening", "fetching"
UPDATING, COUNTING, ENDED = "updating", "counting", "ended"
"""The phases of a run. `BETWEEN` two windows; `OPENING` the data of an epoch; `FETCHING` a window; `UPDATING` by it;
`COUNTING`, averaging and reporting the update; `ENDED`: after the loop, when the model may hold its final weights."""


class LoopPhase:
    """The phase of a run without a checkpoint slot, which has nothing to roll back."""

    phase = BETWEEN

    def __init__(self, trainer: TrainerLike, source: Source) -> None:
        self._trainer, self._source = trainer, source

    def bind(self, user_parts: Mapping[str, Stateful]) -> None:
        """Register the user's parts, which a window may change. No-op here."""

    def refresh(self) -> None:
        """Find the buffers again after `begin_epoch`, which may change layers. No-op here."""

    def open_epoch(self) -> Iterator[Any]:
        """Return the iterator of the current epoch, at its next batch."""
        self.phase = OPENING
        iterator = epoch_batches(self._trainer.world, self._source, self._trainer._counters.epoch)
        self.phase = BETWEEN
        return iterator

    def before_fetch(self) -> None:
        """Enter the phase FETCHING."""
        self.phase = FETCHING

    def restore(self) -> dict[str, Tree]:
        """Roll back to the start of the window in progress. No-op here."""
        return {}

    def data_position(self) -> Tree:
        """Return the position in the data after the batches trained on."""
        self._source.commit()
        return self._source.position()


class Rollback(LoopPhase):
    """The phase of a run with checkpoints, and copies of the state before the window in progress."""

    def __init__(self, trainer: TrainerLike, source: Source, random: RngCheckpoint) -> None:
        super().__init__(trainer, source)
        self._random = random
        saves_errors = trainer.on_error == "save" and trainer.world.size == 1  # several ranks save nothing at an error
        self._snapshot: Snapshot | None = None
        """Copies of all that a window changes before its step; None if errors inside a window are not saved."""
        if saves_errors:
            tracked = Buffers(lambda: trained_modules(trainer)), LossTotals(trainer._tracker), UserState(trainer)
            self._snapshot = Snapshot(*tracked)
        self._user_parts = StateDicts({})
        """Copies of the states of the user's parts. They are saved, and not loaded back into the parts."""
        self._captures_random = saves_errors or source.draws_global_rng
        self._before_opening: dict[str, Tree] = {}
        """The states of parts `data` and `random` while the data of an epoch are opened."""
        self._before_window: dict[str, Any] | None = None
        """The random state before the fetch of the current window; None if nothing may draw."""

    def bind(self, user_parts: Mapping[str, Stateful]) -> None:
        """Register the user's parts, which a window may change."""
        if self._snapshot is not None:
            self._user_parts = StateDicts(user_parts)

    def refresh(self) -> None:
        """Find the buffers again after `begin_epoch`, which may change layers."""
        if self._snapshot is not None:
            self._snapshot.refresh()

    def open_epoch(self) -> Iterator[Any]:
        """Return the iterator of the current epoch, at its next batch.

        After a resume: set the random state of the epoch's start, draw the order again, skip `counters.batch` batches,
        and set the random state of the save.
        """
        counters, random = self._trainer._counters, self._random
        resumed = random.state_after_opening()
        now = resumed or random_state()
        start = random.epoch_start_state if resumed else {}
        data = copy_tree(self.data_position())
        self._before_opening = {"data": data, "random": {"epoch_start": start, "now": now}}
        # A signal may end the run at any line. Before the next line `random` has the state, after it `_before_opening`.
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
        """Capture the state to roll back to, and enter the phase FETCHING."""
        self._source.commit()
        self._before_window = random_state() if self._captures_random else None
        if self._snapshot is not None:
            self._snapshot.capture()
            self._user_parts.capture()
        self.phase = FETCHING  # last: a signal handler of the user may raise at any line before

    def restore(self) -> dict[str, Tree]:
        """Roll back to the start of the window in progress; return the states to save in place of some parts'."""
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
        """Return the position in the data after the batches trained on."""
        if self.phase == OPENING:
            return self._before_opening["data"]
        if self.phase not in (FETCHING, UPDATING):
            self._source.commit()
        return self._source.position()


def rescue(boundary: Boundary, error: BaseException) -> list[str]:
    """Save the last complete state after an error; return the failures of doing so, for notes on the error.

    The state is saved after a signal and after an error of the data; with `on_error="save"` also after other errors of
    user code, KeyboardInterrupt and SystemExit. A save in flight is awaited and reported in any case, as are updates
    whose records wait for other ranks.
    """
    if boundary.run.signals.received and isinstance(error, KeyboardInterrupt):  # a second Ctrl-C
        return []
    failures = _report_held(boundary)
    run, checkpoints, counters = boundary.run, boundary.checkpoints, boundary.counters
    if checkpoints is None:
        return failures
    # Several ranks save only if all have agreed to end here: after an error the others are at another update.
    alone = run.rank_sync is not None and not (isinstance(error, Interrupted) and not error.late)
    trained = bool(counters.rows or counters.earlier_updates)  # untrained, the corrected script may start fresh
    saves_errors = run.trainer.on_error == "save"
    can_save = trained and not alone
    is_complete = can_save and _is_complete(boundary, error, saves_errors=saves_errors)
    if can_save and not is_complete:
        boundary.record.outcome.could_save = _is_complete(boundary, error, saves_errors=True)
    rolled_back = run.rollback.restore() if is_complete else None
    with run.signals.held():
        failing = "the state at the end could not be saved"
        try:
            if is_complete:
                boundary.clock.update()
                if not checkpoints.has_current_state:
                    checkpoints.save(instead=rolled_back)
            written = checkpoints.manager.completed(wait=True, alone=alone)
            failing = "an observer failed in on_save of the last save"
            checkpoints.notify(written)
        except Exception as failed:
            failures.append(f"{failing}: {failed}")
    return failures


def _report_held(boundary: Boundary) -> list[str]:
    """Report the updates whose records still wait for other ranks; return the failures of doing so."""
    run = boundary.run
    with run.signals.held():
        try:
            run.strategy.reporter.report_held_alone()
        except Exception as failed:
            return [f"an observer failed in on_update of the last updates: {failed}"]
    return []


def ends_in(error: BaseException, *, grace: float) -> tuple[BaseException, str]:
    """Return the exception that `fit` raises for `error`, and the reason in `Result.stopped`."""
    if not isinstance(error, Interrupted):
        return error, first_line(error)
    why = f"{error.name}, and the update did not end within grace={grace:g} seconds" if error.late else error.name
    return (KeyboardInterrupt() if error.name == "Ctrl-C" else Stopped(error.number, error.name)), why


def _is_complete(boundary: Boundary, error: BaseException, *, saves_errors: bool) -> bool:
    """Whether to save for this error: a complete state is there, or can be rolled back to.

    `saves_errors`: save also for errors of user code.
    """
    run, status = boundary.run, boundary.run.strategy.status
    place = run.rollback.phase
    if isinstance(error, Interrupted):
        return not error.late and place in (BETWEEN, OPENING, FETCHING)
    if not isinstance(error, Exception | KeyboardInterrupt | SystemExit) or isinstance(error, CheckpointError):
        return False
    is_validating = place == BETWEEN and boundary.counters.interrupted_validation != ""
    if place in (OPENING, FETCHING) or (is_validating and run.signals.data_failed):
        return saves_errors or isinstance(error, Exception)
    if not saves_errors:
        return False
    if place == UPDATING:
        return status.applied is not True and not status.stepping
    return is_validating
