"""The state of one `fit` in progress (`Run`), and its plan with the real lengths of epochs (`EpochLengths`)."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import chain, groupby, islice, pairwise
from math import ceil
from typing import TYPE_CHECKING, Any

from trainwright.core.errors import DataError, first_line
from trainwright.core.plan import NEVER, LengthDependency, Plan
from trainwright.core.progress import Counters
from trainwright.core.rng import RngCheckpoint
from trainwright.core.signals import Signals
from trainwright.data.source import Source
from trainwright.diagnostics.first_batch import FirstBatch, is_compiled
from trainwright.evaluation.passes import autocast, check_repeatable, run_training_forwards
from trainwright.evaluation.weights import choose_weights
from trainwright.fit.plan import settings_of
from trainwright.fit.rollback import BETWEEN, COUNTING, UPDATING, LoopPhase, Rollback
from trainwright.modules.modes import running_statistics
from trainwright.optim.named import check_kernels, check_parameters
from trainwright.precision.base import LossScale
from trainwright.precision.mixed_precision import check_weights
from trainwright.schedules.bound import BoundSchedule, bind_schedules
from trainwright.update import nonfinite_policy
from trainwright.update.deferred_check import DeferredCheck, DeferredSkip, why_immediate
from trainwright.update.loss_tracker import LossTracker
from trainwright.update.manual_optimization import ManualUpdate
from trainwright.update.nonfinite_policy import PATIENCE, NonFiniteOrigin
from trainwright.update.optimizer_steps import OptimizerSteps
from trainwright.update.per_rank_state import refresh_shards
from trainwright.update.snapshot import Buffers, Snapshot, Tensors, UserState
from trainwright.update.strategy import UpdateStrategy
from trainwright.update.trainer_like import TrainerLike, trained_modules
from trainwright.update.window import Window

if TYPE_CHECKING:
    from trainwright.fit.rank_sync import RankSync


UPDATE_GRACE = 20.0
"""Seconds that a signal waits for the end of an update, without a checkpoint slot."""


class Run:
    """The state that the loop reads and writes at each update. Bound once, before the first update."""

    scaler: LossScale | None
    """The loss scale that updates use: `host_scaler`, or its copy on the device. None without one."""
    host_scaler: LossScale | None
    """The loss scale of the precision slot. None without one."""
    checks: bool
    """Whether gradients are checked before they are applied."""
    next_boundary: float = 0
    """Number of applied updates at which the loop calls `_between_updates` next."""
    boundary_requested = False
    """Whether `wake` was called since the work between updates last began."""
    epoch_over = False
    at_boundary = False
    """Whether boundary work comes before the next window: unfinished work, or a stop in `begin_epoch`."""
    unfinished_boundary = ""
    """The boundary with unfinished work from the last session, named as in `interrupted_validation`; or empty."""
    stop_reason = ""
    """The reason given to `stop()`, in this session or in the session that left unfinished work."""
    data_seconds = 0.0
    """Seconds spent waiting for data since the last record."""
    rank_sync: RankSync | None = None
    """Exchanges requests between ranks; None for one rank."""
    snapshot: Snapshot | None = None
    """Copies, from before the update in progress, of all that a forward may change; None if nothing is copied."""
    _begun = -1
    """The last epoch that has begun."""
    _idle = 0
    """Updates in a row in which no step was applied."""

    def __init__(self, trainer: TrainerLike, source: Source, plan: Plan, *, signals: Signals) -> None:
        self.trainer, self.source, self.signals = trainer, source, signals
        self.counters: Counters = trainer._counters
        self.tracker: LossTracker = trainer._tracker
        self.lengths = EpochLengths(plan, source, trainer._counters)
        self.random = RngCheckpoint()
        saves = trainer.checkpoint is not None
        self.rollback = Rollback(trainer, source, self.random) if saves else LoopPhase(trainer, source)
        signals.wake = self.wake
        if trainer.world.size > 1:
            from trainwright.fit.rank_sync import RankSync

            self.rank_sync = RankSync(trainer)
        self._bind_slots(trainer)
        record = trainer._record
        checks = trainer.is_main and record.warns and not record.stages and not is_compiled(trainer.model)
        self.first_batch = FirstBatch(checks=checks)
        """Checks the losses of the first update of the first stage."""
        self.strategy = choose_strategy(self)
        """How updates are made."""
        self.scaler = self.strategy.scaler
        self.tracker.bind(self.scaler)
        self._find_layers()

    def _bind_slots(self, trainer: TrainerLike) -> None:
        # A norm may be a collective: all ranks measure it, also those without the observer.
        wants_norm = any("grad_norm" in observer.wants for observer in trainer.observers)
        wants_norm = any(trainer.world.sum_numbers(wants_norm))
        modules = trained_modules(trainer)
        self.optimizer_steps = OptimizerSteps(trainer.optimizers, trainer.clip, wants_norm=wants_norm, modules=modules)
        self.gradients = self.optimizer_steps.all.gradients
        """The gradients of all optimizers together."""
        plan = self.lengths.tracked
        self.schedules = bind_schedules(trainer.schedule, trainer.optimizers, plan)
        average = None if trainer.average is None else trainer.average.bind(trainer.model, plan)
        self.lengths.follow(self.schedules.values())
        self.average = average if average is not None and average.each_update else None
        """The average; None if it does not count each update."""
        self.weights = choose_weights(trainer, average, self._feed)
        precision = trainer.precision
        self.autocast = autocast(trainer)
        self.host_scaler = None if precision is None else precision.loss_scale(trainer.device.type)
        check_weights(self.host_scaler, self.gradients.parameters)
        self.checks = trainer.on_nonfinite != "ignore" or self.host_scaler is not None
        follows = trainer._hooks.after_update is not None or (precision is not None and precision.follows_updates)
        self.after_update = self._after_update if follows else None

    @property
    def plan(self) -> Plan:
        """The plan, with the real lengths of finished epochs."""
        return self.lengths.plan

    @cached_property
    def settings(self) -> dict[str, str]:
        """The settings of the trainer at the start of the run, as text, for its checkpoints."""
        return settings_of(self.trainer)

    @contextmanager
    def watching_steps(self) -> Iterator[None]:
        """Record the optimizer steps of a custom `update` that does not call `apply_gradients`."""
        optimizers = self.trainer.optimizers.values()
        handles = [optimizer.register_step_post_hook(self._note_step) for optimizer in optimizers]
        handles += [optimizer.register_step_pre_hook(self._note_beginning) for optimizer in optimizers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def start_epoch(self) -> Iterator[Window]:
        """Call `begin_epoch`, open the data, and return the remaining windows of the epoch.

        Returns no window if boundary work comes first, or if `begin_epoch` stops the run.
        """
        counters = self.counters
        self.epoch_over = self.at_boundary = False
        if self.unfinished_boundary and self._resumes_at_boundary():
            return iter(())
        self.signals.check()
        self.begin_epoch(counters.epoch)
        if self.rank_sync is not None and self.trainer._hooks.begin_epoch is not None:
            asked = self.rank_sync.join().stop  # all ranks have the hook, or none
            if asked:
                self.stop_now(asked)
        self.at_boundary = counters.stopped != "" and not self.at_epoch_end
        return iter(()) if self.at_boundary else self._windows(self._open_epoch())

    def _resumes_at_boundary(self) -> bool:
        """Return whether unfinished boundary work comes before the next window."""
        kind, self.unfinished_boundary = self.unfinished_boundary, ""
        self.counters.stopped = self.stop_reason  # this `fit` may have other ends
        if kind == "update" and not self.counters.interrupted_validation and self.at_epoch_end:
            return False  # the work at the end of the epoch includes it
        self.epoch_over, self.at_boundary = kind == "epoch", kind != "epoch"
        self.random.restore_before_opening()
        return True

    def _open_epoch(self) -> Iterator[Window]:
        """Open the data of the epoch at its next batch; return the remaining windows, with this rank's rows."""
        counters, plan = self.counters, self.plan
        begun = time.perf_counter()
        size = plan.accumulated(counters.epoch)
        left = None if plan.epoch_updates is None else plan.epoch_updates - math.ceil(counters.batch / size)
        batches = self.signals.fetch(self.rollback.open_epoch)
        self.signals.watch_children()
        windows = self.strategy.windows(batches, size, move=self.trainer._hooks.move)
        windows = self.lengths.checked(islice(windows, left))
        self.data_seconds += time.perf_counter() - begun
        return windows

    def _windows(self, windows: Iterator[Window]) -> Iterator[Window]:
        """Yield the windows of the epoch until the run is stopped; begin the update of each."""
        rollback, clock = self.rollback, time.perf_counter
        while True:
            begun = clock()
            rollback.before_fetch()
            window = self.signals.fetch(next, windows, None)
            if window is None:
                break
            rollback.phase = UPDATING
            self.data_seconds += clock() - begun
            if not self.counters.rows:
                self.first_batch.open()
            self.strategy.begin(window)
            yield window
            if self.counters.stopped and not self.at_epoch_end:
                return
        rollback.phase = BETWEEN
        self.epoch_over = True

    def finish_update(self, window: Window) -> bool:
        """Finish the update: adapt the loss scale, count the update, roll it back if no step was applied.

        Returns whether a step was applied. A deferred check returns True, and corrects the counters later.
        """
        counters, status = self.counters, self.strategy.status
        self.rollback.phase = COUNTING
        if not counters.rows:
            self.first_batch.warn()
        if self.scaler is not None:
            self.strategy.adapt_scale(self.scaler)
        counters.batch += window.all_batches
        counters.rows += window.all_rows
        if not (status.applied or status.stepped):
            self._finish_skipped()
            return False
        counters.updates += 1
        self._idle = 0
        return True

    def _finish_skipped(self) -> None:
        """Count an update without a step and roll it back; raise after `PATIENCE` of them in a row."""
        status = self.strategy.status
        self.counters.skipped += status.is_refused
        if self.snapshot is not None and status.restores:
            self.snapshot.restore()  # only now: graphs of this update may still hold the buffers
        elif self.snapshot is not None:
            self.snapshot.restore_nonfinite()
        self._idle += 1
        if self._idle >= PATIENCE:
            raise nonfinite_policy.nothing_applied(f"{PATIENCE} updates in a row", skipped=status.applied is not None)

    def begin_epoch(self, epoch: int) -> None:
        """Run the user's `begin_epoch`, once per epoch; then find the layers again, which it may have changed."""
        if self._begun == epoch:
            return
        self._begun = epoch
        self.counters.begun = True
        self.random.epoch_start_state = {}
        if self.trainer._hooks.begin_epoch is not None:
            self.trainer._hooks.begin_epoch(epoch)
        # Without a hook of the user no layer changes. DDP finds unused parameters again in each epoch.
        if self.trainer._hooks.overrides_any or self.rank_sync is not None:
            self._find_layers()
        if self.rank_sync is not None and epoch and self.plan.accumulated(epoch) != self.plan.accumulated(epoch - 1):
            self.rank_sync.start()  # updates take another time from here on
            self.next_boundary = min(self.next_boundary, self.rank_sync.at)

    def check_epoch(self) -> None:
        """Raise if a custom `update` made no step in the epoch."""
        if 0 < self.lengths.made <= self._idle and self.strategy.status.applied is None:
            raise nonfinite_policy.nothing_applied("an epoch", skipped=False)

    def _find_layers(self) -> None:
        """Find the parameters and buffers: `begin_epoch` may add, freeze and unfreeze layers."""
        trainer = self.trainer
        if trainer.parallel.shards:
            refresh_shards(trainer)
        check_parameters(trainer.model, trainer.loss, trainer.optimizers)
        check_kernels(trainer.optimizers)
        self.take_groups()
        average = self.weights.average
        if average is not None:
            average.attach(trainer.model)
            if average.will_need_statistics:
                check_repeatable(self.source)
        self._plan_snapshot()
        self.rollback.refresh()

    def _plan_snapshot(self) -> None:
        """Choose the copies made before each update: all that a skip restores, running statistics alone, or none."""
        trainer = self.trainer
        if trainer.on_nonfinite == "skip":
            self.snapshot = self.snapshot or Snapshot(Buffers(lambda: trained_modules(trainer)), UserState(trainer))
            self.snapshot.refresh()
        elif trainer.on_nonfinite == "raise":
            statistics = running_statistics(trainer.model)
            slots = 1 + self.strategy.updates_ahead
            self.snapshot = Snapshot(Tensors(statistics, slots=slots)) if statistics else None

    def take_groups(self) -> None:
        """Read the parameter groups of the optimizers again: a group may be added at any time."""
        self.strategy.flush()
        self.optimizer_steps.take_groups()
        self.gradients = self.optimizer_steps.all.gradients
        self.strategy.regroup()

    def _feed(self) -> None:
        """Run the training data through the model once, for the BatchNorm statistics of an average."""
        run_training_forwards(self.trainer, self.source)

    def _after_update(self) -> None:
        """Run `after_update` of the precision and the user; a torch scheduler may step there and set the next rate."""
        if self.trainer.precision is not None:
            self.trainer.precision.after_update()
        if self.trainer._hooks.after_update is not None:
            self.optimizer_steps.record_used_lrs()
            self.trainer._hooks.after_update()

    def _note_step(self, *_: Any) -> None:
        self.strategy.status.stepped = True

    def _note_beginning(self, optimizer: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.strategy.status.stepping = True
        self.optimizer_steps.record_lrs_of(optimizer)
        self.strategy.before_step(optimizer, closure=len(given) + len(named) > 1)  # the first is the optimizer

    def stop(self, reason: str) -> None:
        """End the run at the next boundary; several ranks end together, after their next exchange."""
        reason = reason or "stop() was called"
        if self.rank_sync is None:
            self.stop_now(reason)
        else:
            self.rank_sync.stop_reason = reason
        self.wake()

    def stop_now(self, reason: str) -> None:
        """End the run at this boundary, on all ranks."""
        self.counters.stopped = self.stop_reason = reason

    def wake(self) -> None:
        """Have the loop call `_between_updates` after this update; several ranks: at their next exchange."""
        self.boundary_requested = True
        if self.rank_sync is None:
            self.next_boundary = 0

    def find_origin(self) -> NonFiniteOrigin:
        """Find the origin of a non-finite number: the batch, a weight, or the forward or backward of a module."""
        from trainwright.diagnostics import not_finite

        try:
            return not_finite.find_origin(self)
        except Exception as error:  # of an object in the batch: it must not replace the error of the update
            return NonFiniteOrigin((f"where it began cannot be shown: {first_line(error, 200)}",))

    @property
    def at_epoch_end(self) -> bool:
        """Whether no window of the epoch is left, by the length of the data."""
        counters, plan = self.counters, self.plan
        if plan.epoch_updates is not None:
            return math.ceil(counters.batch / plan.accumulated(counters.epoch)) >= plan.epoch_updates
        return counters.batch == self.source.length  # data may yield more batches than their length


def choose_strategy(run: Run) -> UpdateStrategy:
    """Return the update strategy of a run: one rank or several, immediate or deferred check, split or not."""
    trainer = run.trainer
    path = trainer._record.path
    path.why_immediate = why_immediate(trainer, checks=run.checks, scaler=run.host_scaler, schedules=run.schedules)
    update = trainer.update if trainer.on_oom is None else _split_update(run)
    if trainer._hooks.has_custom_update or trainer._hooks.overrides_compute_gradients:
        update = ManualUpdate(run, update)
    if trainer.world.size > 1:
        from trainwright.update.distributed_check import DistributedCheck

        return DistributedCheck(run, update)
    if path.why_immediate:
        return UpdateStrategy(run, update)
    may_skip = run.host_scaler is not None or trainer.on_nonfinite == "skip"
    return DeferredSkip(run, update) if may_skip else DeferredCheck(run, update)


def _split_update(run: Run) -> Any:
    """Return the update that splits a window when memory runs out."""
    from trainwright.acceleration.oom import WindowSplitter

    run.trainer._record.path.splits = splitter = WindowSplitter(run)
    return splitter.update


class EpochLengths:
    """The plan of a run, with the real lengths of finished epochs.

    An epoch may have more or fewer windows than planned: data may be a function of the epoch, a `__len__` may be wrong,
    and the length of a batch sampler may change. Schedules that count the ends of epochs are planned again. Settings
    that were computed from the planned length (a total, a warm-up in epochs) are not: DataError before the next update.
    """

    def __init__(self, plan: Plan, source: Source, counters: Counters) -> None:
        self.plan, self._source, self._counters = plan, source, counters
        self._dependencies: list[LengthDependency] = []
        """Settings that slots computed from the planned lengths."""
        self._schedules: list[BoundSchedule] = []
        self._matters = False
        """Whether any learning rate or setting depends on the lengths."""

    @property
    def tracked(self) -> Plan:
        """The plan to bind slots with; it records the settings that they compute from lengths."""
        return replace(self.plan, dependencies=self._dependencies)

    def follow(self, schedules: Iterable[BoundSchedule]) -> None:
        """Register schedules to plan again when epochs have other lengths. Called after all slots are bound."""
        self._schedules = list(schedules)
        self._matters = len(self._dependencies) > 0 or any(schedule.follows_epochs for schedule in self._schedules)

    @property
    def made(self) -> int:
        """Number of windows trained on in the current epoch."""
        return ceil(self._counters.batch / self.plan.accumulated(self._counters.epoch))

    def checked(self, windows: Iterator[Window]) -> Iterator[Window]:
        """Return the remaining windows of the epoch. DataError if a setting was computed from another length."""
        if not self._matters:
            return windows
        if self.plan.epoch_updates is None and self._source.length not in (None, self.plan.batches):
            self._compare_announced(self._source.length)
        planned = self.plan.updates_in(self._counters.epoch)
        if planned is None:
            return windows
        return chain(islice(windows, max(0, planned - self.made)), self._beyond(windows, planned))

    def _compare_announced(self, batches: int) -> None:
        """Compare the announced length of the current epoch with the planned length."""
        windows = ceil(batches / self.plan.accumulated(self._counters.epoch))
        if windows != self.plan.updates_in(self._counters.epoch):
            self._compare(windows, f"{batches} batches", known=True)

    def _beyond(self, windows: Iterator[Window], planned: int) -> Iterator[Window]:
        """Yield the windows beyond the planned number, after a comparison with the plan."""
        if self.made < planned:
            self._compare(self.made, f"{self._counters.batch} batches", known=True)
            return
        window = next(windows, None)
        if window is not None:
            self._compare(NEVER, f"more than {self._counters.batch} batches", known=False)
            yield window
            yield from windows

    def epoch_ended(self) -> None:
        """Record the length of a finished epoch, in windows and on the clock."""
        plan, clock = self.plan, self._counters.updates
        planned = plan.clock_after(len(plan.past))
        self.plan = replace(plan, past=(*plan.past, (plan.past[-1][0] + self.made, clock)), now=None)
        if self._matters and planned != clock:
            self._replan()

    def state_dict(self) -> list[list[int]]:
        """Return the finished epochs, run-length encoded: [epochs, windows per epoch, applied updates per epoch]."""
        each = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(self.plan.past)]
        return [[len(list(group)), *alike] for alike, group in groupby(each)]

    def load_state_dict(self, tree: list[list[int]]) -> None:
        """Load the finished epochs; plan schedules again if their lengths differ from the plan."""
        past = [(0, 0)]
        for number, windows, updates in tree:
            past += [(past[-1][0] + (k + 1) * windows, past[-1][1] + (k + 1) * updates) for k in range(number)]
        planned = self.plan.planned
        self.plan = replace(self.plan, past=tuple(past))
        if any({windows, clock} != {planned.clock_after(epoch)} for epoch, (windows, clock) in enumerate(past)):
            self._replan(loaded=True)

    def _compare(self, windows: int, measured: str, *, known: bool) -> None:
        """Set the length of the current epoch. DataError if a setting was computed from another length."""
        plan = self.plan
        real = replace(plan, now=windows if known else plan.updates_in(self._counters.epoch) + 1)  # type: ignore[operator]
        wrong = [each for each in self._dependencies if each.value is None or each.value(real) != each.value(plan)]
        if wrong:
            raise self._refused(wrong, measured, real=real, known=known)
        self.plan = replace(plan, now=windows)
        self._replan()

    def _replan(self, *, loaded: bool = False) -> None:
        """Plan again the schedules that count the ends of epochs; after loading, all schedules."""
        for schedule in self._schedules:
            if loaded or schedule.follows_epochs:
                schedule.replan(self.plan)

    def _refused(self, wrong: list[LengthDependency], measured: str, *, real: Plan, known: bool) -> DataError:
        plan, counters = self.plan, self._counters
        number = counters.earlier_epochs + counters.epoch + 1
        settings = ", ".join(dict.fromkeys(dependency.asked_by for dependency in wrong))
        planned = f"{plan.updates_in(counters.epoch)} updates"
        if plan.epoch_updates is None:
            planned = f"{plan.batches} batches ({planned})"
        return DataError(
            f"epoch {number} of the training data is not as long as planned: {settings} was computed from its length",
            have=f"{measured} in epoch {number}",
            want=f"{planned}, as {'epoch_updates says' if plan.epoch_updates else 'the data said at the start'}",
            fix=_cure(wrong, plan, epoch=counters.epoch, length=real.updates_in(counters.epoch) if known else None),
        )


def _cure(wrong: list[LengthDependency], plan: Plan, *, epoch: int, length: int | None) -> str:
    """Return the fix for the error: a total in updates, schedule lengths in updates, or the length of epochs."""
    cures = []
    if any(dependency.is_total for dependency in wrong) and plan.epochs is not None:
        # Assumes that later epochs are as long as this one.
        total: Any = "n" if length is None else (plan.updates_until(epoch) or 0) + length * (plan.epochs - epoch)
        beside = "" if plan.max_updates is None else f" and max_updates={plan.max_updates}"
        cures.append(f"fit(..., max_updates={total}) in the place of epochs={plan.epochs}{beside}")
    if plan.epoch_updates is not None:
        cures.append("epoch_updates=n, as many as each epoch has")
    if any(not dependency.is_total for dependency in wrong):
        lengths = ", ".join(dict.fromkeys(dependency.asked_by for dependency in wrong if not dependency.is_total))
        cures.append(f"Updates(n) in the place of epochs in {lengths}")
    return "; ".join(cures)
