"""The Guest law: batches keep their types, and a `fit` that is refused has never been asked."""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from trainwright import EMA, SWA, Cosine, Epochs, Observer, SettingError, Trainer, Updates, batches

from .guest_cases import adamw, equal, loader, network, rows_of_data, seed_all


class Refuses(Observer):
    def on_fit_start(self, plan):
        raise SettingError("planted")


Pair = namedtuple("Pair", "x y")


@dataclass
class Rows:
    x: torch.Tensor
    y: torch.Tensor


BATCHES = {
    "tuple": lambda x, y: (x, y),
    "list": lambda x, y: [x, y],
    "named tuple": Pair,
    "dict": lambda x, y: {"x": x, "y": y},
    "ordered dict": lambda x, y: OrderedDict(x=x, y=y),
    "user dict": lambda x, y: UserDict(x=x, y=y),
    "dataclass": Rows,
    "nested": lambda x, y: {"x": [Pair(x, None)], "y": (y,)},
}


def check_batches(kind="named tuple"):
    """The very batch that the data gave comes to each step."""
    data = [BATCHES[kind](*pair) for pair in zip(*(column.split(8) for column in rows_of_data()), strict=True)]
    seen = []

    class Looks(Trainer):
        def _loss(self, batch):
            seen.append(batch)
            x, y = _columns(batch)
            return nn.functional.cross_entropy(self.model(x), y)

        def training_step(self, batch):
            return self._loss(batch)

        def validation_step(self, batch):
            return self._loss(batch)

        def predict_step(self, batch):
            return self._loss(batch)

    model = network()
    trainer = Looks(model, adamw(model), accumulate=2, precision="bf16", console=False)
    trainer.fit(data, data, epochs=1)
    trainer.predict(data)
    wanted = [data[0], *data, *data, *data]
    assert len(seen) == len(wanted) and all(one is other for one, other in zip(seen, wanted, strict=True))


def _columns(batch):
    if isinstance(batch, Rows):
        return batch.x, batch.y
    if isinstance(batch, dict | UserDict):
        x, y = batch["x"], batch["y"]
        return (x[0].x, y[0]) if isinstance(y, tuple) else (x, y)
    return batch


@pytest.mark.parametrize("kind", BATCHES)
def test_batches_are_the_ones_that_the_data_gave(kind):
    check_batches(kind)


def check_refused_next_fit(average=None):
    """Weights, counters and rates are as the last `fit` left them, and the next one goes on as if nothing was asked."""
    runs = []
    for refuses in (False, True):
        model = network()
        optimizer = adamw(model)
        trainer = Trainer(
            model, optimizer, nn.CrossEntropyLoss(), schedule=Cosine(final=0.1), average=average, console=False
        )
        seed_all()
        trainer.fit(loader(), epochs=2)
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), trainer._counters.state_dict()))
        if refuses:
            state = torch.get_rng_state()
            model.extra = nn.Linear(1, 1)
            with pytest.raises(SettingError):
                trainer.fit(loader(), epochs=1)
            del model.extra
            with pytest.raises(SettingError):
                trainer.fit(loader(), loader(), epochs=1, validate=Epochs(0.5))
            torch.set_rng_state(state)
            trainer.observers = (Refuses(),)
            with pytest.raises(SettingError, match="planted"):
                trainer.fit(loader(), loader(), epochs=1)
            trainer.observers = ()
            torch.set_rng_state(state)
            after = model.state_dict(), optimizer.state_dict(), trainer._counters.state_dict()
            assert equal(before, after)
        trainer.fit(loader(), epochs=1)
        runs.append(
            copy.deepcopy((model.state_dict(), optimizer.state_dict(), trainer._counters.stage, trainer.history))
        )
    assert equal(*runs)


@pytest.mark.parametrize("average", [None, EMA(0.9), SWA(Updates(1), Updates(1))], ids=["none", "EMA", "SWA"])
def test_a_fit_that_is_refused_has_never_been_asked(average):
    check_refused_next_fit(average)


def test_a_fit_within_a_fit_of_the_same_trainer_is_refused():
    class Nests(Trainer):
        def begin_epoch(self, epoch):
            if epoch == 1:
                with pytest.raises(SettingError, match="one fit at a time"):
                    self.fit(batches(rows_of_data(), 8), epochs=1)

    model, alone = network(), network()
    for one, kind in ((model, Nests), (alone, Trainer)):
        seed_all()
        kind(one, adamw(one), nn.CrossEntropyLoss(), console=False).fit(batches(rows_of_data(), 8), epochs=3)
    assert equal(model.state_dict(), alone.state_dict())
