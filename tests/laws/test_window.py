"""The Window law: k micro-batches of any sizes are one big batch of the same rows, however the loss is counted."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from trainwright import LossScaler, Mean, MixedPrecision, NonFiniteError, Step, Sum, Trainer

from .models import OPTIMIZERS, Losses, Smooth, assert_twins, distance

IGNORED = -100
PROPERTY = settings(max_examples=8, deadline=None, derandomize=True, database=None)


@dataclass(frozen=True)
class Shape:
    """Micro-batches of one epoch: rows and length of each, k of them to an update."""

    sizes: tuple[int, ...]
    lengths: tuple[int, ...]
    k: int
    seed: int = 0
    clip: float | None = None
    stream: bool = False

    def grouped(self, data):
        return [data[i : i + self.k] for i in range(0, len(data), self.k)]

    @property
    def epochs(self):
        return math.ceil(50 / math.ceil(len(self.sizes) / self.k))


def shapes():
    whole = partial(st.integers, 1)
    pairs = st.lists(st.tuples(whole(6), whole(4)), min_size=2, max_size=7)
    rest = st.tuples(pairs, whole(5), st.integers(0, 99), st.sampled_from([None, 0.3]), st.booleans())
    return rest.map(lambda t: Shape(tuple(n for n, _ in t[0]), tuple(n for _, n in t[0]), *t[1:]))


UNEVEN = Shape((4, 1, 6, 2, 3, 5, 2), (2, 4, 1, 3, 3, 1, 2), k=3)
"""Windows of 3, 3 and 1 micro-batches."""


class Positions(Smooth):
    """`Smooth` at every position of a sequence, with classes in dim 1."""

    def forward(self, x):
        return super().forward(x).transpose(1, -1)


def draw(shape, kind, dtype=torch.float64):
    """Micro-batches; some targets are ignored, those of whole micro-batches too, but never of a whole window."""
    generator = torch.Generator().manual_seed(shape.seed)
    data = []
    for index, (rows, length) in enumerate(zip(shape.sizes, shape.lengths, strict=True)):
        places = (rows, length) if kind == "tokens" else (rows,)
        x = torch.randn(*places, 5, generator=generator, dtype=dtype)
        if kind == "numbers":
            y = torch.randn(*places, 4, generator=generator, dtype=dtype)
        elif kind == "shares":
            y = torch.rand(*places, 4, generator=generator, dtype=dtype).softmax(-1)
        else:
            y = torch.randint(4, places, generator=generator)
            y[torch.rand(places, generator=generator) < 0.4] = IGNORED
            y[...] = IGNORED if torch.rand((), generator=generator) < 0.3 else y
            if index % shape.k == 0:
                y.view(-1)[0] = 1
        data.append((x, y))
    return data


def joined(group, places):
    """One big batch of the rows (or tokens) of a window."""
    return torch.cat([x.reshape(-1, 5) for x, _ in group]), torch.cat([y.reshape(-1, *places) for _, y in group])


def flat(parameters):
    return torch.cat([p.grad.flatten() for p in parameters])


def twins(optimizer="sgd", dtype=torch.float64, out=4):
    pairs = []
    for kind in (Smooth, Positions):
        torch.manual_seed(7)
        model = kind(out).to(dtype)
        pairs.append((model, OPTIMIZERS[optimizer](model.parameters())))
    return pairs


def by_hand(model, optimizer, loss_of, groups, clip=None, epochs=1):
    """The plain loop over big batches."""
    losses = []
    for _ in range(epochs):
        for group in groups:
            x, y = joined(group, group[0][1].shape[1:] if group[0][1].is_floating_point() else ())
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            losses.append(loss.item())
    return losses


def given_as(data, stream):
    """A list, or batches without a length."""
    return (lambda epoch: iter(data)) if stream else data


def check(shape, loss, kind="classes", *, trainer=Trainer, reference=None, optimizer="sgd", **more):
    """Parameters after at least 50 updates, and the loss of each."""
    theirs, ours = twins(optimizer)
    data = draw(shape, kind)
    reference = loss if reference is None else reference
    expected = by_hand(*theirs, reference, shape.grouped(data), shape.clip, shape.epochs)
    seen = Losses()
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


def likelihood(output, target):
    return F.nll_loss(output.log_softmax(1), target)


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


def summed(output, y):
    return F.cross_entropy(output, y, ignore_index=IGNORED, reduction="sum")


def valid(y):
    return int((y != IGNORED).sum())


def masked(output, y):
    """A mean by hand, 0 over nothing."""
    return summed(output, y) / max(valid(y), 1)


def tensor_count(y):
    return (y != IGNORED).sum()


def named(output, y):
    return {"a": Mean(masked(output, y), valid(y)), "b": Mean(0.5 * masked(2 * output, y), valid(y))}


def named_by_hand(output, y):
    return masked(output, y) + 0.5 * masked(2 * output, y)


RETURNED = {
    "a mean by torch": (F.cross_entropy, F.cross_entropy),
    "a step": (lambda o, y: Step(F.cross_entropy(o, y), o, y), F.cross_entropy),
    "a mean": (lambda o, y: Mean(masked(o, y), valid(y)), masked),
    "a mean over a float": (lambda o, y: Mean(masked(o, y), 0.3 * valid(y)), masked),
    "a mean over a tensor": (lambda o, y: Mean(masked(o, y), tensor_count(y)), masked),
    "a sum": (lambda o, y: Sum(summed(o, y), valid(y)), masked),
    "a sum over a tensor": (lambda o, y: Sum(summed(o, y), tensor_count(y)), masked),
    "a sum over rows": (lambda o, y: Sum(summed(o, y), y.shape[0]), lambda o, y: summed(o, y) / y.shape[0]),
    "a mean over rows": (lambda o, y: summed(o, y) / y.shape[0], lambda o, y: summed(o, y) / y.shape[0]),
    "named losses": (named, named_by_hand),
    "named rows": (
        lambda o, y: {"a": o.square().sum(1).mean(), "b": o.abs().sum(1).mean()},
        lambda o, y: o.square().sum(1).mean() + o.abs().sum(1).mean(),
    ),
}


def stepping(returned, count=None):
    """A Trainer whose step returns that, with a count of its own."""

    class Own(Trainer):
        def training_step(self, batch):
            x, y = batch
            return returned(self.model(x), y)

    if count is not None:
        Own.count = lambda self, batch: count(batch[1])
    return Own


def check_returned(shape, name, loss=None):
    returned, reference = RETURNED[name]
    check(shape, loss, trainer=stepping(returned), reference=reference)


def check_count(shape, count=valid):
    """`count` overridden: a number or a tensor; the step returns a bare mean."""
    check(shape, None, trainer=stepping(masked, count), reference=masked)


def check_own_count_wins(shape):
    """A step's own count wins over that of a known loss, also where the first of the window are the same number."""

    def mean_over_rows(output, y):
        return Mean(summed(output, y) / y.shape[0], y.shape[0])

    reference = RETURNED["a mean over rows"][1]
    check(shape, nn.CrossEntropyLoss(), trainer=stepping(mean_over_rows), reference=reference)


