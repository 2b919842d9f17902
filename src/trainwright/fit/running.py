"""Binds everything one fit needs, yields the run, and undoes all of it at the end."""

from __future__ import annotations

import secrets
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import nn

from trainwright.acceleration.device_dataset import residing
from trainwright.acceleration.switches import Sped, sped_up
from trainwright.checkpointing import state
from trainwright.checkpointing.checkpoint import Keeping
from trainwright.checkpointing.load import Loaded, dry_save, load_checkpoint, without_slot
from trainwright.checkpointing.state import DamagedError
from trainwright.core.device import devices_of, homes, move
from trainwright.core.errors import NOTE, CheckpointError, NonFiniteError, SettingError, first_line, listed, message
from trainwright.core.plan import Plan
from trainwright.core.process_state import training_afresh
from trainwright.core.records import Result
from trainwright.diagnostics.explain import explain
from trainwright.evaluation.passes import evaluate
from trainwright.fit.between_updates import Pauses
from trainwright.fit.per_rank_state import align_buffers, beside_others
from trainwright.fit.plan import Ends, Resume, check_monitors, make_plan
from trainwright.fit.rescue import ends_in, rescue
from trainwright.fit.resuming import find
from trainwright.fit.rollback import ENDED
from trainwright.fit.run import GRACE, Run
from trainwright.fit.same_config import check_alike
from trainwright.fit.setup import NOT_RUNNING, open_data, settings_of
from trainwright.fit.signals import Interrupted, Signals
from trainwright.fit.stages import stage
from trainwright.modules.dtensors import is_sharded
from trainwright.modules.modes import untrained, wake
from trainwright.optim.named import ONLY, check_parameters, check_saved_schedulers
from trainwright.precision.mixed_precision import switched
from trainwright.protocols import Observer, Source, Stateful
from trainwright.update.optimizer_steps import NamedParts
from trainwright.update.owner import Owner, listening, networks_of
from trainwright.update.snapshot import Buffers, Snapshot


@contextmanager
def running(
    owner: Owner, train: Any, val: Any, *, batch_size: int | None, ends: Ends, resume: Resume
) -> Iterator[tuple[Run, Pauses]]:
    """Yield a run that is bound, checked and loaded; afterwards the model holds the weights that `fit` promises.

    Every error of a setting is raised here, before the first update. Observers hear of the end in any case, and
    signals are handled from here to the end: one that comes while the run is made ready ends it before its first
    window, with a Result.
    """
    from trainwright.data.dataloader.persistent_workers import workers_kept

    signals = Signals(grace=getattr(owner.checkpoint, "grace", GRACE), alone=owner.world.size == 1)
    before = owner.result
    try:
        with signals.installed(), ExitStack() as undo:
            source, held_out = open_data(owner, train, val, ends=ends, batch_size=batch_size)
            run, pauses, plan = _bound_to_newest(
                owner, source, held_out, ends=ends, resume=resume, signals=signals, undo=undo
            )
            undo.enter_context(workers_kept(source, *held_out.values()))
            begun: list[Observer] = []
            error: BaseException | None = None
            try:
                _begin(run, plan, begun)
                with run.watching_steps():
                    yield run, pauses
                error = _leave(run, pauses)
            except BaseException as raised:
                error = _broken_off(run, pauses, raised)
            _end(run, pauses, begun, error=error)
    except Interrupted as interrupted:  # too long in making ready, or a signal that came after the end
        ending, reason = ends_in(interrupted, grace=signals.grace)
        if owner.result is not None and owner.result is not before:
            owner.result = replace(owner.result, stopped=reason)
        raise ending from None


