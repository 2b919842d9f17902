"""Batches that are fed to a run on a real GPU: right beside a slow device, in memory that is used again.

tests/gpu/test_moving_cuda.py tests the ring by itself.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_runs import SIZE, Case, fitted, host_batches, make, rows, same, state_of, watch_of
from steady import WHOLE, memory_counts
from torch import nn
from torch.utils.data import DataLoader, Dataset

from trainwright import Fast, Observer, Trainer, batches
from trainwright.acceleration.transfer import Moving

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("deterministic"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),  # of a loader, beside CUDA's threads
]
CASE = Case("adamw", 0.25, "one", None, "step")


def slow(device: torch.device) -> None:
    """Keep the device busy for about a millisecond, before what follows."""
    if device.type == "cuda":
        torch.cuda._sleep(2_000_000)


class Slow(Trainer[nn.Module]):
    """The device comes late to its batches, and reads the one before once more when the next is there."""

    def training_step(self, batch: Any) -> Any:
        slow(self.device)
        loss = super().training_step(batch)
        before, self.before = getattr(self, "before", batch), batch
        slow(self.device)
        return loss + 0.1 * super().training_step(before)


class SlowPlain(Slow):
    """The same with batches that are moved one by one, each into memory of its own."""

    def to_device(self, batch: Any) -> Any:
        return tuple(one.to(self.device) for one in batch)


def pinned(number: int) -> Any:
    return [(x.pin_memory(), y.pin_memory()) for x, y in host_batches(number)]


def refilled(number: int) -> Any:
    """Batches in one and the same memory, that is written to as soon as a batch was taken."""

    def epoch(_: int) -> Any:
        x, y = torch.empty(SIZE, 20), torch.empty(SIZE, dtype=torch.int64)
        for one, other in host_batches(number):
            x.copy_(one)
            y.copy_(other)
            yield x, y

    return epoch


class Items(Dataset[Any]):
    """Rows that are fetched one by one."""

    def __init__(self, number: int) -> None:
        self.rows = rows(number * SIZE)

    def __len__(self) -> int:
        return len(self.rows[0])

    def __getitem__(self, index: int) -> Any:
        return self.rows[0][index], self.rows[1][index]


def from_worker(number: int) -> Any:
    return DataLoader(Items(number), SIZE, num_workers=1, pin_memory=torch.cuda.is_available())


def on_the_device(number: int) -> Any:
    return batches(rows(number * SIZE), SIZE)


FEEDS: dict[str, Any] = {
    "pageable": host_batches,
    "pinned": pinned,
    "refilled": refilled,
    "a worker": from_worker,
    "on the device": on_the_device,
}


def fed(feed: str, device: torch.device, *, kind: Any = Slow, updates: int = 40, **settings: Any) -> Any:
    """A run over an epoch of such data; `epoch_updates` where they do not tell their length."""
    ends = {"epoch_updates": updates} if feed == "refilled" else {}
    return fitted(make(CASE, device, kind=kind, **settings), FEEDS[feed](updates), updates=updates, **ends)


@pytest.mark.parametrize("feed", FEEDS)
def test_a_device_that_comes_late_reads_what_it_was_given(feed: str, device: torch.device) -> None:
    wanted = fed("pageable", device, kind=SlowPlain)
    ours = fed(feed, device)
    assert isinstance(ours._hooks.move, Moving)
    assert same(state_of(wanted), state_of(ours))


class Waits(Trainer[nn.Module]):
    """The device comes late to its batches."""

    def training_step(self, batch: Any) -> Any:
        slow(self.device)
        return super().training_step(batch)


class Counts(Observer):
    """What the allocators have counted, at two updates."""

    def __init__(self, device: torch.device, first: int, last: int) -> None:
        self._device, self._at = device, (first, last)
        self.found: list[dict[str, int]] = []

    def on_update(self, update: Any) -> None:
        if update.update in self._at:
            self.found.append(memory_counts(self._device))


@pytest.mark.parametrize("feed", ["pageable", "pinned", "on the device"])
def test_a_device_that_comes_late_has_no_memory_allocated_for_it(feed: str, device: torch.device) -> None:
    counts = Counts(device, 12, WHOLE - 6)
    trainer = fed(feed, device, kind=Waits, updates=WHOLE, observers=[counts])
    assert counts.found[0] == counts.found[1]
    assert trainer._hooks.move._rings == {}  # the memory is given back


def failing(number: int) -> Any:
    """Data that end in an error."""

    def epoch(_: int) -> Any:
        yield from host_batches(number)
        raise OSError("the disk is gone")

    return epoch


def test_an_error_of_the_data_comes_after_all_updates_before_it(device: torch.device) -> None:
    trainer = broken(device)
    assert [record.update for record in watch_of(trainer).records] == list(range(1, 13))
    whole = fitted(make(CASE, device), host_batches(12), updates=12)
    assert same(state_of(trainer), state_of(whole))


def broken(device: torch.device) -> Any:
    """A trainer whose data have failed after twelve updates."""
    trainer = make(CASE, device)
    with pytest.raises(OSError, match="the disk is gone"):
        fitted(trainer, failing(12), updates=40, epoch_updates=20)
    return trainer


@pytest.mark.parametrize("shuffle", [False, True])
def test_data_on_the_device_are_those_of_the_host(shuffle: bool, device: torch.device) -> None:
    runs = residing(device, shuffle=shuffle)
    assert same(state_of(runs[0]), state_of(runs[1]))


def residing(device: torch.device, *, shuffle: bool, updates: int = 40) -> list[Any]:
    """Runs over rows on the host and on the device; three epochs."""
    runs = []
    for resident in (False, True):
        data = batches(rows(13 * SIZE + 5), SIZE, shuffle=shuffle, seed=3)
        runs.append(fitted(make(CASE, device, fast=Fast(device_data=resident)), data, updates=updates))
    return runs
