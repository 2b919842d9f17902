"""TensorBoard: what the event files hold, read by the real package; and that steps are never shown twice."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from trainwright import Checkpoint, Observer, Seconds, SettingError, TensorBoardLogger, Trainer, Updates, batches
from trainwright.observers import Throughput

x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
y = torch.arange(40) % 3


class Reported(Observer):
    def __init__(self):
        self.updates, self.validations = [], []

    def on_update(self, update):
        self.updates.append(update)

    def on_validate(self, record):
        self.validations.append(record)


class Killed(Trainer):
    """Ends in an error of its own at update 13, as a crash would."""

    at = 13

    def after_update(self):
        if self.progress.updates == self.at:
            raise OSError("gone")


def made(*observers, cls=Trainer, **settings):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return cls(model, optimizer, nn.CrossEntropyLoss(), console=False, observers=observers, **settings)


def data():
    return batches((x, y), 4, shuffle=True, seed=0)


def read(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Steps and values of every tag, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(directory), size_guidance={"scalars": 0}).Reload()
    return {tag: [(one.step, one.value) for one in shown.Scalars(tag)] for tag in shown.Tags()["scalars"]}


def test_every_number_of_a_run_is_in_the_files(tmp_path: Path) -> None:
    reported = Reported()
    trainer = made(TensorBoardLogger(tmp_path, every=Updates(1)), reported, clip=1.0, metrics={"right": hits})
    result = trainer.fit(data(), batches((x, y), 20), epochs=2)
    shown = read(tmp_path)
    assert set(shown) == {"loss", "lr", "grad_norm", "val_loss", "val_right", "epoch/loss", "epoch/right"}
    for name in ("loss", "lr", "grad_norm"):
        assert shown[name] == [(one.update, pytest.approx(getattr(one, name), rel=1e-6)) for one in reported.updates]
    for tag, name in (("val_loss", "val_loss"), ("epoch/loss", "loss"), ("val_right", "val_right")):
        assert shown[tag] == [(row["update"], pytest.approx(row[name], rel=1e-6)) for row in result.history]
    assert len(shown["loss"]) == 20


def hits(output, target):
    return (output.argmax(1) == target).double()


def test_every_is_kept_to_and_nothing_is_made_for_the_updates_between(tmp_path: Path) -> None:
    class Watched(TensorBoardLogger):
        calls = 0

        def on_update(self, update):
            self.calls += 1
            super().on_update(update)

    watched = Watched(tmp_path, every=Updates(7))
    made(watched).fit(data(), epochs=2)
    assert [step for step, _ in read(tmp_path)["loss"]] == [7, 14]
    assert watched.calls == 2


def test_a_resumed_run_goes_on_in_the_same_directory_without_doubled_steps(tmp_path: Path) -> None:
    def run(cls, name):
        checkpoint = Checkpoint(tmp_path / name / "kept", every=Updates(10))
        board = TensorBoardLogger(tmp_path / name, every=Updates(1))
        made(board, cls=cls, checkpoint=checkpoint).fit(data(), data(), epochs=2, validate=Updates(3), resume="auto")

    with pytest.raises(OSError, match="gone"):
        run(Killed, "killed")
    assert [step for step, _ in read(tmp_path / "killed")["loss"]] == list(range(1, 13))
    run(Trainer, "killed")
    run(Trainer, "whole")
    shown, whole = read(tmp_path / "killed"), read(tmp_path / "whole")
    assert [step for step, _ in shown["loss"]] == list(range(1, 21))
    assert shown == whole


def test_a_run_that_begins_anew_in_a_directory_hides_the_one_before(tmp_path: Path) -> None:
    made(TensorBoardLogger(tmp_path, every=Updates(1))).fit(data(), epochs=2)
    made(TensorBoardLogger(tmp_path, every=Updates(2))).fit(data(), epochs=1)
    shown = read(tmp_path)
    assert [step for step, _ in shown["loss"]] == [2, 4, 6, 8, 10]
    assert [step for step, _ in shown["epoch/loss"]] == [10]


def test_the_stages_of_a_run_follow_one_another(tmp_path: Path) -> None:
    trainer = made(TensorBoardLogger(tmp_path, every=Updates(1)))
    trainer.fit(data(), epochs=1)
    trainer.fit(data(), epochs=1)
    assert [step for step, _ in read(tmp_path)["loss"]] == list(range(1, 21))


def test_numbers_of_groups_optimizers_and_logs_have_tags_of_their_own(tmp_path: Path) -> None:
    class Logs(Trainer):
        def training_step(self, batch):
            self.log("seen", float(self.progress.updates))
            return super().training_step(batch)

    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.2}]
    optimizer = torch.optim.SGD(groups)
    board = TensorBoardLogger(tmp_path, every=Updates(1))
    Logs(model, {"all": optimizer}, nn.CrossEntropyLoss(), console=False, observers=[board]).fit(data(), epochs=1)
    shown = read(tmp_path)
    assert shown["seen"] == [(step, step - 1) for step in range(1, 11)]
    assert [value for _, value in shown["lr/group_1"]] == pytest.approx([0.2] * 10)
    assert [value for _, value in shown["lr_all"]] == pytest.approx([0.1] * 10)
    assert "epoch/seen" in shown
    assert "epoch/lr_all" not in shown


def test_nan_is_written_as_nan_and_an_update_that_was_held_back_has_no_step(tmp_path: Path) -> None:
    bad = x.clone()
    bad[9] = math.nan
    source = batches((bad, y), 4, shuffle=False)
    made(TensorBoardLogger(tmp_path / "skips", every=Seconds(1e-9)), on_nonfinite="skip").fit(source, epochs=1)
    shown = read(tmp_path / "skips")
    assert [step for step, _ in shown["loss"]] == list(range(1, 10))
    assert shown["skipped"] == [(9, 1)]
    made(TensorBoardLogger(tmp_path / "ignores", every=Updates(1)), on_nonfinite="ignore").fit(source, epochs=1)
    losses = [value for _, value in read(tmp_path / "ignores")["loss"]]
    assert [math.isnan(loss) for loss in losses] == [False, False, *[True] * 8]


def test_speeds_are_written_where_they_are_asked_for(tmp_path: Path) -> None:
    made(TensorBoardLogger(tmp_path), Throughput(every=Updates(5))).fit(data(), epochs=1)
    shown = read(tmp_path)
    assert [step for step, _ in shown["speed/rows_per_second"]] == [5, 10]
    assert shown["memory/parameters"][0] == (5, 60)


def test_a_run_that_ends_in_an_error_has_closed_its_file(tmp_path: Path) -> None:
    board = TensorBoardLogger(tmp_path, every=Updates(1))
    with pytest.raises(OSError, match="gone"):
        made(board, cls=Killed).fit(data(), epochs=2)
    assert len(read(tmp_path)["loss"]) == 12


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    name = "trainwright.observers.loggers.base.find_spec"
    monkeypatch.setattr(name, lambda package: None if package == "tensorboard" else found(package))
    with pytest.raises(SettingError, match=r'pip install tensorboard   # or pip install "\.\[tensorboard\]"'):
        TensorBoardLogger(tmp_path)


@pytest.mark.parametrize("every", [5, 0.5, None, "10"])
def test_every_is_a_span_between_updates(tmp_path: Path, every) -> None:
    with pytest.raises(SettingError, match=r"Updates\(n\) or Seconds\(n\)"):
        TensorBoardLogger(tmp_path, every=every)
