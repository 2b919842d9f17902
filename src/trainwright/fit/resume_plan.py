"""Where a `fit` starts: computed from the checkpoint that was read, before anything is loaded from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from trainwright.checkpointing.load import DamagedError, Loaded
from trainwright.checkpointing.parts import fresh_line
from trainwright.core.checks import FormError, check_form, is_count, is_dict, is_none_or, is_number, is_numbers, is_text
from trainwright.core.errors import CheckpointError, SettingError
from trainwright.core.progress import Counters
from trainwright.core.records import Best
from trainwright.fit.plan import Resume
from trainwright.fit.setup import changed, settings_of
from trainwright.update.owner import Owner


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePlan:
    """Where a `fit` starts: at its beginning, at a checkpoint of its own, or at its end.

    At its end where the checkpoint is of a later `fit` of the same run: a script that calls `fit` twice and is started
    again passes over the first call.
    """

    lines: tuple[str, ...] = ()
    """What the header says of it."""
    checkpoint: Loaded | None = None
    """The checkpoint to load, or to learn from how this stage ended; None where it starts at the beginning."""
    progress: Mapping[str, Any] | None = None
    """Part `progress` of that checkpoint."""
    ended: dict[str, Any] | None = None
    """How this stage ended, where the checkpoint is of a later one."""
    earlier: Loaded | None = None
    """The newest checkpoint of an earlier stage, where there is none of this one; its files are retained on."""
    begun_epochs: int = 1
    """Epochs of this stage whose `begin_epoch` runs before the state is loaded: it may change layers."""
    fresh: tuple[str, ...] = ()
    """Parts that start anew in place of being loaded."""
    with_data: bool = True
    """Whether the data are those that it was saved with, and continue where they were."""

    @property
    def place(self) -> str:
        """Where the checkpoint lies, and which stage is over where it is of a later one."""
        assert self.checkpoint is not None
        directory = str(self.checkpoint.path.parent)
        return directory if self.ended is None else f"a stage in {directory}"


def plan_resume(owner: Owner, loaded: Loaded | None, asked: Resume) -> ResumePlan:
    """Work out where the `fit` starts; SettingError, CheckpointError where the checkpoint is not of such a `fit`."""
    if loaded is None:
        return ResumePlan(lines=_start_lines(owner, asked))
    progress = _progress_of(loaded)
    stage, saved_stage = owner._counters.stage, progress["counters"]["stage"]
    if saved_stage > stage:
        ended = progress["stages"][stage]
        line = f"passed over: {loaded.path} is of a later fit of this run"
        begun = ended["counters"]["epoch"] + ended["counters"]["begun"]
        return ResumePlan(lines=(line,), checkpoint=loaded, progress=progress, ended=ended, begun_epochs=begun)
    if saved_stage == stage:
        return _continued(owner, loaded, asked, progress=progress)
    if asked.where != "auto":
        raise SettingError(
            f"resume={str(asked.where)!r} was saved in fit number {saved_stage + 1} of its run, "
            f"this is number {stage + 1}",
            want="a checkpoint of the same fit, or of a later one",
            fix='resume="auto", which starts this fit where there is none of it',
        )
    loaded.tree.clear()  # this fit starts from the weights in memory
    return ResumePlan(earlier=loaded)


def _start_lines(owner: Owner, asked: Resume) -> tuple[str, ...]:
    if asked.where is None or owner.checkpoint is None or not owner._record.follows_failure:
        return ()
    found = f"no checkpoint in {owner.checkpoint.directory}"
    return (f"{found}: it begins with the weights and the optimizer as the fit that failed has left them",)


def _continued(owner: Owner, loaded: Loaded, asked: Resume, *, progress: Mapping[str, Any]) -> ResumePlan:
    """Return the plan of a `fit` that continues at a checkpoint of its own."""
    fresh, counters, now = tuple(asked.fresh), progress["counters"], settings_of(owner)
    saved = progress.get("settings", {})
    if "optimizer" not in fresh:
        _check_optimizer(loaded.path, saved=saved.get("optimizer", now["optimizer"]), now=now["optimizer"], fresh=fresh)
    lines = [
        f"resumed from {loaded.path} at update {loaded.manifest['update']}",
        f"resume_fresh: {' and '.join(fresh)} started anew" if fresh else "",
        "" if asked.data else f"resume_data=False: epoch {loaded.manifest['epoch'] + 1} begins anew, with other data",
        changed(saved, now),
    ]
    return ResumePlan(
        lines=tuple(line for line in lines if line),
        checkpoint=loaded,
        progress=progress,
        begun_epochs=counters["epoch"] + counters["begun"],
        fresh=fresh,
        with_data=asked.data,
    )


def _check_optimizer(path: Path, *, saved: str, now: str, fresh: tuple[str, ...]) -> None:
    """Refuse optimizers of other classes: torch would load their state without a word."""
    if saved == now:
        return
    line = fresh_line([*fresh, "optimizer"])
    raise CheckpointError(
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
    check_form(progress, counters=is_dict, history=_is_history, stages=lambda stages: isinstance(stages, list))
    check_form(progress, settings=_are_texts)
    optional: dict[str, Any] = {"split_at": None, "final": None, "used_rates": {}}
    check_form(optional | progress, split_at=is_none_or(is_number), final=is_none_or(is_dict), used_rates=_are_rates)
    counters, stages = Counters(), progress["stages"]
    for one in stages:
        check_form(one, counters=is_dict, weights=is_text, rows=is_count, left=is_count, best=is_none_or(is_dict))
        check_form(one, notes=lambda notes: isinstance(notes, list) and all(map(is_text, notes)))
        check_form(one, final=is_none_or(is_dict))
        if one["best"] is not None:
            check_form(one["best"], name=is_text, value=is_number, epoch=is_count, update=is_count)
            if set(one["best"]) != {field.name for field in fields(Best)}:
                raise FormError("'best' of an earlier stage cannot be read")
        counters.load_state_dict(one["counters"])
    counters.load_state_dict(progress["counters"])
    if len(stages) < counters.stage:
        raise FormError(f"{len(stages)} stages are listed, and it is of stage {counters.stage}")
    said = (counters.earlier_updates + counters.updates, counters.earlier_epochs + counters.epoch)
    if said != (manifest["update"], manifest["epoch"]):
        listed = f"update {manifest['update']} of epoch {manifest['epoch']}"
        raise FormError(f"the counters say update {said[0]} of epoch {said[1]}, and the manifest {listed}")


def _are_texts(value: object) -> bool:
    """Whether a value is a dict of texts by name."""
    return isinstance(value, Mapping) and all(map(is_text, (*value, *value.values())))


def _are_rates(value: object) -> bool:
    """Whether a value is a dict of lists of rates."""
    lists = value.values() if isinstance(value, Mapping) else [None]
    return all(isinstance(one, list | tuple) and all(map(is_number, one)) for one in lists)


def _is_history(value: object) -> bool:
    """Whether a value is a list of rows, each with the number of its epoch and of its update."""
    return isinstance(value, list) and all(is_numbers(row) and {"epoch", "update"} <= set(row) for row in value)
