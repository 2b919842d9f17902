"""Plans a `fit` before its first update: computes its arithmetic and refuses contradictory settings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainwright.core.checks import check_flag, check_number, check_whole, local_path, settings_text
from trainwright.core.durations import Duration, Epochs, check_duration
from trainwright.core.errors import DataError, SettingError
from trainwright.core.plan import Plan
from trainwright.core.suggestions import did_you_mean, nearest
from trainwright.data.source import Source
from trainwright.metrics.metrics import OverAll
from trainwright.optim.clip import ClipNorm
from trainwright.optim.named import fused_hint
from trainwright.update.per_rank_state import describe_ranks
from trainwright.update.trainer_like import TrainerLike

if TYPE_CHECKING:
    from trainwright.checkpointing.checkpoint import Checkpoint


EACH_EPOCH = Epochs(1)


@dataclass(frozen=True, slots=True)
class Ends:
    """When a `fit` ends and how often it validates, in the order of its arguments."""

    epochs: int | None = None
    max_updates: int | None = None
    max_seconds: float | None = None
    epoch_updates: int | None = None
    validate: Duration = EACH_EPOCH
    validate_at_start: bool = False
    max_val_batches: int | None = None

    def __post_init__(self) -> None:
        check_duration(self.validate, "validate")
        check_flag(self.validate_at_start, f"fit(validate_at_start={self.validate_at_start!r})")
        for name in ("epochs", "max_updates", "epoch_updates", "max_val_batches"):
            value = getattr(self, name)
            if value is not None:
                check_whole(value, f"{name}={value!r}")
        if self.max_seconds is not None:
            check_number(self.max_seconds, f"max_seconds={self.max_seconds!r}", above=0, what="a number of seconds")

    def check_given(self) -> None:
        """Refuse a `fit` without an end. Called after the data check, which refuses `fit(data, 5)`."""
        if self.epochs is None and self.max_updates is None and self.max_seconds is None:
            raise SettingError("fit() without an end", want="epochs, max_updates or max_seconds", fix="epochs=10")

    def check_validates(self, val: Any) -> None:
        """Refuse settings for validations without validation data."""
        given = {"validate_at_start": self.validate_at_start, "max_val_batches": self.max_val_batches}
        for name, value in given.items():
            if value and val is None:
                raise SettingError(
                    f"fit({name}={value}) without validation data", fix=f"fit(train, val, {name}={value})"
                )


@dataclass(frozen=True, slots=True)
class ResumeArgs:
    """The arguments `resume`, `resume_data` and `resume_fresh` of `fit`."""

    where: str | Path | None = None
    data: bool = True
    """True: the data are those of the checkpoint, and continue at the saved position."""
    fresh: Sequence[str] = ()
    """Names of the parts that start fresh instead of being loaded."""

    def __post_init__(self) -> None:
        check_flag(self.data, f"fit(resume_data={self.data!r})")
        if not self.data and self.where is None:
            raise SettingError("fit(resume_data=False) without resume", fix='resume="auto"')
        if self.fresh:
            self._check_fresh()
        if isinstance(self.where, str | Path):
            local_path(self.where, "resume={}", reads=True)

    def _check_fresh(self) -> None:
        from trainwright.checkpointing.parts import NEVER_FRESH

        given = f"fit(resume_fresh={self.fresh!r})"
        if isinstance(self.fresh, str):
            raise SettingError(given, want="a tuple of names of parts", fix=f"resume_fresh=({self.fresh!r},)")
        if not all(isinstance(name, str) for name in self.fresh):
            raise SettingError(given, want="names of parts", fix='resume_fresh=("schedule",)')
        if self.where is None:
            raise SettingError(f"{given} without resume", fix='resume="auto"')
        for name in self.fresh:
            if name in NEVER_FRESH:
                what = f"{given}: a resume is not possible without the saved {name!r}"
                raise SettingError(what, want="another part", fix=NEVER_FRESH[name])


def make_plan(
    trainer: TrainerLike, source: Source, val: Mapping[str, Source], *, ends: Ends, notes: tuple[str, ...] = ()
) -> Plan:
    """Return the plan of a `fit`. SettingError or DataError if the data do not allow its number of passes."""
    if ends.epoch_updates is not None and source.length is not None:
        raise SettingError(
            f"epoch_updates={ends.epoch_updates}, and {source.describe()} has {source.length} batches an epoch",
            want="epoch_updates only for a stream without a length",
            fix="validate=Updates(n) validates inside an epoch",
        )
    if not all(data.repeatable for data in (source, *val.values())):
        _check_passes(source, val, ends)

    schedules = trainer.schedule.values() if isinstance(trainer.schedule, Mapping) else [trainer.schedule]
    watched = watched_numbers(trainer, [getattr(schedule, "monitor", None) for schedule in schedules])
    plan = Plan(
        model=_class_of(trainer.model),
        parameters=sum(parameter.numel() for parameter in trainer.model.parameters()),
        frozen=sum(parameter.numel() for parameter in trainer.model.parameters() if not parameter.requires_grad),
        device=_describe_device(trainer.device),
        precision="" if trainer.precision is None else str(trainer.precision),
        train=source.describe(),
        val=_describe_val(val),
        batches=source.length,
        rows=source.rows,
        batch_size=source.batch_size,
        accumulate=trainer.accumulate,
        epochs=ends.epochs,
        max_updates=ends.max_updates,
        max_seconds=ends.max_seconds,
        epoch_updates=ends.epoch_updates,
        settings=in_brief(trainer),
        hyperparameters={**settings_of(trainer), **_optimizer_numbers(trainer)} if trainer.observers else {},
        watched=tuple(dict.fromkeys(name for name, _ in watched)),
    )
    return replace(plan, notes=(*notes, *_notes(trainer, source, plan, ends=ends)))


def watched_numbers(trainer: TrainerLike, scheduled: Iterable[Any]) -> list[tuple[str, str]]:
    """Return (number, slot) for each number that a slot monitors. `scheduled`: the numbers that schedules monitor."""
    watched = [(name, "the schedule") for name in scheduled]
    if trainer.checkpoint is not None:
        watched.insert(0, (trainer.checkpoint.best, "Checkpoint(best=...)"))
    if trainer.early_stopping is not None:
        watched.insert(0, (trainer.early_stopping.monitor, "EarlyStopping"))
    return [(name, slot) for name, slot in watched if isinstance(name, str)]


def check_watched(trainer: TrainerLike, watched: list[tuple[str, str]], val_numbers: Mapping[str, set[str]]) -> None:
    """Refuse a monitored number that the run does not produce.

    `watched`: pairs of number and slot. `val_numbers`: the names of the numbers of each validation set.
    """
    # A metric may return a dict. Its keys are unknown before the metric has run: without validation data, and for a
    # metric over all rows. Names that begin with such a metric are therefore allowed.
    over_all = [name for name, metric in trainer.metrics.items() if isinstance(metric, OverAll)]
    starts = [f"{prefix}_{name}_" for prefix in val_numbers for name in over_all]
    starts += [] if val_numbers else [f"{name}_" for name in trainer.metrics]
    produced = {"loss", *trainer.metrics}
    for prefix, numbers in val_numbers.items():
        keyed = tuple(f"{prefix}_{metric}_" for metric in trainer.metrics)  # training reports these keys, too
        produced |= numbers | {name.removeprefix(f"{prefix}_") for name in numbers if name.startswith(keyed)}
    for name, slot in watched:
        logged = trainer._hooks.may_log_any_name and not name.startswith("val_")
        may_come = logged or (trainer._hooks.overrides_evaluate and bool(val_numbers))
        if name not in produced and not name.startswith(tuple(starts)) and not may_come:
            raise _not_produced(name, slot, has_val=bool(val_numbers), produced=produced)


def _not_produced(name: str, slot: str, *, has_val: bool, produced: set[str]) -> SettingError:
    if name.startswith("val_") and not has_val:
        return SettingError(
            f"{slot} watches {name!r}, and fit() got no validation data",
            want="fit(train, val, ...)",
            fix=f"pass val, or watch {name.removeprefix('val_')!r}",
        )
    return SettingError(
        f"{slot} watches {name!r}, which this run does not produce.{did_you_mean(name, produced)}",
        want=f"one of {', '.join(sorted(produced))}",
        fix=f"watch {nearest(name, produced) or ('val_loss' if has_val else 'loss')!r}",
    )


def _class_of(model: nn.Module) -> str:
    """Return the name of a model's class. FSDP replaces that class by a subclass."""
    bases = type(model).__bases__
    return (bases[-1] if bases[0].__name__ == "FSDPModule" else type(model)).__name__


