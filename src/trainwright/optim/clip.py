"""Gradient clipping: `ClipNorm`, `ClipValue`, once per update over all parameters of an optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from trainwright.core.errors import SettingError
from trainwright.core.suggestions import suggests
from trainwright.modules.dtensors import Shards, full_tensor
from trainwright.protocols import Clip


@suggests
@dataclass(frozen=True, slots=True)
class ClipNorm:
    """Scale gradients so that their total norm is at most `max_norm`, by torch's `clip_grad_norm_`.

    Args:
        max_norm: The largest norm of the gradient of the complete update.
        norm_type: The order of the norm; `math.inf` for the largest absolute value.
    """

    max_norm: float
    _: KW_ONLY
    norm_type: float = 2.0

    def __post_init__(self) -> None:
        _above_zero("ClipNorm(max_norm=", self.max_norm)
        _above_zero("ClipNorm(norm_type=", self.norm_type)

    def __call__(self, parameters: list[Tensor]) -> Tensor:
        """Clip gradients in place; return the total norm before clipping as a 0-dim tensor."""
        if type(parameters) is Shards:
            return parameters.clip_norm(self.max_norm, self.norm_type)
        norm = clip_grad_norm_(parameters, self.max_norm, self.norm_type)
        return norm if type(norm) is Tensor else full_tensor(norm)


@dataclass(frozen=True, slots=True)
class ClipValue:
    """Clamp every element of the gradients, by torch's `clip_grad_value_`.

    Args:
        limit: Elements are clamped to the range from `-limit` to `limit`.
    """

    limit: float

    def __post_init__(self) -> None:
        _above_zero("ClipValue(limit=", self.limit)

    def __call__(self, parameters: list[Tensor]) -> None:
        """Clip gradients in place."""
        if type(parameters) is Shards:
            parameters.clip_value(self.limit)
        elif any(parameter.grad is not None for parameter in parameters):  # torch's function fails without a gradient
            clip_grad_value_(parameters, self.limit)


def as_clip(setting: float | Callable[[list[Tensor]], Tensor | None] | None) -> Clip | None:
    """Return the clip of `clip=`: None, `ClipNorm` for a number, or a function of the parameters as it is given."""
    if setting is None:
        return None
    if isinstance(setting, int | float) and not isinstance(setting, bool):
        return ClipNorm(setting)
    if callable(setting) and not isinstance(setting, type):
        return setting
    raise SettingError(
        f"clip={setting!r}", want="ClipNorm(...), ClipValue(...) or a function of the parameters", fix="clip=1.0"
    )


def _above_zero(name: str, value: float) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not value > 0 or math.isnan(value):
        raise SettingError(f"{name}{value!r})", want="a number above 0")
