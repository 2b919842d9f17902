"""Base classes of a precision and of a loss scale: each method does nothing unless a subclass overrides it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn


class Precision:
    """How a trainer computes: a subclass overrides what it needs, and is given as `precision=`.

    The order in a run: `prepare_model` when the trainer is built; `switches` around each `fit` and evaluation;
    `autocast` around every step; the loss scale in `backward`; `after_update` after every applied update.
    """

    __slots__ = ()

    def __str__(self) -> str:
        return type(self).__name__

    def prepare_model(self, model: nn.Module) -> None:
        """Change the model in place, on its device, before optimizers are made of its parameters."""

    def switches(self) -> AbstractContextManager[Any]:
        """Return a context in which the process-wide settings of this precision are set: TF32 of `MixedPrecision`."""
        return nullcontext()

    def autocast(self, device_type: str) -> AbstractContextManager[Any] | None:
        """Return a context to enter around every step, again and again; None here: dtypes stay as they are."""
        return None

    def loss_scale(self, device_type: str) -> LossScale | None:
        """Return a new loss scale for one run; None here: losses are not scaled."""
        return None

    def after_update(self) -> None:
        """Run after each applied update, before the user's `after_update`; only where a subclass overrides it."""

    @property
    def follows_updates(self) -> bool:
        """Whether a subclass overrides `after_update`; otherwise it is not called."""
        return type(self).after_update is not Precision.after_update


class LossScale:
    """A constant loss scale of 1. A subclass overrides `scale`, and `adapt` if the scale changes."""

    @property
    def scale(self) -> float | Tensor:
        """The factor of every `grad_tensor` of `backward`: a float, or a 0-dim tensor on the device."""
        return 1.0

    def inv_scale(self) -> Any:
        """Return the factor that unscales gradients: one over the scale."""
        return 1.0 / self.scale

    def adapt(self, overflowed: Any) -> None:
        """Adapt the scale, once per update; `overflowed`: whether a gradient was not finite. A constant scale stays."""

    @property
    def at_floor(self) -> Any:
        """Whether the scale cannot be lowered: an overflow is then a non-finite gradient. True here."""
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return plain data for checkpoints. Empty here."""
        return {}

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
