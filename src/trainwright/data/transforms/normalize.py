"""`Normalize(mean, std)`: a layer that normalizes images per channel, on the device of the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.core.errors import DataError, SettingError
from trainwright.core.suggestions import suggests

_NDIM = 4


@suggests
class Normalize(nn.Module):
    """Subtracts the mean of each channel and divides by its standard deviation, in training and evaluation.

    Use it as the first layer of a model of images of shape (rows, channels, height, width):
    `nn.Sequential(Normalize(mean, std), model)`. uint8 images are divided by 255 first, so that images can be moved to
    the device as uint8, a quarter of the size of float32. Both arguments become buffers, which are saved with the
    weights; the output has their dtype.

    Args:
        mean: The mean of each channel; on the scale from 0 to 1 for uint8 images.
        std: The standard deviation of each channel, on the same scale.

    Raises:
        DataError: For images with another number of channels, or an integer dtype other than uint8.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        given: tuple[tuple[str, Any], ...] = (("mean", mean), ("std", std))
        for name, numbers in given:
            if not isinstance(numbers, Sequence) or not all(isinstance(one, int | float) for one in numbers):
                raise SettingError(f"Normalize({name}={numbers!r})", want="a number for each channel")
        if len(mean) != len(std) or not mean or min(std) <= 0:
            want = "as many of both, one for each channel, and deviations above 0"
            raise SettingError(f"Normalize({tuple(mean)}, {tuple(std)})", want=want)
        for name, numbers in given:
            self.register_buffer(name, torch.tensor([float(one) for one in numbers]).reshape(-1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        """Return the normalized images as a new tensor."""
        if images.ndim != _NDIM or images.shape[1] != len(self.mean):
            want = f"images (rows, {len(self.mean)}, height, width)"
            fix = "x[:, None] for images of one channel" if images.ndim == _NDIM - 1 else None
            have = f"shape {tuple(images.shape)}"
            raise DataError(f"Normalize of {len(self.mean)} channels", have=have, want=want, fix=fix)
        if images.dtype is not torch.uint8 and not images.is_floating_point():
            raise DataError(f"Normalize of {images.dtype}", want="uint8, or floating point")
        scaled = images.to(self.mean.dtype, copy=True)
        if images.dtype is torch.uint8:
            scaled.div_(255)
        return scaled.sub_(self.mean).div_(self.std)

    def extra_repr(self) -> str:
        """Return the number of channels."""
        return f"{len(self.mean)} channels"
