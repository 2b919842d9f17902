"""What cannot be recorded, and what goes on beside recordings: the process and the run are as good as before."""

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
    distance,
    fitted,
    host_batches,
    losses,
    make,
    net,
    noisy_net,
    path_of,
    rows,
    same,
    state_of,
    tensors,
    trained,
    watch_of,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainwright import Checkpoint, Trainer, TrainwrightError, Updates, load_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("deterministic"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),  # of a loader, beside CUDA's threads
]
CASE = Case("adamw", 0.25, "one", None, "step")


class Hindered(nn.Module):
    """A model whose forward does something; most of these do it only while it is recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.body = net()

    def forward(self, x: Any) -> Any:
        hidden = self.body[0](x)
        self.hinder(hidden)
        return self.body[1:](hidden)

    def hinder(self, hidden: Any) -> None:
        """Nothing."""

    @staticmethod
    def recorded(hidden: Any) -> bool:
        """Whether a recording is under way."""
        return hidden.is_cuda and torch.cuda.is_current_stream_capturing()


class Reads(Hindered):
    """Reads a number, always."""

    def hinder(self, hidden: Any) -> None:
        assert hidden.detach().abs().sum().item() > 0


class ReadsThen(Hindered):
    def hinder(self, hidden: Any) -> None:
        if self.recorded(hidden):
            hidden.detach().sum().item()


class Synchronises(Hindered):
    def hinder(self, hidden: Any) -> None:
        if self.recorded(hidden):
            torch.cuda.synchronize()


class Raises(Hindered):
    def hinder(self, hidden: Any) -> None:
        if self.recorded(hidden):
            raise ValueError("not while somebody looks")


class Hungry(Hindered):
    """Runs out of memory."""

    def hinder(self, hidden: Any) -> None:
        if self.recorded(hidden):
            torch.empty(2**46, device=hidden.device)


class Draws(Hindered):
    """Fails after it has drawn random numbers."""

    def hinder(self, hidden: Any) -> None:
        nn.functional.dropout(hidden.detach(), 0.5)
        if self.recorded(hidden):
            hidden.detach().sum().item()


HINDERED = [Reads, ReadsThen, Synchronises, Raises, Hungry, Draws]


@pytest.mark.parametrize("build", HINDERED)
def test_after_a_recording_that_failed_the_run_goes_on_as_without(build: Any, device: torch.device) -> None:
    eager, tried = both_ways(build, device)
    assert same(state_of(eager), state_of(tried))
    assert losses(eager) == losses(tried)
    assert not path_of(tried).startswith("L3")
    assert "no CUDA graph: " in path_of(tried)
    assert "the host takes" not in path_of(tried)  # it was tried
    assert torch.equal(*[noise_after(build, device, graphs=graphs) for graphs in (False, "auto")])
    check_usable(device)


def both_ways(build: Any, device: torch.device, *, updates: int = 20) -> tuple[Any, Any]:
    """The run without recordings, and the one that tries to make them."""
    runs = [trained(CASE, device, graphs=graphs, build=build, updates=updates) for graphs in (False, "auto")]
    return runs[0], runs[1]


def noise_after(build: Any, device: torch.device, *, graphs: Any, updates: int = 8) -> Any:
    """What the device draws after such a run."""
    trained(CASE, device, graphs=graphs, build=build, updates=updates)
    return torch.rand(8, device=device).cpu()


def check_usable(device: torch.device, *, graphs: Any = "require") -> None:
    """The process computes where it did, gives memory back, and records the next run."""
    if device.type == "cuda":
        assert torch.cuda.current_stream(device) == torch.cuda.default_stream(device)
        torch.cuda.synchronize(device)
        gc.collect()
        torch.cuda.empty_cache()  # torch 2.11 refuses it where its allocator takes a recording to be under way
    captured, eager = (trained(CASE, device, graphs=given, updates=20) for given in (graphs, False))
    assert distance(eager.model, captured.model) <= 1e-5
    assert graphs != "require" or path_of(captured).startswith("L3")
    assert torch.ones(3, device=device).sum().item() == 3


@pytest.mark.parametrize("build", HINDERED)
def test_what_must_be_recorded_and_cannot_be_is_an_error_that_says_why(build: Any, device: torch.device) -> None:
    trainer = make(CASE, device, graphs="require", build=build)
    with pytest.raises((TrainwrightError, ValueError, torch.OutOfMemoryError), match=r"\w{3}"):
        fitted(trainer, data_of(CASE), updates=20)
    assert all(torch.isfinite(one).all() for one in tensors(trainer.model))
    check_usable(device)


def test_a_hook_of_a_module_is_called_for_each_batch(device: torch.device) -> None:
    for graphs in (False, "auto"):
        calls: list[int] = []
        trainer = make(CASE, device, graphs=graphs)
        trainer.model[0].register_forward_hook(lambda *_, told=calls: told.append(1))
        fitted(trainer, data_of(CASE), updates=20)
        assert len(calls) == 20, trainer.fast_path


class Keeps(Trainer[nn.Module]):
    """A step that also reads the batch before, which a recording knows nothing of."""

    def training_step(self, batch: Any) -> Any:
        before, self.before = getattr(self, "before", batch), batch
        return super().training_step(batch) + super().training_step(before)


class Turns(Trainer[nn.Module]):
    """A step that is another one each third time, by a number of the host's."""

    seen = 0

    def training_step(self, batch: Any) -> Any:
        self.seen += 1
        return super().training_step(batch) * (2.0 if self.seen % 3 == 0 else 1.0)


