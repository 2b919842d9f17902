"""Fine-tuning: a frozen backbone that is unfrozen in stages, with rates by layer, and averaged weights.

Data      1,797 digits of 8 x 8 pixels that come with scikit-learn: 901 of 0 to 4, and 50 of 5 to 9 to learn from
Time      2 to 3 seconds of training on one CPU core (--smoke: fewer epochs, less)
Expected  at least 94 % of the other 846 digits of 5 to 9 right

A backbone learns to tell the digits 0 to 4 from 901 rows; with a new head it learns 5 to 9 from ten rows of each. The
head is trained alone first, then the backbone's last block with it, then its first, each at three tenths of the rate
of what follows it. The same network without a backbone to start from (--scratch) gets 93 to 96 % right, too: digits are
too easy for a head start to show. How it is written is what this example is for.
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from trainwright import EMA, Cosine, Report, Trainer, accuracy, adamw, batches, freeze, unfreeze

Pair = tuple[Tensor, Tensor]
SCRATCH = "--scratch" in sys.argv


class Block(nn.Sequential):
    def __init__(self, channels: int, wider: int) -> None:
        super().__init__(nn.Conv2d(channels, wider, 3, padding=1, bias=False), nn.BatchNorm2d(wider), nn.ReLU())


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(Block(1, 16), Block(16, 32), nn.MaxPool2d(2), nn.Flatten())
        self.head = nn.Linear(512, 5)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.head(self.backbone(images))
        return scores


class FineTuned(Trainer[Network]):
    def begin_epoch(self, epoch: int) -> None:
        if part := {6: "backbone.1", 10: "backbone"}.get(epoch):
            unfreeze(self.model, part)  # its BatchNorm layers, in eval mode until now, train again too


def digits() -> tuple[Pair, Pair, Pair]:
    """0 to 4; ten rows each of 5 to 9; all others of 5 to 9, held out."""
    pixels, targets = load_digits(return_X_y=True)
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8)[order] / 16
    classes = torch.tensor(targets)[order]
    rows = [torch.where(classes == digit)[0] for digit in range(10)]
    low, few, rest = torch.cat(rows[:5]), torch.cat([r[:10] for r in rows[5:]]), torch.cat([r[10:] for r in rows[5:]])
    return (images[low], classes[low]), (images[few], classes[few] - 5), (images[rest], classes[rest] - 5)


def pretrained(low: Pair, *, epochs: int) -> Network:
    model = Network()
    trainer = Trainer(model, adamw(lr=3e-3), nn.CrossEntropyLoss(), console=False)
    trainer.fit(batches(low, 32, shuffle=True, seed=0), epochs=epochs)
    return model


def fine_tune(model: Network, few: Pair, held_out: Pair, *, epochs: int) -> Report:
    model.head = nn.Linear(512, 5, device=model.head.weight.device)  # a new layer lies on the CPU else
    optimizer = adamw(lr=3e-3)
    if not SCRATCH:
        freeze(model, "backbone")
        optimizer = adamw(lr=3e-3, layer_decay=0.3, layers="backbone")  # frozen parameters are in it too, and wait
    trainer = FineTuned(
        model,
        optimizer,
        nn.CrossEntropyLoss(),
        metrics={"accuracy": accuracy},
        schedule=Cosine(warmup=0.1),
        average=EMA(0.9),
    )
    val = batches(held_out, 256)
    trainer.fit(batches(few, 10, shuffle=True, seed=0), val, epochs=epochs)
    return trainer.report(val)


def main() -> None:
    smoke = "--smoke" in sys.argv
    torch.manual_seed(0)
    low, few, held_out = digits()
    model = Network() if SCRATCH else pretrained(low, epochs=1 if smoke else 5)
    print(fine_tune(model, few, held_out, epochs=12 if smoke else 20))


if __name__ == "__main__":
    torch.set_num_threads(1)  # a network this small gains nothing from more
    main()
