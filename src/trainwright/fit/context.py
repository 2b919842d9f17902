"""One `fit` from its call to its return: enter it (plan, bind, load, begin), leave it (save, restore, report)."""

from __future__ import annotations

import secrets
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from trainwright.acceleration.device_dataset import residing
from trainwright.acceleration.switches import sped_up
from trainwright.checkpointing.load import DamagedError, Loaded, load_checkpoint, without_slot
from trainwright.checkpointing.manager import CheckpointManager
from trainwright.checkpointing.parts import check_savable, gather
from trainwright.core.device import homes
from trainwright.core.errors import NOTE, CheckpointError, NonFiniteError, SettingError, first_line, listed
from trainwright.core.process_state import training_afresh
from trainwright.core.records import Result
from trainwright.core.signals import Interrupted, Signals
from trainwright.data.source import Source
from trainwright.diagnostics.explain import explain
from trainwright.evaluation.passes import evaluate
from trainwright.fit.between_updates import BetweenUpdates
from trainwright.fit.parts import parts_of
from trainwright.fit.plan import Ends, Resume, check_monitors, make_plan
from trainwright.fit.rank_sync import check_same_config
from trainwright.fit.rescue import ends_in, rescue
from trainwright.fit.result import FitEnd
from trainwright.fit.resume import ResumePlan, plan_resume, resume
from trainwright.fit.rollback import ENDED
from trainwright.fit.run import GRACE, Run
from trainwright.fit.setup import NOT_RUNNING, open_data
from trainwright.fit.stages import start_stage
from trainwright.metrics.metrics import OverAll
from trainwright.modules.dtensors import is_sharded
from trainwright.modules.modes import untrained, wake
from trainwright.optim.named import check_kernels, check_parameters, check_saved_schedulers, has_scheduler
from trainwright.protocols import Observer
from trainwright.update.owner import Owner, active_observers, networks_of
from trainwright.update.per_rank_state import among_ranks, broadcast_buffers
from trainwright.update.snapshot import Buffers, Snapshot


