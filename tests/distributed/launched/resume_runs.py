"""What the tests of resuming run on every process: a training that writes down all that it saw and did."""

from __future__ import annotations

import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

from laws.resume_run import digest, random_digests
from trainwright import EMA, Checkpoint, Observer, StepLR, Trainer, Updates, batches
from trainwright.core.durations import Duration
from trainwright.data import shard, sharded

ROWS, SIZE, EPOCHS = 27, 4, 2
"""7 batches an epoch, the last of them of 3 rows: on 3 processes one of 1 row, under BatchNorm two of 2 and 1."""
EACH = Updates(1)


@dataclass(frozen=True)
class Case:
    """A training: `data` are `batches`, a `loader`, or a `stream` of which each process reads its own part."""

    data: str = "batches"
    workers: int = 0
    persistent: bool = False
    accumulate: int = 1
    noise: bool = True
    """Whether rows and model draw numbers, and a layer keeps statistics of its rows."""
    average: bool = False
    per_rank: bool = False
    saves: Duration = EACH
    epochs: int = EPOCHS


class Noisy(Dataset):
    """Rows that begin with their number; the rest of a row draws from torch, Python and NumPy."""

    def __init__(self, *, noise: bool) -> None:
        self.rows, self.noise = numbered(ROWS), noise

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return drawn(*(part[row] for part in self.rows), noise=self.noise)


class Stream(IterableDataset):
    """The same rows in their own order; of each process and worker its share, of two processes 14 and 13 of them."""

    def __init__(self, *, noise: bool) -> None:
        self.rows, self.noise = numbered(ROWS), noise

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        index, total = shard()
        for row in islice(range(ROWS), index, None, total):
            yield drawn(*(part[row] for part in self.rows), noise=self.noise)


