"""The Window law where memory runs out: the same window in smaller micro-batches is the same update."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from records import Records
from trainwright import Checkpoint, MeanLoss, NonFiniteError, StepOutput, SumLoss, Trainer, accuracy, batches, freeze
from trainwright.core.rng import random_state
from trainwright.update import snapshot
from trainwright.update.window import Window

from .deferred_runs import defer_on_cpu
from .models import assert_equal, distance
from .oom_cases import Counting, Noisy, by_hand, numbers, scarce
from .window_cases import UNEVEN, Shape, draw, masked, summed, tensor_count, valid
from .window_cases import by_hand as windows_by_hand

LOSSES = {
    "rows": (nn.CrossEntropyLoss(), None, "classes"),
    "tokens": (nn.CrossEntropyLoss(), None, "tokens"),
    "weights": (nn.CrossEntropyLoss(weight=torch.tensor([0.5, 2.0, 0.1, 1.7], dtype=torch.float64)), None, "tokens"),
    "shares": (nn.CrossEntropyLoss(), None, "shares"),
    "a mean": (F.cross_entropy, lambda o, y: MeanLoss(masked(o, y), valid(y)), "classes"),
    "a mean over a tensor": (F.cross_entropy, lambda o, y: MeanLoss(masked(o, y), tensor_count(y)), "classes"),
    "a sum": (F.cross_entropy, lambda o, y: StepOutput(SumLoss(summed(o, y), valid(y)), o, y), "classes"),
    "a sum alone": (summed, lambda o, y: SumLoss(summed(o, y)), "classes"),
    "torch's own": (F.cross_entropy, F.cross_entropy, "classes"),
}


def stepping(returned):
    class Own(Trainer):
        def training_step(self, batch):
            return returned(self.model(batch[0]), batch[1])

    return Own


def check(shape, name, *, where="forward", most=2, **settings):
    """Parameters after 50 updates, and the loss and the rows of each, beside big batches by hand."""
    loss, returned, kind = LOSSES[name]
    data = draw(shape, kind)
    ours, theirs = scarce(most, where=where), scarce(10**6)
    reference = loss if returned is None or name == "a sum alone" else masked
    expected = windows_by_hand(theirs[0], theirs[1], reference, shape.grouped(data), shape.clip, shape.epochs)
    cls, seen = (Trainer, Records()) if returned is None else (stepping(returned), Records())
    settings = {"accumulate": shape.k, "clip": shape.clip, "console": False, "observers": [seen], **settings}
    trainer = cls(*ours, None if returned else loss, on_oom="split", **settings)
    result = trainer.fit(data, epochs=shape.epochs)
    assert result.updates == len(expected) >= 50
    assert max(ours[0].calls) > most >= max(ours[0].calls[-10:])
    assert distance(ours[0], theirs[0]) <= 1e-12
    rows = [sum(shape.sizes[i : i + shape.k]) for i in range(0, len(data), shape.k)] * shape.epochs
    assert [update.rows for update in seen.updates] == rows
    reported = [one * n for one, n in zip(seen.losses, rows, strict=True)] if name == "a sum alone" else seen.losses
    assert reported == pytest.approx(expected, rel=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_window_that_is_split_makes_the_same_update(name, where):
    check(UNEVEN, name, where=where)


@pytest.mark.parametrize("k", [1, 4])
def test_one_micro_batch_of_several_may_be_too_large(k):
    shape = Shape((3, 2, 9, 1, 2, 3, 2, 1), (1,) * 8, k=k, clip=0.3)
    data = draw(shape, "numbers")
    ours, theirs = scarce(3), scarce(10**6)
    expected = windows_by_hand(*theirs, nn.MSELoss(), shape.grouped(data), 0.3, 25)
    trainer = Trainer(*ours, nn.MSELoss(), accumulate=k, clip=0.3, on_oom="split", console=False)
    assert trainer.fit(data, epochs=25).updates == len(expected)
    assert distance(ours[0], theirs[0]) <= 1e-12
    assert ours[0].calls.count(9) == 1 and 3 in ours[0].calls[8 * k :]  # those that fit stay whole


def split_and_born(make, data, parts, **settings):
    """A run that is split, and one whose data come in these parts: what is left of both."""
    found = []
    for given, own in ((data, {"on_oom": "split"}), (parts, {"accumulate": len(parts) // len(data)})):
        torch.manual_seed(3), np.random.seed(3), random.seed(3)
        model, optimizer = make()
        trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), console=False, **settings, **own)
        result = trainer.fit(given, epochs=3)
        model.most = 10**6
        state = random_state()
        found.append([trainer, result.history, {**state, "numpy": repr(np.random.get_state(legacy=False))}])
    return found


def check_bitwise(kind=Noisy, dtype=torch.float32, **settings):
    """A run that is split is bit for bit the run whose micro-batches come so: noise too."""
    x, y = numbers(dtype=dtype)
    data, parts = (list(zip(x.split(n), y.split(n), strict=True)) for n in (8, 2))
    (ours, history, drawn), (theirs, expected, wanted) = split_and_born(
        lambda: scarce(2, kind=kind, dtype=dtype, where="backward"), data, parts, **settings
    )
    assert_equal(dict(ours.model.state_dict()), dict(theirs.model.state_dict()))
    assert_equal(ours.optimizer.state_dict(), theirs.optimizer.state_dict())
    assert_equal(drawn, wanted)
    assert history == expected


class Draws(nn.Module):
    """Draws from every random state of the process."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 4)

    def forward(self, x):
        return self.layer(x) * (1 + random.random() + np.random.rand() + torch.rand(()))


