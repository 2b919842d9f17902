"""The training that every library is given, and the lines by which it tells how far it is."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Task:
    """A training of `updates` updates with a save after every `every`; epochs and saves do not fall together."""

    updates: int = 40
    every: int = 4
    rows: int = 112
    batch: int = 8
    width: int = 192
    seed: int = 11

    @property
    def epoch(self) -> int:
        """Updates in an epoch."""
        return self.rows // self.batch

    def model(self) -> nn.Module:
        """A network with a mask of noise and a running statistic, so that no part of a state may be missing."""
        torch.manual_seed(self.seed)
        width = self.width
        return nn.Sequential(
            nn.Linear(16, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, width),
            nn.ReLU(), nn.Linear(width, 3),
        )  # fmt: skip

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """One that has two moments of every weight."""
        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    def data(self) -> tuple[Tensor, Tensor]:
        """Inputs (rows, 16) and classes (rows,)."""
        generator = torch.Generator().manual_seed(self.seed)
        x = torch.randn(self.rows, 16, generator=generator)
        return x, (x.sum(1) > 0).long() + (x[:, 0] > 1).long()

    def order(self, epoch: int) -> Iterator[Tensor]:
        """The rows of each batch of an epoch, for loops that are written by hand."""
        generator = torch.Generator().manual_seed(self.seed + 1000 * epoch)
        yield from torch.randperm(self.rows, generator=generator).split(self.batch)


class Tell:
    """Writes one line for each thing that has happened; a line that was written stays, whoever is killed."""

    def __init__(self, fd: int, *, at: Callable[[str, int], None] | None = None) -> None:
        self._fd, self._at, self._write = fd, at, os.write

    def resumed(self, update: int, model: nn.Module, optimizer: Any) -> None:
        """Training goes on from this state; update 0: from the very start."""
        self._line("resumed", update, *digests(model, optimizer))

    def update(self, update: int, model: nn.Module, optimizer: Any) -> None:
        """An update has been made."""
        self._line("update", update, *digests(model, optimizer))

    def saved(self, update: int) -> None:
        """The library says that the state after this update is saved."""
        self._line("saved", update)

    def ended(self, update: int, model: nn.Module, optimizer: Any, *, rest: Any = None) -> None:
        """The training is over; `rest` is what else must come out equal, such as a history."""
        self._line("ended", update, *digests(model, optimizer), _digest([repr(rest).encode()]))

    def _line(self, what: str, update: int, *words: str) -> None:
        self._write(self._fd, (" ".join([what, str(update), *words]) + "\n").encode())
        if self._at is not None:
            self._at(what, update)


def digests(model: nn.Module, optimizer: Any) -> tuple[str, str]:
    """A digest of every bit of the weights and buffers, and one of the optimizer's state."""
    state = optimizer.state_dict()["state"]
    moments = [state[key][name] for key in sorted(state) for name in sorted(state[key])]
    return _digest(map(_bytes, model.state_dict().values())), _digest(map(_bytes, moments))


def _bytes(value: Any) -> Any:
    return (
        value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        if isinstance(value, Tensor)
        else repr(value).encode()
    )


def _digest(pieces: Any) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()