class FitContext:
    """Enter and leave one `fit`: `with FitContext(trainer, train, val, ...) as (run, between)`.

    Entering raises every error of a setting, before the first update. FitEnd gives the model the weights that `fit`
    promises and undoes all that entering has switched, however the fit ends. An observer whose `on_fit_start` has
    returned always gets its `on_fit_end`. Signals are handled from the start of entering to the end of leaving.
    """

    def __init__(
        self, owner: Owner, train: Any, val: Any, *, batch_size: int | None, ends: Ends, resume: Resume
    ) -> None:
        self._owner, self._data, self._ends, self._resume = owner, (train, val, batch_size), ends, resume
        self._signals = Signals(grace=getattr(owner.checkpoint, "grace", GRACE), alone=owner.world.size == 1)
        self._result_before = owner.result
        self._begun: list[Observer] = []
        """The observers that know of the run, and learn of its end."""

    # Enter.

    def __enter__(self) -> tuple[Run, BetweenUpdates]:
        try:
            with ExitStack() as undo:  # undone here where entering fails
                undo.enter_context(self._signals.installed())
                self._open(undo)
                self._undo = undo.pop_all()
        except Interrupted as interrupted:
            raise self._interrupted(interrupted) from None
        return self._run, self._between

    def _open(self, undo: ExitStack) -> None:
        """Make the run ready, and tell the observers that it begins."""
        train, val, batch_size = self._data
        source, held_out = open_data(self._owner, train, val, ends=self._ends, batch_size=batch_size)
        self._bind_to_newest(source, held_out, undo)
        try:
            self._begin()
        except BaseException as error:
            self._close(error)
        undo.enter_context(self._run.watching_steps())

    def _bind_to_newest(self, source: Source, val: Mapping[str, Source], undo: ExitStack) -> None:
        """Bind the run; with `resume="auto"` an older checkpoint replaces a newest one that no part can load."""
        refused: dict[Path, str] = {}
        while True:
            try:
                with ExitStack() as trial:
                    self._bind(source, val, trial, refused=refused)
                    undo.push(trial.pop_all())
                    return
            except DamagedError as error:
                path = Path(error.origin)
                again = error.early or self._owner._hooks.begin_epoch is None  # that hook may not run twice per epoch
                if self._resume.where != "auto" or path in refused or self._owner.world.size > 1 or not again:
                    raise CheckpointError(str(error)) from error.__cause__
                refused[path] = str(error)

    def _bind(self, source: Source, val: Mapping[str, Source], undo: ExitStack, *, refused: Mapping[Path, str]) -> None:
        """Plan, bind, check and load everything that the fit needs; `undo` takes it back."""
        owner, ends, resumes = self._owner, self._ends, self._resume.where is not None
        check_parameters(owner.model, owner.loss, owner.optimizers)
        check_kernels(owner.optimizers)
        if owner.world.size > 1 or owner.parallel.shards:
            undo.enter_context(among_ranks(owner))
        check_same_config(owner, source, val, ends=ends, resumes=resumes)
        start_stage(owner, undo, resumes=resumes, epochs=ends.epochs)
        undo.enter_context(training_afresh(owner.device.type))
        if owner.precision is not None:
            undo.enter_context(owner.precision.switches())
        undo.enter_context(untrained(*owner.frozen.values()))
        sped = undo.enter_context(sped_up(owner, source))
        woken = undo.enter_context(_awake(owner))
        placed = undo.enter_context(residing(owner, source, val))
        notes = (*owner._record.notes, *woken, *sped.notes, *placed)
        plan = make_plan(owner, source, val, ends=ends, notes=notes)
        run = self._run = Run(owner, source, plan, signals=self._signals)
        manager, loaded = self._open_directory(undo, refused=refused)
        resuming = plan_resume(owner, loaded, self._resume) if resumes else ResumePlan()
        between = self._between = BetweenUpdates(run, val, ends, manager=manager)
        owner._bind_run(run, between)
        undo.callback(_release_run, owner, run)
        run.weights.start()
        for epoch in range(resuming.begun_epochs):
            owner._counters.epoch = epoch
            run.begin_epoch(epoch)
        if resuming.ended is None:
            _rehearse(owner, run, val)
        lines, finished = list(resuming.lines), ""
        if resumes:
            lines += resume(resuming, owner, between)
        if resuming.checkpoint is not None:
            sped.loaded()
            finished = resuming.place if owner._counters.stopped else ""
        lines += _check_saves(owner, run, between)
        self._plan = replace(plan, notes=(*plan.notes, *lines), finished=finished)
        between.start()

    def _open_directory(
        self, undo: ExitStack, *, refused: Mapping[Path, str]
    ) -> tuple[CheckpointManager | None, Loaded | None]:
        """Bind the checkpoint slot, and read the checkpoint that is resumed."""
        owner, resume = self._owner, self._resume.where
        settings, places, world = owner.checkpoint, homes(owner.model, owner.device), owner.world
        shards = is_sharded(*owner.model.parameters())
        if settings is None:
            if resume is not None:
                raise without_slot(resume)
            return None, None
        run_id = owner._record.run_id or secrets.token_hex(8)
        manager = settings.bind(run_id, world=world)
        # A second Ctrl-C does not wait for the save in flight; after a first one nothing is.
        undo.push(lambda kind, *_: manager.release(wait=kind is not KeyboardInterrupt))
        manager.prepare(resuming=resume is not None)
        how: dict[str, Any] = {"device": places, "world": world, "lazy_shards": shards, "refused": refused}
        return manager, load_checkpoint(resume, settings.directory, run=manager.run_id, **how)

    def _begin(self) -> None:
        """Call `on_fit_start` of all observers; from here on the fit is not refused any more."""
        error: Exception | None = None
        for observer in active_observers(self._owner):
            try:
                observer.on_fit_start(self._plan)
                self._begun.append(observer)
            except Exception as failed:
                if error is None:
                    error = failed
                else:
                    error.add_note(f"{NOTE}{type(observer).__name__}.on_fit_start failed too: {_with_place(failed)}")
        if error is not None:
            raise error
        record = self._owner._record
        record.weights, record.has_begun, record.failed = self._run.weights, True, True

    # Leave.

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with self._undo:
                self._close(error)
        except Interrupted as interrupted:
            raise self._interrupted(interrupted) from None
        except BaseException as ending:
            if ending is not error:
                raise
            ending.__traceback__ = trace  # it propagates as it came, without the frames of this method

    def _close(self, raised: BaseException | None) -> None:
        """Save, restore, report; raise the error in which the fit ends, if any."""
        if raised is None:
            try:
                raised = self._complete()
                broken_off = False
            except BaseException as failed:
                raised, broken_off = failed, True
        else:
            broken_off = True
        if broken_off:
            assert raised is not None
            raised = self._break_off(raised)
        self._end(raised)

    def _complete(self) -> CheckpointError | None:
        """Wait for the last save and restore the weights that `fit` promises; return the error of that save."""
        owner, run, between, record = self._owner, self._run, self._between, self._owner._record
        run.rollback.phase = ENDED
        if record.ended is None:
            record.save_error = _await_last_save(between)
            FitEnd(between).restore_best()
        if owner.world.size > 1:
            broadcast_buffers(owner)
        between.sync_signals()
        record.failed = record.save_error is not None
        run.signals.check()
        return record.save_error

    def _break_off(self, raised: BaseException) -> BaseException:
        """Save the complete state that an error or a signal leaves, and return the exception that `fit` raises."""
        owner, run, between, record = self._owner, self._run, self._between, self._owner._record
        run.first_batch.close()
        error = self._first_error(raised)
        explain(error, owner)
        caused = owner.world.blame(error) if isinstance(error, Exception) else error
        agreed = isinstance(error, Interrupted) and not error.late  # all ranks obey this signal together
        if not isinstance(error, Exception) and not agreed:
            owner.world.failed(error)
        try:
            failures = rescue(between, caused) if record.has_begun else []
        except BaseException as second:  # a second Ctrl-C
            caused, failures = second, []
        between.update_clock()
        if record.has_begun and record.failed and record.save_error is None:
            record.weights = None
        ending, owner._counters.stopped = ends_in(caused, grace=run.signals.grace)
        if record.save_error is not None and record.save_error is not caused:
            failures.insert(0, f"the state at the end could not be saved: {record.save_error}")
        for failure in failures:
            ending.add_note(f"{NOTE}{failure}")
        if ending is not raised:
            ending.__cause__ = None  # as `raise ending from None` does
        return ending

    def _first_error(self, error: BaseException) -> BaseException:
        """Return `error`, or a non-finite number of an update before it, whose check was deferred until now."""
        run = self._run
        if run.signals.pending and isinstance(error, KeyboardInterrupt):
            return error
        try:
            run.strategy.flush()
        except NonFiniteError as first:
            return first
        return error

    def _end(self, error: BaseException | None) -> None:
        """Make the Result, call `on_fit_end` of the observers, and raise the error in which the fit ends.

        An observer that fails is a note on that error; where there is none, the first failure is raised, after all
        observers were called. A second Ctrl-C ends it at once.
        """
        owner, record, result = self._owner, self._owner._record, FitEnd(self._between).make_result()
        if record.has_begun:
            owner.result = result
            record.stages = [*record.stages[: owner._counters.stage], _summary(owner, result)]
        for observer in self._begun:
            try:
                observer.on_fit_end(result)
            except BaseException as failed:
                if self._signals.pending and isinstance(failed, KeyboardInterrupt):
                    raise
                if error is None:
                    error = failed
                else:
                    error.add_note(f"{NOTE}{type(observer).__name__}.on_fit_end failed too: {_with_place(failed)}")
        if error is not None:
            raise error

    def _interrupted(self, interrupted: Interrupted) -> BaseException:
        """Return what `fit` raises for a signal that came while it was made ready, or after its end."""
        owner = self._owner
        ending, reason = ends_in(interrupted, grace=self._signals.grace)
        if owner.result is not None and owner.result is not self._result_before:
            owner.result = replace(owner.result, stopped=reason)
        return ending


