"""Chooses how a `fit` starts, and executes it: fresh, from a checkpoint, or already finished.

`choose_start` reads the checkpoint and returns a `FitStart`. Its `execute` loads the state. Between the two, the user's
`begin_epoch` runs for each epoch that had begun: it may add layers and parameter groups.

The loaded counters (part `progress`) give the first action of a resumed run:

- `interrupted_validation` is set: repeat that validation.
- `last_boundary < updates`: do the work of the boundary of that update.
- else: train on the next window, after `counters.batch` batches of the epoch.

`DataPosition` checks the data. `Rollback.open_epoch` opens the epoch again without its first `counters.batch` batches.

Refused, each with a fix:

- no complete checkpoint, several runs, another version (`checkpointing/load.py`, `format.py`);
- another run or later checkpoints in the directory (`CheckpointManager.adopt`);
- another optimizer (`_other_optimizer`); other parts or tensors (`parts.check`); other data (`data/source.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, cast

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
from trainwright.fit.plan import ResumeArgs, changed, settings_of
from trainwright.fit.result import copied_weights, path_at
from trainwright.fit.saving import DataPosition, complete_state
from trainwright.modules.dtensors import is_sharded
from trainwright.optim.named import disable_wrong_kernels, has_scheduler
from trainwright.optim.optimizers import set_option
from trainwright.protocols import Tree
from trainwright.update.per_rank_state import PROCESSES, load_rank_state, take_rank_state
from trainwright.update.trainer_like import TrainerLike, active_observers


@dataclass(frozen=True, kw_only=True)
class FitStart:
    """The start of a `fit`. This class is the fresh start: the weights in memory, no checkpoint."""

    lines: tuple[str, ...] = ()
    """Header lines on the start."""
    begun_epochs: int = 1
    """Number of epochs whose `begin_epoch` runs before the state is loaded."""
    origin: str = ""
    """Source of the loaded state, for the header; empty if nothing is loaded."""
    already_finished: ClassVar[bool] = False
    """Whether the stage has ended in an earlier session: nothing is trained."""

    def execute(self, trainer: TrainerLike, boundary: Boundary) -> list[str]:
        """Load the initial state; return further header lines. No-op here."""
        return []


@dataclass(frozen=True, kw_only=True)
class ResumedStart(FitStart):
    """Resumes a `fit` from a checkpoint of the same stage."""

    checkpoint: Loaded
    fresh: tuple[str, ...] = ()
    """Names of the parts that start fresh instead of being loaded."""
    with_data: bool = True
    """Whether the data are those of the checkpoint, and continue at the saved position."""

    def execute(self, trainer: TrainerLike, boundary: Boundary) -> list[str]:
        """Load the checkpoint into all bound parts; warn of differences if the run continues."""
        counters, run = trainer._counters, boundary.run
        given = _settings(trainer)
        reports, lines, seek = _restore(self, trainer, boundary)
        reports += [*disable_wrong_kernels(trainer.optimizers), *_unused(trainer, given)]
        _find_unfinished_work(boundary)
        # Last, when it is known whether the run has ended: after an ended run, `DataPosition` sets the data at once for
        # the next `fit`.
        reports += seek()
        if trainer.world.is_main and not counters.stopped:  # a finished run does not continue
            for report in reports:
                warn_user(report)  # it matters without a console too
        if counters.stopped or not counters.begun or not run.random.epoch_start_state or not self.with_data:
            # Next draws: begin_epoch, the order, or code after this `fit`; or the current epoch begins again.
            run.random.restore()
        at = counters.earlier_updates + counters.updates
        for observer in active_observers(trainer):
            observer.resume_at(at, counters.skipped, continues=not counters.stopped)
        return [*lines, *reports]


@dataclass(frozen=True, kw_only=True)
class FinishedStart(FitStart):
    """Skips a `fit` that has ended: the checkpoint is of a later `fit` of the same run.

    For a script that calls `fit` twice, was interrupted in the second call, and is started again.
    """

    checkpoint: Loaded
    progress: Mapping[str, Any]
    """Part `progress` of the checkpoint."""
    ended: dict[str, Any]
    """The record of this stage's end."""
    already_finished: ClassVar[bool] = True

    def execute(self, trainer: TrainerLike, boundary: Boundary) -> list[str]:
        """Load the counters, history and weights of the end of the stage."""
        self.checkpoint.tree.clear()
        trainer._counters.load_state_dict(self.ended["counters"])
        trainer.history[:] = self.progress["history"][: self.ended["rows"]]
        outcome, path = trainer._record.outcome, path_at(boundary.manager, self.ended["left"])
        outcome.earlier = self.ended
        outcome.lacks_weights = path is None or not _load_model(trainer, path)
        if outcome.lacks_weights:
            outcome.earlier = {**self.ended, "weights": "as built (those of this stage are gone)"}
        return []


