"""The speed of a run, of one process and of several: exact counts, who gets a report, and what it costs."""

from __future__ import annotations

import gc
import io
import sys
import time
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from distributed.pool import pool
from trainwright import Checkpoint, Console, Epochs, Journal, Observer, Seconds, SettingError, Trainer, Updates, batches
from trainwright.distributed.ddp import DDP
from trainwright.observers import Throughput, read_journal
from trainwright.observers.throughput import Speed, merged

x = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
y = torch.arange(48) % 3
FIVE = Updates(5)


class Reported(Observer):
    def __init__(self):
        self.speeds = []

    def on_speed(self, speed):
        self.speeds.append(speed)


def made(cls=Trainer, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 3))
    return cls(
        model, torch.optim.AdamW(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), **{"console": False} | settings
    )


def speeds_of(*, epochs=2, cls=Trainer, every=FIVE, **settings):
    reported, asked = Reported(), {key: settings.pop(key) for key in ("peak", "flops_per_row") if key in settings}
    trainer = made(cls, observers=[Throughput(every=every, **asked), reported], **settings)
    trainer.fit(batches((x, y), 4, shuffle=True, seed=0), epochs=epochs)
    return reported.speeds


def a_speed(**others):
    numbers = {"epoch": 0, "update": 9, "seconds": 2.0, "rows": 64, "updates": 8, "data_seconds": 0.0}
    return Speed(**(numbers | others))


def test_every_row_and_update_is_counted_once() -> None:
    speeds = speeds_of()
    assert [one.update for one in speeds] == [5, 10, 12, 15, 20, 24]
    assert [one.updates for one in speeds] == [5, 5, 2, 3, 5, 4]
    assert [one.rows for one in speeds] == [20, 20, 8, 12, 20, 16]
    assert [one.epoch for one in speeds] == [0, 0, 1, 1, 1, 2]
    assert all(one.seconds > 0 and 0 <= one.waiting <= 1 for one in speeds)
    assert [one.update for one in speeds_of(every=Epochs(1))] == [12, 24]


@pytest.mark.slow
def test_the_time_of_pauses_is_no_training() -> None:
    class Slow(Trainer):
        def end_epoch(self, metrics):
            time.sleep(0.2)

        def evaluate(self, data, name="val", *, batch_size=None):
            time.sleep(0.2)
            return super().evaluate(data, name, batch_size=batch_size)

    reported = Reported()
    trainer = made(Slow, observers=[Throughput(every=Updates(5)), reported])
    result = trainer.fit(batches((x, y), 4), batches((x, y), 16), epochs=2, validate=Updates(3))
    assert result.seconds > 1.6
    assert sum(one.seconds for one in reported.speeds) < 0.4


def test_waiting_for_data_is_reported_and_bounds_the_run() -> None:
    def slow(epoch):
        for batch in zip(x.split(12), y.split(12), strict=True):
            time.sleep(0.05)
            yield batch

    reported = Reported()
    made(observers=[Throughput(), reported]).fit(slow, epochs=2, epoch_updates=4)
    assert [one.bound for one in reported.speeds] == ["input", "input"]
    assert all(0.5 < one.waiting <= 1 for one in reported.speeds)
    assert all(one.data_seconds >= 0.15 for one in reported.speeds)


def test_mfu_is_rows_times_operations_over_the_peak() -> None:
    row = 2 * (2 * 4 * 6) + 3 * (2 * 6 * 3)
    for one in speeds_of(peak=1e9):
        assert one.flops_per_row == row
        assert one.mfu == pytest.approx(one.rows / one.seconds * row / 1e9)
        assert not one.note
    assert {one.flops_per_row for one in speeds_of(peak=1e9, flops_per_row=50.0)} == {50.0}


def test_what_hinders_a_count_is_reported() -> None:
    class Own(Trainer):
        def training_step(self, batch):
            return self.loss(self.model(batch[0]), batch[1])

    class Apart(Trainer):
        def split(self, batch):
            return batch

    class Reads(nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs) * float(inputs.sum() != 0)

    assert [one.note for one in speeds_of()][:1] == ["the peak of cpu is not known: Throughput(peak=...)"]
    assert "steps of your own" in speeds_of(cls=Own, peak=1e9)[0].note
    assert "split of your own" in speeds_of(cls=Apart, peak=1e9)[0].note
    reported, model = Reported(), Reads(4, 3)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, sgd, nn.CrossEntropyLoss(), console=False, observers=[Throughput(peak=1e9), reported])
    trainer.fit((x, y), batch_size=8, epochs=1)
    assert "does not run on the meta device (" in reported.speeds[0].note
    assert reported.speeds[0].mfu is None
    assert speeds_of(cls=Own, peak=1e9, flops_per_row=9)[0].mfu is not None


def test_memory_is_counted_by_kind() -> None:
    memory = speeds_of()[-1].memory
    weights = 4 * (4 * 6 + 6 + 6 + 6 + 6 * 3 + 3)
    assert memory["parameters"] == memory["gradients"] == weights
    assert memory["optimizer"] == 2 * weights + 4 * 6  # two moments, and a step of each parameter
    assert memory["buffers"] == 4 * (6 + 6) + 8
    if sys.platform == "linux":
        assert memory["process"] > 10 * 2**20


def test_what_bounds_a_run_is_reported_where_it_can_be() -> None:
    assert a_speed().bound == ""  # on a CPU host and device are one
    assert a_speed(data_seconds=0.2).bound == "input"
    assert a_speed(looks=4, busy=3, data_seconds=0.1).bound == "compute"
    assert a_speed(looks=4, busy=2).bound == "launch"
    assert a_speed(looks=4, busy=4, data_seconds=1.0).bound == "input"