def _await_last_save(between: BetweenUpdates) -> CheckpointError | None:
    """Wait for the save at the end, which must succeed; return its error where it has failed."""
    saves, lost = between.saves, between.record.save_error
    if saves is None:
        return None
    try:
        saves.report(wait=True)
    except CheckpointError as failed:
        saves.report()  # of those before it that are complete
        return lost or failed
    if lost is not None:  # it could not be encoded, and says nothing of those before
        newest = next(iter(saves.manager.saved), None)
        known = "there is no complete checkpoint of this run" if newest is None else f"the newest is {newest}"
        lost.add_note(f"{NOTE}the state at the end is not saved; {known}")
    failing = saves.manager.failing  # a manager of the user's own that does not raise
    return lost or (CheckpointError(failing) if failing else None)


def _with_place(failed: BaseException) -> str:
    """Return an error in one line, with the place that raised it."""
    place = traceback.extract_tb(failed.__traceback__)[-1]
    return f"{first_line(failed)} ({Path(place.filename).name}:{place.lineno})"


def _summary(owner: Owner, result: Result) -> dict[str, Any]:
    """Return how a stage ended, as plain data for the checkpoints of later ones."""
    counters, restored = owner._counters, owner._record.restored
    left = counters.earlier_updates + counters.updates if restored is None else restored.update
    best = None if result.best is None else {**asdict(result.best), "path": None}
    ended = {"weights": result.weights, "best": best, "notes": list(result.notes), "final": result.final_validation}
    return {"counters": counters.state_dict(), "rows": len(owner.history), "left": left, **ended}


