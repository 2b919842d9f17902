"""What the tests of World run on every process: small trainings, and the plain loop of one process beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

from trainwright import OneCycle, Trainer, accuracy, batches

BATCH = 8
EPOCHS = 3
HIGHEST_RATE = 0.05


@dataclass(frozen=True)
class Case:
    """One training, the same on any number of processes."""

    rows: int = 51
    accumulate: int = 1
    clip: float | None = None
    counts: str = "rows"
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        clip = "clip" if self.clip else "none"
        return f"{self.rows}-{self.accumulate}-{clip}-{self.counts}-{str(self.dtype)[6:]}"

    @property
    def loads(self) -> bool:
        """Whether a DataLoader reads the training rows, and not `batches`; each occurs with every other setting."""
        return (self.accumulate == 1) == (self.clip is None)

    def model(self) -> nn.Module:
        """The model, the same each time."""
        torch.manual_seed(1)
        model: nn.Module = Tokens() if self.counts == "tokens" else nn.Sequential(*perceptron(5, 3))
        return model.to(self.dtype)

    def optimizer(self, model: nn.Module) -> Optimizer:
        """AdamW; SGD in float32, where Adam would make much of the last digit."""
        if self.dtype == torch.float64:
            return AdamW(model.parameters(), lr=0.01)
        return SGD(model.parameters(), lr=0.01, momentum=0.9)

    def data(self, *, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Inputs and targets."""
        x, y = (
            rows_of_tokens(self.rows, seed=seed) if self.counts == "tokens" else rows_of_classes(self.rows, seed=seed)
        )
        return (x if x.dtype == torch.int64 else x.to(self.dtype)), y

    def train_data(self) -> Any:
        """The shuffled training rows."""
        if self.loads:
            order = torch.Generator().manual_seed(3)
            return DataLoader(TensorDataset(*self.data()), BATCH, shuffle=True, generator=order)
        return batches(self.data(), BATCH, shuffle=True, seed=3)


class Tokens(nn.Module):
    """Classes for each token: the classes come first in the output, as torch's losses want them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(7, 4), nn.Linear(4, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        """(n, 6) -> (n, 7, 6)."""
        out: Tensor = self.out(torch.tanh(self.embed(tokens)))
        return out.transpose(1, 2)


def perceptron(inputs: int, outputs: int) -> list[nn.Module]:
    """Two layers."""
    return [nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs)]


def rows_of_classes(rows: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """`rows` rows of 5 numbers in float64, each of one of 3 classes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (rows,), generator=generator)


def rows_of_tokens(rows: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """`rows` rows of 6 tokens with targets, of which about a third are ignored, in some rows all."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 7, (rows, 6), generator=generator)
    targets = torch.randint(0, 7, (rows, 6), generator=generator)
    targets[torch.rand(rows, 6, generator=generator) < 0.35] = -100
    targets[3::5] = -100
    return tokens, targets


def by_trainer(case: Case, **settings: Any) -> dict[str, Any]:
    """Train a case by the Trainer, on as many processes as there are."""
    model = case.model()
    trainer = Trainer(
        model,
        case.optimizer(model),
        nn.CrossEntropyLoss(),
        metrics={"accuracy": accuracy},
        accumulate=case.accumulate,
        clip=case.clip,
        schedule=OneCycle(HIGHEST_RATE),
        console=False,
        **settings,
    )
    result = trainer.fit(case.train_data(), batches(case.data(seed=5), 4), epochs=EPOCHS)
    return {"weights": flat(model), "history": result.history, "size": trainer.world.size}


def by_trainer_each(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Train many cases, one after the other."""
    return [by_trainer(case) for case in cases]


def by_hand(case: Case) -> dict[str, Any]:
    """The same by a loop of one process."""
    model, data, (val_x, val_y) = case.model(), case.train_data(), case.data(seed=5)
    optimizer, loss = case.optimizer(model), nn.CrossEntropyLoss(reduction="sum")
    updates = EPOCHS * -(-len(data) // case.accumulate)
    schedule = OneCycleLR(optimizer, HIGHEST_RATE, total_steps=updates)
    history = []
    for epoch in range(EPOCHS):
        total = hits = things = rate = 0.0
        for window in windows(data, case.accumulate):
            counted = sum(int((y != -100).sum()) for _, y in window)
            optimizer.zero_grad()
            for x, y in window:
                output = model(x)
                (loss(output, y) / counted).backward()
                total += loss(output, y).item()
                hits += int((output.argmax(1) == y).sum())
            if case.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), case.clip)
            rate = schedule.get_last_lr()[0]
            optimizer.step()
            schedule.step()
            things += counted
        with torch.no_grad():
            output, valid = model(val_x), int((val_y != -100).sum())
        history.append(
            {"epoch": epoch + 1, "update": (epoch + 1) * updates // EPOCHS, "loss": total / things}
            | {"accuracy": hits / things, "val_loss": loss(output, val_y).item() / valid}
            | {"val_accuracy": int((output.argmax(1) == val_y).sum()) / valid, "lr": rate}
        )
    return {"weights": flat(model), "history": history}


def windows(data: Any, accumulate: int) -> Iterator[list[Any]]:
    """The batches of a pass, some at a time."""
    passed = iter(data)
    while window := list(islice(passed, accumulate)):
        yield window


def flat(model: nn.Module) -> list[float]:
    """Every parameter and buffer, as plain numbers."""
    values: list[float] = torch.cat([one.detach().double().flatten() for one in model.state_dict().values()]).tolist()
    return values


def apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference of weights and numbers of two runs; infinite where they have not the same numbers."""
    if [list(row) for row in one["history"]] != [list(row) for row in other["history"]]:
        return float("inf")
    pairs = [*zip(one["weights"], other["weights"], strict=True)]
    for row, same in zip(one["history"], other["history"], strict=True):
        pairs += [(row[name], same[name]) for name in row]
    return max(abs(a - b) for a, b in pairs)


def holding(check: Callable[..., None], *args: Any) -> list[list[float]]:
    """Run a check of another law on this process beside the others; returns the weights of every model it trained.

    Its plain loop runs whole on every process, and what the library trains is dealt. Observers are called on the first
    process only: there what they have kept is taken over when `fit` returns, so that each process can check it.
    """
    trained: list[nn.Module] = []
    fit = Trainer.fit

    def watched(self: Trainer[nn.Module], *data: Any, **settings: Any) -> Any:
        result = fit(self, *data, **settings)
        for observer in self.observers:
            if hasattr(observer, "updates"):
                cast(Any, observer).updates = self.world.broadcast(cast(Any, observer).updates)
        trained.append(self.model)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "fit", watched)
        check(*args)
    return [flat(model) for model in trained]
