"""The Schedule law: rates are a function of applied updates, and torch's own to the last bit."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch.optim import SGD, AdamW
from torch.optim import lr_scheduler as torchs

from trainwright.core.durations import Updates
from trainwright.core.plan import Plan
from trainwright.schedules.standard import (
    Cosine,
    Cyclic,
    Exponential,
    FunctionSchedule,
    Linear,
    MultiStep,
    OneCycle,
    StepLR,
    WarmupStableDecay,
)
from trainwright.schedules.stepped import Plateau, TorchSchedule

from .schedule_runs import used, warmed


def parameter():
    return torch.nn.Parameter(torch.zeros(1))


def one_group():
    return SGD([parameter()], lr=0.1, momentum=0.9)


def plain_sgd():
    return SGD([parameter()], lr=0.1)


def two_groups():
    return SGD([{"params": [parameter()], "lr": 0.3}, {"params": [parameter()]}], lr=0.07, momentum=0.9)


def three_groups():
    groups = [{"params": [parameter()], "lr": lr} for lr in (1e-3, 3e-4, 1e-3)]
    return AdamW(groups, betas=(0.88, 0.999))


OPTIMIZERS = {"one": one_group, "two": two_groups, "three": three_groups}
TOTALS = (10, 97, 1000)


def by_hand(optimizer, scheduler, total):
    rows = []
    for _ in range(total):
        rows.append(used(optimizer))
        optimizer.step()
        scheduler.step()
    return rows


def by_us(optimizer, schedule, plan):
    rates = schedule.bind(optimizer, plan)
    rows = []
    for update in range(plan.updates):
        rates.apply(update)
        rows.append(used(optimizer))
    return rows


def halving(update, total):
    return 0.5 ** (4 * update / total)


CASES = {
    "one cycle": (OneCycle(0.7), lambda o, n: torchs.OneCycleLR(o, 0.7, total_steps=n)),
    "one cycle, warmup": (OneCycle(0.7, warmup=0.25), lambda o, n: torchs.OneCycleLR(o, 0.7, n, pct_start=0.25)),
    "one cycle, span": (OneCycle(0.7, warmup=Updates(4)), lambda o, n: torchs.OneCycleLR(o, 0.7, n, pct_start=4 / n)),
    "one cycle, all": (
        OneCycle(
            0.7,
            anneal_strategy="linear",
            base_momentum=0.6,
            max_momentum=0.8,
            div_factor=10,
            final_div_factor=100,
            three_phase=True,
        ),
        lambda o, n: torchs.OneCycleLR(
            o,
            0.7,
            n,
            anneal_strategy="linear",
            base_momentum=0.6,
            max_momentum=0.8,
            div_factor=10,
            final_div_factor=100,
            three_phase=True,
        ),
    ),
    "one cycle, no momentum": (
        OneCycle(0.7, cycle_momentum=False),
        lambda o, n: torchs.OneCycleLR(o, 0.7, n, cycle_momentum=False),
    ),
    "step": (StepLR(Updates(7), gamma=0.3), lambda o, n: torchs.StepLR(o, 7, gamma=0.3)),
    "step, fraction": (StepLR(0.3), lambda o, n: torchs.StepLR(o, round(0.3 * n))),
    "step, warmup": (StepLR(Updates(7), warmup=Updates(3)), lambda o, n: warmed(o, 3, torchs.StepLR(o, 7))),
    "milestones": (
        MultiStep([Updates(4), 0.5, 0.8], gamma=0.3),
        lambda o, n: torchs.MultiStepLR(o, [4, round(n * 0.5), round(n * 0.8)], gamma=0.3),
    ),
    "milestones, warmup": (
        MultiStep([Updates(4), 0.5, 0.5], warmup=Updates(3)),
        lambda o, n: warmed(o, 3, torchs.MultiStepLR(o, [1, round(n / 2) - 3, round(n / 2) - 3])),
    ),
    "exponential": (Exponential(0.97, every=Updates(1)), lambda o, n: torchs.ExponentialLR(o, 0.97)),
    "exponential, warmup": (
        Exponential(0.97, every=Updates(1), warmup=0.2),
        lambda o, n: warmed(o, round(0.2 * n), torchs.ExponentialLR(o, 0.97)),
    ),
    "linear": (Linear(), lambda o, n: torchs.LinearLR(o, 1.0, 0.0, total_iters=n)),
    "linear, all": (
        Linear(0.9, start=0.2, over=Updates(6), warmup=Updates(2)),
        lambda o, n: warmed(o, 2, torchs.LinearLR(o, 0.2, 0.9, total_iters=6)),
    ),
    "cosine": (Cosine(), torchs.CosineAnnealingLR),
    "cosine, warmup": (Cosine(warmup=Updates(5)), lambda o, n: warmed(o, 5, torchs.CosineAnnealingLR(o, n - 5))),
    "cosine, one update of warmup": (
        Cosine(warmup=Updates(1)),
        lambda o, n: warmed(o, 1, torchs.CosineAnnealingLR(o, n - 1)),
    ),
    "cyclic": (
        Cyclic(0.01, 0.3, step_size_up=Updates(7)),
        lambda o, n: torchs.CyclicLR(o, 0.01, 0.3, step_size_up=7),
    ),
    "cyclic, all": (
        Cyclic(
            0.01,
            0.3,
            step_size_up=Updates(3),
            step_size_down=Updates(5),
            mode="exp_range",
            gamma=0.99,
            base_momentum=0.5,
            max_momentum=0.7,
        ),
        lambda o, n: torchs.CyclicLR(
            o,
            0.01,
            0.3,
            step_size_up=3,
            step_size_down=5,
            mode="exp_range",
            gamma=0.99,
            base_momentum=0.5,
            max_momentum=0.7,
        ),
    ),
    "cyclic, own scale": (
        Cyclic(0.01, 0.3, step_size_up=Updates(3), scale_fn=lambda x: 1 / (1 + x), scale_mode="iterations"),
        lambda o, n: torchs.CyclicLR(
            o, 0.01, 0.3, step_size_up=3, scale_fn=lambda x: 1 / (1 + x), scale_mode="iterations"
        ),
    ),
    "cyclic, warmup": (
        Cyclic(0.01, 0.3, step_size_up=Updates(4), mode="triangular2", warmup=Updates(3)),
        lambda o, n: warmed(o, 3, torchs.CyclicLR(o, 0.01, 0.3, step_size_up=4, mode="triangular2")),
    ),
    "function": (FunctionSchedule(halving), lambda o, n: torchs.LambdaLR(o, lambda u: halving(u, n))),
    "torch": (
        TorchSchedule(lambda o: torchs.CosineAnnealingWarmRestarts(o, 4, T_mult=2)),
        lambda o, n: torchs.CosineAnnealingWarmRestarts(o, 4, T_mult=2),
    ),
    "torch, total": (
        TorchSchedule(lambda o, total: torchs.OneCycleLR(o, 0.2, total_steps=total)),
        lambda o, n: torchs.OneCycleLR(o, 0.2, total_steps=n),
    ),
}


@pytest.mark.parametrize(("groups", "total"), (("one", 10), ("two", 10), ("three", 97), ("one", 97), ("two", 1000)))
@pytest.mark.parametrize("case", CASES)
def test_every_rate_is_the_one_of_torchs_scheduler_stepped_by_hand(case, groups, total):
    schedule, scheduler = CASES[case]
    reference, optimizer = OPTIMIZERS[groups](), OPTIMIZERS[groups]()
    expected = by_hand(reference, scheduler(reference, total), total)
    assert by_us(optimizer, schedule, Plan(max_updates=total)) == expected
    assert len({row[0][0] for row in expected}) > 1


@pytest.mark.parametrize("total", TOTALS)
@pytest.mark.parametrize("warmup", (0, 4))
def test_the_final_rate_of_cosine_is_a_factor_of_each_groups_own_rate(warmup, total):
    expected = []
    for group in two_groups().param_groups:
        alone = SGD([parameter()], lr=group["lr"], momentum=0.9)
        cosine = torchs.CosineAnnealingLR(alone, total - warmup, eta_min=0.05 * group["lr"])
        expected.append(by_hand(alone, warmed(alone, warmup, cosine) if warmup else cosine, total))
    schedule = Cosine(warmup=Updates(warmup) if warmup else None, final=0.05)
    rows = by_us(two_groups(), schedule, Plan(max_updates=total))
    assert rows == [[a[0], b[0]] for a, b in zip(*expected, strict=True)]


def test_a_group_with_an_initial_rate_starts_from_it_as_in_torch():
    def begun():
        return SGD([{"params": [parameter()], "lr": 0.03, "initial_lr": 0.2}], lr=0.1)

    reference, optimizer = begun(), begun()
    scheduler = warmed(reference, 5, torchs.CosineAnnealingLR(reference, 45, eta_min=0.1 * 0.2))
    schedule = Cosine(warmup=Updates(5), final=0.1)
    assert by_us(optimizer, schedule, Plan(max_updates=50)) == by_hand(reference, scheduler, 50)


@pytest.mark.parametrize("own", ((0.1, 0.1), (0.1, 0.3)))
def test_lists_give_each_group_its_own_cycle(own):
    def both():
        return SGD([{"params": [parameter()], "lr": lr} for lr in own], momentum=0.9)

    reference, optimizer = both(), both()
    settings = {"base_momentum": [0.7, 0.8], "max_momentum": [0.9, 0.95]}
    scheduler = torchs.OneCycleLR(reference, [0.5, 0.2], total_steps=50, **settings)
    assert by_us(optimizer, OneCycle([0.5, 0.2], **settings), Plan(max_updates=50)) == by_hand(reference, scheduler, 50)


@pytest.mark.parametrize("shape", ("linear", "sqrt", "cosine"))
def test_warmup_stable_decay_is_its_formula(shape):
    total, warmup, decay, final = 200, 20, 60, 0.1
    falls = {
        "linear": lambda p: 1 - p,
        "sqrt": lambda p: 1 - p**0.5,
        "cosine": lambda p: (1 + math.cos(p * math.pi)) / 2,
    }
    schedule = WarmupStableDecay(warmup=0.1, decay=0.3, final=final, shape=shape)
    rows = by_us(plain_sgd(), schedule, Plan(max_updates=total))
    for update, ((rate, _, _),) in enumerate(rows):
        if update < warmup:
            expected = 0.1 * (update + 1) / (warmup + 1)
        elif update < total - decay:
            expected = 0.1
        else:
            expected = 0.1 * (final + (1 - final) * falls[shape]((update - (total - decay)) / decay))
        assert rate == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("mode", ("min", "max"))
def test_plateau_follows_torch_through_a_thousand_validations_and_a_resume(mode):
    draw = random.Random(3)
    values = [draw.choice((math.nan, math.inf, draw.gauss(0, 1) + i / 300)) for i in range(1000)]
    reference, optimizer = two_groups(), two_groups()
    scheduler = torchs.ReduceLROnPlateau(reference, mode=mode, factor=0.9, patience=3, cooldown=2, min_lr=1e-3)
    schedule = Plateau("val_score", mode=mode, factor=0.9, patience=3, cooldown=2, min_lr=1e-3)
    rates = schedule.bind(optimizer, Plan())
    for update, value in enumerate(values):
        rates.apply(update)
        assert used(optimizer) == used(reference)
        scheduler.step(value)
        rates.observe({"val_score": value})
        if update % 97 == 0:
            state, optimizer = rates.state_dict(), two_groups()
            rates = schedule.bind(optimizer, Plan())
            rates.load_state_dict(state)
    assert reference.param_groups[0]["lr"] == 1e-3


@pytest.mark.parametrize("groups", OPTIMIZERS)
@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_goes_on_at_any_update(case, groups):
    schedule, scheduler = CASES[case]
    reference, plan = OPTIMIZERS[groups](), Plan(max_updates=400)
    expected = by_hand(reference, scheduler(reference, 400), 400)
    for update in random.Random(1).sample(range(399), 3):
        killed = OPTIMIZERS[groups]()
        rates = schedule.bind(killed, plan)
        rates.apply(update)
        state, weights = rates.state_dict(), killed.state_dict()
        optimizer = OPTIMIZERS[groups]()
        rates = schedule.bind(optimizer, plan)
        optimizer.load_state_dict(weights)
        assert rates.load_state_dict(state) is None
        rates.apply(update + 1)
        assert used(optimizer) == expected[update + 1]


@pytest.mark.parametrize("accumulate", (((0, 1),), ((0, 3),), ((0, 1), (2, 4))))
@pytest.mark.parametrize("batches", (5, 8))
def test_one_cycle_ends_exactly_at_the_last_update_whatever_the_accumulation(accumulate, batches):
    plan = Plan(batches=batches, epochs=4, accumulate=accumulate)
    rows = by_us(plain_sgd(), OneCycle(0.5), plan)
    assert rows[-1][0][0] == pytest.approx(0.5 / 25 / 1e4)
    assert len(rows) == sum(math.ceil(batches / plan.accumulated(epoch)) for epoch in range(4))
