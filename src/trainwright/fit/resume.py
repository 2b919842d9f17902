"""Where a `fit` starts: a `StartPlan` is computed from the checkpoint that was read, then executed.

It starts fresh, resumes from a checkpoint, or had already finished in an earlier session.

What comes first, by the loaded counters: `interrupted_validation` is set -> that validation; a boundary was reached
after `last_boundary` -> its work; else the next window, behind `counters.batch` batches.

Nothing is loaded before the plan is complete: `begin_epoch` of the epochs that had begun runs in between, since it may
add layers and parameter groups.

Epoch, batch and updates are the counters in part `progress`. `DataPosition` checks the data; `Rollback.open_epoch`
opens the epoch again without its first `counters.batch` batches. Refused, each with a fix: no complete checkpoint,
several runs, another version (`checkpointing/load.py`, `format.py`); another run or later checkpoints in the directory
(`CheckpointManager.adopt`); another optimizer (`_other_optimizer`); other parts or tensors (`parts.check`); other data
(`data/source.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from trainwright.checkpointing import parts as run_parts
from trainwright.checkpointing.load import DamagedError, Loaded, find_weights
from trainwright.checkpointing.optimizer_state import PARAMETERS, put_in_current_order
from trainwright.checkpointing.weights import load_into
from trainwright.core.checks import FormError, check_form, is_count, is_dict, is_none_or, is_number, is_numbers, is_text
from trainwright.core.errors import CheckpointError, SettingError, warn_user
from trainwright.core.progress import Counters
from trainwright.core.suggestions import did_you_mean
from trainwright.fit.boundary import Boundary
from trainwright.fit.early_stopping import is_best
from trainwright.fit.plan import Resume, changed, settings_of
from trainwright.fit.result import copied_weights, path_at
from trainwright.fit.saving import DataPosition, complete_state
from trainwright.modules.dtensors import is_sharded
from trainwright.optim.named import disable_wrong_kernels, has_scheduler
from trainwright.optim.optimizers import set_option
from trainwright.protocols import Tree
from trainwright.update.per_rank_state import PROCESSES, load_rank_state, take_rank_state
from trainwright.update.trainer_like import TrainerLike, active_observers


@dataclass(frozen=True, kw_only=True)
class StartPlan:
    """Where a `fit` starts. This class: at its beginning, with the weights in memory; no checkpoint is loaded."""

    lines: tuple[str, ...] = ()
    """The lines of the header on it."""
    begun_epochs: int = 1
    """Epochs of this stage whose `begin_epoch` runs before the state is loaded: it may change layers."""
    origin: str = ""
    """Where the state is loaded from, in words for the header; empty where nothing is loaded."""
    already_finished: ClassVar[bool] = False
    """Whether the stage has ended: nothing is trained in it."""

    def execute(self, trainer: TrainerLike, boundary: Boundary) -> list[str]:
        """Load the state that the `fit` starts with; return further lines of the header. No-op here."""
        return []


@dataclass(frozen=True, kw_only=True)
class ResumeFrom(StartPlan):
    """A `fit` that resumes from a checkpoint of its own."""

    checkpoint: Loaded
    fresh: tuple[str, ...] = ()
    """Parts that start fresh in place of being loaded."""
    with_data: bool = True
    """Whether the data are those that it was saved with, and continue at their position."""

    def execute(self, trainer: TrainerLike, boundary: Boundary) -> list[str]:
        """Load the checkpoint into everything bound; warn of differences where the run continues."""
        counters, run = trainer._counters, boundary.run
        given = _settings(trainer)
        reports, lines, seek = _restore(self, trainer, boundary)
        reports += [*disable_wrong_kernels(trainer.optimizers), *_unused(trainer, given)]
        _find_unfinished_work(boundary)
        # Last: an ended run sets the data at once, for another `fit` of them (`DataPosition`), and only now is it known
        # whether this one has ended.
        reports += seek()
        if trainer.world.is_main and not counters.stopped:  # a finished run does not continue
            for report in reports:
                warn_user(report)  # it matters without a console too
        if counters.stopped or not counters.begun or not run.random.epoch_start_state or not self.with_data:
            # begin_epoch, the order, or code after this `fit`, draws first; or the current epoch begins again
            run.random.restore()
        at = counters.earlier_updates + counters.updates
        for observer in active_observers(trainer):
            observer.resume_at(at, counters.skipped, continues=not counters.stopped)
        return [*lines, *reports]


@dataclass(frozen=True, kw_only=True)
class AlreadyFinished(StartPlan):
    """A `fit` that had ended before a later one of the same run saved the checkpoint.

    A script that calls `fit` twice and is started again passes over the first call.
    """

    checkpoint: Loaded
    progress: Mapping[str, Any]
    """Part `progress` of the checkpoint."""
    ended: dict[str, Any]
    """How this stage ended."""
    already_finished: ClassVar[bool] = True

    def execute(self, trainer: TrainerLike, boundary: Boundary) -> list[str]:
        """Take the counters, history and weights that the stage ended with."""
        self.checkpoint.tree.clear()
        trainer._counters.load_state_dict(self.ended["counters"])
        trainer.history[:] = self.progress["history"][: self.ended["rows"]]
        outcome, path = trainer._record.outcome, path_at(boundary.manager, self.ended["left"])
        outcome.earlier = self.ended
        outcome.lacks_weights = path is None or not _load_model(trainer, path)
        if outcome.lacks_weights:
            outcome.earlier = {**self.ended, "weights": "as built (those of this stage are gone)"}
        return []


# The plan is computed.


def plan_resume(trainer: TrainerLike, loaded: Loaded | None, asked: Resume) -> StartPlan:
    """Work out where the `fit` starts; SettingError, CheckpointError where the checkpoint is not of such a `fit`."""
    if loaded is None:
        return _start_fresh(trainer)
    progress = _progress_of(loaded)
    stage, saved_stage = trainer._counters.stage, progress["counters"]["stage"]
    if saved_stage == stage:
        return _resume_from(trainer, loaded, asked, progress=progress)
    if saved_stage > stage:
        return _already_finished(loaded, progress, stage=stage)
    if asked.where != "auto":
        raise SettingError(
            f"resume={str(asked.where)!r} was saved in fit number {saved_stage + 1} of its run, "
            f"this is number {stage + 1}",
            want="a checkpoint of the same fit, or of a later one",
            fix='resume="auto", which starts this fit where there is none of it',
        )
    loaded.tree.clear()  # this fit starts from the weights in memory
    return StartPlan()


def _start_fresh(trainer: TrainerLike) -> StartPlan:
    """Return the plan of a `fit` for which there is no checkpoint."""
    if trainer.checkpoint is None or not trainer._record.follows_failure:
        return StartPlan()
    empty = f"no checkpoint in {trainer.checkpoint.directory}"
    line = f"{empty}: it begins with the weights and the optimizer as the fit that failed has left them"
    return StartPlan(lines=(line,))


def _already_finished(loaded: Loaded, progress: Mapping[str, Any], *, stage: int) -> AlreadyFinished:
    """Return the plan of a `fit` that has ended before a later one saved the checkpoint."""
    ended = progress["stages"][stage]
    return AlreadyFinished(
        lines=(f"passed over: {loaded.path} is of a later fit of this run",),
        origin=f"a stage in {loaded.path.parent}",
        begun_epochs=ended["counters"]["epoch"] + ended["counters"]["begun"],
        checkpoint=loaded,
        progress=progress,
        ended=ended,
    )


def _resume_from(trainer: TrainerLike, loaded: Loaded, asked: Resume, *, progress: Mapping[str, Any]) -> ResumeFrom:
    """Return the plan of a `fit` that resumes from a checkpoint of its own."""
    fresh, saved, now = tuple(asked.fresh), progress["settings"], settings_of(trainer)
    if "optimizer" not in fresh and saved["optimizer"] != now["optimizer"]:
        raise _other_optimizer(loaded.path, saved=saved["optimizer"], now=now["optimizer"], fresh=fresh)
    lines = [f"resumed from {loaded.path} at update {loaded.manifest['update']}"]
    if fresh:
        lines.append(f"resume_fresh: {' and '.join(fresh)} started anew")
    if not asked.data:
        lines.append(f"resume_data=False: epoch {loaded.manifest['epoch'] + 1} begins anew, with other data")
    if difference := changed(saved, now):
        lines.append(difference)
    begun = progress["counters"]["epoch"] + progress["counters"]["begun"]
    origin = str(loaded.path.parent)
    return ResumeFrom(
        lines=tuple(lines), origin=origin, begun_epochs=begun, checkpoint=loaded, fresh=fresh, with_data=asked.data
    )


def _other_optimizer(path: Path, *, saved: str, now: str, fresh: tuple[str, ...]) -> CheckpointError:
    """Refuse optimizers of other classes: torch would load their state without a word."""
    line = run_parts.fresh_line([*fresh, "optimizer"])
    return CheckpointError(
        f"{path} was saved with {saved}; this Trainer has {now}",
        want="the same optimizer: its state is of no use to another",
        fix=f"build it as it was; or {line}; or give Checkpoint() a new "
        f"directory and begin with the weights alone: load_weights({str(path)!r}, model)",
        where=False,
    )


def _progress_of(loaded: Loaded) -> Mapping[str, Any]:
    """Return part `progress` of a checkpoint, checked; DamagedError where a run has not written it so."""
    progress: Any = loaded.tree.get("progress")
    try:
        _check_progress(progress, loaded.manifest)
    except FormError as error:
        what = f"{loaded.path} is damaged: in part 'progress' {error}"
        raise DamagedError(what, str(loaded.path), early=True) from error
    checked: Mapping[str, Any] = progress
    return checked


def _check_progress(progress: Any, manifest: Mapping[str, Any]) -> None:
    """Raise FormError where the counters, history and stages of a checkpoint are not as a run writes them."""
    check_form(progress, counters=is_dict, history=_is_history, settings=_are_settings, stages=_is_list)
    check_form(progress, split_at=is_none_or(is_number), final=is_none_or(is_dict), used_lrs=_are_lrs)
    counters, stages = Counters(), progress["stages"]
    for ended in stages:
        _check_stage(ended)
    counters.load_state_dict(progress["counters"])
    if len(stages) < counters.stage:
        raise FormError(f"{len(stages)} stages are listed, and it is of stage {counters.stage}")
    position = (counters.earlier_updates + counters.updates, counters.earlier_epochs + counters.epoch)
    if position != (manifest["update"], manifest["epoch"]):
        listed = f"update {manifest['update']} of epoch {manifest['epoch']}"
        raise FormError(f"the counters say update {position[0]} of epoch {position[1]}, and the manifest {listed}")


def _check_stage(ended: Any) -> None:
    """Raise FormError where the record of a stage that has ended is not as a run writes it."""
    check_form(ended, counters=is_dict, weights=is_text, rows=is_count, left=is_count, best=is_none_or(is_best))
    check_form(ended, notes=_are_lines, final=is_none_or(is_dict))
    Counters().load_state_dict(ended["counters"])


def _is_list(value: object) -> bool:
    return isinstance(value, list)


def _are_lines(value: object) -> bool:
    """Whether a value is a list of texts."""
    return isinstance(value, list) and all(map(is_text, value))


def _are_settings(value: object) -> bool:
    """Whether a value is a dict of texts by name, the optimizer's among them."""
    return isinstance(value, Mapping) and "optimizer" in value and all(map(is_text, (*value, *value.values())))


