"""Images of a whole batch, changed on the device where it lies: flipped, cropped, normalised, or as you like."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from trainwright.core.checks import check_flag, check_whole
from trainwright.core.errors import DataError, SettingError
from trainwright.core.suggestions import suggests
from trainwright.core.trees import sequence_like

Piece = Callable[[Tensor, "Draws"], Tensor]
"""Gives images (rows, channels, height, width) changed."""
_NDIM = 4
_FORM = "a tensor of images (rows, channels, height, width), alone or in a tuple, list or dict"


class Draws:
    """Random numbers of one batch: drawn on the host for all of its rows, of which a process keeps those of its own.

    They depend on (seed, epoch, batch) alone, and no other generator moves.
    """

    def __init__(self, seed: int, *, whole: int, rows: range, device: torch.device) -> None:
        self._seed = seed
        self._whole = whole
        self._rows = rows
        self._device = device
        self._generator: torch.Generator | None = None

    def integers(self, below: int, *shape: int) -> Tensor:
        """Whole numbers from 0 to `below` - 1, of shape (rows, *shape), where the images lie."""
        return self._own(torch.randint(below, (self._whole, *shape), generator=self._begun()))

    def uniform(self, *shape: int) -> Tensor:
        """Numbers from 0 to 1, of shape (rows, *shape), float32, where the images lie."""
        return self._own(torch.rand((self._whole, *shape), generator=self._begun(), dtype=torch.float32))

    def _begun(self) -> torch.Generator:
        if self._generator is None:
            self._generator = torch.Generator().manual_seed(self._seed & 0xFFFFFFFF)
        return self._generator

    def _own(self, drawn: Tensor) -> Tensor:
        own = drawn[self._rows.start : self._rows.stop]
        if self._device.type == "cuda":  # so that the host does not wait for what the device has to do before
            return own.pin_memory().to(self._device, non_blocking=True)
        return own.to(self._device)


@suggests
@dataclass(frozen=True, slots=True)
class Augment:
    """Random flips and crops of images, in training only; each row draws its own.

    `flip`: left and right are exchanged in half of the rows. `crop`: pixels of zeros that are put around an image, out
    of which a part of its old size is cut. For uint8 and any other type; the type stays.
    """

    _: KW_ONLY
    flip: bool = False
    crop: int = 0

    def __post_init__(self) -> None:
        check_flag(self.flip, f"Augment(flip={self.flip!r})")
        check_whole(self.crop, f"Augment(crop={self.crop!r})", least=0, what="pixels around the image", fix="crop=4")
        if not self.flip and not self.crop:
            raise SettingError("Augment() changes nothing", fix="Augment(flip=True, crop=4)")

    def __call__(self, images: Tensor, draws: Draws) -> Tensor:
        """The images, flipped and cropped; a new tensor."""
        height, width = images.shape[2:]
        device = images.device
        down: Tensor = torch.arange(height, device=device).expand(len(images), -1)
        across: Tensor = torch.arange(width, device=device).expand(len(images), -1)
        if self.flip:
            across = torch.where(draws.integers(2, 1) == 1, width - 1 - across, across)
        if self.crop:
            offsets = draws.integers(2 * self.crop + 1, 2)
            images = pad(images, (self.crop,) * 4)
            down, across = down + offsets[:, :1], across + offsets[:, 1:]
        # By one gather: choosing rows by a mask would have the host wait for their number.
        at = (down[:, :, None] * images.shape[3] + across[:, None, :]).flatten(1)
        at = at[:, None].expand(-1, images.shape[1], -1)
        return images.flatten(2).gather(2, at).reshape(*images.shape[:2], height, width)


@suggests
@dataclass(frozen=True, slots=True)
class Normalize:
    """Images less their mean, over their standard deviation, by channel: float32, in training and evaluation alike.

    uint8 is divided by 255 first, and so `mean` and `std` are those of numbers from 0 to 1. Images may travel to the
    device as uint8, a quarter of the bytes.
    """

    mean: Sequence[float]
    std: Sequence[float]
    always = True
    _placed: dict[torch.device, tuple[Tensor, Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        for name, numbers in (("mean", self.mean), ("std", self.std)):
            if not isinstance(numbers, Sequence) or not all(isinstance(one, int | float) for one in numbers):
                raise SettingError(f"Normalize({name}={numbers!r})", want="a number for each channel")
            object.__setattr__(self, name, tuple(map(float, numbers)))
        if len(self.mean) != len(self.std) or not self.mean or min(self.std) <= 0:
            want = "as many of both, one for each channel, and deviations above 0"
            raise SettingError(f"Normalize({self.mean}, {self.std})", want=want)

    def __call__(self, images: Tensor, draws: Draws) -> Tensor:
        """The images as float32, normalised; a new tensor."""
        if images.shape[1] != len(self.mean):
            have = f"{images.shape[1]} channels, in images of shape {tuple(images.shape)}"
            raise DataError(f"Normalize of {len(self.mean)} channels", have=have, want=_FORM)
        if images.dtype is not torch.uint8 and not images.is_floating_point():
            raise DataError(f"Normalize of {images.dtype}", want="uint8, or floating point")
        mean, std = self._on(images.device)
        scaled = images.to(torch.float32, copy=True)
        if images.dtype is torch.uint8:
            scaled.div_(255)
        return scaled.sub_(mean).div_(std)

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._placed:
            made = (torch.tensor(numbers).reshape(-1, 1, 1).to(device) for numbers in (self.mean, self.std))
            self._placed[device] = (next(made), next(made))
        return self._placed[device]


class Augmentation:
    """What `batches(..., augment=...)` was given: changes of images, one after the other."""

    def __init__(self, given: Any) -> None:
        self.pieces: tuple[Piece, ...] = tuple(given) if isinstance(given, list | tuple) else (given,)
        for piece in self.pieces:
            if not callable(piece) or isinstance(piece, type):
                name = piece.__name__ if isinstance(piece, type) else repr(piece)
                want = "Augment(...), Normalize(...), a function of (images, draws), or a list of these"
                raise SettingError(f"augment={name}", want=want, fix="augment=Augment(flip=True, crop=4)")
        if not self.pieces:
            raise SettingError("augment=[] changes nothing", fix="leave augment out")
        self.draws = any(not getattr(piece, "always", False) for piece in self.pieces)
        """Whether anything is drawn."""

    def __call__(self, batch: Any, draws: Draws, *, trains: bool) -> Any:
        """A batch with its images changed; what is random, in training only."""
        images = images_of(batch)
        for piece in self.pieces:
            if trains or getattr(piece, "always", False):
                images = piece(images, draws)
        return _with_images(batch, images)

    def describe(self) -> str:
        """The changes, as they were written."""
        return ", ".join(getattr(piece, "__name__", "") or type(piece).__name__ for piece in self.pieces)


def images_of(batch: Any) -> Tensor:
    """The images of a batch: its first tensor of four dimensions; DataError where there is none."""
    items = list(batch.values()) if isinstance(batch, Mapping) else batch
    items = items if isinstance(items, tuple | list) else [batch]
    for item in items:
        if isinstance(item, Tensor) and item.ndim == _NDIM:
            return item
    shapes = ", ".join(str(tuple(one.shape)) if isinstance(one, Tensor) else type(one).__name__ for one in items)
    what, have = "augment= finds no images in a batch", f"a {type(batch).__name__} of {shapes}"
    raise DataError(what, have=have, want=_FORM, fix="x[:, None] for images of one channel")


def _with_images(batch: Any, images: Tensor) -> Any:
    found = images_of(batch)
    if batch is found:
        return images
    if isinstance(batch, Mapping):
        return {key: images if value is found else value for key, value in batch.items()}
    items = [images if item is found else item for item in batch]
    return sequence_like(batch, items)