def check_plain_sum(shape=UNEVEN):
    """`Sum(total)` and a loss with reduction="sum": the plain sum over the window; the loss is told per row."""
    data = draw(shape, "classes")
    rows = [sum(y.shape[0] for _, y in group) for group in shape.grouped(data)] * 9
    for loss, trainer in (
        (nn.CrossEntropyLoss(reduction="sum"), Trainer),
        (None, stepping(lambda o, y: Sum(summed(o, y)))),
    ):
        theirs, ours = twins()
        expected = by_hand(*theirs, summed, shape.grouped(data), 0.1, 9)
        seen = Losses()
        trainer(*ours, loss, accumulate=shape.k, clip=0.1, observers=[seen], console=False).fit(data, epochs=9)
        assert distance(ours[0], theirs[0]) <= 1e-12
        assert seen.losses == pytest.approx([loss / n for loss, n in zip(expected, rows, strict=True)], rel=1e-10)


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


def check_stale(shape=UNEVEN):
    """Gradients that lie in .grad before `fit`, and between two of them, never enter."""
    theirs, ours = twins()
    data = draw(shape, "classes")
    by_hand(*theirs, F.cross_entropy, shape.grouped(data) * 2)
    trainer = Trainer(*ours, nn.CrossEntropyLoss(), accumulate=shape.k, console=False)
    for _ in range(2):
        for parameter in ours[0].parameters():
            parameter.grad = torch.full_like(parameter, 1e3)
        trainer.fit(data, epochs=1)
    assert distance(ours[0], theirs[0]) <= 1e-12


def check_equal_weights():
    """One-hot gradients: no backward of a window weighs more than another, whatever its place."""
    for sizes in ((2, 2, 2, 2), (1, 2, 3, 2)):
        model = nn.Linear(4, 1, bias=False)
        nn.init.zeros_(model.weight)
        data = [torch.eye(4)[i].expand(rows, 4) for i, rows in enumerate(sizes)]
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        made = type("Own", (Trainer,), {"training_step": lambda self, batch: self.model(batch).mean()})
        made(model, optimizer, accumulate=4, console=False).fit(data, epochs=1)
        assert torch.equal(model.weight.detach(), -torch.tensor([sizes]) / 8)