def _are_lrs(value: object) -> bool:
    """Whether a value is a dict of lists of rates."""
    lists = value.values() if isinstance(value, Mapping) else [None]
    return all(isinstance(rates, list | tuple) and all(map(is_number, rates)) for rates in lists)


def _is_history(value: object) -> bool:
    """Whether a value is a list of rows, each with the number of its epoch and of its update."""
    return isinstance(value, list) and all(is_numbers(row) and {"epoch", "update"} <= set(row) for row in value)


# The plan is executed.


def _load_model(trainer: TrainerLike, path: Path) -> bool:
    """Load the weights of a checkpoint; False where they are of a model that was built otherwise."""
    _, weights = find_weights(path)
    try:
        load_into(trainer.model, weights, source=str(path))
    except CheckpointError:
        return False
    return True


def _restore(
    plan: ResumeFrom, trainer: TrainerLike, boundary: Boundary
) -> tuple[list[str], list[str], Callable[[], list[str]]]:
    """Give every part but the data its state.

    Return the reports of the parts, lines for the header alone, and `seek`, which sets the position in the data.
    """
    loaded = plan.checkpoint
    parts, tree, origin = dict(trainer.parts()), dict(loaded.tree), str(loaded.path)
    loaded.tree.clear()
    has_ranks = trainer.world.size > 1 or PROCESSES in tree
    own, number = take_rank_state(trainer, tree) if has_ranks else (None, 1)
    saved = tree.pop(PARAMETERS, None)
    complete_state(trainer, tree, origin=origin)
    if plan.fresh or not plan.with_data:
        _leave_out(plan, trainer, parts=parts, tree=tree)
    run_parts.check(parts, tree, origin=origin, fresh=plan.fresh)
    matched = put_in_current_order(parts, tree, saved, origin=origin)
    if is_sharded(*trainer.model.parameters()):
        tree = _resharded(tree, parts, boundary)
    position = tree.pop("data", None)
    parts.pop("data", None)
    with _same_lrs(trainer) if "schedule" in plan.fresh else nullcontext():
        reports = run_parts.restore(parts, tree, origin=origin)
    if has_ranks:
        load_rank_state(trainer, own)
    if not plan.with_data:
        trainer._counters.batch = 0
        return reports, matched, list
    part = DataPosition(boundary.run, other_size=number != trainer.world.size)
    return reports, matched, partial(run_parts.restore, {"data": part}, {"data": position}, origin=origin)


