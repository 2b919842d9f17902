"""Comparison of values of a monitored number, for early stopping, the best checkpoint and `Plateau`."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Literal

from trainwright.core.errors import SettingError
from trainwright.core.suggestions import did_you_mean

Mode = Literal["min", "max"]
_LESS_IS_BETTER = ("error", "mae", "mse", "nll", "perplexity", "ppl", "rmse", "wer")
"""Ends of names for which a message suggests "min"; the user has to write it."""


def sort_key(value: float | None, mode: Mode) -> float:
    """Return the sort key of a value: smaller keys are better.

    Value a is better than b if `sort_key(a, mode) < sort_key(b, mode)`. The key of None, NaN and the worst infinity is
    infinity: they are better than no value.
    """
    if value is None or math.isnan(value):
        return math.inf
    return -float(value) if mode == "max" else float(value)


def resolve_mode(monitor: str, mode: Mode | None, call: str) -> Mode:
    """Return the mode of a monitored number; by default "min" for a name that ends in "loss", else SettingError.

    `call`: the code of the setting, with placeholders for monitor and mode.
    """
    if not isinstance(monitor, str) or not monitor:
        raise SettingError(call.format(monitor, mode), want='the name of a number, such as "val_loss"')
    if mode is None and monitor.endswith("loss"):
        return "min"
    if mode not in ("min", "max"):
        less = monitor.lower().endswith(_LESS_IS_BETTER)
        typo = "" if less else did_you_mean(monitor, ["val_loss"])
        raise SettingError(
            f"{call.format(monitor, mode)}: is less or more of {monitor} better?{typo}",
            want='mode="max" where more is better, mode="min" where less is; only a name that ends in "loss" '
            "may leave it out",
            fix=call.format("val_loss" if typo else monitor, "min" if less or typo else "max"),
        )
    return mode


def require_monitor(monitor: str, produced: Collection[str], asked_by: str) -> None:
    """Raise SettingError unless the monitored number is one of `produced`."""
    if monitor not in produced:
        numbers = [name for name in produced if name not in ("epoch", "update")]
        raise SettingError(
            f"{asked_by} watches {monitor!r}, which this run does not produce.{did_you_mean(monitor, numbers)}",
            want="one of " + ", ".join(sorted(numbers)),
            fix="give fit(train, val) validation data"
            if monitor.startswith("val_") and not any(name.startswith("val_") for name in numbers)
            else "",
        )
