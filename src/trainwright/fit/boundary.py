"""The work between two updates: validate, compare with the best, report, save."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from trainwright.checkpointing.manager import CheckpointManager
from trainwright.core.durations import Seconds, Trigger, Updates
from trainwright.core.errors import CheckpointError, SettingError, message
from trainwright.core.progress import Counters
from trainwright.core.records import Validation
from trainwright.data.source import Source
from trainwright.evaluation.passes import evaluate_sets
from trainwright.fit.plan import Ends
from trainwright.fit.result import copied_weights, copies_best, frozen_names
from trainwright.fit.rollback import BETWEEN
from trainwright.fit.run import Run
from trainwright.fit.saving import RunCheckpoints
from trainwright.observers.probes import RunObserver
from trainwright.protocols import listeners
from trainwright.update.trainer_like import active_observers

if TYPE_CHECKING:
    from trainwright.fit.inspection import Inspector
    from trainwright.fit.rank_sync import RankSync, Requests


class Boundary:
    """The steps of `Trainer._between_updates`: the work at a boundary between two updates.

    Also sets `Run.next_boundary`, the update at which the loop calls them next.
    """

    checkpoints: RunCheckpoints | None = None
    """The checkpoints of the run; None before `start`, and without a checkpoint slot."""
    reporter: ValidationReporter | None = None
    """Reports rows of the history to observers; None without observers."""
    epoch_ended = False
    """Whether this is the end of an epoch."""
    at_start = False
    """Whether this is the validation before the first update."""

    def __init__(self, run: Run, val: Mapping[str, Source], ends: Ends, *, manager: CheckpointManager | None) -> None:
        self.run, self.val, self.ends, self.manager = run, val, ends, manager
        self.trainer, self.counters, self.history = run.trainer, run.counters, run.trainer.history
        self.record = run.trainer._record
        early = run.trainer.early_stopping
        self.early_stopper = None if early is None else early.bind()
        self.copies_best = early is not None and copies_best(early, manager)
        """Whether early stopping holds a copy of the best weights."""
        self.clock = RunClock(run.counters, ends)
        self._requests_save = self._save_is_requested = False
        """Whether `save()` was called on this rank; whether it was called on any rank, so that a save is due."""
        self._inspectors: list[Inspector] = []
        """Measure the run at boundaries, for observers."""

    def start(self, *, resumed: bool) -> None:
        """Start clocks and triggers, after loading."""
        run, counters = self.run, self.counters
        if self.ends.validate_at_start and not resumed:
            counters.interrupted_validation = run.unfinished_boundary = "start"
        self.clock.start()
        self._validates = Trigger(self.ends.validate, counters, of="validate")
        self._triggers = [self._validates] if self.val else []
        """Triggers of all work that is due after a number of updates or seconds."""
        if self.ends.max_updates is not None:
            self._triggers.append(Trigger(Updates(self.ends.max_updates), counters, of="max_updates"))
        if self.ends.max_seconds is not None:
            self._triggers.append(Trigger(Seconds(self.ends.max_seconds), counters, of="max_seconds"))
        if self.manager is not None:
            self.checkpoints = RunCheckpoints(run, self.manager)
            self._triggers += self.checkpoints.triggers
        if active_observers(self.trainer):
            self.reporter = ValidationReporter(self)
        if any(isinstance(observer, RunObserver) for observer in self.trainer.observers):
            from trainwright.fit.inspection import inspectors_of

            self._inspectors = inspectors_of(run)
        if run.rank_sync is not None:
            run.rank_sync.start()
        self._continue()
        if self.checkpoints is not None:  # after the first update it reserves memory: the state then has its full size
            run.next_boundary = min(run.next_boundary, counters.updates + 1)

    # The steps, in their order.

    def begin(self, *, epoch_ended: bool) -> None:
        """Update the counters, check whether an end is reached, and run the inspectors of observers."""
        run, counters = self.run, self.counters
        run.rollback.phase, run.boundary_requested = BETWEEN, False
        run.strategy.flush()
        for inspector in self._inspectors:
            inspector.before_boundary()
        if run.rank_sync is not None:
            self._sync_ranks(run.rank_sync)
        run.signals.check()
        self.clock.update()
        run.optimizer_steps.record_used_lrs()
        self.epoch_ended, self.at_start = epoch_ended, counters.interrupted_validation == "start"
        if epoch_ended and not counters.interrupted_validation:
            # Else the run resumed at an interrupted validation, and this epoch is counted already.
            self._count_epoch()
        counters.last_boundary = counters.updates
        if self.checkpoints is not None:
            self.checkpoints.arrive()
        counters.stopped = counters.stopped or self.clock.end_reached()
        for inspector in self._inspectors:
            inspector.at_boundary(epoch_ended=epoch_ended)

    def _count_epoch(self) -> None:
        """Count a finished epoch: in the counters, the lengths, the schedules and the average."""
        run, counters = self.run, self.counters
        if self.trainer._hooks.has_custom_update:
            run.check_epoch()
        run.lengths.epoch_ended()
        counters.epoch, counters.batch, counters.begun = counters.epoch + 1, 0, False
        for schedule in run.schedules.values():
            schedule.epoch_ended()
        if run.weights.average is not None:
            run.weights.average.epoch_ended(counters.updates, counters.epoch)

    def _sync_ranks(self, rank_sync: RankSync) -> None:
        """Exchange the requests of all ranks, and adopt the clock of rank 0."""
        self.clock.update_alone()
        requests = self._exchange(rank_sync)
        self.clock.agree(requests.seconds)
        self.run.strategy.synchronize()
        if requests.signal:
            self.run.signals.obey(requests.signal)

    def _exchange(self, rank_sync: RankSync) -> Requests:
        """Exchange the requests of all ranks; apply requests to stop and to save."""
        requests = rank_sync.join(signal=self.run.signals.received, save=self._requests_save)
        self._requests_save, self._save_is_requested = False, self._save_is_requested or requests.save
        if requests.stop:
            self.run.stop_now(requests.stop)
        return requests

    def sync_signals(self) -> None:
        """Stop all ranks if any rank has received a signal since the last exchange."""
        if self.run.rank_sync is not None:
            requests = self._exchange(self.run.rank_sync)
            if requests.signal:
                self.run.signals.obey(requests.signal)

    def validation_is_due(self) -> bool:
        """Whether to validate now: the duration has passed or a planned end is reached. At most once per update."""
        due = self._validates.fires(self.counters, epoch_ended=self.epoch_ended) or bool(self.clock.planned_end())
        interrupted = self.counters.interrupted_validation in ("start", "update", "epoch")
        return bool(self.val) and self.counters.validated_at != self.counters.updates and (due or interrupted)

    def validate(self, *, final: bool = False) -> dict[str, float]:
        """Return the numbers of all validation sets. `final`: the validation at an early end."""
        record, signals = self.record, self.run.signals
        record.evaluation.errors, record.evaluation.read_batches = {}, signals.batches
        inside = "start" if self.at_start else "update"
        self.counters.interrupted_validation = "final" if final else "epoch" if self.epoch_ended else inside
        # No rank may leave a validation alone: with several ranks a signal waits until the next exchange.
        several = signals.held() if self.run.rank_sync is not None else nullcontext()
        try:
            with several:
                is_own = self.trainer._hooks.overrides_evaluate
                numbers = self._numbers_of_hook() if is_own else evaluate_sets(self.trainer, self.val)
        finally:
            record.evaluation.read_batches = iter
        return self.trainer.world.broadcast(numbers)

    def _numbers_of_hook(self) -> dict[str, float]:
        """Return the numbers of the user's `evaluate`. TypeError if it does not return a dict."""
        numbers: dict[str, float] = {}
        for name, source in self.val.items():
            measured: Any = self.trainer.evaluate(source, name=name)
            if not isinstance(measured, Mapping):
                returned = "None" if measured is None else type(measured).__name__
                what = f"{type(self.trainer).__name__}.evaluate returned {returned}"
                fix = "return super().evaluate(data, name)"
                raise TypeError(message(what, want="a dict of numbers by name", fix=fix, where=False))
            numbers |= measured
        return numbers

    @property
    def ends_inside_epoch(self) -> bool:
        """Whether a planned end is inside an epoch whose numbers are not in the history yet."""
        return bool(self.clock.planned_end()) and self._lacks_row

    def add_row(self, numbers: Mapping[str, float] | None) -> dict[str, float]:
        """Append a row to the history and return it: training numbers of the epoch so far, and validation numbers."""
        row = self._row(numbers)
        if self.epoch_ended:
            self.run.tracker.reset()
        if numbers is not None:
            self.counters.validated_at = self.counters.updates
        self.history.append(row)
        return row

    def _row(self, numbers: Mapping[str, float] | None) -> dict[str, float]:
        counters, tracker, world = self.counters, self.run.tracker, self.trainer.world
        counters.interrupted_validation = ""
        place = {
            "epoch": counters.earlier_epochs + counters.epoch,
            "update": counters.earlier_updates + counters.updates,
        }
        if self.at_start:  # nothing is trained yet, and no learning rate was used
            return {**place, **(numbers or {})}
        tracker.merge(world)
        trained = world.broadcast((tracker.means() or self._last_training_numbers()) if world.is_main else {})
        return {
            **place,
            **trained,
            **(numbers or {}),
            **(self.run.optimizer_steps.numbers() or {"lr": self.run.optimizer_steps.lrs[0]}),
        }

    def _last_training_numbers(self) -> dict[str, float]:
        """Return the training numbers of the last row, for a run that stops between two epochs."""
        last = self.history[-1] if self.history else {}
        return {
            name: value
            for name, value in last.items()
            if name not in ("epoch", "update") and not name.startswith("val_")
        }

    def judge(self, row: Mapping[str, float], *, validated: bool) -> tuple[bool, bool]:
        """Pass the row to early stopping, checkpoints and schedules; return (is the best, is to be saved)."""
        where = {"epoch": int(row["epoch"]), "update": int(row["update"])}
        is_best = save_due = False
        stopper, manager = self.early_stopper, self.manager
        if stopper is not None and self._concerns(stopper.settings.monitor, row, validated=validated):
            is_best = save_due = stopper.judge(row, self.record.evaluation.errors, **where)
            if is_best:
                stopper.weights = self._best_weights() if self.copies_best else None
            self.counters.stopped = self.counters.stopped or stopper.stopped
        monitor = None if manager is None else manager.settings.best
        if manager is not None and monitor and self._concerns(monitor, row, validated=validated):
            save_due = manager.judge(row, **where) or save_due
            if stopper is None:
                is_best = manager.best is not None and manager.best.update == where["update"]
        if (validated or not self.val) and not self.at_start:  # each validation, or each epoch without one
            for schedule in self.run.schedules.values():
                schedule.observe(row)
        return is_best, save_due

    def _concerns(self, monitor: str, row: Mapping[str, float], *, validated: bool) -> bool:
        """Whether `monitor` is compared at this row: validations for `val_...`, any row for training numbers.

        Numbers of a custom `evaluate` are in validation rows alone. The row before the first update may become the best
        and never uses up patience.
        """
        if self.at_start:
            # After an earlier stage that averaged, a checkpoint of this update exists, with other (averaged) weights.
            averaged_before = self.manager is not None and self.counters.earlier_updates and self.run.weights.differs
            return not averaged_before and not math.isnan(row.get(monitor, math.nan))
        trained = monitor in row or not self.trainer._hooks.overrides_evaluate
        return validated or (trained and not monitor.startswith("val_"))

    def _best_weights(self) -> dict[str, Any]:
        """Return a host copy of the evaluation weights."""
        assert self.early_stopper is not None
        with self.run.weights.evaluated():
            left_out = frozen_names(self.trainer)
            return copied_weights(self.trainer.model, self.early_stopper.weights, without=left_out)

    def end_epoch(self, row: Mapping[str, float]) -> None:
        """Call the user's `end_epoch`, then exchange requests: it may stop the run on one rank alone."""
        assert self.trainer._hooks.end_epoch is not None
        self.trainer._hooks.end_epoch(dict(row))
        if self.run.rank_sync is not None:
            self._exchange(self.run.rank_sync)

    def validate_early_end(self) -> None:
        """Validate at an early end of the run, unless this update was validated already.

        The numbers go to `Result.final_validation` alone. History, early stopping, the best, Plateau and `validated_at`
        do not get them. So a run that is resumed here equals a run that never ended.
        """
        measured = self.counters.validated_at == self.counters.updates if self.val else not self._lacks_row
        if self.clock.planned_end() or measured:
            return
        numbers = self.validate(final=True) if self.val else None
        self.record.outcome.final_validation = row = self._row(numbers)
        if self.reporter is not None:
            self.reporter.report(row, is_best=False, validated=bool(self.val), final=True)

    def save(self, *, save_due: bool, validated: bool) -> None:
        """Save if a save is due: by `every`, for a best value (`save_due`), by request, or at the end of the run."""
        self.clock.update()
        if self.checkpoints is None:
            return
        validated = validated or (self.epoch_ended and not self.val)
        due = self.checkpoints.is_due(validated=validated and not self.at_start, epoch_ended=self.epoch_ended)
        if self.counters.stopped:
            self._save_at_the_end(self.checkpoints)
        elif due or save_due or self._save_is_requested:
            self._save_is_requested = False
            self.checkpoints.save()
            self.checkpoints.report()

    def _save_at_the_end(self, checkpoints: RunCheckpoints) -> None:
        """Begin the save at the end, which must succeed; `fit` raises its error after loading the final weights."""
        try:
            checkpoints.save()
        except CheckpointError as failed:  # the state cannot be encoded
            self.record.outcome.save_error = failed

    def end(self) -> None:
        """Set the update of the next boundary."""
        self.run.optimizer_steps.clear_used_lrs()
        self._continue()

    # The update of the next boundary.

    def _continue(self) -> None:
        """Set the update of the next boundary: the next update if `wake` was called meanwhile."""
        run, updates = self.run, self.counters.updates
        dues = [trigger.next_update(self.counters) for trigger in self._triggers]
        dues += [inspector.next_update() for inspector in self._inspectors]
        if run.rank_sync is not None:  # all ranks stop at the same updates
            dues = [run.rank_sync.at, *[due for due in dues if due > updates]]
        run.next_boundary = min(dues, default=math.inf)
        # `wake` may be called by a hook or the writer thread. Read last, so that no call is lost.
        if run.boundary_requested and run.rank_sync is None:
            run.next_boundary = 0
        for inspector in reversed(self._inspectors):  # clocks start last
            inspector.after_boundary()

    def request_save(self) -> None:
        """Request a save after the update in progress. SettingError without a checkpoint slot."""
        if self.manager is None:
            raise SettingError("save() without a checkpoint slot", fix='checkpoint=Checkpoint("runs/x")')
        self._requests_save, self._save_is_requested = True, self._save_is_requested or self.run.rank_sync is None
        self.run.wake()

    @property
    def _lacks_row(self) -> bool:
        """Whether the history lacks a row for the last update of the current epoch."""
        update = self.counters.earlier_updates + self.counters.updates
        return self.counters.batch > 0 and not (self.history and self.history[-1]["update"] == update)


