"""The Window law in one update: its gradients are its own, its parts act once, and it must count something."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from records import Records
from trainwright import MixedPrecision, NonFiniteError, Trainer
from trainwright.precision import LossScaler, Precision

from .models import distance
from .window_cases import (
    IGNORED,
    RETURNED,
    UNEVEN,
    Shape,
    by_hand,
    draw,
    flat,
    joined,
    masked,
    stepping,
    tensor_count,
    twins,
    valid,
)


class Counting(LossScaler):
    adapted = 0

    def adapt(self, overflowed):
        Counting.adapted += 1
        super().adapt(overflowed)


class Scaled(Precision):
    """A precision that only scales, by a power of two: exact."""

    def loss_scale(self, device_type):
        return Counting(MixedPrecision("fp16", init_scale=2.0**11, growth_interval=4))


def check_empty_window(k, policy, count=None):
    """A window that counts nothing: refused, left out, or, where that is asked for, torch's gradient of 0."""
    trainer = Trainer if count is None else stepping(masked, count)
    data = draw(Shape((2, 3, 1, 2, 3, 2), (1,) * 6, k=k), "classes")
    for index in (2, 3):
        data[index][1].fill_(IGNORED)
    theirs, ours = twins()
    loss = nn.CrossEntropyLoss() if count is None else None
    made = trainer(*ours, loss, accumulate=k, on_nonfinite=policy, console=False)
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


def test_gradients_left_over_from_before_never_enter(shape=UNEVEN):
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


def test_no_backward_of_a_window_weighs_more_than_another():
    """One-hot gradients: no backward of a window weighs more than another, whatever its place."""
    for sizes in ((2, 2, 2, 2), (1, 2, 3, 2)):
        model = nn.Linear(4, 1, bias=False)
        nn.init.zeros_(model.weight)
        data = [torch.eye(4)[i].expand(rows, 4) for i, rows in enumerate(sizes)]
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        made = type("Own", (Trainer,), {"training_step": lambda self, batch: self.model(batch).mean()})
        made(model, optimizer, accumulate=4, console=False).fit(data, epochs=1)
        assert torch.equal(model.weight.detach(), -torch.tensor([sizes]) / 8)


def test_clip_schedule_scaler_and_clock_act_once_per_update(shape=UNEVEN):
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

    seen = Records()
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


@pytest.mark.parametrize("name", ["a mean by torch", "a mean", "a sum", "a mean over a tensor", "a mean over rows"])
def test_an_overridden_update_finds_the_windows_own_gradient_and_loss(name):
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


@pytest.mark.parametrize("policy", ["raise", "skip", "ignore"])
@pytest.mark.parametrize(("k", "count"), [(1, None), (2, None), (2, valid), (2, tensor_count)])
def test_a_window_that_counts_nothing_is_judged_by_the_policy(count, k, policy):
    check_empty_window(k, policy, count)
