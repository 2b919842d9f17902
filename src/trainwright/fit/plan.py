"""The arithmetic of the run and every contradiction in it, found before the first update."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from trainwright.core.checks import check_flag, check_number, check_whole, local_path
from trainwright.core.durations import Duration, Epochs, check_duration
from trainwright.core.errors import DataError, SettingError
from trainwright.core.plan import Plan
from trainwright.core.suggestions import did_you_mean, nearest
from trainwright.data.source import Source
from trainwright.fit.describe import in_brief
from trainwright.optim.named import fused_hint
from trainwright.update.owner import Owner
from trainwright.update.per_rank_state import describe_ranks

EACH_EPOCH = Epochs(1)


@dataclass(frozen=True, slots=True)
class Ends:
    """When a `fit` ends, and how often it validates; in the order of its arguments."""

    epochs: int | None = None
    max_updates: int | None = None
    max_seconds: float | None = None
    epoch_updates: int | None = None
    validate: Duration = EACH_EPOCH

    def __post_init__(self) -> None:
        check_duration(self.validate, "validate")
        for name in ("epochs", "max_updates", "epoch_updates"):
            value = getattr(self, name)
            if value is not None:
                check_whole(value, f"{name}={value!r}")
        if self.max_seconds is not None:
            check_number(self.max_seconds, f"max_seconds={self.max_seconds!r}", above=0, what="a number of seconds")

    def check_given(self) -> None:
        """Refuse a `fit` without an end. Called after the check of the data: `fit(data, 5)` has one there."""
        if self.epochs is None and self.max_updates is None and self.max_seconds is None:
            raise SettingError(
                "fit() was not told when to end", want="epochs, max_updates or max_seconds", fix="epochs=10"
            )


@dataclass(frozen=True, slots=True)
class Resume:
    """What `fit(resume=..., resume_data=...)` asks for."""

    where: str | Path | None = None
    data: bool = True
    """Whether the data are those that it was saved with, and go on where they were."""
    fresh: Sequence[str] = ()
    """Parts that start anew in place of being loaded."""

    def __post_init__(self) -> None:
        check_flag(self.data, f"fit(resume_data={self.data!r})")
        if not self.data and self.where is None:
            raise SettingError("fit(resume_data=False) without resume", fix='resume="auto"')
        self._check_fresh()
        if isinstance(self.where, str | Path):
            local_path(self.where, "resume={}", reads=True)

    def _check_fresh(self) -> None:
        given = f"fit(resume_fresh={self.fresh!r})"
        if isinstance(self.fresh, str):
            raise SettingError(given, want="a tuple of names of parts", fix=f"resume_fresh=({self.fresh!r},)")
        if not all(isinstance(name, str) for name in self.fresh):
            raise SettingError(given, want="names of parts", fix='resume_fresh=("schedule",)')
        if self.fresh and self.where is None:
            raise SettingError(f"{given} without resume", fix='resume="auto"')
        if self.fresh:
            self._check_names(given)

    def _check_names(self, given: str) -> None:
        from trainwright.checkpointing.parts import NEVER_FRESH

        for name in self.fresh:
            if name in NEVER_FRESH:
                what = f"{given}: {name!r} is what a resume goes on with"
                raise SettingError(what, want="another part", fix=NEVER_FRESH[name])


def make_plan(
    owner: Owner, source: Source, val: Mapping[str, Source], *, ends: Ends, notes: tuple[str, ...] = ()
) -> Plan:
    """Work out the run, or say what contradicts what."""
    _check_data(source, ends)
    _check_val(val, ends)
    plan = Plan(
        model=_class_of(owner.model),
        parameters=sum(parameter.numel() for parameter in owner.model.parameters()),
        frozen=sum(parameter.numel() for parameter in owner.model.parameters() if not parameter.requires_grad),
        device=_device(owner.device),
        precision="" if owner.precision is None else str(owner.precision),
        train=source.describe(),
        val=_described(val),
        batches=source.length,
        rows=source.rows,
        batch_size=source.batch_size,
        accumulate=owner.accumulate,
        epochs=ends.epochs,
        max_updates=ends.max_updates,
        max_seconds=ends.max_seconds,
        epoch_updates=ends.epoch_updates,
        settings=in_brief(owner),
        watched=_watched(owner),
    )
    return replace(plan, notes=(*notes, *_saves_late(owner, source, plan, ends=ends), *_notes(owner, source, plan)))


def check_monitors(
    owner: Owner,
    *,
    has_val: bool,
    produced: set[str],
    free: tuple[bool, bool],
    rates: Sequence[str] = (),
    prefixes: tuple[str, ...] = (),
) -> None:
    """Refuse a number that is watched and that nothing produces.

    `produced`: names known before the first update; `free`: whether training, and evaluation, may give more;
    `prefixes`: how the names of metrics begin that return a dict of numbers.
    """
    watched = [
        ("EarlyStopping", getattr(owner.early_stopping, "monitor", None)),
        ("Checkpoint(best=...)", getattr(owner.checkpoint, "best", None)),
        *(("the schedule", name) for name in rates),
    ]
    for who, name in watched:
        if name is None or name in produced or name.startswith(prefixes) or _is_free(name, free, has_val):
            continue
        if name.startswith("val_") and not has_val:
            raise SettingError(
                f"{who} watches {name!r}, and fit() got no validation data",
                want="fit(train, val, ...)",
                fix=f"pass val, or watch {name.removeprefix('val_')!r}",
            )
        raise SettingError(
            f"{who} watches {name!r}, which this run does not produce.{did_you_mean(name, produced)}",
            want=f"one of {', '.join(sorted(produced))}",
            fix=f"watch {nearest(name, produced) or ('val_loss' if has_val else 'loss')!r}",
        )


def _class_of(model: nn.Module) -> str:
    """The name of a model's class; torch gives a sharded model one of its own, that derives from it."""
    bases = type(model).__bases__
    return (bases[-1] if bases[0].__name__ == "FSDPModule" else type(model)).__name__


