"""The Schedule law in a run: the rate that is used and reported is torch's own, by the clock of applied updates."""

from __future__ import annotations

import math

import pytest
import torch
from torch.optim import lr_scheduler as torchs

from trainwright import Epochs, MeanLoss, MixedPrecision, Plateau, StepLR, TorchSchedule, batches
from trainwright.schedules import Exponential

from .schedule_runs import CASES, OPTIMIZERS, Watched, by_hand, network, one_group, rows_of_data, run, two_groups, used

WAYS = {
    "plain": ({}, 35),
    "accumulate": ({"accumulate": 3}, 15),
    "accumulate by epoch": ({"accumulate": {0: 1, 2: 4}}, 20),
    "drop last": ({"accumulate": 4, "loader": lambda: batches(rows_of_data(), 3, drop_last=True)}, 10),
    "max_updates": ({"accumulate": 2, "max_updates": 13}, 13),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("groups", OPTIMIZERS)
@pytest.mark.parametrize("case", CASES)
def test_the_rates_of_a_run_are_those_of_torchs_scheduler_in_a_plain_loop(case, groups, way):
    schedule, scheduler = CASES[case]
    settings, total = dict(WAYS[way][0]), WAYS[way][1]
    if "loader" in settings:
        settings["loader"] = settings["loader"]()
    if groups == "adam" and case == "cyclic":
        scheduler = lambda o, n: torchs.CyclicLR(o, 0.01, 0.2, step_size_up=4)  # noqa: E731
    trainer, reported, result = run(schedule, optimizer=OPTIMIZERS[groups], **settings)
    expected = by_hand(scheduler, total, optimizer=OPTIMIZERS[groups])
    assert result.updates == total
    assert trainer.seen == expected
    assert [update.lrs for update in reported] == [tuple(lr for lr, *_ in row) for row in expected]
    assert [update.lr for update in reported] == [row[0][0] for row in expected]
    assert [row["lr"] for row in result.history] == [expected[int(row["update"]) - 1][0][0] for row in result.history]
    assert result.history or "max_updates" in settings


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
    "skip": {"on_nonfinite": "skip"},
    "skip, accumulate": {"on_nonfinite": "skip", "accumulate": 2},
}


def check_a_skipped_update_does_not_advance(way, ends, case="cosine, warmup"):
    """Tries 2, 3 and 6 are skipped: they use the rate of the next applied update, and the run by epochs is 3 short."""
    settings = dict(SKIPS[way])
    schedule, scheduler = CASES[case]
    bad = {2, 3, 6}
    total = 13 if "max_updates" in ends else 5 * math.ceil(7 / settings.get("accumulate", 1))
    trainer, reported, result = run(schedule, poisoned=bad, **settings, **ends)
    expected = by_hand(scheduler, total)
    clock, rates = 0, []
    for call in range(len(trainer.seen)):
        rates.append(expected[clock])
        clock += call not in bad
    assert trainer.seen == rates
    assert [update.lr for update in reported] == [row[0][0] for row in rates]
    assert [call for call, update in enumerate(reported) if update.skipped] == sorted(bad)
    assert [update.update for update in reported] == [
        sum(c not in bad for c in range(n + 1)) for n in range(len(reported))
    ]
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
        return MeanLoss(torch.tensor(self.planned[self.progress.epoch - 1], dtype=torch.float64), 1)


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
    hand = two_groups(network())
    made = torchs.ReduceLROnPlateau(hand, factor=0.5, patience=1)
    expected = []
    for value in Planned.planned:
        expected += [used(hand)] * 7
        made.step(value)
    trainer, reported, _ = run(schedule, cls=Planned, optimizer=two_groups, epochs=10, val=batches(rows_of_data(4), 4))
    assert trainer.seen == expected
    assert [update.lrs for update in reported] == [tuple(lr for lr, *_ in row) for row in expected]
    assert len({row[0][0] for row in expected}) > 2


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
