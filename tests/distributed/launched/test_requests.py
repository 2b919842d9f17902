"""A stop, a save and a signal on one rank hold for all ranks, whenever they come."""

from __future__ import annotations

import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from distributed.launched.test_unused_parameters import AtTimes
from distributed.pool import Pool
from trainwright import (
    Checkpoint,
    EarlyStopping,
    Observer,
    Probe,
    SettingError,
    StepError,
    Stopped,
    Trainer,
    Updates,
    batches,
)
from trainwright.observers import Update


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def data() -> Any:
    rows = torch.Generator().manual_seed(1)
    return batches((torch.randn(24, 4, generator=rows), torch.randint(3, (24,), generator=rows)), 8)


class SavesOnTheFirst(Trainer[nn.Module]):
    def end_epoch(self, metrics: dict[str, float]) -> None:
        if self.is_main:
            self.save()


def save_on_the_first(directory: str) -> list[str]:
    slot = Checkpoint(directory, every=Updates(1000), keep=9)
    SavesOnTheFirst(model(), sgd, nn.CrossEntropyLoss(), checkpoint=slot, console=False).fit(data(), epochs=3)
    return sorted(path.name for path in Path(directory).iterdir() if path.is_dir())


class SignalledAtTheEnd(Trainer[nn.Module]):
    def end_epoch(self, metrics: dict[str, float]) -> None:
        if self.progress.epoch == 2 and not self.is_main:
            os.kill(os.getpid(), signal.SIGTERM)


def signal_the_second_at_the_end() -> tuple[int, str]:
    trainer = SignalledAtTheEnd(model(), sgd, nn.CrossEntropyLoss(), console=False)
    code = 0
    try:
        trainer.fit(data(), epochs=2)
    except Stopped as stopped:
        code = int(str(stopped.code))
    assert trainer.result is not None
    return code, trainer.result.stopped


class Recorder(Observer):
    wants = frozenset({"grad_norm"})

    def __init__(self) -> None:
        self.updates: list[Update] = []

    def on_update(self, update: Update) -> None:
        self.updates.append(update)


class LogsItself(Trainer[nn.Module]):
    def training_step(self, batch: Any) -> Any:
        self.log("share", float(self.is_main))
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])


class LogsAfterwards(Trainer[nn.Module]):
    def after_update(self) -> None:
        self.log("share", float(self.is_main))


def watch_on_the_first(logs: type[Trainer[nn.Module]]) -> list[tuple[float, bool]]:
    recorder = Recorder()
    trainer = logs(
        model(),
        sgd,
        nn.CrossEntropyLoss(),
        observers=[recorder] if os.environ["LOCAL_RANK"] == "0" else [],
        console=False,
    )
    trainer.fit(data(), epochs=1)
    return [(update.values["share"], update.grad_norm is not None) for update in recorder.updates]


def probe_on_the_first() -> str:
    probes = [Probe(lambda trainer: None, every=Updates(2))] if os.environ["LOCAL_RANK"] == "0" else []
    trainer = Trainer(model(), sgd, nn.CrossEntropyLoss(), observers=probes, console=False)
    with pytest.raises(SettingError) as refused:
        trainer.fit(data(), epochs=1)
    return str(refused.value)


class SetFree(Trainer[nn.Sequential]):
    """Sets its first layer free after the second of three updates."""

    def after_update(self) -> None:
        if self.progress.updates == 2:
            self.model[0].requires_grad_(True)


def set_free_inside_an_epoch() -> str:
    net = model()
    net[0].requires_grad_(False)
    trainer = SetFree(net, torch.optim.SGD(net.parameters(), lr=0.1), nn.CrossEntropyLoss(), console=False)
    with pytest.raises(StepError) as refused:
        trainer.fit(data(), epochs=1)
    return str(refused.value)


def use_at_times() -> float:
    torch.manual_seed(0)
    x, y = torch.randn(24, 4), torch.randint(3, (24,))
    x[:, 0] = torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0, 1.0]).repeat_interleave(4)
    net = AtTimes()
    Trainer(net, sgd, nn.CrossEntropyLoss(), console=False).fit(batches((x, y), 8), epochs=2)
    return float(net.at_times.weight.detach().sum())


