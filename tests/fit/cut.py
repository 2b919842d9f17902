"""A training that touches every place where a signal or an error can come, cut there, resumed, and compared."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import threading
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from trainwright import (
    EMA,
    Checkpoint,
    EarlyStopping,
    Epochs,
    Observer,
    OneCycle,
    Probe,
    Stopped,
    Trainer,
    Updates,
    accuracy,
)


class Cut:
    """Does something the `n`-th time that the training comes by a place."""

    def __init__(self, place=None, n=1, what=None):
        self.place, self.left, self.what = place, n, what

    def at(self, place):
        if place == self.place:
            self.left -= 1
            if self.left == 0:
                self.what()


def send(number):
    """Send this process a signal, as `kill` does."""
    return lambda: os.kill(os.getpid(), number)


def send_while_waiting(number, after=0.05, most=60.0):
    """Send it from beside, while this thread waits for data that do not come."""

    def wait():
        timer = threading.Timer(after, send(number))
        timer.start()
        time.sleep(most)
        raise AssertionError("nothing has ended the wait")

    return wait


class Rows(Dataset):
    """Rows with noise of their own code."""

    def __init__(self, cut, place, rows=20, seed=0, noise=True):
        generator = torch.Generator().manual_seed(seed)
        self.x, self.y = torch.randn(rows, 4, generator=generator), torch.randint(0, 3, (rows,), generator=generator)
        self.cut, self.place, self.noise = cut, place, noise

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        self.cut.at(self.place)
        return self.x[index] + (0.1 * torch.randn(4) if self.noise else 0), self.y[index]


class Endless:
    """Batches without end, each drawn anew."""

    def __init__(self, cut):
        self.cut = cut

    def __iter__(self):
        while True:
            self.cut.at("row")
            yield torch.randn(3, 4), torch.randint(0, 3, (3,))


class Steps(torch.optim.AdamW):
    """Has a place inside each step."""

    cut = Cut()

    def step(self, closure=None):
        found = super().step(closure)
        self.cut.at("step")
        return found


class Seen(Observer):
    """Keeps what is reported to it, as plain data."""

    def __init__(self, cut):
        self.cut, self.reported, self.final = cut, [], []

    def _take(self, what, record, *fields):
        self.reported.append((what, *(getattr(record, field) for field in fields)))
        self.cut.at(what)

    def on_update(self, update):
        self._take("on_update", update, "update", "epoch", "loss", "lr", "rows", "values")

    def on_validate(self, record):
        self._numbers("on_validate", record)

    def on_epoch(self, record):
        self._numbers("on_epoch", record)

    def _numbers(self, what, record):
        if record.final:  # the validation of an early end, which the run that never ended does not have
            self.final.append((what, record.update, record.metrics))
            self.cut.at("final")
        else:
            self._take(what, record, "update", "epoch", "metrics", "best", "waited")

    def on_save(self, saved):
        self.cut.at("on_save")


class Cuttable(Trainer):
    """Draws random numbers and keeps a state of its own in every hook."""

    cut = Cut()

    def begin_epoch(self, epoch):
        self.state["draws"] = self.state.get("draws", torch.zeros(2)) + torch.rand(2)
        self.cut.at("begin_epoch")

    def end_epoch(self, metrics):
        self.state["ends"] = self.state.get("ends", 0.0) + torch.rand(()).item()
        self.cut.at("end_epoch")

    def training_step(self, batch):
        x, y = batch
        self.log("noise", random.random() + np.random.rand())
        step = super().training_step((x + 0.01 * torch.randn_like(x), y))
        self.state["steps"] = self.state.get("steps", 0) + 1
        if step.output.requires_grad:
            step.output.register_hook(lambda _: self.cut.at("backward"))
        self.cut.at("training_step")
        return step

    def validation_step(self, batch):
        self.cut.at("validation_step")
        return super().training_step(batch)

    def after_update(self):
        self.state["after"] = self.state.get("after", 0.0) + random.random()
        self.cut.at("after_update")


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 3))


def make(directory, cut=None, *, cls=Cuttable, loss=None, grace=20.0, observers=(), console=False, **settings):
    """A new Trainer, and its observer."""
    cut = Cut() if cut is None else cut
    model = network()
    random.seed(3)
    np.random.seed(4)
    torch.manual_seed(5)
    optimizer = Steps(model.parameters(), lr=0.01)
    seen = Seen(cut)

    def probe(trainer):
        cut.at("probe")
        return {"probed": next(trainer.model.parameters()).sum().item()}

    def ending(trainer):
        seen.reported.append(("probed", trainer.progress.updates))

    def measured(output, target):
        cut.at("metric")
        return accuracy(output, target)

    slots = {
        "schedule": OneCycle(0.05),
        "average": EMA(0.7),
        "metrics": {"accuracy": measured},
        "early_stopping": EarlyStopping("val_loss", patience=9),
        "accumulate": 2,
        "checkpoint": None if directory is None else Checkpoint(directory, best="val_loss", grace=grace),
    }
    trainer = cls(
        model,
        optimizer,
        nn.CrossEntropyLoss() if loss is None else loss,
        observers=[seen, Probe(probe, every=Updates(2)), Probe(ending, every=Epochs(1)), *observers],
        console=console,
        **(slots | settings),
    )
    optimizer.cut = trainer.cut = cut
    cut.trainer = trainer
    return trainer, seen


def data(cut, kind="loader"):
    """Training data, and held-out data: 7 batches and 4 updates in an epoch."""
    train = DataLoader(Rows(cut, "row"), 3, shuffle=True)
    if kind == "generator":
        stored = [(x[None].expand(3, 4), y[None].expand(3)) for x, y in list(Rows(Cut(), ""))[:7]]

        def train(epoch):
            for batch in stored:
                cut.at("row")
                yield batch

    if kind == "iterable":
        train = Endless(cut)
    if kind == "data":  # opened by `fit`

        class Opened(DataLoader):
            def __len__(self):
                cut.at("data")
                return super().__len__()

        train = Opened(Rows(cut, "row"), 3, shuffle=True)
    return train, DataLoader(Rows(cut, "val row", rows=7, seed=1, noise=False), 4)


def go(directory, cut=None, *, kind="loader", ends=None, resume=None, resume_data=True, validates=True, **settings):
    """One run; gives the trainer, its observer and the error it has ended with."""
    cut = Cut() if cut is None else cut
    trainer, seen = make(directory, cut, **settings)
    train, val = data(cut, kind)
    error = None
    ends = {"epochs": 2, "validate": Updates(3)} | (ends or {})
    try:
        trainer.fit(train, val if validates else None, **ends, resume=resume, resume_data=resume_data)
    except BaseException as ended:
        error = ended
    seen.random = (random.random(), np.random.rand(), torch.rand(2).tolist())
    return trainer, seen, error


def state_of(trainer):
    """All that a run has, bit for bit."""
    kept = [value for states in trainer.optimizer.state_dict()["state"].values() for value in states.values()]
    return [*trainer.model.state_dict().values(), *kept, *map(torch.as_tensor, trainer.state.values())]


def check_equal(whole, resumed, *, reported):
    """Hold a resumed run against the one that was never cut; `reported` is what its observers got in both parts."""
    (a, seen, _), (b, _, _) = whole, resumed
    assert b.result.stopped == a.result.stopped
    assert len(state_of(a)) == len(state_of(b))
    assert all(torch.equal(one, other) for one, other in zip(state_of(a), state_of(b), strict=True))
    assert a.result.history == b.result.history
    for name in ("updates", "epochs", "weights", "notes", "skipped"):
        assert getattr(a.result, name) == getattr(b.result, name), name
    best, other = a.result.best, b.result.best
    assert (best.value, best.epoch, best.update) == (other.value, other.epoch, other.update)
    assert reported == seen.reported
    assert resumed[1].random == seen.random


ENDING = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT]


class Other:
    """Other slots, another kind of data, other ends."""

    def __init__(self, **settings):
        self.settings = settings
        self._whole = None

    def whole(self):
        """The run that nobody ends."""
        if self._whole is None:
            with tempfile.TemporaryDirectory() as made:
                self._whole = go(made, **self.given(made))
            assert self._whole[2] is None
        return self._whole

    def given(self, directory):
        return {key: value(directory) if key == "checkpoint" else value for key, value in self.settings.items()}

    def ended_and_resumed(self, directory, cut):
        ended = go(directory, cut, **self.given(directory))
        resumed = go(directory, resume="auto", **self.given(directory))
        assert resumed[2] is None
        check_equal(self.whole(), resumed, reported=ended[1].reported + resumed[1].reported)
        return ended


USUAL = Other()


def check_ended(ended, number):
    trainer, _, error = ended
    if number == signal.SIGINT:
        assert type(error) is KeyboardInterrupt
    else:
        assert type(error) is Stopped and error.code == 128 + number
        assert error.signal == signal.Signals(number).name
    assert trainer.result.stopped == ("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)


class BreaksError(Exception):
    """An error of the user's own code."""


def breaks():
    raise BreaksError("in the user's code")