def _find_unfinished_work(boundary: Boundary) -> None:
    """Decide how the loaded run continues: it has ended, work of its last boundary is due, or its next window.

    The position in the data is that of `DataPosition`.
    """
    run, counters = boundary.run, boundary.counters
    stopped_early = "" if boundary.early_stopper is None else boundary.early_stopper.stopped
    ended = boundary.clock.end_reached() or stopped_early
    if counters.interrupted_validation == "final" and not (run.stop_reason or ended):
        counters.interrupted_validation = ""  # with a later end the run continues without it
    counters.stopped = ended
    if counters.interrupted_validation:
        run.unfinished_boundary, counters.stopped = counters.interrupted_validation, ""
    elif counters.last_boundary < counters.updates:
        run.unfinished_boundary, counters.stopped = "update", stopped_early
    else:  # unfinished work makes the row of the update before it
        run.optimizer_steps.clear_used_lrs()
    if not counters.stopped:
        boundary.record.outcome.final_validation = None


def _resharded(tree: dict[str, Tree], parts: dict[str, Any], boundary: Boundary) -> dict[str, Tree]:
    """Distribute the tensors of a state as the parts are sharded now."""
    from trainwright.distributed.resharding import place

    likes: dict[str, Any] = {}
    if boundary.copies_best:  # host tensors, with the sharding that the weights of the best are to have
        likes["early_stopping"] = {"weights": copied_weights(boundary.trainer.model, None)}
    return place(tree, parts, likes=likes, world=boundary.trainer.world)


