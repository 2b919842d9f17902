"""Law Silence on a real GPU: in steady state nothing waits but the one gate, nothing is allocated, nothing is read."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from gpu_runs import SIZE, Case, by_hand, distance, host_batches, losses, make, path_of, rows, watch_of
from steady import (
    ALLOCATES,
    LAUNCHES,
    STEADY,
    WAITS,
    WARM,
    WHOLE,
    Between,
    blocked,
    counting_memory,
    matching,
    no_sync,
    profiled,
    steady,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainwright import MixedPrecision, Trainer, accuracy, batches
from trainwright.update.deferred_check import AHEAD

pytestmark = pytest.mark.gpu

LEVELS = {
    "L1": Case("adamw", 0.25, "one", "bf16", "one cycle"),
    "L1 four": Case("sgd", 0.25, "four", None, "cycled"),
    "L1 fp16": Case("adamw", 0.25, "four", "fp16", "step"),
}
"""The settings for each level."""


def on_the_device(number: int) -> Any:
    return batches(rows(number * SIZE), SIZE, shuffle=True, seed=0)


def from_a_loader(number: int) -> Any:
    return DataLoader(TensorDataset(*rows(number * SIZE)), SIZE)


def pinned(number: int) -> Any:
    return [(x.pin_memory(), y.pin_memory()) for x, y in host_batches(number)]


DATA: dict[str, Any] = {
    "on the device": on_the_device,
    "pageable": host_batches,
    "pinned": pinned,
    "loader": from_a_loader,
}


def run_of(level: str, device: torch.device, **slots: Any) -> Any:
    return make(LEVELS[level], device, **slots)


def data_for(level: str, kind: str, *, updates: int = WHOLE) -> Any:
    """Data of an epoch without a pause."""
    return DATA[kind](updates * LEVELS[level].micro_batches)


def check_level(trainer: Any, level: str) -> None:
    assert path_of(trainer).startswith(level[:2])


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("level", LEVELS)
def test_twenty_updates_synchronize_nothing(level: str, kind: str, device: torch.device) -> None:
    trainer = run_of(level, device, metrics={"accuracy": accuracy})
    steady(trainer, data_for(level, kind), partial(no_sync, device))
    check_level(trainer, level)
    assert len(watch_of(trainer).records) == WHOLE
    assert all(record.grad_norm > 0 for record in watch_of(trainer).records)


@pytest.mark.parametrize("kind", ["on the device", "pageable"])
def test_the_host_runs_three_updates_ahead_of_a_blocked_device_and_no_further(kind: str, device: torch.device) -> None:
    trainer = run_of("L1", device, accumulate=1)
    came = blocked(trainer, data_for("L1", kind), device)
    check_level(trainer, "L1")
    # The records of the updates before the block come while the host hands over those behind it.
    assert came[AHEAD - 1] < 0.25, came
    assert came[AHEAD] > 0.4, came


@pytest.mark.parametrize("kind", ["on the device", "pageable"])
@pytest.mark.parametrize("level", LEVELS)
def test_no_call_of_cuda_waits_or_allocates(level: str, kind: str, device: torch.device, tmp_path: Any) -> None:
    calls: Counter[str] = Counter()
    trainer = run_of(level, device, metrics={"accuracy": accuracy})
    steady(trainer, data_for(level, kind), partial(profiled, device, tmp_path / "trace.json", calls))
    check_level(trainer, level)
    assert sum(matching(calls, LAUNCHES).values()) >= STEADY, calls
    assert not matching(calls, WAITS), calls
    assert not matching(calls, ALLOCATES), calls
    # The gate; and before pinned memory is written to again, the copy from it that was made three batches before.
    copies = 0 if kind == "on the device" else LEVELS[level].micro_batches
    assert calls["cudaEventSynchronize"] <= (1 + copies) * STEADY, calls


@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("level", LEVELS)
def test_nothing_is_allocated(level: str, kind: str, device: torch.device) -> None:
    changes: dict[str, int] = {}
    trainer = run_of(level, device, metrics={"accuracy": accuracy})
    steady(trainer, data_for(level, kind), partial(counting_memory, device, changes))
    check_level(trainer, level)
    assert changes == {}


OVERFLOWS = {"init_scale": 2.0**10, "growth_interval": 4, "growth_factor": 2.0**16}
"""A scale that grows after four updates, overflows, and is halved until it does not: again and again."""


class Scaled(Trainer[nn.Module]):
    """Keeps the loss scale that it has in the end."""

    def end_epoch(self, metrics: Any) -> None:
        self.scale = self.parts()["precision"].state_dict()["scale"]


def overflowing(device: torch.device, *, windows: int = WHOLE, micro_batches: str = "one") -> Any:
    """A run of so many windows under such a scale, and the same by hand: trainer, model, scales after each update."""
    case = Case("adamw", 0.25, micro_batches, "fp16")
    data = host_batches(windows * case.micro_batches)
    scales: list[float] = []
    scaler = torch.amp.GradScaler(device.type, **OVERFLOWS)
    model = by_hand(case, device, updates=windows, data=data, scaler=scaler, scales=scales)
    trainer = make(case, device, kind=Scaled, precision=MixedPrecision("fp16", **OVERFLOWS))
    return trainer, data, model, scales


@pytest.mark.parametrize("micro_batches", ["one", "four"])
def test_an_overflow_is_skipped_without_a_read_and_halves_the_scale(micro_batches: str, device: torch.device) -> None:
    trainer, data, model, scales = overflowing(device, micro_batches=micro_batches)
    between = Between(partial(no_sync, device), last=WHOLE // 2)  # of the updates that are applied
    trainer.observers = (*trainer.observers, between)
    with between.stack:
        trainer.fit(data, epochs=1)
    assert between.looked > 0
    check_overflows(trainer, model, scales)
    skipped = [record.skipped for record in watch_of(trainer).records]
    assert any(skipped[WARM:])


def check_overflows(trainer: Any, model: nn.Module, scales: list[float]) -> None:
    """The updates that torch's scale skips are the ones that are skipped here, and the scale is the same after."""
    before = [OVERFLOWS["init_scale"], *scales]
    skipped = [record.skipped for record in watch_of(trainer).records]
    assert skipped == [after < earlier for earlier, after in zip(before, scales, strict=False)]
    assert trainer.result.skipped == sum(skipped) > 0
    assert trainer.result.updates + trainer.result.skipped == len(scales)
    assert trainer.scale == scales[-1]
    assert distance(model, trainer.model) < 1e-3  # fp16: see test_same_cuda.py