# Choosing the start.


def choose_start(trainer: TrainerLike, loaded: Loaded | None, args: ResumeArgs) -> FitStart:
    """Return the start of the `fit`. SettingError or CheckpointError if the checkpoint does not fit it."""
    if loaded is None:
        return _start_fresh(trainer)
    progress = _progress_of(loaded)
    stage, saved_stage = trainer._counters.stage, progress["counters"]["stage"]
    if saved_stage == stage:
        return _resume_from(trainer, loaded, args, progress=progress)
    if saved_stage > stage:
        return _already_finished(loaded, progress, stage=stage)
    if args.where != "auto":
        raise SettingError(
            f"resume={str(args.where)!r} was saved in fit number {saved_stage + 1} of its run, "
            f"this is number {stage + 1}",
            want="a checkpoint of the same fit, or of a later one",
            fix='resume="auto", which starts this fit where there is none of it',
        )
    loaded.tree.clear()  # this fit starts from the weights in memory: free the loaded ones
    return FitStart()


def _start_fresh(trainer: TrainerLike) -> FitStart:
    """Return the start of a `fit` without a checkpoint."""
    if trainer.checkpoint is None or not trainer._record.follows_failure:
        return FitStart()
    empty = f"no checkpoint in {trainer.checkpoint.directory}"
    line = f"{empty}: it begins with the weights and the optimizer as the fit that failed has left them"
    return FitStart(lines=(line,))


def _already_finished(loaded: Loaded, progress: Mapping[str, Any], *, stage: int) -> FinishedStart:
    """Return the start of a `fit` that has ended: a later one saved the checkpoint."""
    ended = progress["stages"][stage]
    return FinishedStart(
        lines=(f"passed over: {loaded.path} is of a later fit of this run",),
        origin=f"a stage in {loaded.path.parent}",
        begun_epochs=ended["counters"]["epoch"] + ended["counters"]["begun"],
        checkpoint=loaded,
        progress=progress,
        ended=ended,
    )


def _resume_from(trainer: TrainerLike, loaded: Loaded, args: ResumeArgs, *, progress: Mapping[str, Any]) -> FitStart:
    """Return the start of a `fit` that resumes from a checkpoint of the same stage."""
    fresh, saved, now = tuple(args.fresh), progress["settings"], settings_of(trainer)
    if "optimizer" not in fresh and saved["optimizer"] != now["optimizer"]:
        raise _other_optimizer(loaded.path, saved=saved["optimizer"], now=now["optimizer"], fresh=fresh)
    lines = [f"resumed from {loaded.path} at update {loaded.manifest['update']}"]
    if fresh:
        lines.append(f"resume_fresh: {' and '.join(fresh)} started anew")
    if not args.data:
        lines.append(f"resume_data=False: epoch {loaded.manifest['epoch'] + 1} begins anew, with other data")
    if difference := changed(saved, now):
        lines.append(difference)
    begun = progress["counters"]["epoch"] + progress["counters"]["begun"]
    origin = str(loaded.path.parent)
    return ResumedStart(
        lines=tuple(lines), origin=origin, begun_epochs=begun, checkpoint=loaded, fresh=fresh, with_data=args.data
    )


def _other_optimizer(path: Path, *, saved: str, now: str, fresh: tuple[str, ...]) -> CheckpointError:
    """Return the error for optimizers of other classes. torch would load their state without an error."""
    line = run_parts.fresh_line([*fresh, "optimizer"])
    return CheckpointError(
        f"{path} was saved with {saved}; this Trainer has {now}",
        want="the same optimizer: its state is of no use to another",
        fix=f"build it as it was; or {line}; or give Checkpoint() a new "
        f"directory and begin with the weights alone: load_weights({str(path)!r}, model)",
        where=False,
    )


