"""The Window law: k micro-batches of any sizes are one big batch of the same rows, however the loss is counted."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from records import Records
from trainwright import MeanLoss, SumLoss, Trainer

from .models import distance
from .window_cases import (
    RETURNED,
    UNEVEN,
    Shape,
    by_hand,
    draw,
    flat,
    joined,
    masked,
    stepping,
    summed,
    tensor_count,
    twins,
    valid,
)

PROPERTY = settings(max_examples=8, deadline=None, derandomize=True, database=None)


def shapes():
    whole = partial(st.integers, 1)
    pairs = st.lists(st.tuples(whole(6), whole(4)), min_size=2, max_size=7)
    rest = st.tuples(pairs, whole(5), st.integers(0, 99), st.sampled_from([None, 0.3]), st.booleans())
    return rest.map(lambda t: Shape(tuple(n for n, _ in t[0]), tuple(n for _, n in t[0]), *t[1:]))


def given_as(data, stream):
    """A list, or batches without a length."""
    return (lambda epoch: iter(data)) if stream else data


def check(shape, loss, kind="classes", *, trainer=Trainer, reference=None, optimizer="sgd", **more):
    """Parameters after at least 50 updates, and the loss of each."""
    theirs, ours = twins(optimizer)
    data = draw(shape, kind)
    reference = loss if reference is None else reference
    expected = by_hand(*theirs, reference, shape.grouped(data), shape.clip, shape.epochs)
    seen = Records()
    settings = {"accumulate": shape.k, "clip": shape.clip, "console": False, "observers": [seen], **more}
    result = trainer(*ours, loss, **settings).fit(given_as(data, shape.stream), epochs=shape.epochs)
    assert result.updates == len(expected) >= 50
    assert distance(ours[0], theirs[0]) <= 1e-12
    assert seen.losses == pytest.approx(expected, rel=1e-10)
    assert [update.rows for update in seen.updates] == [
        sum(shape.sizes[i : i + shape.k]) for i in range(0, len(data), shape.k)
    ] * shape.epochs


def rows_loss(output, target):
    return (output - target).square().sum(1).sqrt().mean()


WEIGHTS = torch.tensor([0.5, 2.0, 0.1, 1.7], dtype=torch.float64)
SOFT = {"label_smoothing": 0.1, "weight": WEIGHTS}
KNOWN = {
    "ignored": (nn.CrossEntropyLoss(), "classes"),
    "ignored tokens": (nn.CrossEntropyLoss(), "tokens"),
    "weights": (nn.CrossEntropyLoss(weight=WEIGHTS), "classes"),
    "weighted tokens": (nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=2), "valid tokens"),
    "smoothed": (nn.CrossEntropyLoss(**SOFT), "tokens"),
    "smoothed evenly": (nn.CrossEntropyLoss(label_smoothing=0.2), "classes"),
    "shares": (nn.CrossEntropyLoss(weight=WEIGHTS), "shares"),
    "function": (F.cross_entropy, "tokens"),
    "partial": (partial(F.cross_entropy, **SOFT), "classes"),
    "squares": (nn.MSELoss(), "numbers"),
    "absolute": (partial(F.l1_loss), "numbers"),
    "huber": (nn.HuberLoss(delta=0.5), "numbers"),
    "binary": (nn.BCEWithLogitsLoss(pos_weight=WEIGHTS), "shares"),
    "rows": (rows_loss, "numbers"),
}


def check_known(shape, name):
    loss, kind = KNOWN[name]
    if kind == "valid tokens":
        kind, loss = "tokens", partial(F.cross_entropy, weight=WEIGHTS)
    check(shape, loss, kind)


def check_returned(shape, name, loss=None):
    returned, reference = RETURNED[name]
    check(shape, loss, trainer=stepping(returned), reference=reference)


def check_count(shape, count=valid):
    """`count` overridden: a number or a tensor; the step returns a bare mean."""
    check(shape, None, trainer=stepping(masked, count), reference=masked)


def check_own_count_wins(shape):
    """A step's own count wins over that of a known loss, also where the first of the window are the same number."""

    def mean_over_rows(output, y):
        return MeanLoss(summed(output, y) / y.shape[0], y.shape[0])

    reference = RETURNED["a mean over rows"][1]
    check(shape, nn.CrossEntropyLoss(), trainer=stepping(mean_over_rows), reference=reference)


