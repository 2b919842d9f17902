"""Runs for the tests on a GPU: models, data, the loop by hand, the same by the Trainer. The CPU runs it too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainwright import MixedPrecision, Observer, OneCycle, StepLR, Trainer, Updates
from trainwright.update import deferred_check

UPDATES = 50
SIZE, FEATURES, CLASSES = 16, 20, 5
SCALE = 2.0**10
"""A loss scale that none of these runs overflows under."""
RATES = {"adamw": 2.0**-10, "sgd": 2.0**-5}
"""Learning rates that a float32 holds exactly, as the table on the device does."""
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """One combination of settings; `accumulate`: "one" or "four" micro-batches, or "ragged" ones at an epoch's end."""

    optimizer: str = "adamw"
    clip: float | None = None
    accumulate: str = "one"
    precision: str | None = None
    schedule: str = ""

    def __str__(self) -> str:
        clip = "clip" if self.clip else "no clip"
        return " ".join((self.optimizer, clip, self.accumulate, self.precision or "fp32", self.schedule or "constant"))

    @property
    def level(self) -> str:
        """The level of its updates: a momentum that cycles depends on what a loss scale has left out before."""
        return "L0" if self.schedule == "cycled" and self.precision == "fp16" else "L1"

    @property
    def micro_batches(self) -> int:
        return 1 if self.accumulate == "one" else 4


def net() -> nn.Module:
    torch.manual_seed(0)
    first, second = nn.Linear(FEATURES, 64), nn.Linear(64, 64)
    return nn.Sequential(first, nn.GELU(), nn.LayerNorm(64), second, nn.ReLU(), nn.Linear(64, CLASSES))


def noisy_net() -> nn.Module:
    """With dropout, and statistics and counters of BatchNorm."""
    torch.manual_seed(0)
    first, second = nn.Linear(FEATURES, 64), nn.Linear(64, 64)
    last = nn.Linear(64, CLASSES)
    return nn.Sequential(first, nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3), second, nn.BatchNorm1d(64), last)


def conv_net() -> nn.Module:
    torch.manual_seed(0)
    first, second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
    body = (first, nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout2d(0.2), second, nn.BatchNorm2d(16), nn.ReLU())
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(16 * 8 * 8, CLASSES))


def rows(number: int, shape: Sequence[int] = (FEATURES,), *, seed: int = 1) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(number, *shape, generator=generator)
    # What can be learned: where it cannot, last bits grow, and runs that round otherwise drift apart.
    return x, x.flatten(1)[:, :CLASSES].argmax(dim=1)


def host_batches(number: int, shape: Sequence[int] = (FEATURES,), *, size: int = SIZE, last: int = SIZE) -> list[Batch]:
    """Batches on the host, of which the last one may be short."""
    x, y = rows((number - 1) * size + last, shape)
    return list(zip(x.split(size), y.split(size), strict=True))


def data_of(case: Case, shape: Sequence[int] = (FEATURES,)) -> list[Batch]:
    """The batches of an epoch; of "ragged" windows the last has three micro-batches, one of them of seven rows."""
    return host_batches(11, shape, last=7) if case.accumulate == "ragged" else host_batches(12, shape)


def windows_of(case: Case, data: list[Batch]) -> list[list[Batch]]:
    size = case.micro_batches
    return [data[first : first + size] for first in range(0, len(data), size)]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    # A large eps: else a weight whose gradient is next to nothing moves by the sign of its rounding error.
    "adamw": lambda p: torch.optim.AdamW(p, lr=RATES["adamw"], eps=1e-3, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=RATES["sgd"], momentum=0.875, fused=True),
}


def schedule_by_hand(case: Case, optimizer: Any, updates: int) -> Any:
    import torch.optim.lr_scheduler as torchs

    if case.schedule == "step":
        return torchs.StepLR(optimizer, 13, gamma=0.5)
    if case.schedule:
        highest = 2 * RATES[case.optimizer]
        return torchs.OneCycleLR(optimizer, highest, total_steps=updates, cycle_momentum=case.schedule == "cycled")
    return None


def schedule_of(case: Case) -> Any:
    if case.schedule == "step":
        return StepLR(Updates(13), gamma=0.5)
    if case.schedule:
        return OneCycle(2 * RATES[case.optimizer], cycle_momentum=case.schedule == "cycled")
    return None


def by_hand(
    case: Case,
    device: torch.device,
    *,
    updates: int = UPDATES,
    build: Any = net,
    data: list[Batch] | None = None,
    scaler: Any = None,
    scales: list[float] | None = None,
) -> nn.Module:
    """The loop that people write: autocast, torch's loss scale, clipping and scheduler, each update in full view.

    `scaler`: one with other settings; `scales` gets its scale after each update.
    """
    model = build().to(device)
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    schedule = schedule_by_hand(case, optimizer, updates)
    scaler = scaler or torch.amp.GradScaler(device.type, init_scale=SCALE, enabled=case.precision == "fp16")
    dtype = torch.float16 if case.precision == "fp16" else torch.bfloat16
    windows = windows_of(case, data_of(case) if data is None else data)
    torch.manual_seed(7)
    for window in islice(cycle(windows), updates):
        optimizer.zero_grad()
        whole = sum(len(x) for x, _ in window)
        for x, y in window:
            with torch.autocast(device.type, dtype, enabled=case.precision is not None):
                loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device)) * (len(x) / whole)
            scaler.scale(loss).backward()
        if case.clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        scaler.step(optimizer)
        scaler.update()
        if scales is not None:
            scales.append(scaler.get_scale())
        if schedule is not None:
            schedule.step()
    return model


