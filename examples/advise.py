"""Measure which techniques make a training faster, on its own model and data.

    python examples/advise.py                       # a network of two layers on scikit-learn's digits
    python examples/advise.py --workload cnn        # a small convolutional network on the same
    python examples/advise.py --workload text       # a transformer that continues Python's own documentation
    python examples/advise.py --seconds 180

Prints the time of the parts of an update, problems of the set-up, and a ranked table with the gain of each technique
and the line that enables it. The trainer is restored afterwards and can be trained before or after.
Takes at most a minute by default.
"""

from __future__ import annotations

import argparse
from pydoc_data.topics import topics
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from trainwright import Trainer, advise


def mlp() -> tuple[Trainer[Any], Any]:
    pixels, classes = load_digits(return_X_y=True)
    rows = TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(classes))
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    return Trainer(model, optimizer, nn.CrossEntropyLoss()), DataLoader(rows, 32, shuffle=True)


class Digits(Dataset[tuple[Tensor, int]]):
    """Images one by one, each shifted a little: what a loader with workers is for."""

    def __init__(self) -> None:
        pixels, classes = load_digits(return_X_y=True)
        self.images = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 8, 8)
        self.labels = classes.tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.roll(self.images[index], int(torch.randint(-1, 2, ())), 1).unsqueeze(0), self.labels[index]


def cnn() -> tuple[Trainer[Any], Any]:
    layers: list[nn.Module] = []
    for before, after in ((1, 32), (32, 64), (64, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    return Trainer(model, optimizer, nn.CrossEntropyLoss()), DataLoader(Digits(), 64, shuffle=True)


class Continue(nn.Module):
    """Logits of the next byte at every place of a text."""

    def __init__(self, width: int = 64, blocks: int = 3) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, width), nn.Embedding(128, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
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


def text() -> tuple[Trainer[Any], Any]:
    written = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8).long()
    lines = written[: len(written) // 65 * 65].view(-1, 65)
    loader = DataLoader(TensorDataset(lines[:, :-1], lines[:, 1:]), 16, shuffle=True)
    model = Continue()
    return Trainer(model, torch.optim.AdamW(model.parameters()), nn.CrossEntropyLoss()), loader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=["mlp", "cnn", "text"], default="mlp")
    parser.add_argument("--seconds", type=float, default=60)
    asked = parser.parse_args()
    torch.manual_seed(0)
    trainer, loader = {"mlp": mlp, "cnn": cnn, "text": text}[asked.workload]()
    print(advise(trainer, loader, seconds=asked.seconds))


if __name__ == "__main__":
    main()