class ValidationReporter:
    """Calls `on_validate` and `on_epoch` of the observers."""

    def __init__(self, boundary: Boundary) -> None:
        self._boundary, self._run = boundary, boundary.run
        observers = active_observers(boundary.trainer)
        self._on_validate, self._on_epoch = listeners(observers, "on_validate"), listeners(observers, "on_epoch")
        self._last_time, self._last_rows = time.perf_counter(), boundary.counters.rows

    def report(self, row: Mapping[str, float], *, is_best: bool, validated: bool, final: bool = False) -> None:
        """Report a row of the history, with time and rows since the last report."""
        boundary, counters, stopper = self._boundary, self._boundary.counters, self._boundary.early_stopper
        now = time.perf_counter()
        seconds, rows = now - self._last_time, counters.rows - self._last_rows
        record = Validation(
            epoch=int(row["epoch"]),
            update=int(row["update"]),
            metrics=dict(row),
            best=is_best,
            waited=0 if stopper is None else stopper.waited,
            patience=0 if stopper is None else stopper.settings.patience,
            seconds=seconds,
            rows=rows,
            waiting=min(1.0, self._run.data_seconds / seconds) if seconds else 0.0,
            skipped=counters.skipped,
            notes=boundary.record.path.take_news(),
            final=final,
        )
        self._last_time, self._last_rows, self._run.data_seconds = now, counters.rows, 0.0
        if validated:
            for notify in self._on_validate:
                notify(record)
        if (boundary.epoch_ended and not final) or not validated:
            for notify in self._on_epoch:
                notify(record)


