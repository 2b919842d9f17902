"""The Schedule law in a run: the rate that is used and told is torch's own, by the clock of applied updates."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim import lr_scheduler as torchs

from trainwright import (
    Checkpoint,
    Cosine,
    Cyclic,
    Epochs,
    Exponential,
    Linear,
    Mean,
    MixedPrecision,
    MultiStep,
    Observer,
    OneCycle,
    Plateau,
    SettingError,
    StepLR,
    TorchSchedule,
    Trainer,
    Updates,
    WarmupStableDecay,
    batches,
)


def one_group(model):
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


def two_groups(model):
    first = {"params": model[0].parameters(), "lr": 0.3}
    return SGD([first, {"params": model[1].parameters(), "name": "head"}], lr=0.07, momentum=0.9)


def adam_groups(model):
    groups = [{"params": model[0].parameters(), "lr": 3e-3}, {"params": model[1].parameters()}]
    return AdamW(groups, lr=1e-3, betas=(0.88, 0.999))


OPTIMIZERS = {"one": one_group, "two": two_groups, "adam": adam_groups}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))


def rows_of_data(rows=20):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, 4, generator=generator), torch.randint(0, 3, (rows,), generator=generator)


def used(optimizer):
    return [(group["lr"], group.get("momentum"), group.get("betas")) for group in optimizer.param_groups]


class Told(Observer):
    def __init__(self):
        self.updates = []

    def on_update(self, update):
        self.updates.append(update)


class Watched(Trainer):
    """Notes the rates at the moment of each optimizer step, and makes the gradient of chosen updates infinite."""

    poisoned = frozenset()
    loss_too = False

    def update(self, window):
        self.calls = getattr(self, "calls", -1) + 1
        return super().update(window)

    def training_step(self, batch):
        loss = self.loss(self.model(batch[0]), batch[1])
        if self.calls in self.poisoned:
            weight = self.model[1].weight
            nothing = torch.sqrt((weight - weight.detach()).sum())  # 0, with an infinite slope
            return loss + (nothing / nothing if self.loss_too else nothing)
        return loss

    def apply_gradients(self):
        self.seen = [*getattr(self, "seen", []), used(self.optimizer)]
        return super().apply_gradients()


def run(schedule, *, optimizer=one_group, cls=Watched, poisoned=(), loader=None, **settings):
    """Five epochs, and (rates used at each try, records told, result)."""
    ends = {name: settings.pop(name) for name in ("epochs", "max_updates", "resume", "val") if name in settings}
    model, told = network(), Told()
    trainer = cls(
        model, optimizer(model), nn.CrossEntropyLoss(), schedule=schedule, observers=[told], console=False, **settings
    )
    trainer.poisoned = frozenset(poisoned)
    train = batches(rows_of_data(), 3) if loader is None else loader
    result = trainer.fit(train, **(ends or {"epochs": 5}))
    return trainer, told.updates, result


def by_hand(scheduler, total, *, optimizer=one_group, steps=1):
    """The rates of a plain loop; `steps`: updates per step of the scheduler."""
    hand = optimizer(network())
    made = scheduler(hand, total)
    rows = []
    for update in range(1, total + 1):
        rows.append(used(hand))
        hand.step()
        if update % steps == 0:
            made.step()
    return rows


def warmed(optimizer, updates, scheduler):
    warmup = torchs.LinearLR(optimizer, start_factor=1 / (updates + 1), total_iters=updates)
    return torchs.SequentialLR(optimizer, [warmup, scheduler], milestones=[updates])


def half_cosine(optimizer, total):
    return torchs.CosineAnnealingLR(optimizer, total)


def stable_decay(update, total):
    falls = total - 4
    if update < 2:
        return (update + 1) / 3
    return 1.0 if update <= falls else 1 - (update - falls) / 4


CASES = {
    "one cycle": (OneCycle(0.7), lambda o, n: torchs.OneCycleLR(o, 0.7, total_steps=n)),
    "step": (StepLR(Updates(3), gamma=0.3), lambda o, n: torchs.StepLR(o, 3, gamma=0.3)),
    "milestones": (MultiStep([Updates(2), Updates(5)]), lambda o, n: torchs.MultiStepLR(o, [2, 5])),
    "exponential": (Exponential(0.9, every=Updates(1)), lambda o, n: torchs.ExponentialLR(o, 0.9)),
    "linear": (Linear(), lambda o, n: torchs.LinearLR(o, 1.0, 0.0, total_iters=n)),
    "cosine": (Cosine(), torchs.CosineAnnealingLR),
    "cosine, warmup": (Cosine(warmup=Updates(3)), lambda o, n: warmed(o, 3, torchs.CosineAnnealingLR(o, n - 3))),
    "cyclic": (Cyclic(0.01, 0.2, step_size_up=Updates(4)), lambda o, n: torchs.CyclicLR(o, 0.01, 0.2, step_size_up=4)),
    "function": (
        lambda update, total: 1 - update / total,
        lambda o, n: torchs.LambdaLR(o, lambda update: 1 - update / n),
    ),
    "torch": (
        TorchSchedule(half_cosine),
        torchs.CosineAnnealingLR,
    ),
}

WAYS = {
    "plain": ({}, 35),
    "accumulate": ({"accumulate": 3}, 15),
    "accumulate by epoch": ({"accumulate": {0: 1, 2: 4}}, 20),
    "drop last": ({"accumulate": 4, "loader": lambda: batches(rows_of_data(), 3, drop_last=True)}, 10),
    "max_updates": ({"accumulate": 2, "max_updates": 13}, 13),
}


def check_rates_are_torchs(case, groups, way):
    schedule, scheduler = CASES[case]
    settings, total = dict(WAYS[way][0]), WAYS[way][1]
    if "loader" in settings:
        settings["loader"] = settings["loader"]()
    if groups == "adam" and case == "cyclic":
        scheduler = lambda o, n: torchs.CyclicLR(o, 0.01, 0.2, step_size_up=4)  # noqa: E731
    trainer, told, result = run(schedule, optimizer=OPTIMIZERS[groups], **settings)
    expected = by_hand(scheduler, total, optimizer=OPTIMIZERS[groups])
    assert result.updates == total
    assert trainer.seen == expected
    assert [update.lrs for update in told] == [tuple(lr for lr, *_ in row) for row in expected]
    assert [update.lr for update in told] == [row[0][0] for row in expected]
    assert [row["lr"] for row in result.history] == [expected[int(row["update"]) - 1][0][0] for row in result.history]
    assert result.history or "max_updates" in settings


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("groups", OPTIMIZERS)
@pytest.mark.parametrize("case", CASES)
def test_the_rates_of_a_run_are_those_of_torchs_scheduler_in_a_plain_loop(case, groups, way):
    check_rates_are_torchs(case, groups, way)


def test_warmup_stable_decay_ends_with_the_run():
    trainer, _, result = run(WarmupStableDecay(warmup=Updates(2), decay=Updates(4)), accumulate=3)
    assert [row[0][0] for row in trainer.seen] == pytest.approx([0.1 * stable_decay(u, 15) for u in range(15)])
    assert result.updates == 15


@pytest.mark.parametrize("accumulate", [1, 2, 7])
def test_steps_of_epochs_are_torchs_scheduler_stepped_once_per_epoch(accumulate):
    updates = math.ceil(7 / accumulate)
    for schedule, scheduler in (
        (StepLR(Epochs(2), gamma=0.3), lambda o, n: torchs.StepLR(o, 2, gamma=0.3)),
        (Exponential(0.9), lambda o, n: torchs.ExponentialLR(o, 0.9)),
        (
            TorchSchedule(lambda o: torchs.StepLR(o, 2, gamma=0.3), unit="epoch"),
            lambda o, n: torchs.StepLR(o, 2, gamma=0.3),
        ),
    ):
        trainer, _, _ = run(schedule, accumulate=accumulate, optimizer=two_groups)
        assert trainer.seen == by_hand(scheduler, 5 * updates, optimizer=two_groups, steps=updates)


# Skipped updates.


SKIPS = {
    "fp16": {"precision": MixedPrecision("fp16", init_scale=1024.0)},
    "fp16, accumulate": {"precision": MixedPrecision("fp16", init_scale=1024.0), "accumulate": 2},
    "skip": {"nonfinite": "skip"},
    "skip, accumulate": {"nonfinite": "skip", "accumulate": 2},
}


def check_a_skipped_update_does_not_advance(way, ends, case="cosine, warmup"):
    """Tries 2, 3 and 6 are skipped: they use the rate of the next applied update, and the run by epochs is 3 short."""
    settings = dict(SKIPS[way])
    schedule, scheduler = CASES[case]
    bad = {2, 3, 6}
    total = 13 if "max_updates" in ends else 5 * math.ceil(7 / settings.get("accumulate", 1))
    trainer, told, result = run(schedule, poisoned=bad, **settings, **ends)
    expected = by_hand(scheduler, total)
    clock, rates = 0, []
    for call in range(len(trainer.seen)):
        rates.append(expected[clock])
        clock += call not in bad
    assert trainer.seen == rates
    assert [update.lr for update in told] == [row[0][0] for row in rates]
    assert [call for call, update in enumerate(told) if update.skipped] == sorted(bad)
    assert [update.update for update in told] == [sum(c not in bad for c in range(n + 1)) for n in range(len(told))]
    assert result.skipped == 3
    assert result.updates == (total if "max_updates" in ends else total - 3)


@pytest.mark.parametrize("case", ["cosine, warmup", "one cycle", "torch"])
@pytest.mark.parametrize("ends", [{"epochs": 5}, {"max_updates": 13}], ids=["epochs", "max_updates"])
@pytest.mark.parametrize("way", SKIPS)
def test_a_skipped_update_does_not_advance_the_schedule(way, ends, case):
    check_a_skipped_update_does_not_advance(way, ends, case)


# Validations.


class Planned(Watched):
    planned = (3.0, 2.0, 2.5, 2.6, 1.0, 1.1, 1.2, math.nan, 1.3, 1.4)

    def validation_step(self, batch):
        return Mean(torch.tensor(self.planned[self.progress.epoch - 1], dtype=torch.float64), 1)


def check_plateau_is_torchs(schedule):
    hand = two_groups(network())
    made = torchs.ReduceLROnPlateau(hand, factor=0.5, patience=1)
    expected = []
    for value in Planned.planned:
        expected += [used(hand)] * 7
        made.step(value)
    trainer, told, _ = run(schedule, cls=Planned, optimizer=two_groups, epochs=10, val=batches(rows_of_data(4), 4))
    assert trainer.seen == expected
    assert [update.lrs for update in told] == [tuple(lr for lr, *_ in row) for row in expected]
    assert len({row[0][0] for row in expected}) > 2


@pytest.mark.parametrize(
    "schedule",
    [
        Plateau("val_loss", factor=0.5, patience=1),
        TorchSchedule(
            lambda o: torchs.ReduceLROnPlateau(o, factor=0.5, patience=1), unit="validation", monitor="val_loss"
        ),
    ],
    ids=["Plateau", "TorchSchedule"],
)
def test_plateau_is_torchs_stepped_after_each_validation(schedule):
    check_plateau_is_torchs(schedule)


def test_a_plateau_may_watch_the_training_loss_without_validation():
    trainer, _, _ = run(Plateau("loss", factor=0.5, patience=1, threshold=0.9), epochs=6)
    hand = one_group(network())
    made = torchs.ReduceLROnPlateau(hand, factor=0.5, patience=1, threshold=0.9)
    expected = []
    for row in trainer.history:
        expected += [used(hand)] * 7
        made.step(row["loss"])
    assert trainer.seen == expected
    assert len({row[0][0] for row in expected}) > 1


# Refusals.


@pytest.mark.parametrize("schedule", [OneCycle(0.1), Cosine(), Linear(), lambda u, t: 1.0, StepLR(0.3)])
def test_a_stream_without_max_updates_is_refused_before_the_first_update(schedule):
    given = []

    class Stream:
        def __iter__(self):
            for batch in zip(*(column.split(5) for column in rows_of_data()), strict=True):
                given.append(batch)
                yield batch

    model = network()
    before = [p.clone() for p in model.parameters()]
    trainer = Trainer(model, one_group(model), nn.CrossEntropyLoss(), schedule=schedule, console=False)
    with pytest.raises(SettingError, match="max_updates"):
        trainer.fit(Stream(), epochs=3)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not given
    assert trainer.fit(Stream(), max_updates=3).updates == 3


@pytest.mark.parametrize(
    "schedule",
    [Cosine(), OneCycle(0.1), TorchSchedule(half_cosine)],
)
@pytest.mark.parametrize("group", [0, 1])
def test_a_rate_set_by_hand_during_fit_is_an_error_that_names_the_group(schedule, group):
    class Meddles(Watched):
        def training_step(self, batch):
            if self.progress.updates == 2:
                self.optimizer.param_groups[group]["lr"] = 0.5
            return super().training_step(batch)

    with pytest.raises(SettingError, match=rf"group {group}.*set by hand") as caught:
        run(schedule, optimizer=two_groups, cls=Meddles)
    assert ("'head'" in str(caught.value)) == (group == 1)


def test_without_a_schedule_a_rate_set_by_hand_is_used_and_told():
    class Warms(Watched):
        def training_step(self, batch):
            for group in self.optimizer.param_groups:
                group["lr"] = 0.01 * (self.progress.updates + 1)
            return super().training_step(batch)

    trainer, told, _ = run(None, cls=Warms, epochs=1)
    assert [row[0][0] for row in trainer.seen] == [update.lr for update in told] == [0.01 * (n + 1) for n in range(7)]


# Stages and resume.


def check_a_later_end_plans_anew(tmp_path, schedule, scheduler):
    slot = {"checkpoint": Checkpoint(tmp_path), "accumulate": 2, "optimizer": two_groups}
    first, _, _ = run(schedule, epochs=2, **slot)
    assert first.seen == by_hand(scheduler, 8, optimizer=two_groups)
    with pytest.warns(UserWarning, match="re-planned: 8 -> 16 updates"):
        second, told, result = run(schedule, epochs=4, resume="auto", **slot)
    longer = by_hand(scheduler, 16, optimizer=two_groups)
    assert second.seen == longer[8:]
    assert [update.lrs for update in told] == [tuple(lr for lr, *_ in row) for row in longer[8:]]
    assert result.updates == 16


@pytest.mark.parametrize("case", ["one cycle", "cosine, warmup", "linear", "torch", "function"])
def test_a_resumed_stage_with_a_later_end_plans_anew_and_says_so(case, tmp_path):
    check_a_later_end_plans_anew(tmp_path, *CASES[case])


def check_a_next_stage_starts_anew(case):
    schedule, scheduler = CASES[case]
    trainer, told, _ = run(schedule, optimizer=adam_groups, epochs=2)
    expected = by_hand(scheduler, 14, optimizer=adam_groups)
    assert trainer.seen == expected
    trainer.seen = []
    trainer.fit(batches(rows_of_data(), 3), epochs=2)
    assert trainer.seen == expected
    assert [update.update for update in told] == list(range(1, 29))


@pytest.mark.parametrize("case", CASES)
def test_the_schedule_of_a_next_stage_starts_anew(case):
    check_a_next_stage_starts_anew(case)


def test_a_rate_set_between_two_stages_is_where_the_next_schedule_starts():
    trainer, _, _ = run(Cosine(), epochs=1)
    for group in trainer.optimizer.param_groups:
        group["lr"] = 0.5
    trainer.seen = []
    trainer.fit(batches(rows_of_data(), 3), epochs=1)
    assert [row[0][0] for row in trainer.seen] == pytest.approx(
        [0.5 * (1 + math.cos(math.pi * u / 7)) / 2 for u in range(7)]
    )


def test_the_plan_says_how_many_updates_the_run_makes():
    model = network()
    trainer = Trainer(model, one_group(model), nn.CrossEntropyLoss(), accumulate={0: 2, 1: 3}, console=False)
    for ends in ({"epochs": 3}, {"max_updates": 5}, {"epochs": 2, "max_updates": 100}):
        planned = trainer.plan(batches(rows_of_data(), 3), **ends).updates
        assert trainer.fit(batches(rows_of_data(), 3), **ends).updates == planned