class Kept:
    """Keeps the gradient that it is to clip, and does not clip it."""

    def __init__(self):
        self.gradients = []

    def __call__(self, parameters):
        self.gradients.append(flat(parameters))


def check_float32(shape, loss, kind, trainer=Trainer, reference=None):
    """Float32: the gradient of every single window."""
    theirs, ours = twins(dtype=torch.float32)
    data, kept = draw(shape, kind, torch.float32), Kept()
    ours[1].param_groups[0]["lr"] = 0.0
    trainer(*ours, loss, accumulate=shape.k, clip=kept, console=False).fit(data, epochs=1)
    model, optimizer = theirs
    for group, gradient in zip(shape.grouped(data), kept.gradients, strict=True):
        optimizer.zero_grad()
        x, y = joined(group, group[0][1].shape[1:] if group[0][1].is_floating_point() else ())
        (loss if reference is None else reference)(model(x), y).backward()
        expected = flat(model.parameters())
        assert float((gradient - expected).norm()) <= 1e-6 * float(expected.norm())


@pytest.mark.parametrize("name", KNOWN)
def test_micro_batches_are_one_big_batch_for_losses_that_are_known(name):
    PROPERTY(given(shapes())(lambda shape: check_known(shape, name)))()


@pytest.mark.parametrize("name", RETURNED)
def test_micro_batches_are_one_big_batch_whatever_a_step_returns(name):
    PROPERTY(given(shapes())(lambda shape: check_returned(shape, name)))()


@pytest.mark.parametrize("count", [valid, tensor_count, lambda y: float(valid(y))])
def test_a_count_of_the_users_own_weighs_means(count):
    PROPERTY(given(shapes())(lambda shape: check_count(shape, count)))()


def test_a_steps_own_count_wins_over_that_of_a_known_loss():
    PROPERTY(given(shapes())(check_own_count_wins))()


@pytest.mark.parametrize("name", RETURNED)
def test_a_steps_own_form_wins_over_a_known_loss(name):
    if name != "a mean over rows" and not name.startswith("named rows"):  # there the known loss gives the count
        check_returned(UNEVEN, name, nn.CrossEntropyLoss())


def test_adaptive_optimizers_see_one_big_batch():
    check(UNEVEN, nn.CrossEntropyLoss(), "tokens", optimizer="adamw")


def test_a_sum_is_summed_over_the_window(shape=UNEVEN):
    """`SumLoss(total)` and a loss with reduction="sum": the plain sum over the window; the loss is reported per row."""
    data = draw(shape, "classes")
    rows = [sum(y.shape[0] for _, y in group) for group in shape.grouped(data)] * 9
    for loss, trainer in (
        (nn.CrossEntropyLoss(reduction="sum"), Trainer),
        (None, stepping(lambda o, y: SumLoss(summed(o, y)))),
    ):
        theirs, ours = twins()
        expected = by_hand(*theirs, summed, shape.grouped(data), 0.1, 9)
        seen = Records()
        trainer(*ours, loss, accumulate=shape.k, clip=0.1, observers=[seen], console=False).fit(data, epochs=9)
        assert distance(ours[0], theirs[0]) <= 1e-12
        assert seen.losses == pytest.approx([loss / n for loss, n in zip(expected, rows, strict=True)], rel=1e-10)


@PROPERTY
@given(shapes(), st.sampled_from(["classes", "tokens"]))
def test_float32_gradients_of_each_window_are_those_of_the_big_batch(shape, kind):
    check_float32(shape, nn.CrossEntropyLoss(weight=WEIGHTS.float()), kind)
    check_float32(shape, None, kind, stepping(RETURNED["a mean over a tensor"][0]), masked)