class Counting(LossScaler):
    adapted = 0

    def adapt(self, overflowed):
        Counting.adapted += 1
        super().adapt(overflowed)


class Scaled:
    """A precision that only scales, by a power of two: exact."""

    def autocast(self, device_type):
        return None

    def scaler(self, device):
        return Counting(MixedPrecision("fp16", init_scale=2.0**11, growth_interval=4))


def check_once_per_update(shape=UNEVEN):
    """Clip, schedule, scaler and clock act once per update, on the unscaled gradient of the whole window."""
    theirs, ours = twins()
    data, norms, asked = draw(shape, "classes"), [], []
    losses = by_hand(*theirs, F.cross_entropy, shape.grouped(data), 0.05, 17)
    Counting.adapted = 0

    def clip(parameters):
        norms.append(nn.utils.clip_grad_norm_(parameters, 0.05))
        return norms[-1]

    def factor(update, total):
        asked.append((update, total))
        return 1.0

    seen = Losses()
    loss = nn.CrossEntropyLoss()
    parts = {"precision": Scaled(), "schedule": factor, "observers": [seen]}
    made = Trainer(*ours, loss, accumulate=shape.k, clip=clip, console=False, **parts)
    result = made.fit(data, epochs=17)
    assert len(losses) == len(norms) == Counting.adapted == len(seen.updates) == result.updates == 51
    assert made.progress.updates == 51
    assert {(update, 51) for update in range(51)} <= set(asked) and max(asked) <= (51, 51)
    assert [update.update for update in seen.updates] == list(range(1, 52))
    assert [update.grad_norm for update in seen.updates] == [norm.item() for norm in norms]
    assert sum(norm > 0.05 for norm in norms) > 25
    assert distance(ours[0], theirs[0]) <= 1e-12


def check_by_epoch(shape=UNEVEN):
    """`accumulate` by epoch: each epoch is cut by its own k, from its first batch on."""
    theirs, ours = twins()
    data, seen = draw(replace(shape, k=1), "classes"), Losses()
    groups = []
    for k in (1, 1, 4, 4, 4):
        groups += [data[i : i + k] for i in range(0, 7, k)]
    by_hand(*theirs, F.cross_entropy, groups)
    made = Trainer(*ours, nn.CrossEntropyLoss(), accumulate={0: 1, 2: 4}, observers=[seen], console=False)
    made.fit(data, epochs=5)
    assert [update.rows for update in seen.updates] == [sum(len(y) for _, y in group) for group in groups]
    assert [update.epoch for update in seen.updates] == [0] * 7 + [1] * 7 + [2] * 2 + [3] * 2 + [4] * 2
    assert distance(ours[0], theirs[0]) <= 1e-12


class Asked:
    """Batches without a length; notes how many updates had been made when each was asked for."""

    def __init__(self, data):
        self.data, self.made, self.times = data, None, []

    def __iter__(self):
        for batch in self.data:
            self.times.append(self.made.progress.updates)
            yield batch