def _progress_of(loaded: Loaded) -> Mapping[str, Any]:
    """Return part `progress` of a checkpoint, checked. DamagedError if no run can have written it."""
    progress: Mapping[str, Any] = cast(Any, loaded.tree.get("progress"))
    try:
        _check_progress(progress, loaded.manifest)
    except FormError as error:
        what = f"{loaded.path} is damaged: in part 'progress' {error}"
        raise DamagedError(what, str(loaded.path), early=True) from error
    return progress


def _check_progress(progress: Any, manifest: Mapping[str, Any]) -> None:
    """Raise FormError if a run does not write counters, history and stages in this form."""
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
        raise FormError(f"the counters are at update {position[0]} of epoch {position[1]}, the manifest at {listed}")


def _check_stage(ended: Any) -> None:
    """Raise FormError if a run does not write the record of an ended stage in this form."""
    check_form(ended, counters=is_dict, weights=is_text, rows=is_count, left=is_count, best=is_none_or(is_best))
    check_form(ended, notes=_are_lines, final=is_none_or(is_dict))
    Counters().load_state_dict(ended["counters"])


def _is_list(value: object) -> bool:
    return isinstance(value, list)


def _are_lines(value: object) -> bool:
    """Whether a value is a list of strings."""
    return isinstance(value, list) and all(map(is_text, value))


def _are_settings(value: object) -> bool:
    """Whether a value is a dict of strings with an entry "optimizer"."""
    return isinstance(value, Mapping) and "optimizer" in value and all(map(is_text, (*value, *value.values())))


def _are_lrs(value: object) -> bool:
    """Whether a value is a dict of lists of learning rates."""
    lists = value.values() if isinstance(value, Mapping) else [None]
    return all(isinstance(rates, list | tuple) and all(map(is_number, rates)) for rates in lists)


def _is_history(value: object) -> bool:
    """Whether a value is a list of rows with "epoch" and "update"."""
    return isinstance(value, list) and all(is_numbers(row) and {"epoch", "update"} <= set(row) for row in value)


# Executing the start.


def _load_model(trainer: TrainerLike, path: Path) -> bool:
    """Load the weights of a checkpoint; return False if they do not fit the model."""
    _, weights = find_weights(path)
    try:
        load_into(trainer.model, weights, source=str(path))
    except CheckpointError:
        return False
    return True


def _restore(
    start: ResumedStart, trainer: TrainerLike, boundary: Boundary
) -> tuple[list[str], list[str], Callable[[], list[str]]]:
    """Restore every part except the data.

    Returns the reports of the parts, lines for the header alone, and `seek`, which sets the position in the data.
    """
    loaded = start.checkpoint
    parts, tree, origin = dict(trainer.parts()), dict(loaded.tree), str(loaded.path)
    loaded.tree.clear()
    has_ranks = trainer.world.size > 1 or PROCESSES in tree
    own, number = take_rank_state(trainer, tree) if has_ranks else (None, 1)
    saved = tree.pop(PARAMETERS, None)
    complete_state(trainer, tree, origin=origin)
    if start.fresh or not start.with_data:
        _leave_out(start, trainer, parts=parts, tree=tree)
    run_parts.check(parts, tree, origin=origin, fresh=start.fresh)
    matched = put_in_current_order(parts, tree, saved, origin=origin)
    if is_sharded(*trainer.model.parameters()):
        tree = _resharded(tree, parts, boundary)
    position = tree.pop("data", None)
    parts.pop("data", None)
    with _same_lrs(trainer) if "schedule" in start.fresh else nullcontext():
        reports = run_parts.restore(parts, tree, origin=origin)
    if has_ranks:
        load_rank_state(trainer, own)
    if not start.with_data:
        trainer._counters.batch = 0
        return reports, matched, list
    part = DataPosition(boundary.run, other_size=number != trainer.world.size)
    return reports, matched, partial(run_parts.restore, {"data": part}, {"data": position}, origin=origin)


