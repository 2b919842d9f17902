"""Base classes of precisions and loss scales, whose methods are no-ops unless a subclass overrides them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn


class Precision:
    """Base class for `precision=`: subclasses override the methods that they need.

    Order of the calls in a run: `prepare_model` when the trainer is built; `switches` around each `fit` and evaluation;
    `autocast` around every step; the loss scale in each backward; `after_update` after every applied update.
    """

    __slots__ = ()

    def __str__(self) -> str:
        return type(self).__name__

    def prepare_model(self, model: nn.Module) -> None:
        """Change the model in place, on its device, before optimizers are made for its parameters. No-op here."""

    def switches(self) -> AbstractContextManager[Any]:
        """Return a context that sets process-wide switches, such as TF32. No-op here."""
        return nullcontext()

    def autocast(self, device_type: str) -> AbstractContextManager[Any] | None:
        """Return a context for every step; None here: no autocast."""
        return None

    def loss_scale(self, device_type: str) -> LossScale | None:
        """Return a new loss scale for one run; None here: losses are not scaled."""
        return None

    def after_update(self) -> None:
        """Called after each applied update, before the trainer's `after_update`, if a subclass overrides it."""

    @property
    def follows_updates(self) -> bool:
        """Whether a subclass overrides `after_update`; otherwise that is not called."""
        return type(self).after_update is not Precision.after_update


class LossScale:
    """A constant loss scale of 1. Subclasses override `scale`, and `adapt` for a dynamic scale."""

    @property
    def scale(self) -> float | Tensor:
        """The factor of the gradients of `backward`: a float, or a 0-dim tensor on the device."""
        return 1.0

    def inv_scale(self) -> Any:
        """Return the factor that unscales gradients: 1 / scale."""
        return 1.0 / self.scale

    def adapt(self, overflowed: Any) -> None:
        """Adapt the scale. Called once per update; `overflowed`: whether a gradient was non-finite. No-op here."""

    @property
    def at_floor(self) -> Any:
        """Whether the scale cannot be lowered, so that an overflow counts as a non-finite gradient. True here."""
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return plain data for checkpoints. Empty here."""
        return {}

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        """Load the result of `state_dict`."""