# Parts that start fresh.


SLOTS_WITH_STATE = ("schedule", "average", "early_stopping", "precision", "checkpoint", "loss", "state", "optimizer")
"""Parts that a run may have: no mistake in `resume_fresh`, though neither the checkpoint nor the Trainer has them."""
_RATES = ("lr", "initial_lr", "momentum", "betas")
"""What a schedule sets in a parameter group."""


def _leave_out(plan: ResumeFrom, trainer: TrainerLike, *, parts: dict[str, Any], tree: dict[str, Tree]) -> None:
    """Take the parts that start fresh out of both: they stay as they were built."""
    if not plan.with_data:
        for name in ("data", "totals"):
            parts.pop(name, None)
            tree.pop(name, None)
    known = sorted({*SLOTS_WITH_STATE, *parts, *tree} - set(run_parts.NEVER_FRESH))
    for name in plan.fresh:
        if name not in known:
            what = f"fit(resume_fresh={plan.fresh!r}): there is no part {name!r}.{did_you_mean(name, known)}"
            raise SettingError(what, want=f"some of {', '.join(known)}")
        parts.pop(name, None)
        dropped = tree.pop(name, None)
        if name == "average" and dropped is not None:
            tree["model"] = _trained_weights(trainer.model, tree["model"], dropped)