def _describe_val(val: Mapping[str, Source]) -> str:
    """Return a short description of the validation data; several sets are described by name."""
    if list(val) == ["val"]:
        return val["val"].describe()
    return "; ".join(f"{name.removeprefix('val_')}: {source.describe()}" for name, source in val.items())


def _describe_device(device: torch.device) -> str:
    if device.type == "cpu":
        threads = torch.get_num_threads()
        return f"cpu, {threads} thread{'s' if threads > 1 else ''}"
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def _check_passes(source: Source, val: Mapping[str, Source], ends: Ends) -> None:
    """Refuse data that can be iterated only once if the `fit` needs a second pass."""
    if (ends.epochs or 1) > 1 and ends.epoch_updates is None and not source.repeatable:
        raise DataError(
            f"epochs={ends.epochs}, and {source.describe()} can be iterated only once",
            want="data that can be iterated again",
            fix="pass a callable `lambda epoch: make_batches(epoch)`, a list of batches, or max_updates=...",
        )
    times = math.ceil((ends.epochs or 1) / ends.validate.n) if isinstance(ends.validate, Epochs) else 1
    if times == 1 or ends.max_updates is not None or ends.max_seconds is not None:
        return
    for name, data in val.items():
        if not data.repeatable:
            raise DataError(
                f"{name} data: {times} validations, and {data.describe()} can be iterated only once",
                want="data that can be iterated again",
                fix="pass a list of the batches, or a callable `lambda epoch: make_batches(epoch)`",
            )


