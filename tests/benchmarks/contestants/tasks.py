"""What is trained: four workloads, each plain and with accumulation, clipping and a schedule."""

from __future__ import annotations

import pydoc_data.topics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR
from torch.utils.data import DataLoader, Dataset, TensorDataset

if TYPE_CHECKING:
    from trainwright.data import Batches  # imported where it is used: plain loops are measured without it

LR, MAX_LR = 1e-3, 3e-3
CHARACTERS = 96
"""All printable ones of ASCII and one for any other."""

Optimizers = Literal["adamw", "torch"]
Losses = Literal["torch", "own"]


class Clock:
    """Reads the CPU time of the thread, and of the process, from the end of the first epoch on."""

    def __init__(self) -> None:
        self.begun: tuple[float, float] | None = None

    def epoch_ended(self, *_: object) -> None:
        """Begin, at the first call."""
        if self.begun is None:
            self.begun = time.thread_time(), time.process_time()

    def spent(self) -> tuple[float, float]:
        """Seconds of the thread and of the process."""
        now = time.thread_time(), time.process_time()
        assert self.begun is not None, "no epoch has ended"
        return now[0] - self.begun[0], now[1] - self.begun[1]


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """A map-style data set as users write it: nothing tells that it lies in memory."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


@dataclass(frozen=True)
class Workload:
    """A model, its data and how long a measurement of it is."""

    title: str
    batch_size: int
    epochs: int
    """Of a timed run, after the warm-up epoch."""
    passes: int
    """Of a timed evaluation."""
    times: int
    """How often the data stand in a long pass; 1 where a pass is long already."""
    make: Callable[[], nn.Module]
    data: Callable[[], tuple[Tensor, Tensor]]
    grows: float = 1.0
    """By how much more than elsewhere a last bit that was rounded otherwise may have grown at the end of training."""


@dataclass(frozen=True)
class Task:
    """A workload in one of its two forms, `full` being accumulation by 4, clipping to norm 1 and OneCycle."""

    name: str
    workload: Workload
    full: bool
    epochs: int
    inputs: Tensor = field(repr=False)
    targets: Tensor = field(repr=False)
    optimizers: Optimizers = "adamw"
    losses: Losses = "torch"

    @property
    def accumulate(self) -> int:
        return 4 if self.full else 1

    @property
    def clip(self) -> float | None:
        return 1.0 if self.full else None

    @property
    def size(self) -> int:
        return self.workload.batch_size

    @property
    def length(self) -> int:
        """Batches of an epoch: always whole ones, and whole windows."""
        return len(self.inputs) // self.size

    @property
    def updates(self) -> int:
        """Of a whole run, its warm-up epoch too."""
        return (1 + self.epochs) * self.length // self.accumulate

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.workload.make()

    def optimizer(self, model: nn.Module, *, fused: bool = True) -> torch.optim.AdamW:
        if self.optimizers == "adamw":
            from trainwright import adamw

            return adamw(lr=LR, fused=fused)(model)
        return torch.optim.AdamW(model.parameters(), lr=LR, fused=fused)

    def criterion(self) -> nn.Module:
        """Cross entropy, as torch's own module or inside of one of the user's own."""
        return nn.CrossEntropyLoss() if self.losses == "torch" else OwnLoss()

    def scheduler(self, optimizer: torch.optim.Optimizer) -> LRScheduler | None:
        return OneCycleLR(optimizer, MAX_LR, total_steps=self.updates) if self.full else None

    def loader(self) -> DataLoader[tuple[Tensor, ...]]:
        """The loader that users write around tensors."""
        rows = TensorDataset(self.inputs, self.targets)
        return DataLoader(rows, self.size, shuffle=True, generator=generator())

    def other_loader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """The same batches in the same order from a data set of the user's own."""
        return DataLoader(Rows(self.inputs, self.targets), self.size, shuffle=True, generator=generator())

    def batches(self) -> Batches:
        from trainwright import batches

        return batches((self.inputs, self.targets), self.size, shuffle=True, seed=1)

    def held_out(self) -> DataLoader[tuple[Tensor, ...]]:
        """The loader of an evaluation."""
        return DataLoader(TensorDataset(self.inputs, self.targets), self.size)

    def other_held_out(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return DataLoader(Rows(self.inputs, self.targets), self.size)

    def longer(self) -> Task:
        """The same with `workload.times` as many rows, for evaluations."""
        times = self.workload.times
        inputs, targets = (data.repeat(times, *[1] * (data.ndim - 1)) for data in (self.inputs, self.targets))
        return replace(self, inputs=inputs, targets=targets)

    def shortest(self) -> Task:
        """The same for one epoch after the warm-up."""
        return replace(self, epochs=1)


def task(name: str, *, epochs: int | None = None, optimizers: Optimizers = "adamw", losses: Losses = "torch") -> Task:
    """Make the task of a name such as "W1" or "W1f"."""
    workload = WORKLOADS[name.removesuffix("f")]
    inputs, targets = workload.data()
    return Task(name, workload, name.endswith("f"), epochs or workload.epochs, inputs, targets, optimizers, losses)


class Drawn:
    """The loader's batches for whoever knows where an epoch ends.

    A loader whose sampler is asked for one row more than there is draws a permutation that nobody uses, so that the
    next epoch has another order. `restarts` is how often, after an epoch, a pass is begun and given up.
    """

    def __init__(self, task: Task, restarts: int = 0) -> None:
        self.task, self.restarts, self.drawn = task, restarts, generator()

    def order(self) -> Tensor:
        """Draw as a pass of the loader does."""
        self._begin()
        return torch.randperm(len(self.task.inputs), generator=self.drawn)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Give the next epoch's batches, by one `index_select` each."""
        inputs, targets = self.task.inputs, self.task.targets
        for picked in self.order().split(self.task.size):
            yield inputs.index_select(0, picked), targets.index_select(0, picked)
        for _ in range(self.restarts):
            self._begin()

    def _begin(self) -> None:
        torch.empty((), dtype=torch.int64).random_(generator=self.drawn)  # a loader's base seed


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


class OwnLoss(nn.Module):
    """A loss module that the library cannot recognize."""

    def __init__(self) -> None:
        super().__init__()
        self.cross_entropy = nn.CrossEntropyLoss()

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = self.cross_entropy(output, target)
        return loss


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


def wide_mlp() -> nn.Module:
    sizes = (784, 512, 512)
    hidden = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(512, 10))