# Faults that these must notice.


class Reads(Trainer[nn.Module]):
    """A step that reads its loss."""

    def training_step(self, batch: Any) -> Any:
        loss = super().training_step(batch)
        assert loss.item() >= 0
        return loss


class Copies(Trainer[nn.Module]):
    """A batch that is moved by a copy from memory that is not pinned."""

    def to_device(self, batch: Any) -> Any:
        return tuple(one.to(self.device) for one in batch)


class Allocates(Trainer[nn.Module]):
    """A step that takes more memory each time."""

    def training_step(self, batch: Any) -> Any:
        self.kept = [*getattr(self, "kept", ()), torch.empty(2**25, device=self.device)]
        return super().training_step(batch)


@pytest.mark.parametrize("kind", [Reads, Copies])
def test_a_wait_is_noticed(kind: Any, device: torch.device, tmp_path: Any) -> None:
    with pytest.raises(RuntimeError, match="synchronizing"):
        steady(run_of("L1", device, kind=kind), data_for("L1", "pageable"), partial(no_sync, device))
    came = blocked(run_of("L1", device, kind=kind), data_for("L1", "pageable"), device)
    assert came[AHEAD - 1] > 0.4
    calls: Counter[str] = Counter()
    data = data_for("L1", "pageable")
    steady(run_of("L1", device, kind=kind), data, partial(profiled, device, tmp_path / "trace.json", calls))
    assert matching(calls, WAITS)


def test_an_allocation_is_noticed(device: torch.device) -> None:
    changes: dict[str, int] = {}
    steady(run_of("L1", device, kind=Allocates), data_for("L1", "pageable"), partial(counting_memory, device, changes))
    assert changes["num_device_alloc"] >= STEADY


def test_an_optimizer_that_is_not_fused_reads_and_says_so(device: torch.device) -> None:
    trainer = run_of("L1", device)
    for group in trainer.optimizer.param_groups:
        group["fused"] = None
    with pytest.raises(RuntimeError, match="synchronizing"):
        steady(trainer, data_for("L1", "pageable"), partial(no_sync, device))
    assert "was not built with fused=True" in path_of(trainer)
    assert losses(trainer)
