"""Observers that measure a run between updates: functions of the user (`Probe`), and `Statistics` per parameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trainwright.core.checks import settings_text
from trainwright.core.durations import Duration, Epochs, Updates, check_duration
from trainwright.core.errors import SettingError, message
from trainwright.core.suggestions import suggests
from trainwright.protocols import Observer

_NAME = 36
"""Characters of a parameter's name in a table."""


class RunObserver(Observer):
    """Base class of observers that measure a run at boundaries between updates. Changes nothing in the run.

    It holds the settings. An `Inspector` per run (`fit/inspection.py`) measures, since one observer may serve several
    runs.
    """

    name = ""
    """Class and settings, which must be equal on all ranks; "" if rank 0 alone may have the observer."""


@suggests
class Probe(RunObserver):
    """Calls `fn(trainer)` once per `every`, and logs the dict of numbers that it returns.

    `fn` runs in eval mode, with the averaged weights if the trainer averages, under no_grad and the autocast of the
    run. Modes, random state, `trainer.state` and gradients are restored afterwards. The numbers are in the record of
    the next update; the row of the epoch holds their means over the epoch.

    Args:
        fn: A function `fn(trainer)` that returns a dict of numbers or None.
        every: The interval.
    """

    def __init__(self, fn: Callable[[Any], Mapping[str, float] | None], *, every: Duration = Epochs(1)) -> None:  # noqa: B008
        if not callable(fn) or isinstance(fn, type):
            raise TypeError(
                message(f"Probe({fn!r})", want="a function of the trainer", fix="Probe(lambda trainer: ...)")
            )
        check_duration(every, "every", call="Probe({})")
        self.fn = fn
        self.duration = every
        self.name = f"Probe({settings_text(fn)})"


@suggests
class Statistics(RunObserver):
    """Sends `ModelStatistics` to `on_statistics` of all observers once per `every` updates.

    Measures norm, maximum and share of zeros of each parameter and its gradient, and the norm of its change by the
    update. The numbers are computed on the device and read in one transfer. The weights are copied for a measured
    update; other updates cost nothing. The journal and TensorBoard write the statistics; `latest` holds the last ones.
    With several ranks, rank 0 measures, and all ranks need the same `Statistics`.

    Args:
        every: The interval, in updates.
        parameters: A pattern of parameter names, such as `"head.*"`.

    Raises:
        SettingError: For a sharded model, or if the pattern matches no parameter.
    """

    def __init__(self, *, every: Updates = Updates(100), parameters: str = "*") -> None:  # noqa: B008
        if not isinstance(every, Updates):
            what = f"Statistics(every={every!r})"
            raise SettingError(what, want="Updates(n)", fix="Statistics(every=Updates(100))")
        if not isinstance(parameters, str) or not parameters:
            what = f"Statistics(parameters={parameters!r})"
            raise SettingError(what, want="a pattern of names", fix='Statistics(parameters="head.*")')
        self.duration, self.parameters = every, parameters
        self.name = f"Statistics(every={every}, parameters={parameters!r})"
        self.latest: ModelStatistics | None = None
        """The last statistics."""

    def on_statistics(self, statistics: ModelStatistics) -> None:
        """Store the statistics as `latest`."""
        self.latest = statistics


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterStatistics:
    """One parameter after an update: its values, its gradient, and its change by the update.

    A tensor with a NaN has the norm and maximum NaN. A NaN counts as non-finite, not as zero.
    """

    elements: int
    weight_norm: float
    weight_max: float
    """The largest absolute value."""
    weight_zeros: float
    """The share of elements that are zero, 0 to 1."""
    weight_nonfinite: int
    """The number of elements that are NaN or infinite."""
    grad_norm: float | None = None
    """The norm of the gradient of the step: of the complete window, unscaled and clipped. None without a gradient."""
    grad_max: float | None = None
    grad_zeros: float | None = None
    grad_nonfinite: int = 0
    update_norm: float = 0.0
    """The norm of the change by the update."""
    before: float = 0.0
    """The norm of the parameter before the update."""

    @property
    def update_ratio(self) -> float:
        """`update_norm` / `before`; about 1e-3 is usual. NaN for a zero parameter that did not change."""
        if self.before:
            return self.update_norm / self.before
        return math.inf if self.update_norm else math.nan


@dataclass(frozen=True, slots=True)
class ModelStatistics:
    """The statistics of all parameters after an update. `print` shows a table."""

    epoch: int
    """Finished epochs over all stages."""
    update: int
    """Updates applied so far over all stages."""
    parameters: Mapping[str, ParameterStatistics]

    def __str__(self) -> str:
        head = f"{'parameter':<{_NAME}}{'weight':>10}{'gradient':>10}{'largest':>10}{'zeros':>7}{'moved':>10}"
        return "\n".join([f"update {self.update}", head, *(_line(*named) for named in self.parameters.items())])


def _line(name: str, statistics: ParameterStatistics) -> str:
    """Return a row of the table: norms of weight and gradient, maximum and zeros of the gradient, update ratio."""
    name = name if len(name) < _NAME else f"…{name[2 - _NAME :]}"
    zeros = "-" if statistics.grad_zeros is None else f"{statistics.grad_zeros:.0%}"
    bad = statistics.weight_nonfinite + statistics.grad_nonfinite
    note = f"  {bad} not finite" if bad else ""
    values = (statistics.weight_norm, statistics.grad_norm, statistics.grad_max)
    norms = "".join(f"{_short(value):>10}" for value in values)
    return f"{name:<{_NAME}}{norms}{zeros:>7}{_short(statistics.update_ratio):>10}{note}"


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
