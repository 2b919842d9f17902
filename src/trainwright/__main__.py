"""The demo, `python -m trainwright`: train a small network on handwritten digits, with every part in use."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trainwright import Batches, EarlyStopping, OneCycle, Result, Trainer, accuracy, batches

HELD_OUT = 397


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, and say what was done and how many held-out digits are right; nothing is written to disk."""
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


def _demo(epochs: int) -> Result:
    train, held_out = _digits()
    print(f"Handwritten digits: {train.rows} to train on, {held_out.rows} held out\n")
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
    result = trainer.fit(train, held_out, epochs=epochs)
    right = trainer.evaluate(held_out, name="test")["test_accuracy"]
    print(f"\n{right:.1%} of the held-out digits are right, with the {_weights(result)}.")
    return result


def _digits() -> tuple[Batches, Batches]:
    """The digits, images (rows, 1, 8, 8) from 0 to 1, in the same parts each time."""
    from sklearn.datasets import load_digits

    pixels, targets = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    classes = torch.tensor(targets)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    held_out, training = order[:HELD_OUT], order[HELD_OUT:]

    def part(rows: Tensor) -> tuple[Tensor, Tensor]:
        return images[rows], classes[rows]

    return batches(part(training), 32, shuffle=True, seed=0), batches(part(held_out), 256)


def _network() -> nn.Module:
    """A small convolutional network, with the same first weights each time."""
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


def _weights(result: Result) -> str:
    return f"weights of the {result.weights}" if result.weights.startswith("best") else "last weights"


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


if __name__ == "__main__":
    raise SystemExit(main())
