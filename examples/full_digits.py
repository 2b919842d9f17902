"""Mixed precision, accumulation, clipping, a schedule, early stopping, checkpoints: every slot, on digits.

Data      1,797 digits of 8 x 8 pixels that come with scikit-learn; 397 of them are held out
Time      2 to 3 seconds of training on one CPU core
Expected  at least 98 % of the held-out digits right at the best epoch
Writes    runs/full_digits

A second start continues from the last checkpoint. A finished run shows its result at once.
`bare_digits.py` is the same run as a plain PyTorch loop. Both end with the same weights, bit for bit.
"""

from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trainwright import Checkpoint, EarlyStopping, OneCycle, Result, Trainer, accuracy

Loader = DataLoader[tuple[Tensor, ...]]


def digits() -> tuple[Loader, Loader]:
    pixels, targets = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    classes = torch.tensor(targets)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, val = (TensorDataset(images[rows], classes[rows]) for rows in (order[:1400], order[1400:]))
    shuffling = torch.Generator().manual_seed(0)
    return DataLoader(train, batch_size=32, shuffle=True, generator=shuffling), DataLoader(val, batch_size=256)


def network() -> nn.Module:
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


def train(directory: str | Path, *, epochs: int) -> Result:
    trainer = Trainer(
        network(),
        torch.optim.AdamW,
        nn.CrossEntropyLoss(),
        metrics={"accuracy": accuracy},
        precision="bf16",
        accumulate=2,
        clip=1.0,
        schedule=OneCycle(max_lr=1e-2),
        early_stopping=EarlyStopping("val_accuracy", mode="max", patience=5),
        checkpoint=Checkpoint(directory, best="val_accuracy", mode="max"),
    )
    return trainer.fit(*digits(), epochs=epochs, resume="auto")


def main() -> None:
    train("runs/full_digits", epochs=12)


if __name__ == "__main__":
    torch.set_num_threads(1)  # a network this small gains nothing from more
    main()
