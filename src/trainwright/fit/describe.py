"""The settings of a run as text: in brief for the console's header, in full for the checkpoint and other ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainwright.core.checks import settings_text
from trainwright.optim.clip import ClipNorm
from trainwright.update.trainer_like import TrainerLike

SLOTS = ("loss", "precision", "accumulate", "clip", "schedule", "early_stopping", "average", "on_nonfinite")


def in_brief(trainer: TrainerLike) -> tuple[str, ...]:
    """Return the slots that are set: `schedule OneCycle(max_lr=0.01)`, `clip 1.0`, `average EMA(0.999)`."""
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
    optimizers = ", ".join(f"{name}={_class_of(optimizer)}" for name, optimizer in sorted(trainer.optimizers.items()))
    return {"model": type(trainer.model).__qualname__, "optimizer": optimizers.removeprefix("optimizer="), **slots}


def changed(saved: dict[str, str], now: dict[str, str]) -> str:
    """Return one line on the settings that differ, empty where none does. The schedule reports its own."""
    differing = [name for name in now if name != "schedule" and saved.get(name, now[name]) != now[name]]
    changes = ", ".join(f"{name} {saved[name]} -> {now[name]}" for name in differing)
    return f"settings changed since it was saved: {changes}" if changes else ""


def _class_of(optimizer: Any) -> str:
    """Return the name of an optimizer's class; of torch's class, where it derives from one."""
    classes = [base for base in type(optimizer).__mro__ if base.__module__.startswith("torch.optim.")]
    return classes[0].__name__ if classes and classes[0].__name__ != "Optimizer" else type(optimizer).__name__


def _text(setting: Any) -> str:
    """Return a setting as text; of a norm to clip to the number alone."""
    if isinstance(setting, ClipNorm) and setting == ClipNorm(setting.max_norm):
        return str(setting.max_norm)
    return settings_text(setting)