def _release_run(owner: Owner, run: Run) -> None:
    """Take the run from its owner, but for the records that the next stage needs."""
    record = owner._record
    record.rates = tuple(run.rates.values())
    run.strategy.close()
    if record.splits is not None:
        record.splits = record.splits.summary()
    owner._bind_run(NOT_RUNNING, NOT_RUNNING)


@contextmanager
def _awake(owner: Owner) -> Iterator[tuple[str, ...]]:
    """Train mode inside for a model that was left in eval mode; yields the header's line."""
    switched_on = wake(owner.model)
    if not switched_on:
        yield ()
        return
    try:
        yield (f"switched from eval to train mode: {listed(switched_on)}",)
    finally:
        owner.model.eval()


def _check_saves(owner: Owner, run: Run, between: BetweenUpdates) -> list[str]:
    """Refuse a state that cannot be saved, before the first update; return header lines on inexact resumes of data."""
    if between.manager is None:
        return []
    owner._record.run_id = between.manager.run_id
    run.source.must_resume = True
    parts, ours = owner.parts(), parts_of(run, between)
    if lost := sorted(ours.keys() - (parts or {}).keys()):
        raise SettingError(
            f"parts() of {type(owner).__name__} leaves out {listed(lost, 5)}: no checkpoint would hold them",
            want="the parts of the Trainer, and your own beside them",
            fix="def parts(self): return super().parts() | {...}",
        )
    own = {name: part for name, part in parts.items() if name not in ours}
    run.rollback.bind(own)
    with run.weights.evaluated():
        tree = gather(parts)
    check_savable(tree, owner.metrics)
    if any(map(has_scheduler, owner.optimizers.values())):
        states = {name: tree[name] for name in tree if name in own or name == "state"}
        check_saved_schedulers(owner.optimizers, own, states)
    return [line for line in [run.source.resumes] if line]


def _rehearse(owner: Owner, run: Run, val: Mapping[str, Source]) -> None:
    """Run one validation batch without a trace, so that its mistakes show before the first update."""
    produced = {"loss", *owner.metrics}
    owner._tracker.must_feed = not val and bool(owner.metrics)
    for name, source in val.items():
        if source.repeatable:
            # An evaluation leaves the buffers as its own forwards have changed them.
            with Snapshot(Buffers(lambda: networks_of(owner))):
                numbers = set(evaluate(owner, source, name=name, batches=1).numbers)
                produced |= numbers
                # The keys of a metric that returns a dict: training reports it too.
                trained = tuple(f"{name}_{metric}_" for metric in owner.metrics)
                produced |= {number.removeprefix(f"{name}_") for number in numbers if number.startswith(trained)}
        else:
            produced |= {f"{name}_{number}" for number in ("loss", *owner.metrics)}
    free = (owner._hooks.logs_freely, owner._hooks.evaluates_itself)
    monitors = [rates.monitor for rates in run.rates.values() if rates.monitor is not None]
    check_monitors(
        owner, has_val=bool(val), produced=produced, free=free, rates=monitors, prefixes=_keyed(owner, list(val))
    )


def _keyed(owner: Owner, sets: list[str]) -> tuple[str, ...]:
    """Return how names of numbers may begin that are known only when a metric has returned its dict of numbers."""
    if not sets:
        return tuple(f"{metric}_" for metric in owner.metrics)
    over_all = [name for name, metric in owner.metrics.items() if isinstance(metric, OverAll)]
    return tuple(f"{each}_{name}_" for each in sets for name in over_all)
