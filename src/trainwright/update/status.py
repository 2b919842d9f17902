"""What becomes of one update: written while it is made, read when it is counted."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from trainwright.core.records import Count
from trainwright.update.loss_tracker import Told


@dataclass(slots=True)
class Outcome:
    """The facts of the update in hand; each window begins with a new one."""

    applied: bool | None = None
    """What `apply_gradients` said; None where it was not called."""
    stepped: bool = False
    """Whether an optimizer made a step, as far as anybody watches."""
    stepping: bool = False
    """Whether one has begun to make a step."""
    overflowed: bool | None = None
    """Whether a gradient was not finite; None where none was judged."""
    scaled: bool = False
    """Whether `compute_gradients` has made gradients with the loss scale."""
    left_out: bool = False
    """Whether something was skipped, so that what moved besides weights is put back at the end."""
    losing: tuple[Tensor, Count, bool] | None = None
    """The loss that `minimize` is taking to the weights, until it is judged; its count; whether it is a sum."""
    minimized: dict[str, list[Told]] = field(default_factory=dict)
    """For each name given to `minimize`: its losses, with what they count."""

    @property
    def held_back(self) -> bool:
        """Whether a policy or the loss scale kept every step from being made."""
        return self.applied is False and not self.stepped