@pytest.mark.parametrize("kind", [Keeps, Turns])
def test_a_step_that_a_replay_would_not_make_is_made_as_it_is(kind: Any, device: torch.device) -> None:
    eager, tried = (trained(CASE, device, graphs=graphs, kind=kind) for graphs in (False, "auto"))
    assert distance(eager.model, tried.model) <= 1e-5
    assert losses(tried) == pytest.approx(losses(eager), rel=1e-4)


def with_workers(device: torch.device, number: int) -> Any:
    """A loader whose worker fetches, and whose thread pins memory, while the run goes on."""
    data = TensorDataset(*rows(number * SIZE))
    return DataLoader(data, SIZE, num_workers=1, pin_memory=device.type == "cuda", persistent_workers=True)


def test_a_recording_beside_a_loader_that_pins_memory(device: torch.device) -> None:
    runs = [trained(CASE, device, graphs=graphs, data=with_workers(device, 20)) for graphs in (False, "require")]
    assert distance(runs[0].model, runs[1].model) <= 1e-5
    assert path_of(runs[1]).startswith("L3")


def interrupted(device: torch.device, *, graphs: Any, at: int) -> Any:
    """A trainer that a signal has ended when the record of an update came."""
    trainer = make(CASE, device, graphs=graphs)
    watch_of(trainer).does(at, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        fitted(trainer, data_of(CASE))
    return trainer


def test_an_interrupt_between_replays_ends_with_a_whole_update(device: torch.device) -> None:
    trainer = interrupted(device, graphs="require", at=15)
    done = trainer.progress.updates
    assert 15 <= done <= 20
    whole = trained(CASE, device, graphs="require", updates=done)
    assert same(state_of(trainer), state_of(whole))
    check_usable(device)


def resumed(
    device: torch.device, directory: Any, *, graphs: Any, cut: int = 23, updates: int = 50
) -> tuple[Any, Any, int]:
    """A run as a whole; one that was left in the middle of an epoch and gone on with in another trainer; where.

    Its rates are exact in float32, so that the eager updates that begin each run are the replayed ones bit for bit.
    """
    case = Case("adamw", 0.25, "four", None, "step")

    def trainer(name: str) -> Any:
        saves = Checkpoint(directory / name, every=Updates(7))
        return make(case, device, graphs=graphs, build=noisy_net, checkpoint=saves)

    whole, first, second = trainer("whole"), trainer("cut"), trainer("cut")
    fitted(whole, data_of(case), updates=updates)
    watch_of(first).does(cut, lambda: first.stop("to go on later"))
    fitted(first, data_of(case), updates=updates)
    torch.manual_seed(99)
    torch.randn(5, device=device)
    second.fit(data_of(case), max_updates=updates, resume="auto")
    return whole, second, first.progress.updates


@pytest.mark.parametrize("graphs", ["require", False])
def test_a_run_that_is_resumed_is_the_one_that_was_never_left(graphs: Any, device: torch.device, tmp_path: Any) -> None:
    check_resumed(*resumed(device, tmp_path, graphs=graphs))


def check_resumed(whole: Any, second: Any, cut: int) -> None:
    """They end alike, bit for bit, and so does every update from the cut on."""
    assert 0 < cut < second.result.updates == whole.result.updates
    assert watch_of(second).records[0].update == cut + 1
    assert same(state_of(whole), state_of(second))
    assert losses(whole)[cut:] == losses(second)
    assert whole.history[-1] == second.history[-1]


@pytest.mark.parametrize("graphs", ["require", False])
def test_saves_beside_replays_hold_the_weights_of_their_update(
    graphs: Any, device: torch.device, tmp_path: Any
) -> None:
    directory = tmp_path / "run"
    trained(CASE, device, graphs=graphs, updates=30, checkpoint=Checkpoint(directory, every=Updates(10)))
    check_saved(device, directory, graphs=graphs, updates=(10, 20, 30))


def check_saved(device: torch.device, directory: Any, *, graphs: Any, updates: Any) -> None:
    """Each checkpoint holds what a run of so many updates ends with."""
    found = {path.name: path for path in directory.iterdir() if path.is_dir()}
    assert len(found) == len(updates)
    for number, path in zip(updates, sorted(found.values()), strict=True):
        short, held = trained(CASE, device, graphs=graphs, updates=number), net()
        load_weights(path, held)
        assert same(tensors(short.model), tensors(held)), (number, path)


def test_runs_with_recordings_give_their_memory_back(device: torch.device) -> None:
    def one() -> int:
        trained(CASE, device, graphs="require", updates=12)
        gc.collect()
        return torch.cuda.memory_allocated(device)

    one()
    first = one()
    assert [one() for _ in range(4)] == [first] * 4


def test_two_trainers_take_turns(device: torch.device) -> None:
    pair = [make(CASE, device, graphs="require"), make(CASE, device, graphs="require", build=noisy_net)]
    for trainer in pair * 2:
        fitted(trainer, host_batches(12), updates=12)
    for trainer, build in zip(pair, (net, noisy_net), strict=True):
        alone = make(CASE, device, build=build)
        for _ in range(2):
            fitted(alone, host_batches(12), updates=12)
        assert distance(alone.model, trainer.model) <= 1e-5