@pytest.mark.slow
@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
def test_a_split_run_is_bit_for_bit_the_run_in_these_parts(precision):
    check_bitwise(precision=precision, clip=0.5, metrics={"accuracy": accuracy})


def fused(most):
    model, _ = scarce(most, kind=Noisy, dtype=torch.float32, where="backward")
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)


@pytest.mark.slow
def test_updates_whose_check_is_deferred_are_split_alike(monkeypatch):
    defer_on_cpu(monkeypatch)
    x, y = numbers(dtype=torch.float32)
    data, parts = (list(zip(x.split(n), y.split(n), strict=True)) for n in (8, 2))
    (ours, history, drawn), (theirs, expected, wanted) = split_and_born(
        lambda: fused(2), data, parts, metrics={"accuracy": accuracy}, clip=0.5
    )
    assert ours.fast_path.startswith("L1") and "up to 3 updates later" in ours.fast_path
    assert_equal(dict(ours.model.state_dict()), dict(theirs.model.state_dict()))
    assert_equal(drawn, wanted)
    assert history == expected


def test_a_loss_that_is_not_finite_is_reported_late_of_the_update_that_had_it(monkeypatch):
    defer_on_cpu(monkeypatch)
    x, y = numbers(40, dtype=torch.float32)
    x[12] = torch.nan  # in the second update, not reported yet when the third is split
    model, optimizer = fused(8)
    data = [*zip(x[:24].split(8), y[:24].split(8), strict=True), (x[24:], y[24:])]
    with pytest.raises(NonFiniteError, match="update 2"):
        Trainer(model, optimizer, nn.CrossEntropyLoss(), on_oom="split", console=False).fit(data, epochs=1)
    assert 16 in model.calls and all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Draws, Counting])
def test_random_states_and_buffers_are_as_if_nothing_had_failed(kind):
    check_bitwise(kind, metrics={"accuracy": accuracy}, on_nonfinite="skip")


@pytest.mark.slow
def test_the_law_sees_a_random_state_that_is_not_restored(monkeypatch):
    monkeypatch.setattr(snapshot, "set_random_state", lambda state: None)
    with pytest.raises(AssertionError):
        check_bitwise(metrics={"accuracy": accuracy})


@pytest.mark.slow
def test_the_law_sees_a_buffer_that_is_not_restored(monkeypatch):
    monkeypatch.setattr(snapshot.Buffers, "restore", lambda self, ago=0: None)
    with pytest.raises(AssertionError):
        check_bitwise(Counting, metrics={"accuracy": accuracy})


@pytest.mark.slow
def test_the_law_sees_numbers_that_count_twice(monkeypatch):
    monkeypatch.setattr(snapshot.LossTotals, "restore", lambda self, ago=0: None)
    with pytest.raises(AssertionError):
        check_bitwise(metrics={"accuracy": accuracy})