def check_on_policy(k=3):
    """A batch is asked for only when the update before its window is applied."""
    data = Asked(draw(replace(UNEVEN, k=1), "classes"))
    data.made = Trainer(*twins()[0], nn.CrossEntropyLoss(), accumulate=k, console=False)
    data.made.fit(data, epochs=2)
    per_epoch = math.ceil(7 / k)
    assert data.times == [j // k + per_epoch * epoch for epoch in range(2) for j in range(7)]


def check_endless(k=3):
    """Epochs cut from an endless stream by `epoch_updates`: its windows are all full, and no batch is lost."""
    shape = Shape((2, 3, 1, 4) * 6, (1,) * 24, k=k)
    theirs, ours = twins()
    data, seen = draw(shape, "classes"), Losses()
    by_hand(*theirs, F.cross_entropy, shape.grouped(data))
    made = Trainer(*ours, nn.CrossEntropyLoss(), accumulate=k, observers=[seen], console=False)
    made.fit(iter(data), max_updates=8, epoch_updates=3)
    assert [update.epoch for update in seen.updates] == [0] * 3 + [1] * 3 + [2] * 2
    assert distance(ours[0], theirs[0]) <= 1e-12


def check_update_hook(name):
    """`update` overridden: the gradients are the window's own at once, and so is the loss, scaled or not."""
    returned, reference = RETURNED[name]
    theirs, ours = twins()
    data, found = draw(UNEVEN, "classes"), []

    class Own(stepping(returned)):
        def update(self, window):
            loss = self.compute_gradients(window)
            found.append((loss.item(), flat(self.model.parameters())))
            assert self.apply_gradients()
            return loss

    Own(*ours, accumulate=3, precision=Scaled(), console=False).fit(data, epochs=1)
    model, optimizer = theirs
    for group, (loss, gradient) in zip(UNEVEN.grouped(data), found, strict=True):
        optimizer.zero_grad()
        x, y = joined(group, ())
        expected = reference(model(x), y)
        expected.backward()
        assert float((gradient - flat(model.parameters())).abs().max()) <= 1e-14
        assert loss == pytest.approx(expected.item(), rel=1e-12)
        optimizer.step()


def check_empty_window(k, policy, count=None):
    """A window that counts nothing: refused, left out, or, where that is asked for, torch's gradient of 0."""
    trainer = Trainer if count is None else stepping(masked, count)
    data = draw(Shape((2, 3, 1, 2, 3, 2), (1,) * 6, k=k), "classes")
    for index in (2, 3):
        data[index][1].fill_(IGNORED)
    theirs, ours = twins()
    loss = nn.CrossEntropyLoss() if count is None else None
    made = trainer(*ours, loss, accumulate=k, nonfinite=policy, console=False)
    if policy == "raise":
        with pytest.raises(NonFiniteError, match=rf"update {2 // k + 1}: [\s\S]*counts nothing"):
            made.fit(data, epochs=1)
        by_hand(*theirs, F.cross_entropy, [data[i : i + k] for i in range(0, 2, k)])
        assert distance(ours[0], theirs[0]) <= 1e-12
        return
    groups = [data[i : i + k] for i in range(0, 6, k)]
    left = [group for group in groups if any(valid(y) for _, y in group)]
    by_hand(*theirs, F.cross_entropy, groups if policy == "ignore" else left, epochs=3)
    result = made.fit(data, epochs=3)
    assert distance(ours[0], theirs[0]) <= 1e-12
    assert result.skipped == (0 if policy == "ignore" else 3 * (len(groups) - len(left)))


def check_lone(k):
    """Micro-batches that are alone in their window are the plain loop bit for bit."""
    data = draw(UNEVEN, "classes")
    theirs, ours = twins("adamw")
    for _ in range(8):
        for x, y in data:
            if valid(y):
                theirs[1].zero_grad()
                F.cross_entropy(theirs[0](x), y).backward()
                theirs[1].step()
    fed = [batch for batch in data if valid(batch[1])]
    Trainer(*ours, nn.CrossEntropyLoss(), accumulate=k, console=False).fit(fed, epochs=8)
    assert_twins(ours, theirs)


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


def test_a_sum_is_summed_over_the_window():
    check_plain_sum()


@PROPERTY
@given(shapes(), st.sampled_from(["classes", "tokens"]))
def test_float32_gradients_of_each_window_are_those_of_the_big_batch(shape, kind):
    check_float32(shape, nn.CrossEntropyLoss(weight=WEIGHTS.float()), kind)
    check_float32(shape, None, kind, stepping(RETURNED["a mean over a tensor"][0]), masked)


def test_gradients_left_over_from_before_never_enter():
    check_stale()


def test_no_backward_of_a_window_weighs_more_than_another():
    check_equal_weights()


def test_clip_schedule_scaler_and_clock_act_once_per_update():
    check_once_per_update()


def test_accumulation_by_epoch_cuts_each_epoch_anew():
    check_by_epoch()


@pytest.mark.parametrize("k", [1, 3, 4])
def test_a_batch_is_asked_for_when_the_update_before_is_applied(k):
    check_on_policy(k)


def test_an_endless_stream_loses_no_batch_at_the_ends_of_epochs():
    check_endless()


@pytest.mark.parametrize("name", ["a mean by torch", "a mean", "a sum", "a mean over a tensor", "a mean over rows"])
def test_an_overridden_update_finds_the_windows_own_gradient_and_loss(name):
    check_update_hook(name)


@pytest.mark.parametrize("policy", ["raise", "skip", "ignore"])
@pytest.mark.parametrize(("k", "count"), [(1, None), (2, None), (2, valid), (2, tensor_count)])
def test_a_window_that_counts_nothing_is_judged_by_the_policy(count, k, policy):
    check_empty_window(k, policy, count)


@pytest.mark.parametrize("k", [1])
def test_windows_of_one_are_the_plain_loop_bit_for_bit(k):
    check_lone(k)
