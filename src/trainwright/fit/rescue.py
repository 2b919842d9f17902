"""Saves what is whole where a run ends before its end: for a signal, or for an error."""

from __future__ import annotations

from trainwright.core.errors import CheckpointError, Stopped, first_line
from trainwright.core.signals import Interrupted
from trainwright.fit.between_updates import BetweenUpdates
from trainwright.fit.rollback import BETWEEN, FETCHING, OPENING, UPDATING


def rescue(between: BetweenUpdates, error: BaseException) -> list[str]:
    """Save the state of the boundary before the window in hand, where it is whole and somebody wants it.

    A signal and an error of the data always do, another error of user code, KeyboardInterrupt and SystemExit included,
    with `on_error="save"`. A save in flight is waited for and told in any case, and so are updates that were to be
    told when several processes meet. Returns what has failed here, for notes on the error that ends the run.
    """
    at_once = between.run.signals.pending and isinstance(error, KeyboardInterrupt)  # a second Ctrl-C
    if at_once:
        return []
    failures = _tell_updates(between)
    if between.manager is None:
        return failures
    run, saves, counters = between.run, between.saves, between.counters
    # Of several processes only those save that have all agreed to end here: the others are somewhere else.
    alone = run.rank_sync is not None and not (isinstance(error, Interrupted) and not error.late)
    trained = counters.rows or counters.earlier_updates  # where nothing was, the mended script may begin anew
    asked = run.owner.on_error == "save"
    is_whole = bool(trained) and not alone and _is_whole(between, error, asked=asked)
    would = bool(trained) and not alone and not asked and not is_whole
    between.record.could_save = would and _is_whole(between, error, asked=True)
    own = run.rollback.restore() if is_whole else None
    with run.signals.held():
        what = "the state at the end could not be saved"
        try:
            if is_whole:
                between.update_clock()
                if not saves.are_done:
                    saves.save(instead=own)
            written = saves.completed(wait=True, alone=alone)
            what = "an observer failed when it was told of the last save"
            saves.notify(written)
        except Exception as failed:
            failures.append(f"{what}: {failed}")
    return failures


def _tell_updates(between: BetweenUpdates) -> list[str]:
    """Tell the updates that have waited for other processes, which do not come any more; what has failed in it."""
    run = between.run
    with run.signals.held():
        try:
            run.strategy.reporter.report_held_alone()
        except Exception as failed:
            return [f"an observer failed when it was told of the last updates: {failed}"]
    return []


def ends_in(error: BaseException, *, grace: float) -> tuple[BaseException, str]:
    """What whoever called `fit` gets for `error`, and the reason that `Result.stopped` tells."""
    if not isinstance(error, Interrupted):
        return error, first_line(error)
    why = f"{error.name}, and the update did not end within grace={grace:g} seconds" if error.late else error.name
    return (KeyboardInterrupt() if error.name == "Ctrl-C" else Stopped(error.number, error.name)), why


def _is_whole(between: BetweenUpdates, error: BaseException, *, asked: bool) -> bool:
    """Whether the state before the window in hand is whole, or can be made so, and is to be saved for this error.

    `asked`: whether it is for errors of user code too.
    """
    run, outcome = between.run, between.run.outcome
    place = run.rollback.phase
    if isinstance(error, Interrupted):
        return not error.late and place in (BETWEEN, OPENING, FETCHING)
    if not isinstance(error, Exception | KeyboardInterrupt | SystemExit) or isinstance(error, CheckpointError):
        return False
    is_validating = place == BETWEEN and between.counters.pause != ""
    if place in (OPENING, FETCHING) or (is_validating and run.signals.data_failed):
        return asked or isinstance(error, Exception)
    if not asked:
        return False
    if place == UPDATING:
        return outcome.applied is not True and not outcome.stepping
    return is_validating
