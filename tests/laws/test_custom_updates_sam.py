"""The laws Window and Plain where the gradient is computed twice (SAM), and where a closure computes it (LBFGS)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from trainwright import MeanLoss, NonFiniteError, OneCycle, Trainer

from .models import assert_equal, distance
from .own_updates import Closed, Scaled, Sharp, closed_by_hand, run, sharp_by_hand
from .window_cases import UNEVEN, Smooth, draw, joined, masked, twins, valid

LBFGS = {
    "plain": {"lr": 0.05, "max_iter": 4, "history_size": 5},
    "strong_wolfe": {"max_iter": 5, "history_size": 5, "line_search_fn": "strong_wolfe"},
}


def whole(data, k):
    """Batches joined as windows of k join them."""
    return [joined(data[i : i + k], ()) for i in range(0, len(data), k)]


def drawn(k=1, dtype=torch.float64):
    """Uneven batches, some targets ignored, but never all of a window."""
    data = draw(replace(UNEVEN, k=k), "classes", dtype)
    return data if k > 1 else whole(data, 1)


def sharp_twins(optimizer="sgd", dtype=torch.float64):
    return twins(optimizer, dtype)


def closed_twins(search="plain"):
    pairs = []
    for _ in range(2):
        torch.manual_seed(7)
        model = Smooth().double()
        pairs.append((model, torch.optim.LBFGS(model.parameters(), **LBFGS[search])))
    return pairs


class Counted(Sharp):
    """SAM whose step tells what its mean is over, so that the whole is known only when all batches have run."""

    def training_step(self, batch):
        x, y = batch
        return MeanLoss(masked(self.model(x), y), valid(y))


def check_sharp(
    k=1, *, trainer=Sharp, clip=None, optimizer="sgd", one_cycle=False, precision=None, dtype=torch.float64
):
    """SAM over windows of k is SAM over their rows as one batch; over lone batches bit for bit, scaled or not."""
    theirs, ours = sharp_twins(optimizer, dtype)
    data = drawn(k, dtype)
    epochs = 8 if k == 1 else 17
    groups = whole(data, k) * epochs
    schedule, settings = None, {}
    if one_cycle:
        total = len(groups)
        schedule = torch.optim.lr_scheduler.OneCycleLR(theirs[1], max_lr=0.05, total_steps=total)
        settings["schedule"] = OneCycle(max_lr=0.05)
    cast = precision if isinstance(precision, str) else None
    losses = sharp_by_hand(*theirs, F.cross_entropy, groups, clip=clip, schedule=schedule, cast=cast)
    loss = None if trainer is Counted else nn.CrossEntropyLoss()
    settings |= {"clip": clip, "precision": precision, "accumulate": k, "loss": loss}
    _, result, updates = run(trainer, ours, data, epochs=epochs, **settings)
    assert result.updates == len(updates) == len(groups) and result.skipped == 0
    if k > 1:
        assert distance(ours[0], theirs[0]) <= 1e-12
        assert [update.loss for update in updates] == pytest.approx(losses, rel=1e-12)
    else:
        assert_equal(dict(ours[0].state_dict()), dict(theirs[0].state_dict()))
        assert_equal(ours[1].state_dict()["state"], theirs[1].state_dict()["state"])
        assert [update.loss for update in updates] == losses


def check_closed(k=1, *, search="plain", clip=None):
    """LBFGS over windows of k is LBFGS over their rows as one batch; over lone batches bit for bit.

    Few updates, and a clip that seldom bites: on changing batches LBFGS amplifies the difference of a last bit by 1e4
    in 9 updates, and how sums are rounded depends on the vector units of the CPU. Hence 1e-10, not 1e-12.
    """
    theirs, ours = closed_twins(search)
    data = drawn(k)
    groups = whole(data, k)
    losses = closed_by_hand(*theirs, F.cross_entropy, groups, clip=clip)
    settings = {"clip": clip, "accumulate": k, "loss": nn.CrossEntropyLoss()}
    _, result, updates = run(Closed, ours, data, **settings)
    assert result.updates == len(updates) == len(groups)
    if k > 1:
        assert distance(ours[0], theirs[0]) <= 1e-10
        assert [update.loss for update in updates] == pytest.approx(losses, rel=1e-10)
    else:
        assert_equal(dict(ours[0].state_dict()), dict(theirs[0].state_dict()))
        assert [update.loss for update in updates] == losses


class Counts:
    """Adds to a Trainer what it does to `self.state` in an update."""

    def training_step(self, batch):
        self.state["rows"] = self.state.get("rows", 0) + len(batch[0])
        return super().training_step(batch)


SHARP = {
    "sgd": {},
    "adamw": {"optimizer": "adamw"},
    "a step that tells its count": {"trainer": Counted, "precision": Scaled()},
    "clipped, with a schedule": {"clip": 0.1, "one_cycle": True},
    "clipped, under a loss scale": {"clip": 0.1, "precision": Scaled()},
    "bf16": {"precision": "bf16", "dtype": torch.float32, "optimizer": "adamw"},
}


@pytest.mark.parametrize(
    ("case", "k"),
    [(case, k) for case in SHARP for k in (1, 3) if (case, k) != ("bf16", 3)],  # it rounds by batch
)
def test_sam_is_its_plain_loop_over_whole_batches(case, k):
    check_sharp(k, **SHARP[case])


@pytest.mark.parametrize(
    ("search", "clip"), [("plain", None), ("plain", 1.5), ("strong_wolfe", None), ("strong_wolfe", 0.2)]
)
@pytest.mark.parametrize("k", [1, 3])
def test_lbfgs_is_its_plain_loop_over_whole_batches(k, search, clip):
    check_closed(k, search=search, clip=clip)


def test_lbfgs_over_uneven_micro_batches_is_lbfgs_over_all_rows(search="strong_wolfe"):
    """Uneven micro-batches of one window are the full batch: what LBFGS is meant for."""
    theirs, ours = closed_twins(search)
    data = drawn(3)
    closed_by_hand(*theirs, F.cross_entropy, whole(data, len(data)) * 6)
    run(Closed, ours, data, epochs=6, accumulate=len(data), loss=nn.CrossEntropyLoss())
    assert distance(ours[0], theirs[0]) <= 1e-10


def test_the_norm_of_a_closures_update_is_its_first():
    """The norm that is reported of a closure's update is that of its first gradient, before clipping."""
    theirs, ours = closed_twins()
    data, norms = drawn(), []
    _, _, updates = run(Closed, ours, data, loss=nn.CrossEntropyLoss(), clip=0.2)
    model, optimizer = theirs
    for x, y in data:
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())
        closed_by_hand(model, optimizer, F.cross_entropy, [(x, y)], clip=0.2)
    assert [update.grad_norm for update in updates] == norms


