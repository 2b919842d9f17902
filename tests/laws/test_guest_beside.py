"""The Guest law: the global generators end where the plain loop leaves them, and trainers do not know each other."""

from __future__ import annotations

import copy
import random
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

from trainwright import (
    EMA,
    SWA,
    Cosine,
    MixedPrecision,
    Observer,
    Probe,
    Trainer,
    Updates,
    accuracy,
    batches,
)

from .guest_cases import (
    EPOCHS,
    adamw,
    equal,
    generators,
    loader,
    network,
    plain_loop,
    process,
    rows_of_data,
    seed_all,
)


def draw(*_):
    random.random()
    np.random.rand()
    torch.rand(3)


class Draws(Trainer):
    """Draws from every generator wherever a pass leaves no trace."""

    def validation_step(self, batch):
        draw()
        return super().validation_step(batch)

    def predict_step(self, batch):
        draw()
        return super().predict_step(batch)


class DrawsEachEpoch(Draws):
    """Draws at each epoch's start, where the plain loop does too."""

    def begin_epoch(self, epoch):
        draw()


class Asks(Draws):
    """Asks for everything between and in the updates."""

    def begin_epoch(self, epoch):
        self.ask()

    def after_update(self):
        self.ask()

    def end_epoch(self, metrics):
        self.ask()

    def ask(self):
        held_out = loader(seed=1)
        self.evaluate(held_out)
        self.predict(held_out)
        self.report(held_out)
        self.plan(lambda epoch: draw() or loader(), held_out, epochs=2)


class Watches(Observer):
    """Looks at everything that is reported to it, and draws nothing."""

    def __init__(self):
        self.seen = []

    def on_update(self, update):
        self.seen.append(update)

    def on_validate(self, record):
        self.seen.append(record)


WITH = {
    "nothing": {},
    "validation": {"val": True},
    "validation at each update": {"val": True, "validate": Updates(1)},
    "metrics": {"val": True, "metrics": {"accuracy": accuracy}},
    "EMA": {"average": EMA(0.9)},
    "EMA and validation": {"average": EMA(0.9), "val": True},
    "SWA": {"average": SWA(Updates(1), Updates(1))},
    "SWA and validation": {"average": SWA(Updates(2), Updates(2)), "val": True, "validate": Updates(1)},
    "a probe": {"observers": [Probe(draw, every=Updates(1))]},
    "an observer": {"observers": [Watches()]},
    "questions": {"cls": Asks},
    "questions, SWA": {"cls": Asks, "average": SWA(Updates(1), Updates(1))},
    "draws in begin_epoch": {"cls": DrawsEachEpoch, "each_epoch": draw, "val": True},
    "console": {"console": True},
}


def check_generators(what="nothing"):
    settings = {"cls": Draws, "console": False, "val": None, **WITH[what]}
    cls, each_epoch = settings.pop("cls"), settings.pop("each_epoch", None)
    val = loader(seed=1) if settings.pop("val") else None
    fit = {"validate": settings.pop("validate")} if "validate" in settings else {}
    theirs, ours = network(), network()
    theirs_optimizer, ours_optimizer = adamw(theirs), adamw(ours)
    expected = plain_loop(theirs, theirs_optimizer, loader(), each_epoch=each_epoch)
    trainer = cls(ours, ours_optimizer, nn.CrossEntropyLoss(), **settings)
    seed_all()
    trainer.fit(loader(), val, epochs=EPOCHS, **fit)
    assert equal(expected, generators())
    assert equal(theirs_optimizer.state_dict(), ours_optimizer.state_dict())
    if "average" not in settings:
        assert equal(theirs.state_dict(), ours.state_dict())


@pytest.mark.parametrize("what", WITH)
def test_generators_and_optimizer_are_where_the_plain_loop_leaves_them(what):
    check_generators(what)


def test_an_evaluation_before_the_fit_decides_nothing_of_it():
    """An evaluation of unseeded training data before the `fit` decides nothing of it."""
    ends = []
    for evaluates in (False, True):
        model, data = network(), batches(rows_of_data(), 8, shuffle=True)
        trainer = Trainer(model, adamw(model), nn.CrossEntropyLoss(), console=False)
        seed_all()
        if evaluates:
            trainer.evaluate(data)
            trainer.predict(data)
        trainer.fit(data, data if evaluates else None, epochs=EPOCHS)
        ends.append((model.state_dict(), generators()))
    assert equal(*ends)


# Two trainers, side by side and one inside a hook of another.


class Noisy(Trainer):
    """Its own noise in each step; does something in one of its hooks."""

    act = None
    place = ""

    def at(self, place):
        if self.act is not None and place == self.place:
            self.act()

    def training_step(self, batch):
        x, y = batch
        self.at("before the loss")
        loss = super().training_step((x + 0.1 * torch.randn_like(x), y))
        self.at("after the loss")
        return loss

    def begin_epoch(self, epoch):
        self.at("begin_epoch")

    def end_epoch(self, metrics):
        self.at("end_epoch")

    def after_update(self):
        self.at("after_update")


