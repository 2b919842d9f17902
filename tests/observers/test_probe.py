"""Probes and periodic observers: when they are called, that nothing is changed by them, where their numbers go."""

from __future__ import annotations

import io
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from trainwright import (
    Checkpoint,
    Console,
    Epochs,
    Journal,
    Observer,
    Probe,
    Seconds,
    SettingError,
    Trainer,
    Updates,
    accuracy,
    batches,
)
from trainwright.core import durations
from trainwright.fit import boundary as clock_of_fit
from trainwright.observers import read_journal

x = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
y = torch.arange(12) % 3


def made(cls=Trainer, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 3))
    return cls(
        model, torch.optim.AdamW(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), **{"console": False} | settings
    )


def train(size=2):
    return batches((x, y), size, shuffle=True, seed=0)


class Reported(Observer):
    def __init__(self, every=None):
        self.every = every
        self.updates = []

    def on_update(self, update):
        self.updates.append(update)


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        (Updates(1), [*range(1, 13)]),
        (Updates(4), [4, 8, 12]),
        (Updates(5), [5, 10]),
        (Updates(6), [6, 12]),
        (Epochs(1), [6, 12]),
        (Epochs(2), [12]),
        (Seconds(1e9), []),
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_probe_is_called_each_time_its_span_has_passed(every, expected, stream):
    seen = []
    trainer = made(observers=[Probe(lambda trainer: seen.append(trainer.progress.updates), every=every)])
    data = (lambda epoch: (batch for batch in train())) if stream else train()
    trainer.fit(data, epochs=2)
    assert seen == expected


def test_a_probe_of_a_class_of_ones_own_is_called_too():
    class Mine(Probe):
        """Probes after each update."""

        def __init__(self):
            super().__init__(lambda trainer: seen.append(trainer.progress.updates), every=Updates(1))

    seen = []
    made(observers=[Mine()]).fit(train(), epochs=1)
    assert seen == list(range(1, 7))


@pytest.fixture
def a_second_a_step(monkeypatch):
    """A class of Trainer whose steps take a second each, by the clock that spans in seconds read."""
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    for module in (durations, clock_of_fit):
        monkeypatch.setattr(module, "time", clock)

    class Timed(Trainer):
        def training_step(self, batch):
            clock.now += 1.0
            return super().training_step(batch)

    return Timed


def test_a_probe_and_an_observer_are_called_after_so_many_seconds(a_second_a_step):
    seen, reported = [], Reported(Seconds(2.5))
    probe = Probe(lambda trainer: seen.append(trainer.progress.updates), every=Seconds(2.5))
    made(a_second_a_step, observers=[probe, reported]).fit(train(), epochs=2)
    assert seen == [update.update for update in reported.updates] == [3, 6, 9, 12]


def test_a_backward_in_a_probe_changes_no_update():
    def probe(trainer):
        with torch.enable_grad():
            trainer.model(x).sum().backward()

    histories = []
    for probes in ([], [Probe(probe, every=Updates(1))]):
        torch.manual_seed(5)
        histories.append(made(observers=probes).fit(train(), epochs=2).history)
    assert histories[0] == histories[1]


def test_numbers_of_a_probe_stand_in_the_next_update_and_in_the_epochs_row():
    reported = Reported()
    probe = Probe(lambda trainer: {"n": float(trainer.progress.updates)}, every=Updates(2))
    result = made(observers=[probe, reported]).fit(train(), epochs=2)
    expected = [None, None, 2.0, None, 4.0, None, 6.0, None, 8.0, None, 10.0, None]
    assert [update.values.get("n") for update in reported.updates] == expected
    assert [row["n"] for row in result.history] == [4.0, 10.0]


def test_the_name_of_a_metric_is_refused():
    probe = Probe(lambda trainer: {"accuracy": 1.0}, every=Updates(2))
    with pytest.raises(SettingError, match="a metric has this name"):
        made(observers=[probe], metrics={"accuracy": accuracy}).fit(train(), epochs=1)


def test_numbers_of_a_probe_are_kept_by_a_validation_inside_the_epoch_and_by_a_checkpoint(tmp_path):
    class Dies(Observer):
        at = None

        def on_update(self, update):
            if update.update == self.at:
                raise ZeroDivisionError

    def run(directory, at=None):
        dies, reported = Dies(), Reported()
        dies.at = at
        probe = Probe(lambda trainer: {"n": float(trainer.progress.updates)}, every=Updates(2))
        slot = Checkpoint(directory, every=Updates(2))
        trainer = made(observers=[probe, dies, reported], checkpoint=slot)
        return trainer.fit(train(), train(), epochs=2, validate=Updates(4), resume="auto").history, reported

    whole, reported = run(tmp_path / "whole")
    assert [update.values.get("n") for update in reported.updates[2:6]] == [2.0, None, 4.0, None]
    for at in (3, 5, 9):
        with pytest.raises(ZeroDivisionError):
            run(tmp_path / "cut", at)
    resumed, also = run(tmp_path / "cut")
    assert resumed == whole
    assert [update.values for update in also.updates] == [update.values for update in reported.updates[8:]]
    assert also.updates[0].values["n"] == 8.0


@pytest.mark.parametrize(
    ("returned", "match"),
    [
        (3.0, r"returned a float(.|\n)*a dict of numbers, or None"),
        ([1], r"returned a list"),
        ({"loss": 1.0}, "reserved"),
        ({"val_x": 1.0}, "starts with val_"),
        ({3: 1.0}, "a string"),
        ({"n": "three"}, r"'n' is a str"),
        ({"n": torch.ones(2)}, r"'n' is a tensor of shape \(2,\)"),
        ({"n": None}, r"'n' is a NoneType"),
    ],
    ids=str,
)
def test_what_is_no_dict_of_numbers_is_refused_by_the_probes_name(returned, match):
    def mine(trainer):
        return returned

    trainer = made(observers=[Probe(mine, every=Updates(2))])
    with pytest.raises((SettingError, TypeError, ValueError), match=match) as caught:
        trainer.fit(train(), epochs=1)
    assert trainer.progress.updates == 2 and trainer.result.updates == 2
    if not isinstance(returned, dict):
        assert "Probe(mine)" in str(caught.value)


