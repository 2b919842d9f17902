"""Recompute the blocks of a transformer in the backward: bit-equal weights with a fraction of the memory.

Data      1,797 digits of 8 x 8 pixels that come with scikit-learn, each read as a sequence of 64 pixels
Time      about 20 seconds on one CPU core
Expected  a line for each way: bytes kept for the backward, the most at once, operations, time of an update; with every
          block recomputed a 26th is kept, for a quarter more operations; the weights are the same bit for bit
"""

import time

import torch
from sklearn.datasets import load_digits
from torch import nn

from trainwright import Trainer, batches, summary
from trainwright.modules import checkpoint_activations


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        wide: torch.Tensor = self.wide(self.norms[1](x))
        return x + wide


class Pixels(nn.Module):
    def __init__(self, width: int = 64, blocks: int = 6) -> None:
        super().__init__()
        self.values, self.places = nn.Embedding(17, width), nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 10)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        x = self.values(pixels) + self.places.weight
        for block in self.blocks:
            x = block(x)
        scores: torch.Tensor = self.head(x.mean(1))
        return scores


WAYS = {"stored": None, "every second block": 2, "every block": 1}


def main() -> None:
    torch.set_num_threads(1)
    pixels, targets = load_digits(return_X_y=True)
    rows = 64
    train = batches((torch.tensor(pixels, dtype=torch.long), torch.tensor(targets)), rows, shuffle=True, seed=0)
    example = torch.zeros(rows, 64, dtype=torch.long)
    updates, first, operations = 12, None, 0
    print(f"{'':<20}{'kept':>10}{'at most':>10}{'operations':>12}{'ms':>7}  weights")
    for name, every in WAYS.items():
        torch.manual_seed(0)
        model = Pixels()
        trainer = Trainer(model, torch.optim.AdamW(model.parameters(), 1e-3), nn.CrossEntropyLoss(), console=False)
        if every is not None:
            checkpoint_activations(model.blocks[::every], {Block})
        total = summary(model, example).total  # of a copy on the meta device: nothing is run here
        operations = operations or total.flops
        begin = time.perf_counter()
        trainer.fit(train, max_updates=updates)
        ms = 1000 * (time.perf_counter() - begin) / updates
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        first = weights if first is None else first
        sizes = f"{total.kept / 2**20:>6.1f} MiB{total.peak / 2**20:>6.1f} MiB"
        same = "the same bit for bit" if torch.equal(weights, first) else "others"
        print(f"{name:<20}{sizes}{total.flops / operations:>11.2f}x{ms:>7.0f}  {same}")


if __name__ == "__main__":
    main()