def _notes(trainer: TrainerLike, source: Source, plan: Plan, *, ends: Ends) -> list[str]:
    """Return the header lines on ranks, data, slots and automatic choices."""
    notes = [] if trainer.world.size == 1 else describe_ranks(trainer, plan, apart=source.is_own_part)
    notes += [source.note] if source.note else []
    if plan.val and trainer._hooks.overrides_training_step and not trainer._hooks.overrides_validation_step:
        notes.append("validates by your training_step, in eval mode")
    if plan.precision == "tf32" and trainer.device.type == "cpu":
        notes.append("tf32 has no effect on a cpu")
    notes += fused_hint(trainer.optimizers, plan.updates) if trainer.fast.defaults else []
    if trainer.early_stopping is not None:
        notes.append(f"stops early on {trainer.early_stopping.monitor}")
    if trainer.checkpoint is not None:
        notes += _describe_checkpoint(trainer.checkpoint, source, plan, ends=ends)
    if isinstance(trainer.loss, nn.Module) and any(True for _ in trainer.loss.parameters()):
        notes += _describe_trained_loss(trainer)
    return notes


def _describe_checkpoint(checkpoint: Checkpoint, source: Source, plan: Plan, *, ends: Ends) -> list[str]:
    best = f", best by {checkpoint.best}" if checkpoint.best else ""
    lines = [f"checkpoints in {checkpoint.directory}{best}"]
    if checkpoint.every == "auto" and plan.updates_in(0) is None:
        lines += _warn_of_late_saves(source, plan, ends=ends)
    return lines


