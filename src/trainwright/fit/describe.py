"""What fills the slots of a run, in a few words for the console's header."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from trainwright.core.durations import Duration
from trainwright.optim.clip import ClipNorm
from trainwright.update.owner import Owner

_PLAIN = str | int | float | Duration


def in_brief(owner: Owner) -> tuple[str, ...]:
    """`schedule OneCycle(max_lr=0.01)`, `clip 1.0`, `average EMA(0.999)`, `frozen teacher`: those that are set."""
    told = {
        "schedule": _each(owner.schedule),
        "clip": _each(owner.clip),
        "average": _each(owner.average),
        "frozen": ", ".join(owner.frozen),
    }
    return tuple(f"{slot} {text}" for slot, text in told.items() if text)


def _each(setting: Any) -> str:
    """One setting, or several by the names of their optimizers."""
    if isinstance(setting, Mapping):
        return ", ".join(f"{name} {_text(one)}" for name, one in setting.items())
    return "" if setting is None else _text(setting)


def _text(setting: Any) -> str:
    """A setting with its first value and those that are not the default: `StepLR(step=Epochs(30), gamma=0.5)`."""
    if isinstance(setting, ClipNorm) and setting == ClipNorm(setting.max_norm):
        return str(setting.max_norm)
    if not is_dataclass(setting) or isinstance(setting, type):
        return _name(setting)
    first = next(iter(fields(setting)), None)
    said = []
    for one in fields(setting):
        value, by_place = getattr(setting, one.name), one is first and not one.kw_only
        if by_place or one.default is MISSING or not _same(value, one.default):
            # A value that has a default or stands alone is known by its place; others are told by name.
            bare = by_place and (one.default is not MISSING or len(fields(setting)) == 1)
            said.append(_value(value) if bare else f"{one.name}={_value(value)}")
    return f"{type(setting).__name__}({', '.join(said)})" if said else type(setting).__name__


def _same(value: Any, default: Any) -> bool:
    """Whether a setting is left at its default; what is no plain value may have an == of its own."""
    return value is default or (isinstance(value, _PLAIN) and value == default)


def _value(value: Any) -> str:
    if isinstance(value, Duration):
        return f"{type(value).__name__}({value.n})"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return repr(value) if value is None or isinstance(value, str | int | float) else _name(value)


def _name(value: Any) -> str:
    """The name of a function or a class, never an address."""
    return str(getattr(value, "__name__", type(value).__name__))