def _bound_to_newest(
    owner: Owner,
    source: Source,
    val: Mapping[str, Source],
    *,
    resume: Resume,
    undo: ExitStack,
    ends: Ends,
    signals: Signals,
) -> tuple[Run, Pauses, Plan]:
    """What `_bound` gives; with `resume="auto"` a checkpoint that no part can load is passed over for an older one."""
    refused: dict[Path, str] = {}
    while True:
        try:
            with ExitStack() as trial:
                bound = _bound(
                    owner, source, val, ends=ends, resume=resume, signals=signals, undo=trial, refused=refused
                )
                undo.push(trial.pop_all())
                return bound
        except DamagedError as error:
            path = Path(error.origin)
            again = error.early or owner.hooks.begin_epoch is None  # that hook may not run twice for an epoch
            if resume.where != "auto" or path in refused or owner.world.size > 1 or not again:
                raise CheckpointError(str(error)) from error.__cause__
            refused[path] = str(error)


def _bound(
    owner: Owner,
    source: Source,
    val: Mapping[str, Source],
    *,
    ends: Ends,
    resume: Resume,
    signals: Signals,
    undo: ExitStack,
    refused: Mapping[Path, str],
) -> tuple[Run, Pauses, Plan]:
    """Bind, check and load everything that one fit needs; `undo` gets what takes it back."""
    check_parameters(owner)
    undo.enter_context(beside_others(owner))
    check_alike(owner, source, val, ends=ends, resumes=resume.where is not None)
    undo.enter_context(stage(owner, resumes=resume.where is not None, epochs=ends.epochs))
    undo.enter_context(_ground(owner))
    sped = undo.enter_context(_switched_on(owner, source, val))
    plan = make_plan(owner, source, val, ends=ends, notes=sped.notes)
    run = Run(owner, source, plan, signals=signals)
    keeper, loaded = _open_directory(owner, resume.where, undo, refused=refused)
    found = find(loaded, resume, stage=owner.counters.stage)
    pauses = Pauses(run, val, ends, keeper=keeper)
    owner.hold(run, pauses)
    undo.callback(_let_go, owner, run)
    run.shown.start()
    found.begin_epochs(owner, run)
    if not found.passes:
        _rehearse(owner, run, val)
    if found.path is not None:
        reports = found.pass_stage(owner, pauses) if found.passes else found.load(owner, pauses)
        sped.loaded()
        finished = found.place if owner.counters.stopped else ""
        plan = replace(plan, notes=(*plan.notes, *reports), finished=finished)
    if keeper is not None:
        told = [*found.go_on(owner, keeper), *_ready_to_save(owner, run, pauses)]
        plan = replace(plan, notes=(*plan.notes, *told))
    pauses.start()
    return run, pauses, plan


def parts_of(run: Run, pauses: Pauses) -> dict[str, Stateful]:
    """Return every part of a run that has state, by the names of a checkpoint."""
    owner = run.owner
    named: dict[str, Any] = {
        "model": owner.model,
        "loss": owner.loss if isinstance(owner.loss, nn.Module) and owner.loss.state_dict() else None,
        "optimizer": NamedParts(owner.optimizers) if run.steppers.named else owner.optimizers[ONLY],
        "precision": run.scaler,
        "schedule": run.rates,
        "average": run.shown if run.shown.differs else None,
        "early_stopping": pauses.watch,
        "checkpoint": pauses.keeper,
        "progress": state.Held(
            lambda: {
                "counters": owner.counters.state_dict(),
                "history": owner.history,
                "final": pauses.leaving.final,
                "asked": run.asked,
                "stages": owner.between.stages,
                "settings": settings_of(owner),
                **_split_at(owner),
                **run.steppers.used_rates(),
                "epochs": run.lengths.state_dict(),
            },
            lambda tree: _take_progress(run, pauses, tree),
        ),
        "totals": run.ledger,
        "data": run.source,
        "state": state.Held(lambda: owner.state, lambda tree: _take_state(owner, tree)),
        "random": run.random,
    }
    return {name: part for name, part in named.items() if part is not None}


