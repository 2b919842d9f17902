"""The Plain law where it evaluates: the numbers are the plain loop's, and the training goes on as without them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from trainwright import Trainer, Updates

from .models import assert_equal, assert_twins, build, ready
from .plain_loops import EPOCHS, by_trainer, cast


def check_validation(validate=None, kind="mlp"):
    """Validation that draws, also in the middle of an epoch: the plain loop that puts the RNG back after its own."""
    data, val = ready(kind), ready(kind, 29, seed=9)
    every = len(data) if validate is None else validate.n
    theirs, ours = build(kind), build(kind)
    model, optimizer = theirs
    expected, vals = [], []
    torch.manual_seed(3)
    for _ in range(EPOCHS):
        for x, y in data:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            expected.append(loss.item())
            if len(expected) % every == 0:
                rng = torch.get_rng_state()
                vals.append(evaluated(model, val))
                torch.set_rng_state(rng)
    rng = torch.get_rng_state()
    settings = {"val": val, "validate": validate, "trainer": Drawing}
    _, result, losses, our_rng = by_trainer(*ours, nn.CrossEntropyLoss(), data, **settings)
    assert losses == expected
    found = [row["val_loss"] for row in result.history if "val_loss" in row]
    assert found[: len(vals)] == vals and len(found) - len(vals) <= (len(expected) % every > 0)
    assert_twins(ours, theirs)
    assert torch.equal(our_rng, rng)


def evaluated(model, data):
    """Loss over all rows, in eval mode; every draw a user's evaluation may make is made."""
    model.eval()
    with torch.no_grad():
        total = sum(F.cross_entropy(model(x), y, reduction="sum").item() for x, y in data)
        torch.rand(3)
    model.train()
    return total / sum(y.numel() for _, y in data)


class Drawing(Trainer):
    """A validation step that draws."""

    def validation_step(self, batch):
        torch.rand(5)
        return super().validation_step(batch)


def check_evaluate(kind="mlp", precision=None):
    """Each module's mode, the RNG and every gradient are afterwards what they were."""
    model, optimizer = build(kind)
    data = ready(kind, 29)
    trainer = Drawing(model, optimizer, nn.CrossEntropyLoss(), precision=precision, console=False)
    with cast(precision):
        expected = evaluated(model, data)
        model.eval()
        with torch.no_grad():
            outputs = torch.cat([model(x) for x, _ in data])
        model.train()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    first = next(model.children()).eval()
    before, rng = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    assert trainer.evaluate(data, name="test") == {"test_loss": expected}
    assert torch.equal(trainer.predict(data), outputs)
    assert_equal(dict(model.state_dict()), before)
    assert torch.equal(torch.get_rng_state(), rng)
    assert model.training and not first.training
    assert all(bool((parameter.grad == 1).all()) and parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("validate", [None, Updates(4), Updates(5)])
@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_validation_in_between_leaves_the_training_as_it_is(kind, validate):
    check_validation(validate, kind)


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_evaluate_and_predict_are_the_plain_loop_without_a_trace(kind, precision):
    check_evaluate(kind, precision)
