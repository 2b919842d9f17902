"""What the GPU benchmarks are made of: tasks, contestants, what was found of them, targets, and cases of these."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Batch = tuple[Tensor, ...]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
NOT_ON_CPU = "not on cpu"


@dataclass(frozen=True)
class Bench:
    """Where and how large: `tiny` sizes show that everything runs, and say nothing about time."""

    device: torch.device
    tiny: bool
    rounds: int

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def backend(self) -> str:
        """What `torch.compile` makes kernels with; on the CPU it only traces, which shows that it can be compiled."""
        return "inductor" if self.on_cuda else "eager"

    def size(self, real: int, tiny: int) -> int:
        return tiny if self.tiny else real


@dataclass(frozen=True)
class Task:
    """What is trained: a model on one epoch's batches, which lie on the device, an epoch to warm up and then more."""

    title: str
    bench: Bench
    make: Callable[[], nn.Module]
    data: Sequence[Batch] = field(repr=False)
    epochs: int
    """Timed ones, after the one that warms up."""
    optimizer: Callable[..., Optimizer]
    """From parameters, and whether its kernels are fused, to an optimizer."""
    tolerance: float
    """How far weights may be from the reference's: the norm of the difference over that of the way they have gone."""
    criterion: nn.Module | None = None
    """From output and target to a mean loss; None where the model takes the whole batch and returns the loss."""
    counts: Callable[[Batch], int | Tensor] = lambda batch: batch[0].numel()
    """What the loss of such a model is a mean over."""
    precision: str | None = None
    clip: float | None = None
    channels_last: bool = False
    variants: Mapping[str, Sequence[Batch]] = field(default_factory=dict, repr=False)
    """The same rows in other batches."""
    rows: tuple[Tensor, Tensor] | None = field(default=None, repr=False)
    """Images and labels on the host, where the way to the device is measured."""
    batch_size: int = 0
    flops: float = 0.0
    """Operations of one update, forward and backward; 0 where nobody asks."""

    @property
    def device(self) -> torch.device:
        return self.bench.device

    @property
    def lies_channels_last(self) -> bool:
        """Whether the loop by hand lays weights and images so: the package does that by itself, on CUDA alone."""
        return self.channels_last and self.bench.on_cuda

    @property
    def updates(self) -> int:
        """Timed ones."""
        return self.epochs * len(self.data)

    def model(self, *, by_hand: bool = True) -> nn.Module:
        """The same weights each time; `by_hand`: laid out as the loop by hand wants them."""
        torch.manual_seed(0)
        with self.device:
            model = self.make()
        return model.to(memory_format=torch.channels_last) if by_hand and self.lies_channels_last else model

    def autocast(self, **settings: Any) -> AbstractContextManager[Any]:
        if self.precision is None:
            return nullcontext()
        return torch.autocast(self.device.type, DTYPES[self.precision], **settings)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        if self.criterion is None:
            loss: Tensor = model(*batch)
            return loss
        return self.criterion(model(batch[0]), batch[1])


class Clock:
    """Waits for the device at the end of each epoch and reads the time; the first epoch warms up."""

    def __init__(self, task: Task, *, begin: Callable[[], None] = lambda: None) -> None:
        self._device, self._epochs, self._begin = task.device, task.epochs, begin
        self.times: list[float] = []
        self.allocations = 0
        """How often the device was asked for memory in the timed epochs."""
        self.note = ""
        """What a contestant has to say."""

    def epoch_ended(self, *_: object) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        if not self.times:
            self._begin()
            self.allocations -= self._asked()
            now = time.perf_counter()
        self.times.append(now)
        if len(self.times) == 1 + self._epochs:
            self.allocations += self._asked()

    def _asked(self) -> int:
        return torch.cuda.memory_stats(self._device).get("num_device_alloc", 0) if self._device.type == "cuda" else 0

    @property
    def seconds(self) -> float:
        return self.times[-1] - self.times[0]


@dataclass(frozen=True)
class Contestant:
    """Trains a task for 1 + `task.epochs` epochs, tells the clock of each epoch's end, and returns the model."""

    name: str
    train: Callable[[Task, Clock], nn.Module]
    note: str = ""
    needs_cuda: bool = False
    package: str | None = None
    variant: str = ""
    """Which of `task.variants` are its batches."""
    equals: str | None = "tuned"
    """Whose final weights it must have; None: it computes something else."""

    def absent(self, bench: Bench) -> str:
        """Why it does not take part; empty where it does."""
        if self.needs_cuda and not bench.on_cuda:
            return NOT_ON_CPU
        if self.package is not None:
            try:
                version(self.package)
            except PackageNotFoundError:
                return f"{self.package} is not installed"
        return ""


@dataclass
class Runs:
    """What was found of one contestant, round by round."""

    seconds: list[float] = field(default_factory=list)
    """Per update."""
    peak: list[int] = field(default_factory=list)
    """Bytes of the device's memory over what was taken before."""
    allocations: list[int] = field(default_factory=list)
    syncs: dict[str, float] = field(default_factory=dict)
    """Waits of the host for the device, per update, by the name of the call."""
    graphs: int = 0
    """Graphs that torch has compiled for it."""
    differs: float | None = None
    """From the reference's weights; None where that was not compared."""
    failed: str = ""
    absent: str = ""
    note: str = ""


Found = Mapping[str, Runs]


@dataclass(frozen=True)
class Target:
    """A number that is to be reached, judged by its median over the rounds."""

    title: str
    values: Callable[[Found], list[float] | None]
    """One per round; None where somebody whom it needs has no times."""
    at_most: float | None = None
    at_least: float | None = None

    @property
    def bound(self) -> str:
        return f"<= {self.at_most:g}" if self.at_most is not None else f">= {self.at_least:g}"

    def met(self, value: float) -> bool:
        if self.at_most is not None:
            return value <= self.at_most
        assert self.at_least is not None
        return value >= self.at_least


@dataclass(frozen=True)
class Case:
    """Contestants at a task, and what they are to reach."""

    name: str
    """One of B1 to B9; several cases may have the same."""
    task: Callable[[Bench], Task]
    contestants: Sequence[Contestant]
    targets: Callable[[Task], Sequence[Target]]
    counts_syncs: bool = False
    remarks: str = ""


def ratio(a: str, b: str, **bound: float) -> Target:
    """The target that the time of `a` over that of `b` keeps to a bound."""
    return Target(f"{a} / {b}", lambda found: ratios(found.get(a), found.get(b)), **bound)


def ratios(a: Runs | None, b: Runs | None) -> list[float] | None:
    """The ratios of each round, or None where one of the two has no times."""
    if a is None or b is None or not a.seconds or len(a.seconds) != len(b.seconds):
        return None
    return [x / y for x, y in zip(a.seconds, b.seconds, strict=True)]