def _watched(owner: Owner) -> tuple[str, ...]:
    """The numbers that something is decided by, each once."""
    schedule = owner.schedule
    schedules = schedule.values() if isinstance(schedule, Mapping) else [schedule]
    names = [getattr(owner.early_stopping, "monitor", None), getattr(owner.checkpoint, "best", None)]
    names += [getattr(one, "monitor", None) for one in schedules]
    return tuple(dict.fromkeys(name for name in names if isinstance(name, str)))


def _described(val: Mapping[str, Source]) -> str:
    """The validation data in a few words, by name where there are several."""
    if list(val) == ["val"]:
        return val["val"].describe()
    return "; ".join(f"{name.removeprefix('val_')}: {source.describe()}" for name, source in val.items())


def _is_free(name: str, free: tuple[bool, bool], has_val: bool) -> bool:
    """Whether code of the user's own may yet produce this number."""
    training, evaluation = free
    return (evaluation and has_val) or (training and not name.startswith("val_"))


def _check_data(source: Source, ends: Ends) -> None:
    if ends.epoch_updates is not None and source.length is not None:
        raise SettingError(
            f"epoch_updates={ends.epoch_updates}, and {source.describe()} has {source.length} batches an epoch",
            want="epoch_updates only for a stream without a length",
            fix="validate=Updates(n) validates inside an epoch",
        )
    again = (ends.epochs or 1) > 1 and ends.epoch_updates is None
    if again and not source.repeatable:
        raise DataError(
            f"epochs={ends.epochs}, and {source.describe()} can be iterated only once",
            want="data that can be iterated again",
            fix="pass a callable `lambda epoch: make_batches(epoch)`, a list of batches, or max_updates=...",
        )


def _check_val(val: Mapping[str, Source], ends: Ends) -> None:
    """Refuse validation data that are used up before the last validation that is sure to come."""
    times = math.ceil((ends.epochs or 1) / ends.validate.n) if isinstance(ends.validate, Epochs) else 1
    if times == 1 or ends.max_updates is not None or ends.max_seconds is not None:
        return
    for name, source in val.items():
        if not source.repeatable:
            raise DataError(
                f"{name} data: {times} validations, and {source.describe()} can be iterated only once",
                want="data that can be iterated again",
                fix="pass a list of the batches, or a callable `lambda epoch: make_batches(epoch)`",
            )


def _notes(owner: Owner, source: Source, plan: Plan) -> list[str]:
    notes = describe_ranks(owner, plan, apart=source.sharded) if owner.world.size > 1 else []
    notes += [source.note] if source.note else []
    if plan.val and owner._hooks.steps_itself and not owner._hooks.validates_itself:
        notes.append("validates by your training_step, in eval mode")
    if str(owner.precision) == "tf32" and owner.device.type == "cpu":
        notes.append("tf32 has no effect on a cpu")
    notes += fused_hint(owner.optimizers, plan.updates) if owner.fast.defaults else []
    if (early := owner.early_stopping) is not None:
        notes.append(f"stops early on {early.monitor}")
    if (checkpoint := owner.checkpoint) is not None:
        best = f", best by {checkpoint.best}" if getattr(checkpoint, "best", None) else ""
        notes.append(f"checkpoints in {checkpoint.directory}{best}")
    if _loss_is_left_out(owner):
        notes.append(
            "the parameters of the loss are trained and saved, but neither averaged nor put back with the best"
        )
    return notes


def _loss_is_left_out(owner: Owner) -> bool:
    """Whether the loss has parameters, and something holds other weights of the model than the last."""
    if not isinstance(owner.loss, nn.Module) or not any(True for _ in owner.loss.parameters()):
        return False
    restores = (getattr(slot, "restore_best", False) for slot in (owner.early_stopping, owner.checkpoint))
    return owner.average is not None or any(restores)


def _saves_late(owner: Owner, source: Source, plan: Plan, *, ends: Ends) -> list[str]:
    """Say where nothing falls due, or perhaps nothing, at which a checkpoint would be written before the run ends.

    Data of a known length come to the end of an epoch in any case; so does a second epoch that was asked for.
    """
    if owner.checkpoint is None or owner.checkpoint.every != "auto" or plan.updates_in(0) is not None:
        return []
    if plan.val and not isinstance(ends.validate, Epochs):
        return []
    between = ends.validate.n if plan.val and isinstance(ends.validate, Epochs) else 1
    if (ends.epochs or 0) > between:
        return []
    perhaps = ", unless an epoch's data end before" if source.repeatable and ends.epochs is None else ""
    return [f"saves at the end alone{perhaps}: give Checkpoint(..., every=Updates(n)) for more"]


def _device(device: torch.device) -> str:
    if device.type == "cpu":
        threads = torch.get_num_threads()
        return f"cpu, {threads} thread{'s' if threads > 1 else ''}"
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
