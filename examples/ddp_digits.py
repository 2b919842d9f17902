"""The same script on one process and on several, with the same accuracy.

    python examples/ddp_digits.py
    torchrun --nproc-per-node 2 examples/ddp_digits.py
    python examples/ddp_digits.py --launch 2                          # started by `launch`, which notebooks can use too

Data      1,797 digits of 8 x 8 pixels that come with scikit-learn; 397 of them are held out
Expected  at least 98 % of the held-out digits right, whichever way, and a loss on them that is the same to 12 digits
Time      4 to 7 seconds of training
Writes    runs/ddp_digits; --directory names another

A second start in any of these ways continues from the last checkpoint. A finished run prints its result at once.
To train again, use another --directory. The weights are float64 to show that the computation is the same. In float32
several processes sum in another order, and the result differs in the seventh digit.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

from trainwright import Checkpoint, OneCycle, Trainer, accuracy, batches, launch


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 10),
    ).double()


def main(directory: str | None, epochs: int) -> float:
    torch.set_num_threads(1)  # a network this small gains nothing from more
    torch.manual_seed(0)
    pixels, targets = load_digits(return_X_y=True)
    images, classes = torch.tensor(pixels).view(-1, 1, 8, 8) / 16, torch.tensor(targets)
    order = torch.randperm(len(images))
    training, held_out = order[:1400], order[1400:]
    # 64 rows of each micro-batch over all processes together: 32 on each of two.
    train = batches((images[training], classes[training]), 64, shuffle=True, seed=0)
    val = batches((images[held_out], classes[held_out]), 256)

    trainer = Trainer(
        network(),
        torch.optim.AdamW,
        nn.CrossEntropyLoss(),
        metrics={"accuracy": accuracy},
        clip=1.0,
        schedule=OneCycle(max_lr=1e-2),
        checkpoint=Checkpoint(directory, best="val_accuracy", mode="max") if directory else None,
    )
    trainer.fit(train, val, epochs=epochs, resume="auto" if directory else None)

    numbers = trainer.evaluate(val, name="held_out")  # on all processes: each takes its part of the rows
    right: float = numbers["held_out_accuracy"]
    trainer.print(f"{right:.4%} of the held-out digits are right, loss {numbers['held_out_loss']:.12f}")
    if trainer.is_main and directory:
        print(f"processes: {trainer.world.size}. The checkpoints are in {directory}")
    return right


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--launch", type=int, default=1, metavar="N", help="start N processes")
    parser.add_argument("--directory", help="for the checkpoints")
    asked = parser.parse_args()
    directory = asked.directory or "runs/ddp_digits"
    launch(main, directory, 12, processes=asked.launch)