def test_stretches_add_up() -> None:
    whole = merged([a_speed(looks=2, busy=2, data_seconds=0.5), a_speed(update=20, seconds=6.0, looks=1, peak=1.0)])
    assert (whole.seconds, whole.rows, whole.updates, whole.data_seconds) == (8.0, 128, 16, 0.5)
    assert (whole.rows_per_second, whole.updates_per_second, whole.waiting) == (16.0, 2.0, 0.0625)
    assert (whole.update, whole.looks, whole.busy, whole.peak) == (20, 3, 2, 1.0)


def test_a_resumed_run_measures_what_it_does_itself(tmp_path) -> None:
    def fit(epochs, **settings):
        reported = Reported()
        observers = [Throughput(every=Updates(5)), reported, Journal(tmp_path / "run.jsonl")]
        trainer = made(observers=observers, checkpoint=Checkpoint(tmp_path / "run", every=Updates(4)))
        trainer.fit(batches((x, y), 4, shuffle=True, seed=0), epochs=epochs, **settings)
        return [one.update for one in reported.speeds]

    assert fit(1) == [5, 10, 12]
    assert fit(2, resume="auto") == [15, 20, 24]
    found = [one["update"] for one in read_journal(tmp_path / "run.jsonl") if one["event"] == "speed"]
    assert found == [5, 10, 12, 15, 20, 24]


def test_the_console_tells_it_after_the_row_of_an_epoch_and_once_why_a_number_is_missing() -> None:
    stream = io.StringIO()
    made(console=Console(stream), observers=[Throughput(every=Updates(5))]).fit((x, y), batch_size=4, epochs=2)
    lines = stream.getvalue().splitlines()
    reported = [i for i, line in enumerate(lines) if line.startswith(" speed ")]
    assert len(reported) == 2
    assert lines[reported[0] - 1].split()[:2] == ["1", "12"]
    assert (
        "rows/s · " in lines[reported[0]]
        and "updates/s" in lines[reported[0]]
        and "waiting for data" in lines[reported[0]]
    )
    assert stream.getvalue().count("no MFU: the peak of cpu is not known") == 1
    assert "parameters 252 B" in stream.getvalue()
    stream = io.StringIO()
    asked = Throughput(peak=1e9)
    made(console=Console(stream), observers=[asked]).fit((x, y), batch_size=4, epochs=1)
    assert "MFU " in stream.getvalue() and "no MFU" not in stream.getvalue()


def test_the_journal_holds_every_record(tmp_path) -> None:
    made(observers=[Throughput(every=Updates(5), peak=1e9), Journal(tmp_path / "run.jsonl")]).fit(
        (x, y), batch_size=4, epochs=1
    )
    records = [one for one in read_journal(tmp_path / "run.jsonl") if one["event"] == "speed"]
    assert [one["update"] for one in records] == [5, 10, 12]
    assert records[0]["rows"] == 20 and records[0]["mfu"] > 0 and records[0]["memory"]["buffers"] == 56


@pytest.mark.slow
def test_nothing_is_called_for_it_between_two_turns() -> None:
    def calls(updates, *observers):
        counted = Counter()

        def profile(frame, event, _):
            if event == "call" and "trainwright" in frame.f_code.co_filename:  # what torch calls is its own affair
                counted[f"{frame.f_code.co_filename}:{frame.f_code.co_name}"] += 1

        trainer = made(observers=observers)
        data = [(x[:8], y[:8])] * updates
        gc.collect()
        gc.disable()  # what earlier tests have left is not collected, and called, in here
        sys.setprofile(profile)
        try:
            trainer.fit(data, epochs=1)
        finally:
            sys.setprofile(None)
            gc.enable()
        return counted

    asked = Throughput(every=Updates(10_000))
    calls(3, asked)
    assert calls(40, asked) - calls(20, asked) == calls(40) - calls(20)
    some, more = (calls(101, Throughput(every=Updates(n))).total() for n in (20, 10))
    assert 0 < more - some <= 5 * 70  # each turn is a pause of the loop, which has 40 of them


@pytest.mark.parametrize(
    ("given", "reported"),
    [
        ({"every": Seconds(1)}, "would ask the clock at every update"),
        ({"every": Epochs(0.5)}, "whole epochs"),
        ({"every": 100}, "every=Updates"),
        ({"peak": 0}, "a number above 0"),
        ({"flops_per_row": "many"}, "count_flops"),
        ({"peak": float("inf")}, "a number above 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(given, reported) -> None:
    with pytest.raises(SettingError, match=reported):
        Throughput(**given)


def on_ranks(only_first: bool) -> list[Any]:
    torch.manual_seed(0)
    model, reported = nn.Linear(4, 3), Reported()
    asked = [Throughput(every=Updates(3), peak=1e9), reported]
    trainer = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        nn.CrossEntropyLoss(),
        console=False,
        parallel=DDP(),
        observers=asked if not only_first or torch.distributed.get_rank() == 0 else [],
    )
    trainer.fit(batches((torch.randn(50, 4), torch.arange(50) % 3), 8), epochs=2)
    return [(one.update, one.rows, one.flops_per_row, one.peak, one.note) for one in reported.speeds]


@pytest.mark.slow
@pytest.mark.parametrize("only_first", [False, True])
def test_the_first_process_tells_the_rows_of_all(only_first: bool) -> None:
    first, second = pool(2).run(on_ranks, only_first)
    assert second == []
    assert first[-1][0] == 14 and sum(one[1] for one in first) == 100
    row = 2 * (2 * 4 * 3)  # the inputs need no gradient
    assert {one[2:] for one in first} == {(row, 2e9, "")}  # the peaks add up
