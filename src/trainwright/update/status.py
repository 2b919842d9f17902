"""The status of the update in progress: written while it is made, read when it is counted."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from trainwright.core.records import Count
from trainwright.update.running_means import Term


@dataclass(slots=True)
class UpdateStatus:
    """The status of the update in progress; each window begins with a new one."""

    applied: bool | None = None
    """Whether `apply_gradients` has applied gradients; None where it was not called."""
    stepped: bool = False
    """Whether an optimizer has made a step; only steps of a custom `update` are seen here."""
    stepping: bool = False
    """Whether such a step has begun."""
    overflowed: bool | None = None
    """Whether a gradient was not finite; None where none was checked."""
    is_scaled: bool = False
    """Whether `compute_gradients` has made gradients with the loss scale."""
    restores: bool = False
    """Whether a step was skipped by `on_nonfinite="skip"`, so that buffers and `state` are restored at the end."""
    minimizing: tuple[Tensor, Count, bool] | None = None
    """The loss that `minimize` was given, until it is checked; its count; whether it is a sum."""
    minimized: dict[str, list[Term]] = field(default_factory=dict)
    """The losses of each name given to `minimize`, with their counts."""

    @property
    def is_refused(self) -> bool:
        """Whether a policy or the loss scale has refused every step."""
        return self.applied is False and not self.stepped