class RunClock:
    """Counts the seconds of a stage over all of its sessions, and compares the counters with the ends of the `fit`.

    Several ranks use the seconds of rank 0 at the last exchange of requests, so that all reach `max_seconds` at the
    same update.
    """

    def __init__(self, counters: Counters, ends: Ends) -> None:
        self._counters, self._ends = counters, ends
        self._agreed: float | None = None
        """The seconds of rank 0 at the last exchange; None for one rank."""

    def start(self) -> None:
        """Start the clock after loading: the seconds of earlier sessions count."""
        self._began = time.perf_counter() - self._counters.seconds

    def update(self) -> None:
        """Set the counted seconds to now; with several ranks, to the last exchange."""
        self._counters.seconds = time.perf_counter() - self._began if self._agreed is None else self._agreed

    def update_alone(self) -> None:
        """Set the counted seconds to now by the clock of this rank. Called before an exchange."""
        self._agreed = None
        self.update()

    def agree(self, seconds: float) -> None:
        """Adopt the seconds of rank 0."""
        self._began -= seconds - self._counters.seconds
        self._agreed = seconds

    def end_reached(self) -> str:
        """Return the end of the `fit` that is reached, such as "epochs=3 reached"; else an empty string."""
        limit = self._ends.max_seconds
        if limit is not None and self._counters.seconds >= limit:
            return self.planned_end() or f"max_seconds={limit:g} reached"
        return self.planned_end()

    def planned_end(self) -> str:
        """Return the end in updates or epochs that is reached; else an empty string."""
        counters, ends = self._counters, self._ends
        if ends.max_updates is not None and counters.updates >= ends.max_updates:
            return f"max_updates={ends.max_updates} reached"
        if ends.epochs is not None and counters.epoch >= ends.epochs:
            past = f": {counters.epoch} are done already" if counters.epoch > ends.epochs else ""
            return f"epochs={ends.epochs} reached{past}"
        return ""
