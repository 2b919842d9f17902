"""Models, data and measurements that the programs of all libraries share, so that they differ in the loop alone."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

SEED = 11
EPOCHS = 6
"""Epochs of a run that is killed."""
ROWS, SIZE = 448, 16
"""Rows and batch size of a run that is killed: 28 updates per epoch."""
ACCUMULATE_ROWS, ACCUMULATE_TOKENS = 3, 4
BAD_BATCH = 20
"""The batch (from 0) that holds a NaN."""
MONITOR = "val_acuracy"
"""A misspelt name."""


def noisy_model() -> nn.Module:
    """A network of 0.5 MB (with its optimizer's moments) with dropout and BatchNorm; the seed is the caller's."""
    width = 192
    return nn.Sequential(
        nn.Linear(16, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, width),
        nn.ReLU(), nn.Linear(width, 3),
    )  # fmt: skip


def killed_data() -> TensorDataset:
    """Rows of a run that is killed: inputs (448, 16) and three classes."""
    generator = torch.Generator().manual_seed(SEED)
    x = torch.randn(ROWS, 16, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long() + (x[:, 0] > 1).long())


def digits() -> tuple[TensorDataset, TensorDataset]:
    """scikit-learn's digits in a drawn order: 1,400 rows to train on, 397 to validate on."""
    from sklearn.datasets import load_digits

    pixels, classes = load_digits(return_X_y=True)
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(pixels / 16, dtype=torch.float32)[order], torch.tensor(classes)[order]
    return TensorDataset(x[:1400], y[:1400]), TensorDataset(x[1400:], y[1400:])


def digits_model() -> nn.Module:
    """A perceptron on the digits, always with the same first weights."""
    torch.manual_seed(SEED)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def exact_digits() -> TensorDataset:
    """The 1,400 rows in float64, so that rounding does not hide a difference."""
    x, y = digits()[0].tensors
    return TensorDataset(x.double(), y)


class Tagger(nn.Module):
    """Predicts a class for each token; returns scores (batch, classes, tokens)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(17, 16), nn.Linear(16, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scores of each token."""
        return self.head(self.embed(tokens).tanh()).transpose(1, 2)


def tagger() -> nn.Module:
    """A tagger in float64, always with the same first weights."""
    torch.manual_seed(SEED)
    return Tagger().double()


def sentences() -> TensorDataset:
    """256 sequences of 1 to 24 tokens, padded to 24; the target of padding is -100."""
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(1, 17, (256, 24), generator=generator)
    lengths = torch.randint(1, 25, (256, 1), generator=generator)
    padding = torch.arange(24) >= lengths
    return TensorDataset(tokens.masked_fill(padding, 0), (tokens % 5).masked_fill(padding, -100))


def with_a_nan() -> TensorDataset:
    """The 1,400 rows, one number of batch 20 (from 0) being NaN."""
    x, y = digits()[0].tensors
    x[BAD_BATCH * 32 + 3, 5] = float("nan")
    return TensorDataset(x, y)


def loader(data: TensorDataset, size: int = 32, *, shuffle: bool = False) -> DataLoader[Any]:
    """The `DataLoader` that a user writes."""
    return DataLoader(data, batch_size=size, shuffle=shuffle)


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    """SGD without momentum: an error of one update shows in the weights as it is."""
    return torch.optim.SGD(model.parameters(), lr=lr)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Adam: two moments of every weight have to be saved."""
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def trained_digits() -> nn.Module:
    """The perceptron after two epochs of a plain loop: the model that is validated."""
    model, optimizer = digits_model(), None
    optimizer = adam(model)
    for _ in range(2):
        for x, y in loader(digits()[0]):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model


class Log:
    """Reports how far a run is: the start of each epoch, the moment from which on it may be killed, and the end.

    It may be killed as soon as it has reported a checkpoint of update 28 * `first` or a later one as complete. Who
    waits for its saves has done so when epoch `first` begins; who saves in the background reports it by `saved`.
    """

    def __init__(self, fd: int, first: int) -> None:
        self.fd, self.first, self.background = fd, first, False

    def epoch(self, number: int) -> None:
        """Epoch `number` begins."""
        self._line(f"epoch {number}")
        if number == self.first and not self.background:
            self._line("saved 1")

    def saved(self, update: int) -> None:
        """The checkpoint of this update is complete."""
        if update >= self.first * ROWS // SIZE:
            self._line("saved 1")

    def _line(self, text: str) -> None:
        os.write(self.fd, f"{text}\n".encode())

    def ended(self, model: nn.Module) -> None:
        """The run has ended with these weights and buffers."""
        self._line(f"ended {EPOCHS} {digest(model)}")


def digest(model: nn.Module) -> str:
    """A digest of every bit of the weights and buffers."""
    found = hashlib.blake2b(digest_size=12)
    for value in model.state_dict().values():
        found.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


class Watched:
    """Counts the updates of an optimizer, and those after which a weight is not finite."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.updates, self.spoilt = model, 0, 0
        optimizer.register_step_post_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.updates += 1
        self.spoilt += not self.finite

    @property
    def finite(self) -> bool:
        """Whether all weights are finite."""
        return all(bool(value.isfinite().all()) for value in self.model.parameters())

    @contextmanager
    def outcome(self, found: dict[str, Any]) -> Iterator[None]:
        """Write into `found` how the block ends: the error, the updates made, the state of the weights."""
        try:
            yield
            found["error"] = None
        except Exception as error:
            found["error"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
        found |= {"updates": self.updates, "updates_with_nan_weights": self.spoilt, "finite_weights": self.finite}


def folders(directory: Path, pattern: str) -> list[Path]:
    """Folders that match, by the number at their end, oldest first."""
    return sorted(directory.glob(pattern), key=lambda path: int(path.name.rpartition("_")[2]))
