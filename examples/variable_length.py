"""Sequences of variable length: find the module of the standard library that a line of Python is from.

    python examples/variable_length.py [--packed] [--nested]

Data      about 13,600 different lines of 8 modules of this Python's standard library; a fifth of them are held out
Time      about 10 seconds of training on one CPU core, about a minute with the options
Expected  at least 75 % of the held-out lines right; the largest module alone would be right for 28 %

The model reads a line as bytes. Buckets of similar lengths reduce the padding of a batch to about 5 %, from 51 %.
Two options train further models on batches without any padding: --packed a GRU on packed rows (75 % right), and
--nested attention without positions on nested rows (55 % right).
"""

import sys
import sysconfig
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from trainwright import OneCycle, StepOutput, SumLoss, Trainer, accuracy
from trainwright.data import bucketed, pad

MODULES = ("_pydecimal", "typing", "argparse", "difflib", "enum", "ipaddress", "pickle", "mailbox")
LONGEST = 128


def main() -> None:
    torch.set_num_threads(1)  # a network this small gains nothing from more
    torch.manual_seed(0)
    warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors is in prototype stage")
    rows = lines_of(MODULES)
    order = torch.randperm(len(rows)).tolist()
    training, held_out = [[rows[i] for i in part] for part in (order[len(order) // 5 :], order[: len(order) // 5])]

    train = bucketed(training, tokens=4096, lengths=length, shuffle=True, seed=0, collate=pad())
    val = bucketed(held_out, tokens=4096, lengths=length, collate=pad())
    model = Reader()
    optimizer = torch.optim.AdamW(model.parameters())
    trainer = Lines(model, optimizer, metrics={"accuracy": accuracy}, schedule=OneCycle(5e-3))
    trainer.fit(train, val, epochs=4)

    largest = max(sum(target == module for _, target in held_out) for module in range(len(MODULES)))
    right = trainer.evaluate(val, name="held_out")["held_out_accuracy"]
    print(f"{right:.1%} of the held-out lines are right, {largest / len(held_out):.1%} by the largest module alone")
    print(f"{train.padding():.1%} of what was read is padding, {train.padding_mixed():.1%} without buckets")

    if "--packed" in sys.argv:
        train_without_padding("packed", PackedReader(), packed, training, held_out)
    if "--nested" in sys.argv:
        train_without_padding("nested", NestedReader(), nested, training, held_out)


def train_without_padding(
    name: str, model: nn.Module, collate: Callable[[list[Any]], Any], training: list[Any], held_out: list[Any]
) -> None:
    """Train by the default step: a batch is (lines, modules), and each line counts once."""
    train = bucketed(training, 64, lengths=length, shuffle=True, seed=0, collate=collate)
    val = bucketed(held_out, 64, lengths=length, collate=collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), metrics={"accuracy": accuracy})
    trainer.fit(train, val, epochs=4)
    print(f"{name}: {trainer.evaluate(val, name='held_out')['held_out_accuracy']:.1%} of the held-out lines are right")


def lines_of(modules: tuple[str, ...]) -> list[tuple[bytes, int]]:
    """Return every line that is in one module only, with the number of the module, in any order."""
    found: dict[bytes, set[int]] = {}
    for number, module in enumerate(modules):
        for line in Path(sysconfig.get_path("stdlib"), f"{module}.py").read_bytes().splitlines():
            if len(text := line.strip()[:LONGEST]) >= 8:
                found.setdefault(text, set()).add(number)
    return [(line, min(numbers)) for line, numbers in found.items() if len(numbers) == 1]


def length(row: tuple[bytes, int]) -> int:
    return len(row[0])


class Reader(nn.Module):
    """Bytes to classes: two convolutions, and the maximum of each over the line. Padding is 0 in every layer."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 24)
        self.short = nn.Conv1d(24, width, 5, padding=2)
        self.long = nn.Conv1d(width, width, 3, padding=1)
        self.classes = nn.Sequential(nn.Dropout(0.3), nn.Linear(2 * width, len(MODULES)))

    def forward(self, line: Tensor, mask: Tensor) -> Tensor:
        """(rows, bytes), True where a byte is real -> (rows, modules)."""
        real = mask[:, None]
        embedded = self.embed(line).transpose(1, 2) * real
        short = F.relu(self.short(embedded)) * real
        long = F.relu(self.long(short)) * real
        scores: Tensor = self.classes(torch.cat([short.amax(2), long.amax(2)], 1))
        return scores


def packed(rows: list[tuple[Any, int]]) -> tuple[PackedSequence, Tensor]:
    """Collate rows for `nn.RNN`, `nn.LSTM` and `nn.GRU`; no row may be empty."""
    sequences, targets = columns(rows)
    return pack_sequence(sequences, enforce_sorted=False), targets


def nested(rows: list[tuple[Any, int]]) -> tuple[Tensor, Tensor]:
    """Collate rows to a nested tensor, (rows, *, ...): `F.scaled_dot_product_attention` attends within each row."""
    sequences, targets = columns(rows)
    return torch.nested.nested_tensor(sequences, layout=torch.jagged), targets


def columns(rows: list[tuple[Any, int]]) -> tuple[list[Tensor], Tensor]:
    """The sequences as tensors, and the targets as one."""
    sequences = [torch.tensor(list(one)) if isinstance(one, bytes) else torch.as_tensor(one) for one, _ in rows]
    return sequences, torch.tensor([target for _, target in rows])


class PackedReader(nn.Module):
    """Bytes to classes: the last state of a GRU."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed, self.gru = nn.Embedding(256, 24), nn.GRU(24, width)
        self.classes = nn.Linear(width, len(MODULES))

    def forward(self, line: PackedSequence) -> Tensor:
        """Packed bytes -> (rows, modules)."""
        _, last = self.gru(line._replace(data=self.embed(line.data)))
        scores: Tensor = self.classes(last[0])
        return scores


class NestedReader(nn.Module):
    """Bytes to classes: one layer of attention, and the mean over each line."""

    def __init__(self, width: int = 64, heads: int = 2) -> None:
        super().__init__()
        self.embed, self.qkv, self.heads = nn.Embedding(256, width), nn.Linear(width, 3 * width), heads
        self.classes = nn.Linear(width, len(MODULES))

    def forward(self, line: Tensor) -> Tensor:
        """(rows, *) -> (rows, modules)."""
        query, key, value = (
            one.unflatten(-1, [self.heads, -1]).contiguous().transpose(1, 2)  # torch attends to contiguous heads alone
            for one in self.qkv(self.embed(line)).chunk(3, -1)
        )
        read = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(-2)
        scores: Tensor = self.classes(torch.stack([one.mean(0) for one in read.unbind()]))
        return scores


class Lines(Trainer[Reader]):
    """Weights each line by its number of bytes: the loss is the mean over all bytes of an update."""

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor]) -> StepOutput:
        line, mask, module = batch
        classes = self.model(line, mask)
        tokens = mask.sum(1)
        losses = F.cross_entropy(classes, module, reduction="none")
        self.log("padding", 1 - mask.float().mean(), count=mask.numel())
        return StepOutput(SumLoss((losses * tokens).sum(), tokens.sum()), classes, module)


if __name__ == "__main__":
    main()