class Watch(Observer):
    """Keeps the record of every update, and the paths that updates took; records come up to three updates late."""

    wants = ("grad_norm",)

    def __init__(self) -> None:
        self.records: list[Any] = []
        self.paths: list[str] = []
        self.trainer: Any = None
        self._does: dict[int, Callable[[], None]] = {}

    def does(self, at: int, what: Callable[[], None]) -> None:
        """Have `what` called when the record of an update comes."""
        self._does[at] = what

    def on_update(self, update: Any) -> None:
        self.records.append(update)
        path = self.trainer.fast_path
        if path not in self.paths[-1:]:
            self.paths.append(path)
        self._does.get(update.update, lambda: None)()


def precision_of(case: Case) -> Any:
    return MixedPrecision("fp16", init_scale=SCALE) if case.precision == "fp16" else case.precision


@contextmanager
def checked_at_once() -> Iterator[None]:
    """Have runs inside read the numbers of each update before its step, as on the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deferred_check, "ASYNC_DEVICES", set())
        yield


def make(case: Case, device: torch.device, *, build: Any = net, kind: Any = Trainer, **slots: Any) -> Any:
    """A Trainer for a case, with a `Watch` first among its observers, as `watch_of(trainer)`."""
    model = build().to(device)
    watch = Watch()
    observers = [watch, *slots.pop("observers", ())]
    slots = {
        "precision": precision_of(case),
        "accumulate": case.micro_batches,
        "clip": case.clip,
        "schedule": schedule_of(case),
    } | slots
    loss = slots.pop("loss", None) or nn.CrossEntropyLoss()
    trainer = kind(
        model,
        lambda placed: OPTIMIZERS[case.optimizer](placed.parameters()),
        loss,
        device=device,
        console=False,
        observers=observers,
        **slots,
    )
    watch.trainer = trainer
    return trainer


def watch_of(trainer: Any) -> Watch:
    """The watch of a trainer."""
    watch = trainer.observers[0]
    assert isinstance(watch, Watch)
    return watch


def fitted(trainer: Any, data: Any, val: Any = None, *, updates: int = UPDATES, **ends: Any) -> Any:
    """The trainer after so many updates from the same random state."""
    torch.manual_seed(7)
    trainer.fit(data, val, max_updates=updates, **ends)
    return trainer


def trained(case: Case, device: torch.device, *, updates: int = UPDATES, data: Any = None, **settings: Any) -> Any:
    """A case trained by the Trainer."""
    return fitted(make(case, device, **settings), data_of(case) if data is None else data, updates=updates)


def tensors(model: nn.Module) -> list[Tensor]:
    """Weights and buffers, on the host."""
    return [one.detach().cpu() for one in (*model.parameters(), *model.buffers())]


def state_of(trainer: Any) -> list[Tensor]:
    """Weights, buffers, and the state of the optimizer, on the host."""
    own = [value for state in trainer.optimizer.state.values() for value in state.values() if value is not None]
    return [*tensors(trainer.model), *[torch.as_tensor(value).detach().cpu() for value in own]]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether they are equal bit for bit."""
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def distance(one: nn.Module, other: nn.Module) -> float:
    """The largest difference of any weight, as a share of the largest weight; NaN where one of them is not finite."""
    pairs = list(zip(one.parameters(), other.parameters(), strict=True))
    off = torch.stack([(a.detach().cpu() - b.detach().cpu()).abs().max() for a, b in pairs]).max()
    return float(off / torch.stack([a.detach().cpu().abs().max() for a, _ in pairs]).max())


def moved(model: nn.Module, build: Any = net) -> bool:
    """Whether every weight tensor was trained at all."""
    return not any(
        torch.equal(a.detach().cpu(), b) for a, b in zip(model.parameters(), build().parameters(), strict=True)
    )


def losses(trainer: Any) -> list[float]:
    return [record.loss for record in watch_of(trainer).records]


def path_of(trainer: Any) -> str:
    """The path that the updates took in the end, while the run went on; it begins with its level."""
    return str(watch_of(trainer).paths[-1])


def cases() -> Iterator[Case]:
    """All combinations that deferred, immediate and hand-written updates are compared for."""
    for optimizer in OPTIMIZERS:
        for clip in (None, 0.25):
            for accumulate in ("one", "four", "ragged"):
                for precision in (None, "bf16", "fp16"):
                    for schedule in ("step", "one cycle", "cycled"):
                        yield Case(optimizer, clip, accumulate, precision, schedule)
