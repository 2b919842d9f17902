"""What of a batch a model is called with, outside of any trainer: as the default steps of one would call it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from trainwright.core.errors import SettingError
from trainwright.modules.dry_run import Given
from trainwright.update.batches import split

Call = Callable[[nn.Module, Any], Any]
"""Calls a model with a batch."""


def given_by(model: nn.Module, batch: Any, what: str) -> Given:
    """The inputs in a batch, else the whole of it, whichever the model's forward takes.

    `what` is the function that errors speak of. SettingError where it takes neither.
    """
    inputs, _ = split(batch)
    whole = batch if isinstance(batch, tuple | list | Mapping) else (batch,)
    for each in (inputs, whole):
        given = Given((), dict(each)) if isinstance(each, Mapping) else Given(tuple(each))
        if _takes(model, given):
            return given
    have = ", ".join(map(str, batch)) if isinstance(batch, Mapping) else f"a {type(batch).__name__} of {len(whole)}"
    raise SettingError(
        f"{what}: the model cannot be called with this batch",
        have=have,
        want=f"{type(model).__name__}.forward{inspect.signature(model.forward)}",
        fix=f'{what}(model, batch, call=lambda model, batch: model(batch["image"]))' if what == "summary" else "",
    )


def _takes(model: nn.Module, given: Given) -> bool:
    try:
        inspect.signature(model.forward).bind(*given.inputs, **given.keywords)
    except TypeError:
        return False
    return True
