"""Enters a `fit` (plan, bind, load, begin) and leaves it (save, restore, report)."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from trainwright.acceleration.switches import align_state, speed_up
from trainwright.checkpointing.checkpoint import Checkpoint
from trainwright.checkpointing.load import DamagedError, Loaded, load_checkpoint, without_slot
from trainwright.checkpointing.manager import CheckpointManager
from trainwright.checkpointing.parts import check_savable
from trainwright.core.device import homes
from trainwright.core.errors import NOTE, CheckpointError, NonFiniteError, SettingError, first_line, listed, user_line
from trainwright.core.progress import Counters
from trainwright.core.records import Result
from trainwright.core.signals import Interrupted, Signals
from trainwright.core.torch_private import versions_preserved
from trainwright.data.source import Source, require_resume
from trainwright.diagnostics.explain import explain
from trainwright.diagnostics.first_batch import refusing_own_steps
from trainwright.evaluation.passes import evaluate
from trainwright.fit.boundary import Boundary
from trainwright.fit.opening import open_data
from trainwright.fit.plan import Ends, ResumeArgs, check_watched, make_plan, watched_numbers
from trainwright.fit.rank_sync import check_same_config
from trainwright.fit.record import NOT_RUNNING
from trainwright.fit.result import FitEnd
from trainwright.fit.resume import FitStart, choose_start
from trainwright.fit.rollback import ENDED, ends_in, rescue
from trainwright.fit.run import UPDATE_GRACE, Run
from trainwright.fit.saving import gather_state, parts_of
from trainwright.modules.dtensors import is_sharded
from trainwright.modules.modes import untrained, wake
from trainwright.optim.named import check_saved_schedulers, has_scheduler
from trainwright.optim.optimizers import set_option
from trainwright.precision.autocast import reset_grad_and_autocast
from trainwright.protocols import Observer
from trainwright.update.per_rank_state import among_ranks, broadcast_buffers, broadcast_weights
from trainwright.update.snapshot import Buffers, Snapshot
from trainwright.update.trainer_like import TrainerLike, active_observers, free_transfer_memory, networks_of


class FitContext:
    """Context of one `fit`: `with FitContext(trainer, train, val, ...) as (run, boundary)`.

    `__enter__` installs the signal handlers and calls `_open`. `_bind` builds, checks and loads everything that the run
    needs, and raises all errors of settings. `_call_on_fit_start` calls the observers.

    `__exit__` calls `_finish`. `_finish_normally` waits for the last save and loads the final weights. After an error,
    its own included, `_finish_after_error` saves the complete state. `_emit_result` calls `on_fit_end` and raises the
    error of the fit. Then all switches are undone and the signal handlers removed.

    An error between `on_fit_start` and the loop is handled by `_finish` too. After an earlier error the switches are
    undone, and nothing else.
    """

    def __init__(
        self, trainer: TrainerLike, train: Any, val: Any, *, batch_size: int | None, ends: Ends, resume: ResumeArgs
    ) -> None:
        self._trainer, self._data, self._ends, self._resume = trainer, (train, val, batch_size), ends, resume
        grace = UPDATE_GRACE if trainer.checkpoint is None else trainer.checkpoint.grace
        self._signals = Signals(grace=grace, alone=trainer.world.size == 1)
        self._result_before = trainer.result
        self._started: list[Observer] = []
        """Observers whose `on_fit_start` has returned."""
        self._refused: dict[Path, str] = {}
        """Checkpoints with a part that could not be loaded, each with the reason; an older one is resumed instead."""

    # Enter.

    def __enter__(self) -> tuple[Run, Boundary]:
        try:
            with ExitStack() as undo:  # undone here if entering fails
                undo.enter_context(self._signals.installed())
                self._open(undo)
                self._undo = undo.pop_all()
        except Interrupted as interrupted:
            raise self._end_by_signal(interrupted) from None
        return self._run, self._boundary

    def _open(self, undo: ExitStack) -> None:
        """Open the data, bind the run, and call `on_fit_start` of the observers."""
        from trainwright.core.figures import warn_of_missing_plots

        if self._trainer.is_main:
            warn_of_missing_plots()
        train, val, batch_size = self._data
        source, held_out = open_data(self._trainer, train, val, ends=self._ends, batch_size=batch_size)
        if self._resume.where is None:
            self._bind(source, held_out, undo)
        else:
            self._bind_to_newest(source, held_out, undo)
        try:
            self._call_on_fit_start()
        except BaseException as error:
            self._finish(error)
        if self._trainer._hooks.has_custom_update:
            undo.enter_context(self._run.watching_steps())
        elif self._trainer._hooks.overrides_training_step:
            undo.enter_context(refusing_own_steps(self._trainer))

    def _bind_to_newest(self, source: Source, val: Mapping[str, Source], undo: ExitStack) -> None:
        """Bind the run. With `resume="auto"`, try an older checkpoint if the newest one cannot be loaded."""
        while True:
            try:
                with ExitStack() as trial:
                    self._bind(source, val, trial)
                    undo.push(trial.pop_all())
                    return
            except DamagedError as error:
                self._refuse(error)

    def _refuse(self, error: DamagedError) -> None:
        """Record that a checkpoint cannot be loaded. CheckpointError if no older one may be tried."""
        path = Path(error.origin)
        again = error.early or self._trainer._hooks.begin_epoch is None  # `begin_epoch` must not run twice per epoch
        if self._resume.where != "auto" or path in self._refused or self._trainer.world.size > 1 or not again:
            raise CheckpointError(str(error)) from error.__cause__
        self._refused[path] = str(error)

    def _bind(self, source: Source, val: Mapping[str, Source], undo: ExitStack) -> None:
        """Plan, bind, check and load everything that the fit needs, in this order; `undo` reverts it."""
        trainer, ends, resumes = self._trainer, self._ends, self._resume.where is not None
        # 1. All ranks have the same configuration.
        if trainer.world.size > 1 or trainer.parallel.shards:
            undo.enter_context(among_ranks(trainer))
        if trainer.world.size > 1:
            check_same_config(trainer, source, val, ends=ends, resumes=resumes)
        # 2. The stage starts: it sets the counters, rates and weights that the plan is made with.
        start_stage(trainer, undo, resumes=resumes, source=source if ends.epochs == 1 else None)
        plan = make_plan(trainer, source, val, ends=ends, notes=self._switch(source, val, undo))
        run = self._run = Run(trainer, source, plan, signals=self._signals)
        # 3. A checkpoint is read, and the start is chosen by it.
        manager = loaded = None
        if trainer.checkpoint is not None:
            manager, loaded = self._open_directory(trainer.checkpoint, undo)
        elif self._resume.where is not None:
            raise without_slot(self._resume.where)
        start = choose_start(trainer, loaded, self._resume) if resumes else FitStart()
        if manager is not None and loaded is not None:
            manager.adopt(loaded)
        # 4. The trainer refers to the run: hooks of the user run from here on.
        boundary = self._boundary = Boundary(run, val, ends, manager=manager)
        trainer._bind_run(run, boundary)
        undo.callback(_release_run, trainer, run)
        run.weights.start()
        # 5. `begin_epoch` gives the model the layers that it had at the save; one validation batch runs with them.
        for epoch in range(start.begun_epochs):
            trainer._counters.epoch = epoch
            run.begin_epoch(epoch)
        if not start.already_finished:
            _rehearse(trainer, run, val)
        # 6. The state is loaded, and checked to be savable.
        lines = [*start.lines, *start.execute(trainer, boundary)]
        if start.origin:
            align_state(trainer.optimizers.values())
        if manager is not None:
            trainer._record.run_id = manager.run_id
            lines += _check_saves(trainer, run, boundary)
        # 7. Clocks and triggers start at the loaded counters.
        finished = start.origin if trainer._counters.stopped else ""
        self._plan = replace(plan, notes=(*plan.notes, *lines), finished=finished, run=trainer._record.run_id)
        boundary.start(resumed=start.origin != "")

    def _switch(self, source: Source, val: Mapping[str, Source], undo: ExitStack) -> tuple[str, ...]:
        """Set grad mode, precision, module modes and faster kernels for the fit; return header lines."""
        trainer, notes = self._trainer, []
        undo.enter_context(reset_grad_and_autocast(trainer.device.type))
        if trainer.precision is not None:
            undo.enter_context(trainer.precision.switches())
        if trainer.frozen:
            undo.enter_context(untrained(*trainer.frozen.values()))
        switched_on = wake(trainer.model)
        if switched_on:
            undo.callback(trainer.model.eval)
            notes.append(f"switched from eval to train mode: {listed(switched_on)}")
        return (*trainer._record.notes, *notes, *speed_up(trainer, source, val, undo=undo))

    def _open_directory(self, settings: Checkpoint, undo: ExitStack) -> tuple[CheckpointManager, Loaded | None]:
        """Bind the checkpoint slot; read the checkpoint to resume. Return the manager and the checkpoint, or None."""
        trainer, resume = self._trainer, self._resume.where
        manager = settings.bind(trainer._record.run_id, world=trainer.world)
        # A second Ctrl-C does not wait for the save in flight. After a first one none is in flight.
        undo.push(lambda kind, *_: manager.release(wait=kind is not KeyboardInterrupt))
        manager.prepare(resuming=resume is not None)
        if resume is None:
            return manager, None
        loaded = load_checkpoint(
            resume,
            settings.directory,
            run=manager.run_id,  # of an earlier fit of this trainer; a new id matches none: the only run is loaded
            device=homes(trainer.model, trainer.device),
            world=trainer.world,
            lazy_shards=is_sharded(*trainer.model.parameters()),
            refused=self._refused,
        )
        return manager, loaded

    def _call_on_fit_start(self) -> None:
        """Call `on_fit_start` of all observers. From here on the fit counts as begun."""
        error: BaseException | None = None
        for observer in active_observers(self._trainer):
            try:
                observer.on_fit_start(self._plan)
                self._started.append(observer)
            except Exception as failed:
                error = _with_failure(error, failed, f"{type(observer).__name__}.on_fit_start")
        if error is not None:
            raise error
        record = self._trainer._record
        record.weights, record.has_begun, record.failed = self._run.weights, True, True

    # Leave.

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            with self._undo:
                self._finish(error)
        except Interrupted as interrupted:
            raise self._end_by_signal(interrupted) from None
        except BaseException as ending:
            if ending is not error:
                raise
            ending.__traceback__ = tb  # without the frames of this method

    def _finish(self, raised: BaseException | None) -> None:
        """Save, restore and report; raise the error that ends the fit, if any."""
        ending: BaseException | None = None
        failed = raised
        if failed is None:
            try:
                ending = self._finish_normally()
            except BaseException as error:
                failed = error
        if failed is not None:
            ending = self._finish_after_error(failed)
        self._emit_result(ending)

    def _finish_normally(self) -> CheckpointError | None:
        """Wait for the last save and load the final weights; return the error of that save, or None."""
        trainer, run, boundary, record = self._trainer, self._run, self._boundary, self._trainer._record
        outcome = record.outcome
        run.rollback.phase = ENDED
        if outcome.earlier is None:
            outcome.save_error = _await_last_save(boundary)
            FitEnd(boundary).restore_best()
        if trainer.world.size > 1:
            broadcast_buffers(trainer)
        boundary.sync_signals()
        record.failed = outcome.save_error is not None
        run.signals.check()
        return outcome.save_error

    def _finish_after_error(self, raised: BaseException) -> BaseException:
        """Save the last complete state after an error or a signal; return the exception that `fit` raises."""
        trainer, run, boundary, record = self._trainer, self._run, self._boundary, self._trainer._record
        save_error = record.outcome.save_error
        run.first_batch.close()
        error = self._first_error(raised)
        explain(error, trainer)
        caused = trainer.world.cause_of(error) if isinstance(error, Exception) else error
        agreed = isinstance(error, Interrupted) and not error.late  # all ranks obey this signal together
        if not isinstance(error, Exception) and not agreed:
            trainer.world.report_error(error)
        try:
            failures = rescue(boundary, caused) if record.has_begun else []
        except BaseException as second:  # a second Ctrl-C
            caused, failures = second, []
        boundary.clock.update()
        if record.has_begun and record.failed and save_error is None:
            record.weights = None
        ending, trainer._counters.stopped = ends_in(caused, grace=run.signals.grace)
        if save_error is not None and save_error is not caused:
            failures.insert(0, f"the state at the end could not be saved: {save_error}")
        for failure in failures:
            ending.add_note(f"{NOTE}{failure}")
        if ending is not raised:
            ending.__cause__ = None  # as `raise ending from None` does
        return ending

    def _first_error(self, error: BaseException) -> BaseException:
        """Return `error`, or the NonFiniteError of an earlier update whose check was deferred."""
        run = self._run
        if run.signals.received and isinstance(error, KeyboardInterrupt):
            return error
        try:
            run.strategy.flush()
        except NonFiniteError as first:
            return first
        return error

    def _emit_result(self, error: BaseException | None) -> None:
        """Set `trainer.result`, call `on_fit_end` of the observers, and raise the error that ends the fit.

        The failure of an observer becomes a note on that error. Without an error, the first failure is raised after all
        observers were called. A second Ctrl-C is raised at once.
        """
        trainer, record, result = self._trainer, self._trainer._record, FitEnd(self._boundary).make_result()
        if record.has_begun:
            trainer.result = result
            record.stages = [*record.stages[: trainer._counters.stage], _summary(trainer, result)]
        for observer in self._started:
            try:
                observer.on_fit_end(result)
            except BaseException as failed:
                if self._signals.received and isinstance(failed, KeyboardInterrupt):
                    raise
                error = _with_failure(error, failed, f"{type(observer).__name__}.on_fit_end")
        if error is not None:
            raise error

    def _end_by_signal(self, interrupted: Interrupted) -> BaseException:
        """Return the exception that `fit` raises for a signal before its loop or after its end."""
        trainer = self._trainer
        ending, reason = ends_in(interrupted, grace=self._signals.grace)
        if trainer.result is not None and trainer.result is not self._result_before:
            trainer.result = replace(trainer.result, stopped=reason)
        return ending


def _await_last_save(boundary: Boundary) -> CheckpointError | None:
    """Wait for the save at the end, which must succeed; return its error, or None."""
    checkpoints, lost = boundary.checkpoints, boundary.record.outcome.save_error
    if checkpoints is None:
        return None
    try:
        checkpoints.report(wait=True)
    except CheckpointError as failed:
        checkpoints.report()  # earlier saves that are complete
        return lost or failed
    if lost is not None:  # an error in encoding, without a word on earlier saves
        newest = next(iter(checkpoints.manager.saved), None)
        known = "there is no complete checkpoint of this run" if newest is None else f"the newest is {newest}"
        lost.add_note(f"{NOTE}the state at the end is not saved; {known}")
    failing = checkpoints.manager.failing  # of a custom manager that does not raise
    return lost or (CheckpointError(failing) if failing else None)


def _with_failure(error: BaseException | None, failed: BaseException, call: str) -> BaseException:
    """Return the first error, with a note on a later failure of an observer; the failure if there is no error."""
    if error is None:
        return failed
    place = traceback.extract_tb(failed.__traceback__)[-1]
    error.add_note(f"{NOTE}{call} failed too: {first_line(failed)} ({Path(place.filename).name}:{place.lineno})")
    return error


def _summary(trainer: TrainerLike, result: Result) -> dict[str, Any]:
    """Return the end of a stage as plain data, for the checkpoints of later stages."""
    counters, restored = trainer._counters, trainer._record.outcome.restored
    left = counters.earlier_updates + counters.updates if restored is None else restored.update
    best = None if result.best is None else {**asdict(result.best), "path": None}
    ended = {"weights": result.weights, "best": best, "notes": list(result.notes), "final": result.final_validation}
    return {"counters": counters.state_dict(), "rows": len(trainer.history), "left": left, **ended}


def _release_run(trainer: TrainerLike, run: Run) -> None:
    """Remove the run from its trainer; leave the records that the next stage needs."""
    record = trainer._record
    record.schedules = tuple(run.schedules.values())
    run.strategy.close()
    if record.path.splits is not None:
        record.path.splits = record.path.splits.summary()
    trainer._bind_run(NOT_RUNNING, NOT_RUNNING)


def _check_saves(trainer: TrainerLike, run: Run, boundary: Boundary) -> list[str]:
    """Refuse a state that cannot be saved; return header lines on data that cannot resume exactly."""
    require_resume(run.source)
    parts, ours = trainer.parts(), parts_of(run, boundary)
    if lost := sorted(ours.keys() - (parts or {}).keys()):
        raise SettingError(
            f"parts() of {type(trainer).__name__} leaves out {listed(lost, 5)}: no checkpoint would hold them",
            want="the parts of the Trainer, and your own beside them",
            fix="def parts(self): return super().parts() | {...}",
        )
    if trainer.parallel.shards and trainer.checkpoint is not None and trainer.checkpoint.trainable_only:
        what, fix = "Checkpoint(trainable_only=True) with FSDP: sharded models are saved completely", "parallel=DDP()"
        raise SettingError(what, want="one of the two", fix=fix)
    own = {name: part for name, part in parts.items() if name not in ours}
    run.rollback.bind(own)
    with run.weights.evaluated():
        tree = gather_state(trainer, parts)
    check_savable(tree, trainer.metrics)
    if any(map(has_scheduler, trainer.optimizers.values())):
        states = {name: tree[name] for name in tree if name in own or name == "state"}
        check_saved_schedulers(trainer.optimizers, own, states)
    return [line for line in [run.source.resume_caveat] if line]


def _rehearse(trainer: TrainerLike, run: Run, val: Mapping[str, Source]) -> None:
    """Run one validation batch and restore all state, so that mistakes are raised before the first update."""
    trainer._tracker.must_feed = not val and bool(trainer.metrics)
    val_numbers = {name: _val_numbers(trainer, name, source) for name, source in val.items()}
    watched = watched_numbers(trainer, [schedule.monitor for schedule in run.schedules.values()])
    if watched:
        check_watched(trainer, watched, val_numbers)


def _val_numbers(trainer: TrainerLike, name: str, source: Source) -> set[str]:
    """Return the names of the numbers of a validation set."""
    if not source.repeatable:
        return {f"{name}_{number}" for number in ("loss", *trainer.metrics)}
    # An evaluation does not restore buffers that its forwards change.
    with Snapshot(Buffers(lambda: networks_of(trainer))):
        return set(evaluate(trainer, source, name=name, batches=1).numbers)


def start_stage(trainer: TrainerLike, undo: ExitStack, *, resumes: bool, source: Source | None) -> None:
    """Start a stage. After an error before its loop, `undo` restores the trainer to the end of its last `fit`.

    `source`: the data of a `fit` of one epoch, else None. SettingError if a `fit` of the same trainer is in progress.
    """
    last = trainer._record
    if last.is_under_way:
        what, fix = "fit() from within a fit() of the same Trainer", "another Trainer, with a model of its own"
        raise SettingError(what, want="one fit at a time", fix=fix)
    before = TrainedStage(trainer) if last.stages else LastStage(trainer)
    record = trainer._record = last.next_stage()
    undo.push(before.leave)
    trainer._tracker.reset()
    before.begin_next(resumes=resumes)
    if source is not None:
        record.notes += _note_a_loop(trainer, source, last_caller=last.caller)
    if trainer.world.size > 1:
        # After the trained weights are restored: averaged weights that the user changed are not replaced.
        broadcast_weights(trainer)


def _note_a_loop(trainer: TrainerLike, source: Source, *, last_caller: str) -> tuple[str, ...]:
    """Return a header line, once, if `fit(epochs=1)` is called in a loop and a slot restarts with each call."""
    record, line = trainer._record, user_line()
    restarted = [name for name in ("schedule", "early_stopping") if getattr(trainer, name) is not None]
    restarted += ["order of the data"] if source.restarts_order else []
    record.caller = last_caller if last_caller == "-" else line
    if last_caller != line or not line or not restarted:
        return ()
    record.caller = "-"
    verb = "starts" if len(restarted) == 1 else "start"
    slots = " and ".join(restarted).replace("_", " ")
    return (f"fit(epochs=1) in a loop ({line}): the {slots} {verb} anew with each fit: write fit(epochs=n)",)


class LastStage:
    """Record and counters of a trainer before its first `fit`, to restore after an error."""

    def __init__(self, trainer: TrainerLike) -> None:
        self._trainer, self._record, self._counters = trainer, trainer._record, trainer._counters.state_dict()

    def begin_next(self, *, resumes: bool) -> None:
        """Prepare counters, rates and weights for the next stage. No-op: there was no stage before."""

    def leave(self, kind: Any, error: BaseException | None, tb: Any) -> None:
        """End the stage, as an `__exit__`; restore the trainer after an error before the loop."""
        trainer = self._trainer
        trainer._record.is_under_way = False
        if error is not None and not trainer._record.has_begun:
            self._restore()
        free_transfer_memory(trainer._hooks)

    def _restore(self) -> None:
        self._trainer._record = self._record
        self._trainer._counters.load_state_dict(self._counters)


class TrainedStage(LastStage):
    """State of a trainer after an earlier `fit`: its group options and evaluation weights too."""

    def __init__(self, trainer: TrainerLike) -> None:
        super().__init__(trainer)
        self._groups = [
            (group, {key: _plain(value) for key, value in group.items() if key != "params"})
            for optimizer in trainer.optimizers.values()
            for group in optimizer.param_groups
        ]
        tensors = [] if self._record.weights is None else [*trainer.model.parameters(), *trainer.model.buffers()]
        self._weights = [(tensor, tensor.detach().clone()) for tensor in tensors]

    def begin_next(self, *, resumes: bool) -> None:
        """Reset the counters of the stage; restore the unscheduled rates and the trained weights."""
        _count_anew(self._trainer._counters, continues=self._record.failed and resumes)
        for schedule in self._record.schedules:
            schedule.restore_groups()
        weights = self._record.weights
        if weights is not None and not weights.restore():
            self._weights, self._record.weights = [], None  # they are the user's now
            line = "the weights were changed since the last fit: they are trained, not the ones it averaged"
            self._trainer._record.notes = (line,)

    def _restore(self) -> None:
        super()._restore()
        taken = _UndoneSchedule(self._groups)
        if taken.changed:
            self._record.schedules = (taken,)
        if self._record.weights is not None:
            self._record.weights.install()
            # Their versions are recorded in `weights`.
            with versions_preserved(tensor for tensor, _ in self._weights), torch.no_grad():
                for tensor, value in self._weights:
                    tensor.copy_(value)


def _count_anew(counters: Counters, *, continues: bool) -> None:
    """Reset the counters for a new stage; keep the totals of earlier stages.

    `continues`: the `fit` resumes after a failed one, as the same stage.
    """
    fresh = Counters(
        stage=counters.stage + (not continues),
        earlier_updates=counters.earlier_updates + (0 if continues else counters.updates),
        earlier_epochs=counters.earlier_epochs + (0 if continues else counters.epoch),
    )
    counters.load_state_dict(fresh.state_dict())


class _UndoneSchedule:
    """Group options that a schedule's `restore_groups` had set and a refused fit has reverted."""

    def __init__(self, groups: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
        self.changed = [
            (group, key, _plain(group[key]), value)
            for group, before in groups
            for key, value in before.items()
            if key in group and _plain(group[key]) != value
        ]
        for group, key, _, value in self.changed:
            set_option(group, key, value)

    def restore_groups(self) -> None:
        """Set the options again, unless the user has changed them since."""
        for group, key, given, value in self.changed:
            if _plain(group[key]) == value:
                set_option(group, key, given)


def _plain(value: Any) -> Any:
    """Return an option of a group; a tensor with one element as a number."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