def _warn_of_late_saves(source: Source, plan: Plan, *, ends: Ends) -> list[str]:
    """Return a warning if a run on data without a length may save only at its end.

    No warning if the end of an epoch is certain: for data of a known length, or with a second epoch in the plan.
    """
    by_epochs = isinstance(ends.validate, Epochs)
    if (plan.val and not by_epochs) or (ends.epochs or 0) > (ends.validate.n if plan.val else 1):
        return []
    perhaps = ", unless an epoch's data end before" if source.repeatable and ends.epochs is None else ""
    return [f"saves at the end alone{perhaps}: give Checkpoint(..., every=Updates(n)) for more"]


def _describe_trained_loss(trainer: TrainerLike) -> list[str]:
    """Return a header line if best or averaged weights are loaded into the model, but not into its trained loss."""
    early, checkpoint = trainer.early_stopping, trainer.checkpoint
    restores = (early is not None and early.restore_best) or (checkpoint is not None and checkpoint.restore_best)
    if trainer.average is None and not restores:
        return []
    return ["the parameters of the loss are trained and saved, but neither averaged nor restored with the best"]


SLOTS = ("loss", "precision", "accumulate", "clip", "schedule", "early_stopping", "average", "on_nonfinite")


def in_brief(trainer: TrainerLike) -> tuple[str, ...]:
    """Return the filled slots as text, such as `schedule OneCycle(max_lr=0.01)` or `clip 1.0`."""
    slots = {"schedule": trainer.schedule, "clip": trainer.clip, "average": trainer.average}
    texts = {name: _by_optimizer(setting) for name, setting in slots.items() if setting is not None}
    texts["frozen"] = ", ".join(trainer.frozen)
    return tuple(f"{name} {text}" for name, text in texts.items() if text)


def _by_optimizer(setting: Any) -> str:
    """Return one setting as text, or several by the names of their optimizers."""
    if isinstance(setting, Mapping):
        return ", ".join(f"{name} {_text(value)}" for name, value in setting.items())
    return _text(setting)


def settings_of(trainer: TrainerLike) -> dict[str, str]:
    """Return the model's class, the optimizers' classes and every slot that affects training, as text."""
    slots = {name: _text(getattr(trainer, name)) for name in SLOTS}
    by_epoch = dict(trainer.accumulate)
    slots["accumulate"] = _text(by_epoch[0] if list(by_epoch) == [0] else by_epoch)
    classes = {name: _optimizer_class(optimizer) for name, optimizer in sorted(trainer.optimizers.items())}
    optimizers = ", ".join(f"{name}={text}" for name, text in classes.items())
    return {"model": type(trainer.model).__qualname__, "optimizer": optimizers.removeprefix("optimizer="), **slots}


def _optimizer_numbers(trainer: TrainerLike) -> dict[str, Any]:
    """Return the hyperparameters of each optimizer's first group, by name: `lr`, or `G.lr` for optimizer "G".

    Numbers, tuples and flags that are on; no tensors.
    """
    numbers = {}
    for name, optimizer in trainer.optimizers.items():
        prefix = "" if name == "optimizer" else f"{name}."
        for key, value in optimizer.param_groups[0].items():
            if value is not False and isinstance(value, int | float | tuple):  # a tensor would be read
                numbers[f"{prefix}{key}"] = value
    return numbers


def changed(saved: dict[str, str], now: dict[str, str]) -> str:
    """Return one line on the settings that differ; empty if none does. The schedule reports its own changes."""
    differing = [name for name in now if name != "schedule" and saved.get(name, now[name]) != now[name]]
    changes = ", ".join(f"{name} {saved[name]} -> {now[name]}" for name in differing)
    return f"settings changed since it was saved: {changes}" if changes else ""


def _optimizer_class(optimizer: Any) -> str:
    """Return the name of an optimizer's class; for a subclass of a torch optimizer, the name of torch's class."""
    classes = [base for base in type(optimizer).__mro__ if base.__module__.startswith("torch.optim.")]
    return classes[0].__name__ if classes and classes[0].__name__ != "Optimizer" else type(optimizer).__name__


def _text(setting: Any) -> str:
    """Return a setting as text; `ClipNorm(x)` as the number x."""
    if isinstance(setting, ClipNorm) and setting == ClipNorm(setting.max_norm):
        return str(setting.max_norm)
    return settings_text(setting)
