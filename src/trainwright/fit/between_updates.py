"""The work between two updates, when something falls due: probe, validate, judge, report, save."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from trainwright.checkpointing.manager import CheckpointManager
from trainwright.core.errors import CheckpointError, SettingError, message
from trainwright.core.records import Validation
from trainwright.core.triggers import Trigger
from trainwright.data.source import Source
from trainwright.evaluation.passes import probe_context
from trainwright.fit.plan import Ends
from trainwright.fit.result import FitEnd
from trainwright.fit.rollback import BETWEEN
from trainwright.fit.run import Run
from trainwright.fit.saving import RunCheckpoints
from trainwright.observers.probes import Inspecting, Probe
from trainwright.observers.throughput import Throughput
from trainwright.protocols import listeners
from trainwright.update.owner import listening

if TYPE_CHECKING:
    from trainwright.fit.inspection import Inspector
    from trainwright.fit.rank_sync import RankSync, Requests


class BetweenUpdates:
    """The steps of `Trainer._between_updates`, each of them one of its lines, and what tells when they are due."""

    def __init__(self, run: Run, val: Mapping[str, Source], ends: Ends, *, manager: CheckpointManager | None) -> None:
        self.run, self.val, self.ends = run, val, ends
        self.owner, self.counters, self.history = run.owner, run.counters, run.owner.history
        self.record = run.owner._record
        early = run.owner.early_stopping
        self.watch = None if early is None else early.bind()
        self.manager = manager
        self.saves = RunCheckpoints(run, manager=manager)
        self.fit_end = FitEnd(run, ends, manager=manager, watch=self.watch)
        self._before, self._started = self.counters.seconds, time.perf_counter()
        self._clock: float | None = None
        """The seconds that all ranks go by until the next updates; None for one process, which has a clock."""
        self._epoch_ended = False
        self._inspectors: list[Inspector] = []
        """Observers that measure the run itself, its speed for instance."""

    def start(self) -> None:
        """Start clocks and triggers, after loading."""
        counters = self.counters
        self._before, self._started = counters.seconds, time.perf_counter()
        self._last_time, self._last_rows = self._started, counters.rows
        self._validates = Trigger(self.ends.validate, counters, of="validate")
        self.saves.start()
        observers = self.owner.observers
        self._probes = [
            (one, Trigger(one.duration, counters, of="every")) for one in observers if isinstance(one, Probe)
        ]
        here = listening(self.owner)
        self._on_validate, self._on_epoch = listeners(here, "on_validate"), listeners(here, "on_epoch")
        self._updates_before = counters.updates - (1 if counters.batch else 0)
        self._inspectors = self._make_inspectors()
        if counters.pause == "final" and not (self.run.stop_reason or self.end_reached() or self._stopped_early):
            counters.pause = ""  # resumed with a later end: the run goes on without the validation of the earlier one
        self.run.pending = counters.pause or ("update" if counters.paused < counters.updates else "")
        counters.stopped = counters.stopped or self.completed_end()
        if not counters.stopped:
            self.record.final_validation = None
        if self.run.rank_sync is not None:
            self._check_probes()
            self.run.rank_sync.start()
        self.end()

    def _make_inspectors(self) -> list[Inspector]:
        """Return what measures the run, imported only where an observer asks for it."""
        throughput = any(isinstance(one, Throughput) for one in listening(self.owner))
        if not throughput and not any(isinstance(one, Inspecting) for one in self.owner.observers):
            return []
        from trainwright.fit.inspection import inspectors_of

        return inspectors_of(self.run)

    def _check_probes(self) -> None:
        """Refuse probes that only some ranks have: all of them stop for one, and it may be a forward of all."""
        probes = [f"{probe.name} every {probe.duration}" for probe, _ in self._probes]
        others = [one.name for one in self.owner.observers if isinstance(one, Inspecting)]
        each = self.owner.world.gather([*probes, *others])
        if any(names != each[0] for names in each):
            what = "the processes were given different probes"
            have = "; ".join(f"rank {rank}: {', '.join(names) or 'none'}" for rank, names in enumerate(each[:4]))
            fix = "observers=[Probe(...)] on every process, and `if trainer.is_main` in its function"
            raise SettingError(what, have=have, want="the same ones on all of them", fix=fix)

    # The steps, in their order.

    def begin(self, *, epoch_ended: bool) -> None:
        """Bring the counters up to date, and find out whether an end is reached."""
        run, counters = self.run, self.counters
        run.rollback.phase, run.woken = BETWEEN, False
        run.strategy.flush()
        for one in self._inspectors:
            one.pause()
        if run.rank_sync is not None:
            self._sync_ranks(run.rank_sync)
        run.signals.check()
        self.update_clock()
        run.steppers.note_unnoted()
        self._epoch_ended = epoch_ended
        if epoch_ended and not counters.pause:  # else it was counted before, in a run that ended in its validation
            self._count_epoch()
        counters.paused = counters.updates
        self.saves.arrive()
        counters.stopped = counters.stopped or self.end_reached()
        for one in self._inspectors:
            one.report(epoch_ended=epoch_ended)

    def _count_epoch(self) -> None:
        """Count an epoch that is over, for all that counts epochs."""
        run, counters = self.run, self.counters
        run.check_epoch(self._updates_before)
        run.lengths.epoch_ended()
        counters.epoch, counters.batch, self._updates_before = counters.epoch + 1, 0, counters.updates
        counters.begun = False
        if run.rates is not None:
            run.rates.epoch_ended()
        if run.weights.average is not None:
            run.weights.average.epoch_ended(counters.updates, counters.epoch)

    def _sync_ranks(self, rank_sync: RankSync) -> None:
        """Exchange the requests of all ranks, and take the clock of rank 0."""
        self._clock = None
        self.update_clock()
        requests = self._exchange(rank_sync)
        self._before += requests.seconds - self.counters.seconds
        self._clock = requests.seconds
        self.run.strategy.synchronize()
        if requests.signal:
            self.run.signals.obey(requests.signal)

    def _exchange(self, rank_sync: RankSync) -> Requests:
        """Exchange the requests of all ranks, and note a stop and a save among them."""
        requests = rank_sync.join(signal=self.run.signals.pending, save=self.saves.requested_here)
        self.saves.requested_here, self.saves.requested = False, self.saves.requested or requests.save
        if requests.stop:
            self.run.stop_now(requests.stop)
        return requests

    def sync_signals(self) -> None:
        """Stop all ranks if any of them has received a signal since the last exchange."""
        if self.run.rank_sync is not None:
            requests = self._exchange(self.run.rank_sync)
            if requests.signal:
                self.run.signals.obey(requests.signal)

    def probe(self, trainer: Any, *, epoch_ended: bool) -> None:
        """Call the probes that are due, and note the numbers that they return."""
        for probe, trigger in self._probes if not self.counters.pause else ():
            if trigger.fires(self.counters, epoch_ended=epoch_ended):
                with probe_context(self.owner, self.run.source):
                    numbers = probe.fn(trainer)
                self.run.tracker.record_probe(numbers, probe.name)

    def validation_is_due(self, *, epoch_ended: bool) -> bool:
        """Whether to validate now: the duration has passed, or a planned end is reached; once at an update."""
        fires = self._validates.fires(self.counters, epoch_ended=epoch_ended)
        broken_off = self.counters.pause in ("update", "epoch")
        return bool(self.val) and not self._is_validated and (fires or broken_off or bool(self.planned_end()))

    def validate(self, evaluate: Callable[..., dict[str, float]], *, final: bool = False) -> dict[str, float]:
        """Return the numbers of every set of validation data; `final`: only because the run ends early."""
        record, signals = self.record, self.run.signals
        record.errors, record.read_batches = {}, signals.batches
        self.counters.pause = "final" if final else "epoch" if self._epoch_ended else "update"
        numbers: dict[str, float] = {}
        # No rank may leave a validation alone: with several a signal waits for its end and the next exchange.
        several = signals.held() if self.run.rank_sync is not None else nullcontext()
        try:
            with several:
                for name, source in self.val.items():
                    numbers |= self._checked(evaluate(source, name=name))
        finally:
            record.read_batches = iter
        return self.owner.world.same(numbers)

    def _checked(self, numbers: Any) -> Mapping[str, float]:
        """Refuse an `evaluate` of the user's own that returns no dict, such as None without a return."""
        if isinstance(numbers, Mapping):
            return numbers
        what = f"{type(self.owner).__name__}.evaluate returned {'None' if numbers is None else type(numbers).__name__}"
        fix = "return super().evaluate(data, name)"
        raise TypeError(message(what, want="a dict of numbers by name", fix=fix, where=False))

    @property
    def ends_inside_epoch(self) -> bool:
        """Whether a planned end lies inside an epoch whose numbers are in no row yet."""
        return bool(self.planned_end()) and self._lacks_row

    def add_row(self, numbers: Mapping[str, float] | None, *, epoch_ended: bool) -> dict[str, float]:
        """Append a row to the history: the epoch's training numbers so far, and those of the validation."""
        row = self._row(numbers)
        if epoch_ended:
            self.run.tracker.reset()
        if numbers is not None:
            self.counters.validated = self.counters.updates
        self.history.append(row)
        return row

    def _row(self, numbers: Mapping[str, float] | None) -> dict[str, float]:
        counters, tracker, world = self.counters, self.run.tracker, self.owner.world
        counters.pause = ""
        tracker.merge(world)
        trained = world.same((tracker.means() or self._last_training_numbers()) if world.is_main else {})
        return {
            "epoch": counters.earlier_epochs + counters.epoch,
            "update": counters.earlier_updates + counters.updates,
            **trained,
            **(numbers or {}),
            **(self.run.steppers.numbers() or {"lr": self.run.steppers.rates[0]}),
        }

    def _last_training_numbers(self) -> dict[str, float]:
        """Return the training numbers of the last row, for a run that is stopped between two epochs."""
        last = self.history[-1] if self.history else {}
        return {
            name: value
            for name, value in last.items()
            if name not in ("epoch", "update") and not name.startswith("val_")
        }

    def judge(self, row: Mapping[str, float], *, validated: bool) -> tuple[bool, bool]:
        """Give the row to early stopping, checkpoints and schedule; return whether it is the best, and to be saved."""
        where = {"epoch": int(row["epoch"]), "update": int(row["update"])}
        best = False
        early, watch, manager, rates = self.owner.early_stopping, self.watch, self.manager, self.run.rates
        if early is not None and watch is not None and self._concerns(early.monitor, row, validated=validated):
            best = watch.judge(row, self.record.errors, **where)
            if best and early.restore_best:
                self.fit_end.store_best()
            self.counters.stopped = self.counters.stopped or watch.stopped
        saves = best
        if (
            manager is not None
            and manager.settings.best
            and self._concerns(manager.settings.best, row, validated=validated)
        ):
            saves = manager.judge(row, **where) or saves
            if watch is None:
                best = manager.best is not None and manager.best.update == where["update"]
        if rates is not None and (validated or not self.val):  # each validation, or each epoch without one
            rates.observe(row)
        return best, saves

    def _concerns(self, monitor: str, row: Mapping[str, float], *, validated: bool) -> bool:
        """Whether a row is one to judge `monitor` by: validations for `val_...`, any row for training numbers.

        Numbers that only an `evaluate` of the user's own gives are in the rows of validations.
        """
        trained = monitor in row or not self.owner._hooks.evaluates_itself
        return validated or (trained and not monitor.startswith("val_"))

    def report(
        self, row: Mapping[str, float], *, best: bool, validated: bool, epoch_ended: bool, final: bool = False
    ) -> None:
        """Call `on_validate` and `on_epoch` of the observers."""
        now, counters = time.perf_counter(), self.counters
        seconds, rows = now - self._last_time, counters.rows - self._last_rows
        record = Validation(
            epoch=int(row["epoch"]),
            update=int(row["update"]),
            metrics=dict(row),
            best=best,
            waited=0 if self.watch is None else self.watch.waited,
            patience=0 if self.watch is None else self.watch.settings.patience,
            seconds=seconds,
            rows=rows,
            waiting=min(1.0, self.run.waited / seconds) if seconds else 0.0,
            skipped=counters.skipped,
            notes=self.record.take_news(),
            final=final,
        )
        self._last_time, self._last_rows, self.run.waited = now, counters.rows, 0.0
        for notify in self._on_validate if validated else []:
            notify(record)
        for notify in self._on_epoch if epoch_ended or not validated else []:
            notify(record)

    def validate_early_end(self, evaluate: Callable[..., dict[str, float]], *, epoch_ended: bool) -> None:
        """Validate at an early end at which no validation was due, apart from all that a resumed run reads.

        History, early stopping, the best and Plateau do not see these numbers, and `validated` does not count them: a
        run that is resumed from here, and validates at the same update, is then the run that never ended.
        """
        if self.run.rank_sync is not None and epoch_ended and self.owner._hooks.end_epoch is not None:
            self._exchange(self.run.rank_sync)  # `end_epoch` may have stopped it on one rank
        measured = self._is_validated if self.val else not self._lacks_row
        if not self.counters.stopped or self.planned_end() or measured:
            return
        numbers = self.validate(evaluate, final=True) if self.val else None
        self.record.final_validation = row = self._row(numbers)
        self.report(row, best=False, validated=bool(self.val), epoch_ended=False, final=True)

    def save(self, *, keep: bool, validated: bool, epoch_ended: bool) -> None:
        """Save, where a save is due."""
        self.update_clock()
        validated = validated or (epoch_ended and not self.val)
        if self.saves.are_due(keep=keep, validated=validated, epoch_ended=epoch_ended):
            if self.counters.stopped:
                self._save_at_the_end()
            else:
                self.saves.save()
                self.saves.report()

    def _save_at_the_end(self) -> None:
        """Begin the save that must succeed; `fit` raises its error once the model holds its final weights."""
        try:
            self.saves.save()
        except CheckpointError as failed:  # the state cannot be encoded
            self.record.save_error = failed

    def end(self) -> None:
        """Set the update after which the loop comes back: at once, where it was woken meanwhile."""
        run = self.run
        if not run.pending:  # the work that a resumed run begins with makes the row of the last update before it
            run.steppers.forget_rates()
        run.due = self._next_due()
        if run.woken and run.rank_sync is None:  # by a hook, or the thread that saves; asked last: no call is lost
            run.due = 0
        for one in reversed(self._inspectors):  # clocks come first and go last
            one.resume()

    # When it is due.

    def _next_due(self) -> float:
        """Return the update after which the loop must come back next, ends of epochs apart."""
        counters, ends = self.counters, self.ends
        dues = [self._validates.next_update(counters)] if self.val else []
        dues += [trigger.next_update(counters) for _, trigger in self._probes]
        dues += [one.next_update() for one in self._inspectors]
        dues.append(self.saves.next_due())
        if ends.max_updates is not None:
            dues.append(ends.max_updates)
        if ends.max_seconds is not None:
            dues.append(counters.updates)  # time passes in skipped updates too
        if self.run.rank_sync is not None:  # all ranks stop at the same updates
            dues = [self.run.rank_sync.at, *[due for due in dues if due > counters.updates]]
        return min(dues, default=math.inf)

    @property
    def _is_validated(self) -> bool:
        """Whether the weights of this update were validated already."""
        return self.counters.validated == self.counters.updates

    @property
    def _lacks_row(self) -> bool:
        """Whether updates of the current epoch are in no row of the history yet."""
        update = self.counters.earlier_updates + self.counters.updates
        return self.counters.batch > 0 and not (self.history and self.history[-1]["update"] == update)

    def update_clock(self) -> None:
        """Bring the seconds of this stage, over all of its sessions, up to now."""
        elapsed = self._before + time.perf_counter() - self._started
        self.counters.seconds = elapsed if self._clock is None else self._clock

    def completed_end(self) -> str:
        """Return which end a loaded run has reached with all its work done; "" where work was still due there."""
        complete = not self.counters.pause and self.counters.paused == self.counters.updates
        return self.end_reached() if complete else ""

    def end_reached(self) -> str:
        """Return which end of the `fit` is reached, or an empty string."""
        counters, ends = self.counters, self.ends
        if ends.max_seconds is not None and counters.seconds >= ends.max_seconds:
            return self.planned_end() or f"max_seconds={ends.max_seconds:g} reached"
        return self.planned_end()

    def planned_end(self) -> str:
        """Return which end of the `fit` is reached that is known beforehand, or an empty string."""
        counters, ends = self.counters, self.ends
        if ends.max_updates is not None and counters.updates >= ends.max_updates:
            return f"max_updates={ends.max_updates} reached"
        if ends.epochs is not None and counters.epoch >= ends.epochs:
            past = f": {counters.epoch} are done already" if counters.epoch > ends.epochs else ""
            return f"epochs={ends.epochs} reached{past}"
        return ""

    @property
    def _stopped_early(self) -> str:
        """Why early stopping ends the run, or an empty string."""
        return "" if self.watch is None else str(self.watch.stopped)
