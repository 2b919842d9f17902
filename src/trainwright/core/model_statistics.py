"""Statistics of the parameters of a model, their gradients and their last change, in plain numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

_NAME = 36


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterStatistics:
    """One parameter after an update: itself, the gradient it was moved by, and how far it has moved.

    A NaN in a tensor makes its norm and its maximum NaN, and counts as not finite; it is no zero.
    """

    elements: int
    weight_norm: float
    weight_max: float
    """The largest absolute value."""
    weight_zeros: float
    """Share of the elements that are zero, 0 to 1."""
    weight_nonfinite: int
    """How many elements are NaN or infinite."""
    grad_norm: float | None = None
    """Of the gradient that the optimizer got: of the complete window, unscaled and clipped; None without one."""
    grad_max: float | None = None
    grad_zeros: float | None = None
    grad_nonfinite: int = 0
    update_norm: float = 0.0
    """The norm of the change by the update."""
    before: float = 0.0
    """The norm of the parameter before the update."""

    @property
    def update_ratio(self) -> float:
        """How far the update has moved it, as a share of what it was; about 1e-3 is usual; NaN for zeros that stay."""
        if self.before:
            return self.update_norm / self.before
        return math.inf if self.update_norm else math.nan


@dataclass(frozen=True, slots=True)
class ModelStatistics:
    """All parameters of a model after an update; `print` shows a table."""

    epoch: int
    """Finished epochs over all stages."""
    update: int
    """Updates applied so far over all stages."""
    parameters: Mapping[str, ParameterStatistics]

    def __str__(self) -> str:
        head = f"{'parameter':<{_NAME}}{'weight':>10}{'gradient':>10}{'largest':>10}{'zeros':>7}{'moved':>10}"
        return "\n".join([f"update {self.update}", head, *(_line(*named) for named in self.parameters.items())])


def _line(name: str, statistics: ParameterStatistics) -> str:
    """A row of the table: norms of weight and gradient, the gradient's maximum and zeros, the share that has moved."""
    name = name if len(name) < _NAME else f"…{name[2 - _NAME :]}"
    zeros = "-" if statistics.grad_zeros is None else f"{statistics.grad_zeros:.0%}"
    bad = statistics.weight_nonfinite + statistics.grad_nonfinite
    note = f"  {bad} not finite" if bad else ""
    values = (statistics.weight_norm, statistics.grad_norm, statistics.grad_max)
    norms = "".join(f"{_short(value):>10}" for value in values)
    return f"{name:<{_NAME}}{norms}{zeros:>7}{_short(statistics.update_ratio):>10}{note}"


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