def _trained_weights(model: nn.Module, averaged: Mapping[str, Any], average: Any) -> dict[str, Any]:
    """Return the trained weights of a checkpoint whose part "model" holds the averaged ones."""
    if "taken" not in average:
        what = 'resume_fresh=("average",): the optimizer of the checkpoint averages by itself, and is loaded'
        raise SettingError(what, fix="build the Trainer as when it was saved")
    raw = {**(average["raw"] or {}), **average.get("statistics", {})}
    first: dict[int, str] = {}
    trained = dict(averaged)
    for name, tensor in chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    ):
        value = raw.get(first.setdefault(id(tensor), name))  # a tied tensor has its first name alone
        if name in trained and value is not None:
            trained[name] = value
    return trained


@contextmanager
def _same_lrs(trainer: TrainerLike) -> Iterator[None]:
    """Restore, after loading inside, the values in the parameter groups that a schedule sets."""
    before = [
        (optimizer, index, key, group[key])
        for optimizer in trainer.optimizers.values()
        for index, group in enumerate(optimizer.param_groups)
        for key in _RATES
        if key in group
    ]
    yield
    for optimizer, index, key, value in before:
        set_option(optimizer.param_groups[index], key, value)


# Settings of optimizers that the checkpoint overrules.


def _settings(trainer: TrainerLike) -> dict[str, dict[str, Any]]:
    """Return the plain settings of every parameter group, of all optimizers in order."""
    settings = {}
    for name, optimizer in trainer.optimizers.items():
        taken = inspect.signature(type(optimizer)).parameters
        counted = set(optimizer.defaults) - set(taken)  # no settings: the optimizer counts in its groups
        for index, group in enumerate(optimizer.param_groups):
            plain = {key: value for key, value in group.items() if isinstance(value, int | float | tuple)}
            settings[f"{name}'s group {index}"] = {key: plain[key] for key in plain if key not in counted}
    return settings


def _unused(trainer: TrainerLike, given: dict[str, dict[str, Any]]) -> list[str]:
    """Return a line for each setting that the checkpoint has overruled, but for those that a schedule sets."""
    scheduled = _RATES if _has_schedule(trainer) else ()
    loaded = _settings(trainer)
    return [
        f"resumed: {key}={loaded[name].get(key)!r} of the {name} is the checkpoint's, {mine!r} is not used"
        for name, settings in given.items()
        for key, mine in settings.items()
        if key not in scheduled and loaded[name].get(key) != mine
    ]


def _has_schedule(trainer: TrainerLike) -> bool:
    """Whether rates are set by a schedule, or by a torch scheduler that the user has built."""
    return trainer.schedule is not None or any(map(has_scheduler, trainer.optimizers.values()))
