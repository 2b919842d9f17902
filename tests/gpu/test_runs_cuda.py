"""Runs on a real GPU that end early, go on, save, and take turns: each update is complete, and each bit is in place."""

from __future__ import annotations

import gc
import signal
from typing import Any

import pytest
import torch
from gpu_runs import (
    SIZE,
    Case,
    data_of,
    fitted,
    host_batches,
    losses,
    make,
    net,
    noisy_net,
    rows,
    same,
    state_of,
    tensors,
    trained,
    watch_of,
)
from torch.utils.data import DataLoader, TensorDataset

from trainwright import Checkpoint, Updates, load_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("deterministic"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),  # of a loader, beside CUDA's threads
]
CASE = Case("adamw", 0.25, "one", None, "step")


def with_workers(device: torch.device, number: int) -> Any:
    """A loader whose worker fetches, and whose thread pins memory, while the run goes on."""
    data = TensorDataset(*rows(number * SIZE))
    return DataLoader(data, SIZE, num_workers=1, pin_memory=device.type == "cuda", persistent_workers=True)


def test_a_loader_that_pins_memory_feeds_the_same_run(device: torch.device) -> None:
    plain, loaded = (trained(CASE, device, data=data) for data in (host_batches(20), with_workers(device, 20)))
    assert same(state_of(plain), state_of(loaded))


def interrupted(device: torch.device, *, at: int) -> Any:
    """A trainer that a signal has ended when the record of an update came."""
    trainer = make(CASE, device)
    watch_of(trainer).does(at, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        fitted(trainer, data_of(CASE))
    return trainer


def test_an_interrupt_ends_with_a_complete_update(device: torch.device) -> None:
    trainer = interrupted(device, at=15)
    done = trainer.progress.updates
    assert 15 <= done <= 20
    whole = trained(CASE, device, updates=done)
    assert same(state_of(trainer), state_of(whole))


def resumed(device: torch.device, directory: Any, *, cut: int = 23, updates: int = 50) -> tuple[Any, Any, int]:
    """A run without a break; one that was left in the middle of an epoch and resumed in another trainer; where."""
    case = Case("adamw", 0.25, "four", None, "step")

    def trainer(name: str) -> Any:
        saves = Checkpoint(directory / name, every=Updates(7))
        return make(case, device, build=noisy_net, checkpoint=saves)

    whole, first, second = trainer("whole"), trainer("cut"), trainer("cut")
    fitted(whole, data_of(case), updates=updates)
    watch_of(first).does(cut, lambda: first.stop("to go on later"))
    fitted(first, data_of(case), updates=updates)
    torch.manual_seed(99)
    torch.randn(5, device=device)
    second.fit(data_of(case), max_updates=updates, resume="auto")
    return whole, second, first.progress.updates


def test_a_run_that_is_resumed_is_the_one_that_was_never_left(device: torch.device, tmp_path: Any) -> None:
    check_resumed(*resumed(device, tmp_path))


def check_resumed(whole: Any, second: Any, cut: int) -> None:
    """They end alike, bit for bit, and so does every update from the cut on."""
    assert 0 < cut < second.result.updates == whole.result.updates
    assert watch_of(second).records[0].update == cut + 1
    assert same(state_of(whole), state_of(second))
    assert losses(whole)[cut:] == losses(second)
    assert whole.history[-1] == second.history[-1]


def test_saves_hold_the_weights_of_their_update(device: torch.device, tmp_path: Any) -> None:
    directory = tmp_path / "run"
    trained(CASE, device, updates=30, checkpoint=Checkpoint(directory, every=Updates(10)))
    check_saved(device, directory, updates=(10, 20, 30))


def check_saved(device: torch.device, directory: Any, *, updates: Any) -> None:
    """Each checkpoint holds what a run of so many updates ends with."""
    found = {path.name: path for path in directory.iterdir() if path.is_dir()}
    assert len(found) == len(updates)
    for number, path in zip(updates, sorted(found.values()), strict=True):
        short, held = trained(CASE, device, updates=number), net()
        load_weights(path, held)
        assert same(tensors(short.model), tensors(held)), (number, path)


def test_runs_give_their_memory_back(device: torch.device) -> None:
    def one() -> int:
        trained(CASE, device, updates=12)
        gc.collect()
        return torch.cuda.memory_allocated(device)

    one()
    first = one()
    assert [one() for _ in range(4)] == [first] * 4


def test_two_trainers_take_turns(device: torch.device) -> None:
    pair = [make(CASE, device), make(CASE, device, build=noisy_net)]
    for trainer in pair * 2:
        fitted(trainer, host_batches(12), updates=12)
    for trainer, build in zip(pair, (net, noisy_net), strict=True):
        alone = make(CASE, device, build=build)
        for _ in range(2):
            fitted(alone, host_batches(12), updates=12)
        assert same(tensors(alone.model), tensors(trainer.model))