@contextmanager
def _ground(owner: Owner) -> Iterator[None]:
    """What the whole run stands on, whatever surrounds the call of `fit`."""
    with (
        training_afresh(owner.device.type),
        switched(owner.precision),
        untrained(*owner.frozen.values()),
    ):
        yield


def _begin(run: Run, plan: Plan, begun: list[Observer]) -> None:
    """Tell every observer that the run begins; `begun` gets those that are to hear of its end."""
    error: Exception | None = None
    for observer in listening(run.owner):
        try:
            observer.on_fit_start(plan)
            begun.append(observer)
        except Exception as failed:
            if error is None:
                error = failed
            else:
                error.add_note(f"{NOTE}{type(observer).__name__}.on_fit_start failed too: {_told_at(failed)}")
    if error is not None:
        raise error
    # From here on the fit is not refused any more: what it leaves behind is what it has come to.
    between = run.owner.between
    between.shown, between.failed, between.refused_to = run.shown, True, None


def _leave(run: Run, pauses: Pauses) -> CheckpointError | None:
    """Leave the model with the weights that `fit` promises; return the error of the last save, where it failed."""
    owner = run.owner
    run.rollback.phase = ENDED
    if pauses.leaving.passed is None:
        pauses.leaving.lost = _lost(pauses)
        pauses.leaving.restore_best()
    align_buffers(owner)
    pauses.hear_signals()
    owner.between.failed = pauses.leaving.lost is not None
    run.signals.check()
    return pauses.leaving.lost


def _lost(pauses: Pauses) -> CheckpointError | None:
    """Wait for the save at the end, which must succeed; return its error where it has failed."""
    keeper, lost = pauses.keeper, pauses.leaving.lost
    try:
        pauses.saves.hear(wait=True)
    except CheckpointError as failed:
        pauses.saves.hear()  # of those before it that are complete
        return lost or failed
    if lost is not None and keeper is not None:  # it could not be encoded, and says nothing of those before
        newest = next(iter(keeper.saved), None)
        known = "there is no complete checkpoint of this run" if newest is None else f"the newest is {newest}"
        lost.add_note(f"{NOTE}the state at the end is not saved; {known}")
    failing = getattr(keeper, "failing", "")  # a keeper of the user's own that does not raise
    return lost or (CheckpointError(failing) if failing else None)


def _broken_off(run: Run, pauses: Pauses, raised: BaseException) -> BaseException:
    """Save what an error or a signal leaves complete, and return what `fit` raises."""
    owner = run.owner
    run.first_batch.close()
    error = _first_of(raised, run)
    explain(error, owner)
    caused = owner.world.blame(error) if isinstance(error, Exception) else error
    if not isinstance(error, Exception) and not _is_agreed(error):
        owner.world.failed(error)
    has_begun = owner.between.refused_to is None
    try:
        failures = rescue(pauses, caused) if has_begun else []
    except BaseException as second:  # a second Ctrl-C
        caused, failures = second, []
    pauses.stop_clock()
    if has_begun and owner.between.failed and pauses.leaving.lost is None:
        owner.between.shown = None
    ending, owner.counters.stopped = ends_in(caused, grace=run.signals.grace)
    if pauses.leaving.lost is not None and pauses.leaving.lost is not caused:
        failures.insert(0, f"the state at the end could not be saved: {pauses.leaving.lost}")
    for failure in failures:
        ending.add_note(f"{NOTE}{failure}")
    if ending is not raised:
        ending.__cause__ = None  # as `raise ending from None` does
    return ending