def test_tensors_and_whole_numbers_are_numbers():
    probe = Probe(lambda trainer: {"a": torch.tensor(2), "b": 3, "c": np.float64(4), "d": torch.ones(1, 1).sum()})
    row = made(observers=[probe]).fit(train(), epochs=1).history[0]
    assert (row["a"], row["b"], row["c"], row["d"]) == (2.0, 3.0, 4.0, 1.0)


def test_a_probe_may_stop_the_run_and_have_it_saved(tmp_path):
    def probe(trainer):
        trainer.stop("seen enough")

    trainer = made(observers=[Probe(probe, every=Updates(4))], checkpoint=Checkpoint(tmp_path))
    result = trainer.fit(train(), epochs=9)
    assert (result.stopped, result.updates) == ("seen enough", 4)
    assert (tmp_path / "update-0000000004").exists() and result.final_validation["update"] == 4


def test_a_probe_may_ask_for_a_checkpoint(tmp_path):
    probe = Probe(lambda trainer: trainer.save(), every=Updates(4))
    made(observers=[probe], checkpoint=Checkpoint(tmp_path, every=Epochs(9))).fit(train(), max_updates=5)
    assert sorted(path.name for path in tmp_path.glob("update-*")) == ["update-0000000004", "update-0000000005"]


def test_an_error_of_a_probe_ends_the_run_and_everything_is_put_back():
    def probe(trainer):
        raise KeyError("mine")

    state = torch.get_rng_state()
    trainer = made(observers=[Probe(probe, every=Updates(2))])
    with pytest.raises(KeyError, match="mine"):
        trainer.fit(train(), epochs=1)
    assert trainer.result.stopped.startswith("KeyError") and trainer.progress.updates == 2
    assert torch.is_grad_enabled() and all(module.training for module in trainer.model.modules())
    assert state is not None
    trainer.observers = ()
    assert trainer.fit(train(), epochs=1).updates == 6


def test_a_log_in_a_probe_is_refused():
    trainer = made(observers=[Probe(lambda trainer: trainer.log("n", 1.0), every=Updates(2))])
    with pytest.raises(Exception, match="outside a step"):
        trainer.fit(train(), epochs=1)


@pytest.mark.parametrize("fn", [3, None, "f", Reported])
def test_what_is_no_function_is_refused(fn):
    with pytest.raises(TypeError, match="a function of the trainer"):
        Probe(fn)


@pytest.mark.parametrize("every", [3, Epochs(0.5), None])
def test_a_span_that_a_probe_cannot_have_is_refused_when_it_is_given(every):
    with pytest.raises(SettingError, match="every="):
        Probe(lambda trainer: None, every=every)


# Observers with `every` and `wants`.


def test_an_observer_receives_every_nth_update():
    reported = Reported(Updates(4))
    made(observers=[reported]).fit(train(), epochs=2)
    assert [update.update for update in reported.updates] == [4, 8, 12]


@pytest.mark.parametrize("every", [Epochs(1), 5, "epoch"])
def test_another_span_of_an_observer_is_refused_when_the_trainer_is_made(every):
    with pytest.raises(SettingError, match=r"Reported\.every(.|\n)*Updates\(n\)"):
        made(observers=[Reported(every)])


def test_a_span_of_an_observer_that_watches_no_update_is_refused():
    class Epochwise(Observer):
        """Hears of epochs alone."""

        every = Updates(4)

        def on_epoch(self, record):
            """Nothing."""

    with pytest.raises(SettingError, match=r"Epochwise\.every=Updates\(n=4\), and Epochwise has no on_update"):
        made(observers=[Epochwise()])


def test_the_norm_is_measured_where_an_observer_wants_it():
    class Wants(Reported):
        wants = frozenset({"grad_norm"})

    reported, wants = Reported(), Wants()
    made(observers=[reported]).fit(train(), epochs=1)
    made(observers=[wants]).fit(train(), epochs=1)
    assert all(update.grad_norm is None for update in reported.updates)
    assert all(update.grad_norm > 0 for update in wants.updates)
    with pytest.raises(TypeError, match="only 'grad_norm'"):
        type("Mine", (Observer,), {"wants": frozenset({"loss"})})


def test_a_journal_has_the_numbers_of_a_probe(tmp_path):
    probe = Probe(lambda trainer: {"n": 7.0}, every=Updates(2))
    made(observers=[probe, Journal(tmp_path / "journal.jsonl")]).fit(train(), epochs=1)
    records = read_journal(tmp_path / "journal.jsonl")
    assert [record["update"] for record in records if record.get("values") == {"n": 7.0}] == [3, 5]


# What hooks print.


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_line_is_printed_above_the_live_bar(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)

    class Prints(Trainer):
        def after_update(self):
            time.sleep(0.03)
            assert self.is_main
            self.print("update", self.progress.updates)

    made(Prints, console=Console(terminal)).fit(train(), epochs=2)
    lines = [line.rpartition("\r")[2].rstrip() for line in terminal.getvalue().split("\n")]
    assert [line for line in lines if line.startswith("update ")] == [f"update {n}" for n in range(1, 13)]
    assert "loss" in terminal.getvalue() and "\r" in terminal.getvalue()


def test_print_without_a_bar_prints_a_line(capsys):
    made().print("one", 2)
    assert capsys.readouterr().out == "one 2\n"
