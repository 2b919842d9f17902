"""Prune a network twice: weights masked one by one, and whole channels taken out, with what each really gives.

Data      1,797 digits of 8 x 8 pixels that come with scikit-learn; 397 of them are held out
Time      about 10 seconds on one CPU core (--smoke: an epoch of a few rows, less)
Expected  half the channels give a model with about a quarter of the parameters and operations, which takes about half
          the time for a batch, and is as accurate after fine-tuning; masks alone make nothing smaller or faster
"""

import copy
import sys
import time
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn

from trainwright import OneCycle, Trainer, accuracy, batches, mask_weights, shrink, summary

SMOKE = "--smoke" in sys.argv


def network() -> nn.Sequential:
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]

    layers = [*block(1, 32), *block(32, 64), nn.MaxPool2d(2), *block(64, 64), nn.Flatten(), nn.Linear(1024, 10)]
    return nn.Sequential(*layers)


def fit(model: nn.Module, train: Any, *, epochs: int, lr: float) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.05)
    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), schedule=OneCycle(max_lr=lr), console=False)
    trainer.fit(train, epochs=1 if SMOKE else epochs)


def milliseconds(model: nn.Module, images: torch.Tensor) -> float:
    """The median time of a forward."""
    model.eval()
    seconds = []
    with torch.inference_mode():
        for _ in range(5 if SMOKE else 30):
            begin = time.perf_counter()
            model(images).cpu()  # which waits for a GPU
            seconds.append(time.perf_counter() - begin)
    model.train()
    return 1000 * sorted(seconds)[len(seconds) // 2]


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    pixels, targets = load_digits(return_X_y=True)
    images, classes = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(targets)
    order = torch.randperm(len(images))
    training, held_out = order[: 160 if SMOKE else 1400], order[1400:]
    train = batches((images[training], classes[training]), 32, shuffle=True, seed=0)
    val = batches((images[held_out], classes[held_out]), 397)
    batch = images[held_out][:256]

    print(f"{'':<34}{'parameters':>12}{'not zero':>10}{'MFLOPs':>9}{'ms':>8}{'accuracy':>10}")

    def row(name: str, model: nn.Module) -> None:
        trainer = Trainer(model, None, nn.CrossEntropyLoss(), metrics={"accuracy": accuracy}, console=False)
        right = trainer.evaluate(val)["val_accuracy"]
        weights = list(model.parameters())
        size, used = sum(p.numel() for p in weights), sum(int(p.count_nonzero()) for p in weights)
        flops = summary(model, batch)[""].flops / len(batch) / 1e6
        taken = milliseconds(model, batch.to(trainer.device))
        print(f"{name:<34}{size:>12,}{used:>10,}{flops:>9.2f}{taken:>8.2f}{right:>10.1%}")

    model = network()
    fit(model, train, epochs=8, lr=3e-3)
    row("trained", model)

    masked = copy.deepcopy(model)
    masks = mask_weights(masked, 0.9)  # nine of ten weights, those nearest to zero
    fit(masked, train, epochs=3, lr=1e-3)  # the others learn to do without them
    masks.remove()
    row("90 % of weights masked, tuned", masked)

    smaller = shrink(model, batch, 0.5, by="bn")  # by the scales of BatchNorm; the layers that end the net stay
    row("half of the channels removed", smaller.model)
    fit(smaller.model, train, epochs=3, lr=1e-3)  # a new model, with an optimizer of its own
    row("half of the channels, tuned", smaller.model)
    print(smaller)


if __name__ == "__main__":
    main()