class Block(nn.Module):
    """A layer of a transformer, its normalizations first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, length, width))
        return x + self.mlp(self.norm_2(x))


class Transformer(nn.Module):
    """Characters (rows, length) to logits (rows, characters, length)."""

    def __init__(self, length: int = 64, width: int = 128, layers: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(CHARACTERS, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CHARACTERS)

    def forward(self, x: Tensor) -> Tensor:
        positions = self.positions(torch.arange(x.shape[1]))
        return self.head(self.norm(self.blocks(self.tokens(x) + positions))).transpose(1, 2)


@cache
def digits() -> tuple[Tensor, Tensor]:
    """Whole windows of whole batches: 1,792 of the 1,797 rows."""
    x, y = load_digits(return_X_y=True)
    return torch.tensor(x[:1792] / 16, dtype=torch.float32), torch.tensor(y[:1792])


def images() -> tuple[Tensor, Tensor]:
    inputs, targets = digits()
    return inputs.view(-1, 1, 8, 8), targets


@cache
def synthetic() -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(2)
    return torch.randn(4096, 784, generator=drawn), torch.randint(10, (4096,), generator=drawn)


@cache
def text() -> tuple[Tensor, Tensor]:
    """128 pieces of 64 characters of Python's own help, and the characters that follow each."""
    whole = "".join(pydoc_data.topics.topics.values())[: 128 * 64 + 1]
    codes = torch.tensor([ord(c) - 31 if " " <= c <= "~" else 0 for c in whole])
    return codes[:-1].view(128, 64), codes[1:].view(128, 64).contiguous()


WORKLOADS = {
    "W1": Workload("MLP 64-64-10, digits, batch 32", 32, 40, 40, 10, mlp, digits),
    "W2": Workload("CNN 16-32 channels, 8x8, batch 64", 64, 10, 10, 10, cnn, images, 100.0),
    "W3": Workload("MLP 784-512-512-10, batch 128", 128, 3, 5, 1, wide_mlp, synthetic),
    "W4": Workload("transformer 4 x d128, T = 64, batch 16", 16, 2, 3, 1, Transformer, text),
}
NAMES = [name + form for name in WORKLOADS for form in ("", "f")]