KINDS = {
    "plain": {},
    "bf16": {"precision": "bf16", "average": EMA(0.9)},
    "fp16": {"precision": MixedPrecision("fp16", init_scale=2.0**20), "accumulate": 2, "on_nonfinite": "skip"},
    "tf32": {"precision": "tf32", "average": SWA(Updates(1), Updates(1))},
}


def fitted(kind, seed, *, act=None, place="", epochs=1):
    """What a `fit` gives that is started from a seed of its own; the generators around it are left alone."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        with torch.inference_mode(mode=False):
            model, train, val = network(seed), loader(seed=seed), loader(seed=seed + 1)
        optimizer = adamw(model)
        probes = [Probe(lambda trainer: trainer.at("probe"), every=Updates(1))]
        trainer = Noisy(
            model, optimizer, nn.CrossEntropyLoss(), console=False, schedule=Cosine(), observers=probes, **KINDS[kind]
        )
        trainer.act, trainer.place = act, place
        torch.manual_seed(seed)
        trainer.fit(train, val, epochs=epochs)
        return copy.deepcopy((model.state_dict(), optimizer.state_dict(), trainer.history, torch.get_rng_state()))
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


@cache
def alone(kind, seed):
    return fitted(kind, seed)


PLACES = ["begin_epoch", "before the loss", "after the loss", "after_update", "end_epoch", "probe"]


def check_inside(outer="bf16", inner="plain", place="before the loss"):
    seen = []
    both = fitted(outer, 7, act=lambda: seen.append(fitted(inner, 8)), place=place)
    assert seen and all(equal(one, alone(inner, 8)) for one in seen)
    assert equal(both, alone(outer, 7))


PAIRS = [(outer, inner, "before the loss") for outer in ("bf16", "fp16", "tf32") for inner in KINDS]
PAIRS += [(outer, inner, place) for outer, inner in (("bf16", "plain"), ("fp16", "bf16")) for place in PLACES[2:]]
PAIRS += [("plain", "bf16", "begin_epoch"), ("tf32", "fp16", "begin_epoch")]


@pytest.mark.sample(8)
@pytest.mark.parametrize(("outer", "inner", "place"), PAIRS)
def test_a_fit_inside_a_hook_of_another_is_both_of_them_alone(outer, inner, place):
    check_inside(outer, inner, place)


def check_evaluation_inside(outer="bf16", inner="plain", place="before the loss"):
    """Evaluation, prediction and report of another trainer's model, with weights of its own that count."""
    model = network(8)
    other = Draws(model, adamw(model), nn.CrossEntropyLoss(), console=False, **KINDS[inner])
    seed_all()
    other.fit(loader(seed=8), epochs=1)
    data, seen = list(loader(seed=9)), []

    def ask():
        seen.append((other.evaluate(data), other.predict(data), other.report(data).to_dict()))

    ask()
    before = copy.deepcopy(model.state_dict())
    both = fitted(outer, 7, act=ask, place=place)
    assert len(seen) > 1 and all(equal(one, seen[0]) for one in seen[1:])
    assert equal(before, model.state_dict()) and equal(both, alone(outer, 7))


@pytest.mark.parametrize(
    ("inner", "place"), [*(("fp16", place) for place in PLACES), *((inner, "after the loss") for inner in KINDS)]
)
def test_evaluations_of_another_trainer_in_a_hook_give_what_they_give_alone(inner, place):
    check_evaluation_inside("bf16", inner, place)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
@pytest.mark.parametrize("kind", KINDS)
def test_what_surrounds_a_fit_is_not_in_it_and_stays(kind, mode):
    with mode():
        before = process()
        inside = fitted(kind, 8)
        assert process() == before
    assert equal(inside, alone(kind, 8))


def test_trainers_that_take_turns_are_each_of_them_alone():
    runs = {}
    for kind, settings in KINDS.items():
        model = network(8)
        trainer = Noisy(model, adamw(model), nn.CrossEntropyLoss(), console=False, schedule=Cosine(), **settings)
        runs[kind] = (model, trainer)
    before = process()
    for kind, (_, trainer) in runs.items():
        torch.manual_seed(8)
        trainer.fit(loader(seed=8), loader(seed=9), epochs=1)
        for other in runs:
            runs[other][1].evaluate(loader(seed=9))
        assert process() == before, kind
    for kind, (model, trainer) in runs.items():
        state, optimizer, history, _ = alone(kind, 8)
        assert equal(state, model.state_dict()) and equal(history, trainer.history)
        assert equal(optimizer, trainer.optimizer.state_dict())