def numbered(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs whose first column is the number of the row, and targets."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
    x[:, 0] = torch.arange(rows)
    return x, torch.randn(rows, 2, generator=generator, dtype=torch.float64)


def drawn(x: Tensor, y: Tensor, *, noise: bool) -> tuple[Tensor, Tensor]:
    """A row with its number left as it is, and noise of every kind on the rest."""
    if not noise:
        return x, y
    noisy = x + 0.1 * torch.randn_like(x) + 0.1 * random.random() + 0.1 * float(np.random.rand())
    noisy[0] = x[0]
    return noisy, y


class Net(nn.Module):
    """A small network that leaves the number of the row out."""

    def __init__(self, *, noise: bool) -> None:
        super().__init__()
        middle = [nn.BatchNorm1d(8), nn.Dropout(0.3)] if noise else [nn.Identity(), nn.Identity()]
        first = nn.Linear(5, 8, bias=not noise)  # a bias before a BatchNorm has gradient 0, of which AdamW makes steps
        self.net = nn.Sequential(first, *middle, nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        """(n, 6) -> (n, 2)."""
        output: Tensor = self.net(x[:, 1:])
        return output


class Watching(Trainer[Net]):
    """Notes on each process, after every update, what it was made of and where it has led."""

    trace: list[dict[str, Any]]
    act: Callable[[Any], None] | None = None
    """What is done after each update; it is given the trainer."""

    def after_update(self) -> None:
        window = self._tracker.window
        taken = [batch[0][:rows] for batch, rows in zip(window.batches, window.rows, strict=True)]
        numbers = [int(number) for x in taken for number in x[:, 0]]
        seen = {"update": self.progress.updates, "numbers": numbers, "rows": digest(*taken)}
        states = {"model": digest(*self.model.state_dict().values()), **random_digests()}
        self.trace.append({**seen, **states})
        self.state["applied"] = self.state.get("applied", 0) + 1
        if self.act is not None:
            self.act(self)


def data_of(case: Case) -> Any:
    """What a case trains on."""
    if case.data == "batches":
        size: dict[str, Any] = {"per_rank": SIZE // 2} if case.per_rank else {"batch_size": SIZE}
        return batches(Noisy(noise=case.noise), **size, shuffle=True, seed=1)
    workers: dict[str, Any] = {"num_workers": case.workers, "persistent_workers": case.persistent}
    if case.workers:
        workers["multiprocessing_context"] = "fork"  # a process that was spawned spawns its own, which takes seconds
    if case.data == "stream":
        return sharded(DataLoader(Stream(noise=case.noise), batch_size=SIZE // 2, drop_last=True, **workers))
    rows = Noisy(noise=case.noise)
    order = RandomSampler(rows, generator=torch.Generator().manual_seed(3)) if case.workers else None
    return DataLoader(rows, batch_size=SIZE, sampler=order, shuffle=None if order else True, **workers)


def trainer_of(case: Case, directory: Path | None, **more: Any) -> Watching:
    """The trainer of a case, built the same each time."""
    torch.manual_seed(1)
    model = Net(noise=case.noise).double()
    checkpoint = None
    if directory is not None:
        checkpoint = Checkpoint(directory, best="val_loss", every=case.saves, keep=99, async_save=False)
    settings: dict[str, Any] = {"checkpoint": checkpoint, "console": False, **more}
    trainer = Watching(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.01),
        nn.MSELoss(),
        accumulate=case.accumulate,
        clip=1.0,
        schedule=StepLR(Updates(2), gamma=0.9),
        average=EMA(0.8) if case.average else None,
        **settings,
    )
    trainer.trace = []
    return trainer


class Notes(Observer):
    """Records the notes of the header."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_fit_start(self, plan: Any) -> None:
        self.lines += plan.notes


def train(
    case: Case,
    directory: Path | None,
    *,
    resume: str | None = None,
    act: Callable[[Any], None] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Train a case; what this process saw, and what all of it has come to."""
    random.seed(2)
    np.random.seed(3)
    notes = Notes()
    trainer = trainer_of(case, directory, observers=[notes], **more)
    trainer.act = act
    torch.manual_seed(4 if resume is None else 99)  # what a resume finds is none of its business
    held_out = batches(numbered(10, seed=5), 4)
    ended = ""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            trainer.fit(data_of(case), held_out, epochs=case.epochs, validate=Updates(3), resume=resume)
        except (KeyboardInterrupt, SystemExit) as error:
            ended = f"{type(error).__name__}({getattr(error, 'code', '')})"
    result = trainer.result
    assert result is not None
    return {
        "trace": trainer.trace,
        "history": result.history,
        "stopped": result.stopped,
        "ended": ended,
        "updates": result.updates,
        "notes": notes.lines,
        "warned": [str(one.message) for one in warned],
        "left": left_by(trainer),
        "weights": {name: value.detach().clone() for name, value in trainer.model.state_dict().items()},
    }


def left_by(trainer: Watching) -> dict[str, str]:
    """The bits that a run leaves behind on this process."""
    moments = trainer.optimizer.state_dict()["state"]
    return {
        "weights": digest(*trainer.model.state_dict().values()),
        "optimizer": digest(*(moments[key][name] for key in sorted(moments) for name in sorted(moments[key]))),
        "state": repr(trainer.state),
        **random_digests(),
    }


def from_each(case: Case, root: Path, updates: list[int]) -> dict[str, Any]:
    """Train a case undisturbed, then from each of its checkpoints as if it had been killed after it."""
    whole = train(case, root / "whole")
    return {"whole": whole, "again": {update: train(case, cut(root, update), resume="auto") for update in updates}}


def cut(root: Path, update: int) -> Path:
    """A directory as it was when the checkpoint of `update` was the newest: the first process makes it for all."""
    directory = root / f"cut {update}"
    distributed = torch.distributed.is_initialized()
    if not distributed or torch.distributed.get_rank() == 0:
        for one in (root / "whole").iterdir():
            number = one.name.removeprefix("update-")
            if number.isdigit() and int(number) <= update:
                shutil.copytree(one, directory / one.name)
    if distributed:
        torch.distributed.barrier()
    return directory
