"""The range test makes the updates of `fit` at rising rates, leaves no trace, and suggests a rate that trains."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

from trainwright import Fast, SettingError, Trainer, batches
from trainwright.schedules import Linear
from trainwright.tools import lr_search
from trainwright.tools.lr_search import find_lr, read


def rows(number=96, *, seed=0):
    """Points of two rings, which a small network can tell apart."""
    generator = torch.Generator().manual_seed(seed)
    angle, ring = torch.rand(number, generator=generator) * 2 * math.pi, torch.arange(number) % 2
    radius = 1.0 + ring + 0.1 * torch.randn(number, generator=generator)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1), ring


def network(*, norm=False, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 32), nn.BatchNorm1d(32) if norm else nn.Tanh(), nn.ReLU(), nn.Linear(32, 2))


def made(model=None, optimizer=None, **settings):
    model = network() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3) if optimizer is None else optimizer
    return Trainer(model, optimizer, nn.CrossEntropyLoss(), console=False, **settings)


def ready(*, size=16, number=96):
    inputs, targets = rows(number)
    return list(zip(inputs.split(size), targets.split(size), strict=True))


# What is measured


def test_rates_and_losses_are_those_of_a_plain_loop():
    model, data, number = network(), ready(), 20
    twin = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    found = find_lr(made(model, optimizer, clip=1.0, accumulate=2), data, lowest=1e-3, highest=0.1, updates=number)
    plain = torch.optim.SGD(twin.parameters(), lr=0.5, momentum=0.9)
    for update in range(number):
        rate = 1e-3 * 100 ** (update / (number - 1))
        plain.param_groups[0]["lr"] = found.rates[update]
        assert found.rates[update] == pytest.approx(rate, rel=1e-12)
        pair = [data[(2 * update + k) % len(data)] for k in range(2)]
        plain.zero_grad()
        losses = [nn.functional.cross_entropy(twin(x), y) for x, y in pair]
        (sum(losses) / 2).backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        plain.step()
        assert found.losses[update] == pytest.approx(sum(losses).item() / 2, rel=1e-6)
    assert len(found.rates) == number
    assert found.stopped == "the highest rate was reached"


def watched(model, optimizer):
    """A trainer that notes the rates of all groups at each step, and where it does."""
    seen = []

    class Watched(Trainer):
        def training_step(self, batch):
            seen.append([group["lr"] for one in self.optimizers.values() for group in one.param_groups])
            return super().training_step(batch)

    return Watched(model, optimizer, nn.CrossEntropyLoss(), console=False), seen


def test_groups_stay_in_proportion():
    model = network()
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[3].parameters(), "lr": 0.3}]
    trainer, seen = watched(model, torch.optim.SGD(groups))
    found = find_lr(trainer, ready(), updates=60)
    assert found.rates[0] == pytest.approx(1e-7)
    for rate, (first, second) in zip(found.rates, seen, strict=True):
        assert first == rate
        assert second == pytest.approx(3 * rate)


def test_several_optimizers_rise_together():
    model = network()
    optimizers = {"a": torch.optim.SGD(model[0].parameters(), 0.1), "b": torch.optim.SGD(model[3].parameters(), 0.2)}
    trainer, seen = watched(model, optimizers)
    found = find_lr(trainer, ready(), updates=60)
    assert [first for first, _ in seen] == pytest.approx(found.rates)
    assert all(second == pytest.approx(2 * first) for first, second in seen)


def test_what_schedules_have_left_in_the_groups_does_not_count():
    model = network()
    found = find_lr(made(model, torch.optim.SGD(model.parameters(), lr=0.1)), ready(), updates=60)
    trainer = made(model, torch.optim.SGD(model.parameters(), lr=0.1), schedule=Linear(final=0.0))
    trainer.fit(ready(), epochs=1)
    model.load_state_dict(network().state_dict())
    assert find_lr(trainer, ready(), updates=60).losses == pytest.approx(found.losses)
    trainer.optimizer.param_groups[0]["initial_lr"] = 0.7
    assert find_lr(trainer, ready(), updates=60).losses == pytest.approx(found.losses)


def test_nothing_is_compiled_for_it():
    def backend(graph, inputs):
        raise AssertionError

    trainer = made(fast=Fast(compile={"backend": backend}), precision="bf16")
    assert find_lr(trainer, ready(), updates=60).suggestion


# Where it ends


def steep(scale=100.0):
    """A parabola of this curvature: SGD diverges on it from a rate of 2 / scale on."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 3.0)
    data = [(torch.full((4, 1), math.sqrt(scale / 2)), torch.zeros(4, 1)) for _ in range(8)]
    return Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), console=False), data


def test_it_stops_where_the_loss_diverges_and_suggests_less():
    trainer, data = steep()
    found = find_lr(trainer, data, lowest=1e-6)
    assert found.stopped.startswith("the loss is more than 4 times its best")
    assert 2e-2 < found.rates[-1] < 10
    assert 1e-4 < found.suggestion < 2e-2