class SlowlyValidated(Trainer[nn.Module]):
    """Its first process is signalled in a validation that takes longer than the grace of a signal."""

    def validation_step(self, batch: Any) -> Any:
        if self.is_main and self.progress.updates:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)
        return super().validation_step(batch)


def signal_the_first_in_a_validation(directory: str) -> tuple[str, int]:
    slot = Checkpoint(directory, grace=0.1)
    trainer = SlowlyValidated(model(), sgd, nn.CrossEntropyLoss(), checkpoint=slot, console=False)
    with pytest.raises(Stopped):
        trainer.fit(data(), data(), epochs=1)
    assert trainer.result is not None
    return trainer.result.stopped, len(list(Path(directory).glob("update-*")))


class StopsAtTheStart(Trainer[nn.Module]):
    """Its second process stops before the third epoch; the first one may know of an end of its own by then."""

    knows = False

    def begin_epoch(self, epoch: int) -> None:
        if epoch == 2 and not self.is_main:
            self.stop("enough")
        if epoch == 2 and self.is_main and self.knows:
            self._counters.stopped = "an end of its own"


def stop_at_the_start(knows: bool) -> tuple[str, int, int, int]:
    trainer = StopsAtTheStart(model(), sgd, nn.CrossEntropyLoss(), console=False)
    trainer.knows = knows
    result = trainer.fit(data(), epochs=5)
    return result.stopped, result.updates, result.epochs, len(result.history)


@pytest.mark.parametrize("knows", [False, True])
def test_a_stop_on_one_rank_before_an_epoch_stops_all_there(ranks2: Pool, knows: bool) -> None:
    assert ranks2.run(stop_at_the_start, knows) == 2 * [("enough", 6, 2, 2)]


class Grown(Trainer[nn.Module]):
    """Its best is the first epoch; afterwards its model gets a part more."""

    def begin_epoch(self, epoch: int) -> None:
        if epoch == 1:
            self.model.register_buffer("more", torch.zeros(2))

    def validation_step(self, batch: Any) -> Any:
        return torch.tensor(float(self.progress.epoch))


def grow() -> list[str]:
    stopping = EarlyStopping("val_loss", patience=1, restore_best=True)
    trainer = Grown(model(), sgd, nn.CrossEntropyLoss(), early_stopping=stopping, console=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(data(), data(), epochs=9)
    return [f"{Path(one.filename).name}: {one.message}" for one in caught]


def test_warnings_that_hold_for_all_ranks_come_from_rank_0(ranks2: Pool) -> None:
    (line,), others = ranks2.run(grow)
    assert line.startswith("test_requests.py: the weights of the best val_loss") and "changed since" in line
    assert others == []


def test_a_validation_is_finished_and_saved_when_one_rank_gets_a_signal(ranks2: Pool, tmp_path: Path) -> None:
    assert ranks2.run(signal_the_first_in_a_validation, str(tmp_path)) == 2 * [("SIGTERM", 1)]


@pytest.mark.parametrize("logs", [LogsItself, LogsAfterwards])
def test_observers_on_one_rank_get_the_numbers_of_all(ranks2: Pool, logs: type[Trainer[nn.Module]]) -> None:
    assert ranks2.run(watch_on_the_first, logs) == [3 * [(0.5, True)], []]


def test_probes_on_one_rank_alone_are_refused(ranks2: Pool) -> None:
    assert all("rank 1: none" in text for text in ranks2.run(probe_on_the_first))


def test_layers_unfrozen_inside_an_epoch_are_refused(ranks2: Pool) -> None:
    assert all("begin_epoch" in text for text in ranks2.run(set_free_inside_an_epoch))


def test_a_layer_used_on_one_rank_alone_is_averaged(ranks2: Pool) -> None:
    first, second = ranks2.run(use_at_times)
    assert first == second


def test_a_save_requested_on_one_rank_at_an_epochs_end_is_made_by_all(ranks2: Pool, tmp_path: Path) -> None:
    kept = ranks2.run(save_on_the_first, str(tmp_path / "run"))
    assert len(kept[0]) == 3, kept


def test_a_signal_after_the_last_exchange_stops_all_ranks(ranks2: Pool) -> None:
    assert ranks2.run(signal_the_second_at_the_end) == 2 * [(128 + signal.SIGTERM, "SIGTERM")]
