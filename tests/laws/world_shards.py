"""What the tests of sharded models run on every process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trainwright import FSDP, Trainer, batches


def data_of(rows: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """`rows` rows of inputs and targets of a regression, in float64."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 5, generator=generator, dtype=torch.float64)
    return x, torch.randn(rows, 2, generator=generator, dtype=torch.float64)


class Block(nn.Module):
    """A layer that is gathered by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """(n, 8) -> (n, 8)."""
        out: Tensor = x + torch.tanh(self.inner(x))
        return out


def stacked() -> nn.Module:
    """A model of blocks, the same each time."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), Block(), Block(), nn.Linear(8, 2)).double()


def train(rows: int = 51, *, parallel: Any = None, **more: Any) -> dict[str, Any]:
    """Train it; returns the whole weights and the history."""
    model = stacked()
    trainer = Trainer(
        model,
        lambda made: torch.optim.AdamW(made.parameters(), lr=0.01),
        nn.MSELoss(),
        parallel=parallel or FSDP(blocks={Block}),
        console=False,
        **more,
    )
    result = trainer.fit(batches(data_of(rows), 8, shuffle=True, seed=3), batches(data_of(13, seed=5), 4), epochs=3)
    weights = {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in model.state_dict().items()
    }
    predicted = trainer.predict(batches(data_of(13, seed=5), 4))
    return {"weights": weights, "history": result.history, "predicted": predicted}