@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize(
    ("trainer", "by_hand", "make"), [(Sharp, sharp_by_hand, sharp_twins), (Closed, closed_by_hand, closed_twins)]
)
def test_a_bad_window_leaves_the_weights_before_it(trainer, by_hand, make, policy):
    """A window with a number that is not finite: the weights before it stay, and the state where it is left out."""
    theirs, ours = make()
    data = drawn()
    data[3][0][0, 0] = torch.nan
    own = type("Own", (Counts, trainer), {})
    made = own(*ours, nn.CrossEntropyLoss(), on_nonfinite=policy, console=False)
    if policy == "raise":
        with pytest.raises(NonFiniteError, match=r"^update 4: "):
            made.fit(data, epochs=1)
        by_hand(*theirs, F.cross_entropy, data[:3])
    else:
        result = made.fit(data, epochs=1)
        assert (result.updates, result.skipped) == (6, 1)
        by_hand(*theirs, F.cross_entropy, data[:3] + data[4:])
        passes = made.state["rows"] / sum(len(x) for index, (x, _) in enumerate(data) if index != 3)
        assert passes == 2 or trainer is Closed
    assert_equal(dict(ours[0].state_dict()), dict(theirs[0].state_dict()))


def test_a_window_that_is_left_out_leaves_the_state_before_it():
    """A window that is left out leaves no trace in the user's state."""

    class Own(Sharp):
        def update(self, window):
            self.state["windows"] = self.state.get("windows", 0) + 1
            self.state.setdefault("sums", torch.zeros(())).add_(1)
            return super().update(window)

    _, ours = twins()
    data = drawn()
    data[3][0][0, 0] = torch.nan
    made, _, _ = run(Own, ours, data, on_nonfinite="skip", loss=nn.CrossEntropyLoss())
    assert (made.state["windows"], float(made.state["sums"])) == (6, 6.0)


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_step_to_weights_that_are_not_finite_is_undone(policy):
    """A step that ends at weights which are not finite, after a first gradient that was, is undone."""
    theirs, ours = closed_twins()
    data, calls = drawn()[:3], []

    class Own(Closed):
        def training_step(self, batch):
            calls.append(self.progress.batch)
            return super().training_step(batch) * (torch.nan if calls[-1] == 1 and calls.count(1) == 2 else 1.0)

    made = Own(*ours, nn.CrossEntropyLoss(), on_nonfinite=policy, console=False)
    if policy == "raise":
        with pytest.raises(NonFiniteError, match=r"^update 2: "):
            made.fit(data, epochs=1)
        closed_by_hand(*theirs, F.cross_entropy, data[:1])
    else:
        result = made.fit(data, epochs=1)
        assert (result.updates, result.skipped) == (2, 1)
        closed_by_hand(*theirs, F.cross_entropy, data[:1])
        theirs[1].state.clear()
        closed_by_hand(*theirs, F.cross_entropy, data[2:])
    assert_equal(dict(ours[0].state_dict()), dict(theirs[0].state_dict()))


@pytest.mark.parametrize(("trainer", "make"), [(Sharp, sharp_twins), (Closed, partial(closed_twins, "plain"))])
def test_the_clock_advances_once_per_update_however_often_gradients_are_computed(trainer, make):
    """One clock for an update, however often it computes gradients: the rates are OneCycle's, one per update."""
    (model, optimizer), ours = make()
    data = drawn()
    settings = {"max_lr": 0.5, "total_steps": 2 * len(data), "cycle_momentum": False}
    schedule, rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, **settings), []
    for batch in data * 2:
        rates.append(optimizer.param_groups[0]["lr"])
        by_hand = closed_by_hand if trainer is Closed else sharp_by_hand
        by_hand(model, optimizer, F.cross_entropy, [batch], schedule=schedule)
    ours_schedule = OneCycle(max_lr=0.5, cycle_momentum=False)
    _, _, updates = run(trainer, ours, data, epochs=2, schedule=ours_schedule, loss=nn.CrossEntropyLoss())
    assert [update.lr for update in updates] == rates
    assert_equal(dict(ours[0].state_dict()), dict(model.state_dict()))


def test_a_step_by_a_closure_needs_a_name_where_there_are_several_optimizers():
    model = nn.Linear(5, 4)
    optimizers = {"G": torch.optim.SGD([model.weight], lr=0.1), "D": torch.optim.LBFGS([model.bias])}
    made = Closed(model, optimizers, nn.CrossEntropyLoss(), console=False)
    with pytest.raises(ValueError, match="name one of 'G', 'D'"):
        made.fit(drawn(1, torch.float32), epochs=1)
    assert isinstance(made, Trainer) and made.progress.updates == 0
