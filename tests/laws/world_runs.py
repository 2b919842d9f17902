"""What the tests of World run on every process: small trainings in float64, and what they leave behind."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trainwright import Trainer, batches


def rows_of_numbers(rows: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """`rows` rows of inputs and targets of a regression, in float64."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 5, generator=generator, dtype=torch.float64)
    return x, torch.randn(rows, 2, generator=generator, dtype=torch.float64)


def rows_of_tokens(rows: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """`rows` rows of 6 tokens with targets, of which about a third are ignored, in some rows all."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 7, (rows, 6), generator=generator)
    targets = torch.randint(0, 7, (rows, 6), generator=generator)
    targets[torch.rand(rows, 6, generator=generator) < 0.35] = -100
    targets[::9] = -100
    return tokens, targets


class Tokens(nn.Module):
    """Classes for each token: the classes come first in the output, as torch's losses want them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(7, 4), nn.Linear(4, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        """(n, 6) -> (n, 7, 6)."""
        out: Tensor = self.out(torch.tanh(self.embed(tokens)))
        return out.transpose(1, 2)


def model_of(counts: str) -> nn.Module:
    """The model of a case, the same each time."""
    torch.manual_seed(1)
    model: nn.Module = Tokens() if counts == "tokens" else nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))
    return model.double()


def data_of(counts: str, rows: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """The data of a case."""
    return rows_of_tokens(rows, seed=seed) if counts == "tokens" else rows_of_numbers(rows, seed=seed)


def train(
    rows: int = 51, *, accumulate: int = 1, clip: float | None = None, counts: str = "rows", epochs: int = 3, **more: Any
) -> dict[str, Any]:
    """Train a case; returns weights, optimizer state and history."""
    model = model_of(counts)
    loss: nn.Module = nn.CrossEntropyLoss() if counts == "tokens" else nn.MSELoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trainer = Trainer(model, optimizer, loss, accumulate=accumulate, clip=clip, console=False, **more)
    result = trainer.fit(
        batches(data_of(counts, rows), 8, shuffle=True, seed=3),
        batches(data_of(counts, 13, seed=5), 4),
        epochs=epochs,
    )
    return {
        "weights": {name: value.clone() for name, value in model.state_dict().items()},
        "history": result.history,
        "rank": trainer.world.rank,
    }
