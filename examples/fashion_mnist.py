"""Pictures of clothes: a small convolutional network with techniques of efficient training.

    python fashion_mnist.py [--data DIRECTORY] [--epochs 10] [--bf16] [--compile]

Data      Fashion-MNIST, 70,000 pictures of 28 x 28 pixels in ten classes, where --data names the directory of its
          four files (github.com/zalandoresearch/fashion-mnist), packed or not; else the 1,797 digits of scikit-learn
Time      digits: 2 to 3 seconds of training on one CPU core
Expected  at least 98 % of the held-out digits right

Pictures stay in memory as uint8. The first two layers of the model shift, flip and normalize complete batches on the
device, so no worker has to fetch rows. Convolutions before a BatchNorm have no bias, because BatchNorm subtracts it.
Weights have the channels-last format.
bf16 is enabled on GPUs that support it; --bf16 enables it on CPUs with AMX. --compile pays off in runs of minutes.
"""

import argparse
import gzip
import math
import struct
import sys
import zlib
from pathlib import Path
from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from trainwright import Fast, OneCycle, Trainer, accuracy, batches
from trainwright.data import Normalize

FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
WHERE = f"""no --data, so this trains on scikit-learn's digits. It may name a directory with the files of Fashion-MNIST:
  {"  ".join(FILES)}
  each as it is or packed (.gz), from github.com/zalandoresearch/fashion-mnist"""
Rows = tuple[Tensor, Tensor]
"""Pictures, uint8 of shape (rows, 1, height, width), and their classes (rows)."""


class Pictures(NamedTuple):
    train: Rows
    test: Rows
    augment: nn.Module
    batch_size: int


def clothes(directory: Path) -> Pictures:
    """Fashion-MNIST, from its four files in this directory; FileNotFoundError names those that are not there."""
    found = [[path for path in (directory / name, directory / f"{name}.gz") if path.is_file()] for name in FILES]
    missing = [name for name, paths in zip(FILES, found, strict=True) if not paths]
    if missing:
        raise FileNotFoundError(f"{directory} holds no {', '.join(missing)}, neither so nor with .gz at the end")
    images, classes, test_images, test_classes = (read_idx(paths[0]) for paths in found)
    train, test = as_rows(images, classes, directory=directory), as_rows(test_images, test_classes, directory=directory)
    return Pictures(train, test, ShiftAndFlip(shift=2, flip=True), 128)


def read_idx(path: Path) -> Tensor:
    """The uint8 tensor that an IDX file holds, packed by gzip or not; ValueError for anything else.

    Two zero bytes, one for the type (8 is uint8), one for the number of dimensions, their sizes as big-endian int32,
    then the values, the last dimension fastest (yann.lecun.com/exdb/mnist).
    """
    held = path.read_bytes()
    if held.startswith(b"\x1f\x8b"):
        try:
            held = gzip.decompress(held)
        except (EOFError, OSError, zlib.error) as error:
            raise ValueError(f"{path} is damaged, or was not downloaded completely: {error}") from error
    if len(held) < 4 or held[:2] != b"\0\0" or held[3] == 0:
        raise ValueError(f"{path} is no IDX file: it begins with {held[:4]!r}")
    if held[2] != 8:
        raise ValueError(f"{path} holds values of type 0x{held[2]:02x}; read is 0x08, uint8")
    start = 4 + 4 * held[3]
    if len(held) < start:
        raise ValueError(f"{path} ends inside of its header, after {len(held)} of {start} bytes")
    shape = struct.unpack(f">{held[3]}i", held[4:start])
    if min(shape) < 1 or len(held) - start != math.prod(shape):
        raise ValueError(f"{path} holds {len(held) - start:,} values, and its header says {shape}")
    return torch.frombuffer(bytearray(held[start:]), dtype=torch.uint8).reshape(shape)


def as_rows(images: Tensor, classes: Tensor, *, directory: Path) -> Rows:
    """Images with a channel and classes as int64; ValueError where they do not belong together."""
    if images.dim() != 3 or classes.dim() != 1 or len(images) != len(classes) or classes.max() > 9:
        have = f"images {tuple(images.shape)} and classes {tuple(classes.shape)} up to {int(classes.max())}"
        raise ValueError(f"{directory}: {have}; they should be (rows, height, width) and (rows), from 0 to 9")
    return images[:, None], classes.long()