def _end(run: Run, pauses: Pauses, begun: Sequence[Observer], *, error: BaseException | None) -> None:
    """Write the Result, tell every observer that has begun, and raise what the run has ended in.

    An observer that fails is a note on that error; where there is none, the first failure is raised, after the others
    have been told. A second Ctrl-C ends it at once.
    """
    owner = run.owner
    between, result = owner.between, pauses.leaving.result()
    if between.refused_to is None:
        owner.result, between.begun = result, True
        between.stages = [*between.stages[: owner.counters.stage], _ended(owner, result, pauses.leaving.left)]
    for observer in begun:
        try:
            observer.on_fit_end(result)
        except BaseException as failed:
            if run.signals.pending and isinstance(failed, KeyboardInterrupt):
                raise
            if error is None:
                error = failed
            else:
                error.add_note(f"{NOTE}{type(observer).__name__}.on_fit_end failed too: {_told_at(failed)}")
    if error is not None:
        raise error


def _told_at(failed: BaseException) -> str:
    """An error in one line, with the place that raised it."""
    place = traceback.extract_tb(failed.__traceback__)[-1]
    return f"{first_line(failed)} ({Path(place.filename).name}:{place.lineno})"


def _first_of(error: BaseException, run: Run) -> BaseException:
    """What ends the run: `error`, or a number that was not finite in an update before it, heard of only now."""
    if run.signals.pending and isinstance(error, KeyboardInterrupt):
        return error
    try:
        run.strategy.flush()
    except NonFiniteError as first:
        return first
    return error


def _is_agreed(error: BaseException) -> bool:
    """Whether all processes end in it together: a signal that they have agreed to obey."""
    return isinstance(error, Interrupted) and not error.late


def _ended(owner: Owner, result: Result, left: int | None) -> dict[str, Any]:
    """How a stage has ended, as plain data: a later stage's checkpoint tells it to the `fit` that passes this one."""
    counters = owner.counters
    left = counters.earlier_updates + counters.updates if left is None else left
    best = None if result.best is None else {**asdict(result.best), "path": None}
    told = {"weights": result.weights, "best": best, "notes": list(result.notes), "final": result.final_validation}
    return {"counters": counters.state_dict(), "rows": len(owner.history), "left": left, **told}


def _let_go(owner: Owner, run: Run) -> None:
    """Take the run from its owner, but for what the next stage needs."""
    owner.between.rates = run.rates
    run.strategy.close()
    if owner.between.splits is not None:
        owner.between.splits = owner.between.splits.let_go()
    owner.hold(NOT_RUNNING, NOT_RUNNING)


@contextmanager
def _switched_on(owner: Owner, source: Source, val: Mapping[str, Source]) -> Iterator[Sped]:
    """What is switched for the run, with all lines that the header begins its notes with."""
    with sped_up(owner, source) as sped, _awake(owner) as woken, residing(owner, source, val) as lies:
        yield replace(sped, notes=(*owner.between.notes, *woken, *sped.notes, *lies))


@contextmanager
def _awake(owner: Owner) -> Iterator[tuple[str, ...]]:
    """Train mode for a model that was left in eval mode, and eval mode again at the end; gives the header's line."""
    switched_on = wake(owner.model)
    if not switched_on:
        yield ()
        return
    try:
        yield (f"switched from eval to train mode: {listed(switched_on)}",)
    finally:
        owner.model.eval()


def _ready_to_save(owner: Owner, run: Run, pauses: Pauses) -> list[str]:
    """Have all be told that there will be checkpoints, and refuse what cannot be saved now, not at the first save.

    Returns what the header says of data that may not go on exactly.
    """
    assert pauses.keeper is not None
    owner.between.run_id = pauses.keeper.run_id
    source: Any = run.source
    if hasattr(source, "must_resume"):
        source.must_resume = True
    parts, ours = owner.parts(), parts_of(run, pauses)
    if lost := sorted(ours.keys() - (parts or {}).keys()):
        raise SettingError(
            message(
                f"parts() of {type(owner).__name__} leaves out {listed(lost, 5)}: no checkpoint would hold them",
                want="the parts of the Trainer, and your own beside them",
                fix="def parts(self): return super().parts() | {...}",
            )
        )
    own = {name: part for name, part in parts.items() if name not in ours}
    run.rollback.bind(own)
    with run.shown.evaluated():
        tree = state.gather(parts)
    dry_save(tree)
    check_saved_schedulers(owner, own, {name: tree[name] for name in tree if name in own or name == "state"})
    return [line for line in [getattr(source, "resumes", "")] if line]