def test_it_stops_where_the_loss_is_not_finite():
    trainer, data = steep(1e30)
    with pytest.warns(UserWarning, match="find_lr suggests no rate: the sweep saw 1 finite loss"):
        found = find_lr(trainer, data, lowest=1.0)
    assert found.stopped.startswith("the loss is inf at a rate of ")
    assert len(found.losses) == 1
    assert json.loads(json.dumps(found.to_dict()))["suggestion"] is None


# What it suggests


@pytest.mark.parametrize("maker", [torch.optim.AdamW, torch.optim.SGD])
def test_the_suggested_rate_trains_better_than_others(maker):
    model = network()
    found = find_lr(made(model, maker(model.parameters(), lr=1e-3)), ready(size=16, number=960))

    def loss_at(rate):
        model = network()
        trainer = made(model, maker(model.parameters(), lr=rate), on_nonfinite="ignore")
        trainer.fit(ready(size=16, number=960), epochs=2)
        last = trainer.evaluate(ready(size=96))["val_loss"]
        return last if math.isfinite(last) else math.inf

    best = loss_at(found.suggestion)
    assert best < loss_at(found.suggestion / 30)
    assert best < loss_at(found.suggestion * 100)
    assert found.suggestion == min(found.steepest, 10 * found.tenth / 3)


def test_rates_too_low_to_learn_suggest_none():
    with pytest.warns(UserWarning, match="suggests no rate: the loss falls by no more than") as reported:
        found = find_lr(made(), batches(rows(), 16, shuffle=True, seed=0), lowest=1e-12, highest=1e-9)
    assert reported[0].filename == __file__
    assert (found.suggestion, found.steepest, found.tenth) == (None, None, None)


@pytest.mark.parametrize("seed", range(5))
def test_targets_of_chance_suggest_none(seed):
    inputs, targets = rows(640)
    shuffled = targets[torch.randperm(640, generator=torch.Generator().manual_seed(seed))]
    with pytest.warns(UserWarning, match="suggests no rate"):
        find_lr(made(network(seed=seed)), batches((inputs, shuffled), 32, shuffle=True, seed=seed), highest=1e-3)


@pytest.mark.parametrize("seed", range(3))
def test_to_come_back_from_an_explosion_is_no_fall(seed, monkeypatch):
    monkeypatch.setattr(lr_search, "DIVERGES", 1e30)
    model = network(seed=seed)
    trainer = made(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    with pytest.warns(UserWarning, match="suggests no rate"):
        found = find_lr(trainer, ready(), lowest=1e3, highest=1e9)
    assert len(found.losses) > 16
    assert max(found.losses) > 10 * found.losses[0]


def test_a_fall_at_either_end_is_said():
    trainer, data = steep()
    assert find_lr(trainer, data, lowest=1e-6, highest=1e-3).notes == (
        "the loss still falls at the highest rate: raise it, highest=0.1",
    )
    assert find_lr(trainer, data, lowest=5e-3, highest=5e-2).notes == (
        "the loss falls fastest right at the lowest rate: begin lower, lowest=5e-05",
    )


def test_smoothing_keeps_a_straight_line_and_does_not_lag():
    rates = [10 ** (k / 10) for k in range(50)]
    losses = [5 - 0.1 * k for k in range(50)]
    found = read(rates, losses, stopped="")
    assert found.smoothed == pytest.approx(losses)
    valley = read(rates, [abs(k - 30) / 10 for k in range(50)], stopped="")
    assert valley.smoothed.index(min(valley.smoothed)) == 30
    assert valley.tenth == pytest.approx(rates[30] / 10)


# No trace


# Mistakes


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"lowest": 0}, "lowest=0, highest=10.0"),
        ({"lowest": -1}, "lowest=-1"),
        ({"lowest": 1.0, "highest": 0.1}, "the highest above the lowest"),
        ({"highest": math.inf}, "highest=inf"),
        ({"updates": 15}, "at least 16"),
        ({"updates": 20.0}, "a whole number"),
    ],
)
def test_settings_that_make_no_sweep_are_refused(settings, says):
    with pytest.raises(SettingError, match=says):
        find_lr(made(), ready(), **settings)


def test_a_first_group_without_a_rate_is_refused():
    model = network()
    with pytest.raises(SettingError, match="whose rate is 0"):
        find_lr(made(model, torch.optim.SGD(model.parameters(), lr=0.0)), ready())
    with pytest.raises(SettingError, match="without an optimizer"):
        find_lr(Trainer(model, loss=nn.CrossEntropyLoss(), console=False), ready())


# The record


def test_the_record_is_data_text_and_a_plot(tmp_path):
    found = find_lr(made(), ready())
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["suggestion"] == found.suggestion
    assert len(plain["rates"]) == len(plain["losses"]) == len(plain["smoothed"])
    assert str(found).startswith(f"suggested rate {found.suggestion:.3g}: where the smoothed loss falls fastest")
    figure = found.plot(tmp_path / "range.png")
    assert (tmp_path / "range.png").stat().st_size > 10_000
    (axes,) = figure.axes
    assert axes.get_xscale() == "log"
    assert [line.get_label().split(":")[0] for line in axes.lines][2:] == [
        "suggestion", "steepest", "a tenth of the lowest",
    ]  # fmt: skip