@pytest.mark.slow
def test_the_law_sees_a_wrong_share(monkeypatch):
    monkeypatch.setattr(Window, "weight", lambda self, count, *, is_sum: count / (2.0 * len(self.batches)))
    with pytest.raises((AssertionError, torch.OutOfMemoryError)):
        check(UNEVEN, "rows")


class Listed:
    """A metric that keeps all it sees, without a merge."""

    def __init__(self):
        self.seen = []

    def update(self, output, target):
        self.seen += target.tolist()

    def compute(self):
        return float(len(self.seen))

    def reset(self):
        self.seen = []


class Logs(Trainer):
    def training_step(self, batch):
        self.state["rows"] = self.state.get("rows", 0) + len(batch[1])
        self.state["sum"] = self.state.get("sum", torch.zeros(())) + batch[1].sum()
        self.log("target", batch[1].double().mean())
        output = self.model(batch[0])
        loss = F.cross_entropy(output, batch[1])
        return StepOutput({"a": loss, "b": 0.5 * loss}, output, batch[1])


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_logged_numbers_metrics_and_state_count_each_row_once(where):
    x, y = numbers()
    found = []
    for most, on_oom in ((10**6, None), (3, "split")):
        model, optimizer = scarce(most, where=where)
        seen, metrics = Records(), {"listed": Listed(), "accuracy": accuracy}
        trainer = Logs(model, optimizer, metrics=metrics, on_oom=on_oom, observers=[seen], console=False)
        history = trainer.fit((x, y), epochs=3, batch_size=10).history
        found.append([history, [u.values for u in seen.updates], trainer.state["rows"], trainer.state["sum"].item()])
    (rows, values, n, total), (split_rows, split_values, m, split_total) = found
    assert m == n == 72 and total == split_total
    assert [row["listed"] for row in split_rows] == [24.0] * 3
    for ours, theirs in zip(split_rows + split_values, rows + values, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-12)


@pytest.mark.slow
def test_a_count_of_the_users_own_is_asked_of_each_part():
    class Valid(Trainer):
        def count(self, batch):
            return valid(batch[1])

        def training_step(self, batch):
            return masked(self.model(batch[0]), batch[1])

    data = draw(UNEVEN, "classes")
    ours, theirs = scarce(2), scarce(10**6)
    expected = windows_by_hand(*theirs, masked, UNEVEN.grouped(data), None, 4)
    trainer = Valid(*ours, accumulate=3, on_oom="split", console=False)
    assert trainer.fit(data, epochs=4).updates == len(expected)
    assert distance(ours[0], theirs[0]) <= 1e-12


@pytest.mark.slow
def test_a_frozen_batch_norm_is_no_obstacle():
    def normed():
        made = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))
        freeze(made, "1")
        return made

    x, y = numbers()
    ours, theirs = scarce(2, kind=normed), scarce(10**6, kind=normed)
    expected = by_hand(*theirs, x, y, 8, epochs=9)
    trainer = Trainer(*ours, nn.CrossEntropyLoss(), on_oom="split", console=False)
    trainer.fit(list(zip(x.split(8), y.split(8), strict=True)), epochs=9)
    assert distance(ours[0], theirs[0]) <= 1e-12 and len(expected) == 27


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_what_fits(tmp_path):
    x, y = numbers(30)

    def run(directory, updates, resume=None, on_oom="split", most=2):
        model, optimizer = scarce(most, kind=Noisy, dtype=torch.float64)
        trainer = Trainer(
            model, optimizer, nn.CrossEntropyLoss(), on_oom=on_oom, checkpoint=Checkpoint(directory), console=False
        )
        torch.manual_seed(1)
        trainer.fit(batches((x, y), 7, shuffle=True, seed=0), max_updates=updates, resume=resume)
        return model

    whole = run(tmp_path / "a", 9)
    run(tmp_path / "b", 4)
    again = run(tmp_path / "b", 9, "auto")
    assert_equal(dict(whole.state_dict()), dict(again.state_dict()))
    assert max(again.calls) <= 2  # nothing is tried that is known not to fit
    run(tmp_path / "c", 4, on_oom=None, most=10**6)
    assert max(run(tmp_path / "c", 9, "auto").calls[-5:]) <= 2  # a checkpoint of a run that did not split
