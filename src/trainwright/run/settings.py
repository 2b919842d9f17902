"""The settings of a Trainer as text, so that a checkpoint can tell which of them it was saved under."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
from typing import Any

from trainwright.run.owner import Owner

SLOTS = ("loss", "precision", "accumulate", "clip", "schedule", "early_stopping", "average", "nonfinite")


def settings_of(owner: Owner) -> dict[str, str]:
    """What fills each slot that has a say in what is trained, the model's class and the optimizers' among them."""
    slots = {name: _text(getattr(owner, name)) for name in SLOTS}
    by_epoch = dict(owner.accumulate)
    slots["accumulate"] = _text(by_epoch[0] if list(by_epoch) == [0] else by_epoch)
    optimizers = ", ".join(f"{name}={_kind(one)}" for name, one in sorted(owner.optimizers.items()))
    return {"model": type(owner.model).__qualname__, "optimizer": optimizers.removeprefix("optimizer="), **slots}


def digest(settings: dict[str, str]) -> str:
    """A short name for these settings: equal ones have equal names."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def changed(saved: dict[str, str], now: dict[str, str]) -> str:
    """One line that says which settings are others now; empty where none is. The schedule tells of itself."""
    differing = [name for name in now if name != "schedule" and saved.get(name, now[name]) != now[name]]
    told = ", ".join(f"{name} {saved[name]} -> {now[name]}" for name in differing)
    return f"settings changed since it was saved: {told}" if told else ""


def _kind(optimizer: Any) -> str:
    """The class of an optimizer; torch's, where it is one of torch's with something added."""
    kinds = [kind for kind in type(optimizer).__mro__ if kind.__module__.startswith("torch.optim.")]
    return kinds[0].__name__ if kinds and kinds[0].__name__ != "Optimizer" else type(optimizer).__name__


def _text(value: Any) -> str:
    """A value as it is written; functions and objects without a text of their own by name."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_text(one)}" for key, one in value.items()) + "}"
    if isinstance(value, functools.partial):
        named = [f"{name}={_text(one)}" for name, one in value.keywords.items()]
        return f"partial({', '.join([_text(value.func), *map(_text, value.args), *named])})"
    if inspect.isroutine(value):
        return value.__qualname__
    text = repr(value)
    return type(value).__qualname__ if " at 0x" in text else text