def _find_unfinished_work(boundary: Boundary) -> None:
    """Set how the loaded run continues: it has ended, work at its last boundary is due, or the next window follows."""
    run, counters = boundary.run, boundary.counters
    stopped_early = "" if boundary.early_stopper is None else boundary.early_stopper.stopped
    ended = boundary.clock.end_reached() or stopped_early
    if counters.interrupted_validation == "final" and not (run.stop_reason or ended):
        counters.interrupted_validation = ""  # this `fit` ends later: the run continues without that validation
    counters.stopped = ended
    if counters.interrupted_validation:
        run.unfinished_boundary, counters.stopped = counters.interrupted_validation, ""
    elif counters.last_boundary < counters.updates:
        run.unfinished_boundary, counters.stopped = "update", stopped_early
    else:  # unfinished work still needs the rates, for the row of its update
        run.optimizer_steps.clear_used_lrs()
    if not counters.stopped:
        boundary.record.outcome.final_validation = None


def _resharded(tree: dict[str, Tree], parts: dict[str, Any], boundary: Boundary) -> dict[str, Tree]:
    """Shard the tensors of a state as the parts are sharded now."""
    from trainwright.distributed.resharding import place

    likes: dict[str, Any] = {}
    if boundary.copies_best:  # host tensors with the sharding of the best weights
        likes["early_stopping"] = {"weights": copied_weights(boundary.trainer.model, None)}
    return place(tree, parts, likes=likes, world=boundary.trainer.world)


# Parts that start fresh.


SLOTS_WITH_STATE = ("schedule", "average", "early_stopping", "precision", "checkpoint", "loss", "state", "optimizer")
"""Parts that a run may have. `resume_fresh` may name them even if checkpoint and Trainer lack them."""
_RATES = ("lr", "initial_lr", "momentum", "betas")
"""Options of a parameter group that a schedule sets."""


def _leave_out(start: ResumedStart, trainer: TrainerLike, *, parts: dict[str, Any], tree: dict[str, Tree]) -> None:
    """Remove the parts that start fresh from `parts` and `tree`: they stay as they were built."""
    if not start.with_data:
        for name in ("data", "totals"):
            parts.pop(name, None)
            tree.pop(name, None)
    known = sorted({*SLOTS_WITH_STATE, *parts, *tree} - set(run_parts.NEVER_FRESH))
    for name in start.fresh:
        if name not in known:
            what = f"fit(resume_fresh={start.fresh!r}): there is no part {name!r}.{did_you_mean(name, known)}"
            raise SettingError(what, want=f"some of {', '.join(known)}")
        parts.pop(name, None)
        dropped = tree.pop(name, None)
        if name == "average" and dropped is not None:
            tree["model"] = _trained_weights(trainer.model, tree["model"], dropped)


def _trained_weights(model: nn.Module, averaged: Mapping[str, Any], average: Any) -> dict[str, Any]:
    """Return the trained weights of a checkpoint whose part "model" holds averaged weights."""
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
    """Restore the scheduled options of the parameter groups at exit; loading inside the context changes them."""
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


# Settings of optimizers that the checkpoint overrides.


def _settings(trainer: TrainerLike) -> dict[str, dict[str, Any]]:
    """Return the plain settings of every parameter group, of all optimizers in order."""
    settings = {}
    for name, optimizer in trainer.optimizers.items():
        taken = inspect.signature(type(optimizer)).parameters
        counted = set(optimizer.defaults) - set(taken)  # counters that the optimizer keeps in its groups
        for index, group in enumerate(optimizer.param_groups):
            plain = {key: value for key, value in group.items() if isinstance(value, int | float | tuple)}
            settings[f"{name}'s group {index}"] = {key: plain[key] for key in plain if key not in counted}
    return settings


def _unused(trainer: TrainerLike, given: dict[str, dict[str, Any]]) -> list[str]:
    """Return a line for each setting that the checkpoint has overridden; scheduled options are left out."""
    scheduled = _RATES if _has_schedule(trainer) else ()
    loaded = _settings(trainer)
    return [
        f"resumed: {key}={loaded[name].get(key)!r} of the {name} is the checkpoint's, {mine!r} is not used"
        for name, settings in given.items()
        for key, mine in settings.items()
        if key not in scheduled and loaded[name].get(key) != mine
    ]


def _has_schedule(trainer: TrainerLike) -> bool:
    """Whether a schedule, or a torch scheduler of the user, sets the learning rates."""
    return trainer.schedule is not None or any(map(has_scheduler, trainer.optimizers.values()))
