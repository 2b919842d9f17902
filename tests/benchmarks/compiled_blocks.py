"""Compile the blocks of a transformer, in place: the same losses, and what it costs and gives on this machine.

    python tests/benchmarks/compiled_blocks.py

Trains twice from the same weights on Python's own documentation, plain and with `Fast(compile="regional")`, which
compiles the block that the model repeats once for all of them. Prints the losses of both, the time to the first update,
that of a later one, and what was compiled and compiled again, with the reason. State-dict keys are the same before and
after, and checkpoints of one run are loaded by the other. On one core of a Xeon it does not pay: 70 ms an update plain,
108 ms compiled, and 14 s (3 s once torch has a cache) before the first. `advise` says what it gives on your machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, field
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trainwright import Fast, Observer, Trainer
from trainwright.observers import Update


class Continue(nn.Module):
    """Logits of the next byte at every place of a text."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, width), nn.Embedding(64, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(blocks)
        )
        self.out = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embed(text) + self.place(torch.arange(text.shape[1], device=text.device))
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1], device=text.device)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        logits: Tensor = self.out(x)
        return logits.transpose(1, 2)


@dataclass
class Times(Observer):
    """When each update was done, and its loss."""

    stamps: list[float] = field(default_factory=lambda: [time.perf_counter()])
    losses: list[float] = field(default_factory=list)

    def on_update(self, update: Update) -> None:
        self.stamps.append(time.perf_counter())
        self.losses.append(update.loss)

    def __str__(self) -> str:
        seconds = [after - before for before, after in zip(self.stamps, self.stamps[1:], strict=False)]
        later = statistics.median(seconds[2:])
        return f"first update {seconds[0]:.1f} s, later ones {1000 * later:.0f} ms, last loss {self.losses[-1]:.4f}"


def train(fast: Fast, *, updates: int, width: int, blocks: int) -> tuple[Times, Trainer[Continue]]:
    torch.manual_seed(0)
    written = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8).long()
    lines = written[: len(written) // 65 * 65].view(-1, 65)
    loader = DataLoader(TensorDataset(lines[:, :-1], lines[:, 1:]), 16, shuffle=True)
    model = Continue(width, blocks)
    times = Times()
    trainer = Trainer(
        model, torch.optim.AdamW, nn.CrossEntropyLoss(), clip=1.0, fast=fast, observers=[times], console=False
    )
    trainer.fit(loader, max_updates=updates)
    return times, trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=40)
    parser.add_argument("--smoke", action="store_true", help="a tiny model, traced but not made into machine code")
    asked = parser.parse_args()
    size = (
        {"updates": 4, "width": 16, "blocks": 3}
        if asked.smoke
        else {"updates": asked.updates, "width": 128, "blocks": 4}
    )
    plain, _ = train(Fast(), **size)
    compiled, trainer = train(Fast(compile={"backend": "aot_eager"} if asked.smoke else "regional"), **size)
    if not trainer.is_main:  # of several processes the first one gets the records of updates
        return
    print(f"plain     {plain}")
    print(f"compiled  {compiled}")
    print(f"          {trainer.fast_path}")
    far = max(abs(a - b) for a, b in zip(plain.losses, compiled.losses, strict=True))
    print(f"losses differ by at most {far:.1e}")


if __name__ == "__main__":
    main()