def digits() -> Pictures:
    """What scikit-learn brings along: 8 x 8 pixels from 0 to 16. A mirrored digit is none, so nothing is flipped."""
    pixels, targets = load_digits(return_X_y=True)
    images = (torch.tensor(pixels) * 255 / 16).round().to(torch.uint8).view(-1, 1, 8, 8)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = ((images[rows], torch.tensor(targets)[rows]) for rows in (order[:1400], order[1400:]))
    return Pictures(train, test, ShiftAndFlip(shift=1), 50)


class ShiftAndFlip(nn.Module):
    """Shift and mirror images at random, in training only, on the device of the batch.

    Each row draws for itself; a transform of torchvision that is given a complete batch draws once for all of its rows.
    The numbers come from torch's own generator of the device, as those of dropout: a resumed run draws the same.
    """

    def __init__(self, *, shift: int = 0, flip: bool = False) -> None:
        super().__init__()
        self.shift, self.flip = shift, flip

    def forward(self, images: Tensor) -> Tensor:
        """(rows, channels, height, width) -> the same; where an image is shifted away there are zeros."""
        if not self.training:
            return images
        (rows, channels, height, width), device = images.shape, images.device
        down = torch.arange(height, device=device).expand(rows, -1)
        across = torch.arange(width, device=device).expand(rows, -1)
        if self.flip:  # half of the rows
            mirrored = torch.randint(2, (rows, 1), device=device) == 1
            across = torch.where(mirrored, width - 1 - across, across)
        if self.shift:
            offsets = torch.randint(2 * self.shift + 1, (rows, 2), device=device)
            images = F.pad(images, (self.shift,) * 4)
            down, across = down + offsets[:, :1], across + offsets[:, 1:]
        # One gather: choosing rows by a mask would have the host wait for their number.
        pixels = (down[:, :, None] * images.shape[3] + across[:, None, :]).flatten(1)
        pixels = pixels[:, None].expand(-1, channels, -1)
        return images.flatten(2).gather(2, pixels).reshape(rows, channels, height, width)


def block(entering: int, leaving: int) -> nn.Module:
    """A convolution without a bias: the BatchNorm after it has one."""
    convolution = nn.Conv2d(entering, leaving, 3, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(leaving), nn.ReLU())


def network(width: int = 32) -> nn.Module:
    first = [block(1, width), block(width, width), nn.MaxPool2d(2)]
    second = [block(width, 2 * width), block(2 * width, 2 * width), nn.MaxPool2d(2)]
    last = [block(2 * width, 4 * width), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10)]
    return nn.Sequential(*first, *second, *last)


def train(pictures: Pictures, *, epochs: int, bf16: bool = False, compiled: bool = False) -> float:
    """The share of test pictures that are right at the end; an eighth of the others is for validation."""
    torch.manual_seed(0)
    images, classes = pictures.train
    order = torch.randperm(len(images))
    val, training = order[: len(order) // 8], order[len(order) // 8 :]
    scaled = images[training] / 255
    normalize = Normalize(mean=[scaled.mean().item()], std=[scaled.std().item()])
    trainer = Trainer(
        nn.Sequential(pictures.augment, normalize, network()),
        torch.optim.AdamW,
        nn.CrossEntropyLoss(),
        metrics={"accuracy": accuracy},
        precision="bf16" if bf16 else "auto",
        schedule=OneCycle(max_lr=1e-2),
        fast=Fast(channels_last=True, compile="full" if compiled else None),
    )
    trainer.fit(
        batches((images[training], classes[training]), pictures.batch_size, shuffle=True, seed=0),
        batches((images[val], classes[val]), 500),
        epochs=epochs,
    )
    return trainer.evaluate(batches(pictures.test, 500), name="test")["test_accuracy"]


def main() -> None:
    reading = argparse.ArgumentParser(description="Fashion-MNIST, or digits where it is not there.")
    reading.add_argument("--data", type=Path, metavar="DIRECTORY", help="where the four files of Fashion-MNIST lie")
    reading.add_argument("--epochs", type=int, default=10)
    reading.add_argument("--bf16", action="store_true", help="on a CPU with bf16 units")
    reading.add_argument(
        "--compile", action="store_true", help="half a minute before the first update, each then shorter"
    )
    asked = reading.parse_args()
    if asked.data is None:
        print(WHERE)
        torch.set_num_threads(1)  # digits gain nothing from more
    try:
        pictures = digits() if asked.data is None else clothes(asked.data)
    except (FileNotFoundError, ValueError) as error:
        sys.exit(f"{error}\n--data names a directory with {', '.join(FILES)}")
    right = train(pictures, epochs=asked.epochs, bf16=asked.bf16, compiled=asked.compile)
    print(f"{right:.1%} of {len(pictures.test[0]):,} test pictures are right")


if __name__ == "__main__":
    main()