def _open_directory(
    owner: Owner, resume: str | Path | None, undo: ExitStack, *, refused: Mapping[Path, str]
) -> tuple[Keeping | None, Loaded | None]:
    """Bind the checkpoint slot, and find what is to be resumed."""
    settings, places, world = owner.checkpoint, homes(owner.model, owner.device), owner.world
    shards = is_sharded(*owner.model.parameters())
    if settings is None:
        if resume is not None:
            raise without_slot(resume)
        return None, None
    run_id = owner.between.run_id or secrets.token_hex(8)
    bind: Any = settings.bind
    keeper: Keeping = bind(run_id) if world.size == 1 and not shards else bind(run_id, world=world)
    undo.push(lambda kind, *_: _release(keeper, at_once=kind is KeyboardInterrupt))
    keeper.prepare(resuming=resume is not None)
    how: dict[str, Any] = {"device": places, "world": world, "later": shards, "refused": refused}
    return keeper, load_checkpoint(resume, settings.directory, run=keeper.run_id, **how)


def _release(keeper: Keeping, *, at_once: bool) -> None:
    """Release the keeper; a second Ctrl-C does not wait for what is in flight, and after a first one nothing is."""
    abandon = getattr(keeper, "abandon", None)
    if at_once and abandon is not None:
        abandon()
    else:
        keeper.release()


def _rehearse(owner: Owner, run: Run, val: Mapping[str, Source]) -> None:
    """Run one validation batch without a trace, so that what is wrong with it shows before the first update."""
    produced = {"loss", *owner.metrics}
    owner.ledger.must_feed = not val and bool(owner.metrics)
    for name, source in val.items():
        if source.repeatable:
            # An evaluation leaves the buffers as its own forwards have changed them.
            with Snapshot(Buffers(lambda: networks_of(owner))):
                produced |= set(evaluate(owner, source, name=name, batches=1).numbers)
        else:
            produced |= {f"{name}_{number}" for number in ("loss", *owner.metrics)}
    free = (owner.hooks.logs_freely, owner.hooks.evaluates_itself)
    monitors = () if run.rates is None else run.rates.monitors
    check_monitors(owner, has_val=bool(val), produced=produced, free=free, rates=monitors)


def _take_state(owner: Owner, tree: Any) -> None:
    """Put the user's state in the dict that there is, on the device of the run; beside several each where it lay."""
    owner.state.clear()
    owner.state.update(tree if len(devices_of(owner.model)) > 1 else move(tree, owner.device))


def _split_at(owner: Owner) -> dict[str, float]:
    """From how many elements on batches are split, where memory has run out: a resumed run goes on with it."""
    limit = None if owner.between.splits is None else owner.between.splits.limit
    return {} if limit is None else {"split_at": limit}


def _take_progress(run: Run, pauses: Pauses, tree: Any) -> None:
    owner = run.owner
    run.steppers.take_used_rates(tree)
    epochs, counters = tree.get("epochs", []), tree["counters"]
    if sum(one[0] for one in epochs) > counters["earlier_epochs"] + counters["epoch"] + 1:
        raise RuntimeError("'epochs' are more than the counters say")  # before a list of that length is made
    run.lengths.load_state_dict(epochs)
    if owner.between.splits is not None:
        owner.between.splits.limit = tree.get("split_at")
    owner.counters.load_state_dict(tree["counters"])
    owner.history[:] = tree["history"]
    owner.between.stages = list(tree["stages"])
    # What was asked for counts only where the pause that it asked for is still to be done.
    due = owner.counters.pause or owner.counters.paused < owner.counters.updates
    pauses.leaving.final, run.asked = tree["final"], tree["asked"] if due else ""
