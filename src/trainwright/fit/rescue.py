"""Saves the complete state of a run that a signal or an error ends."""

from __future__ import annotations

from trainwright.core.errors import CheckpointError, Stopped, first_line
from trainwright.core.signals import Interrupted
from trainwright.fit.boundary import Boundary
from trainwright.fit.rollback import BETWEEN, FETCHING, OPENING, UPDATING


def rescue(boundary: Boundary, error: BaseException) -> list[str]:
    """Save the state from before the window in progress, where it is complete and to be saved for this error.

    A signal and an error of the data are always saved for; another error of user code, KeyboardInterrupt and SystemExit
    included, with `on_error="save"`. A save in flight is awaited and reported in any case, and so are updates whose
    records wait for other ranks. Returns the failures of this, for notes on the error that ends the run.
    """
    if boundary.run.signals.received and isinstance(error, KeyboardInterrupt):  # a second Ctrl-C
        return []
    failures = _report_held(boundary)
    run, checkpoints, counters = boundary.run, boundary.checkpoints, boundary.counters
    if checkpoints is None:
        return failures
    # Several ranks save only where all have agreed to end here: after an error the others are elsewhere.
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
    """Report the updates whose records wait for other ranks, which do not come any more; return its failures."""
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
    """Whether the state before the window in progress is complete, or can be rolled back to, and is to be saved.

    `saves_errors`: for errors of user code too.
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
