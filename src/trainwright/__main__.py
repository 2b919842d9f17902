"""The demo, `python -m trainwright`: trains a small network on handwritten digits with the main slots in use."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import nn

from trainwright import EarlyStopping, OneCycle, Trainer, accuracy, batches
from trainwright.data import Batches

TRAINING, VALIDATION, TEST = 1200, 200, 397
"""Number of digits for training, for validation, and held out for the test."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, then print the test accuracy and the classification report. Writes nothing to disk."""
    parser = argparse.ArgumentParser(
        prog="python -m trainwright",
        description="Train a small network on the 1,797 handwritten digits that come with scikit-learn.",
    )
    parser.add_argument("--epochs", type=_at_least_one, default=12, help="passes over the data (default: 12)")
    options = parser.parse_args(arguments)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a network this small gains nothing from more
    try:
        _demo(options.epochs)
    finally:
        torch.set_num_threads(threads)
    return 0


def _demo(epochs: int) -> None:
    train, val, test = _digits()
    print(f"Handwritten digits: {TRAINING} to train on, {VALIDATION} to validate with, {TEST} held out for the end.\n")
    trainer = Trainer(
        _network(),
        torch.optim.AdamW,
        nn.CrossEntropyLoss(),
        metrics={"accuracy": accuracy},
        accumulate=2,
        clip=1.0,
        schedule=OneCycle(max_lr=1e-2),
        early_stopping=EarlyStopping("val_accuracy", mode="max", patience=5),
        device="cpu",
    )
    trainer.fit(train, val, epochs=epochs)
    right = trainer.evaluate(test, name="test")["test_accuracy"]
    print(f"\n{right:.1%} of the {TEST} held-out digits are right.\n\n{trainer.report(test)}")


def _digits() -> tuple[Batches, Batches, Batches]:
    """Return training, validation and test data: images (rows, 1, 8, 8) from 0 to 1, always split equally."""
    from sklearn.datasets import load_digits

    pixels, targets = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    classes = torch.tensor(targets)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, val, test = ((images[rows], classes[rows]) for rows in order.split([TRAINING, VALIDATION, TEST]))
    return batches(train, 32, shuffle=True, seed=0), batches(val, 256), batches(test, 256)


def _network() -> nn.Module:
    """Return a small convolutional network with fixed initial weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(512, 10),
        )


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


if __name__ == "__main__":
    raise SystemExit(main())
