"""What the state of a schedule holds, and what a resume makes of it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from groups import linear, parameter, rate, sgd
from torch.optim import SGD
from torch.optim import lr_scheduler as torchs

from trainwright.core.checks import FormError
from trainwright.core.durations import Updates
from trainwright.core.errors import CheckpointError, SettingError
from trainwright.core.plan import Plan
from trainwright.schedules.standard import Cosine, FunctionSchedule, OneCycle, StepLR
from trainwright.schedules.stepped import Plateau, TorchSchedule


def is_plain(tree):
    if isinstance(tree, dict):
        return type(tree) is dict and all(isinstance(k, str | int) for k in tree) and all(map(is_plain, tree.values()))
    if isinstance(tree, list | tuple):
        return type(tree) in (list, tuple) and all(map(is_plain, tree))
    return tree is None or type(tree) in (bool, int, float, str, torch.Tensor)


def milestones(optimizer):
    first = torchs.LinearLR(optimizer, total_iters=3)
    return torchs.SequentialLR(optimizer, [first, torchs.MultiStepLR(optimizer, [2, 5])], milestones=[6])


SCHEDULES = [
    OneCycle(0.5),
    Cosine(warmup=0.1),
    StepLR(Updates(3)),
    FunctionSchedule(linear),
    Plateau("val_loss"),
    TorchSchedule(milestones),
    TorchSchedule(lambda o: torchs.CyclicLR(o, 0.1, 0.2, step_size_up=5)),
    TorchSchedule(torchs.ReduceLROnPlateau, unit="validation", monitor="val_loss"),
]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_state_is_plain_data_and_a_copy(schedule):
    optimizer = sgd(momentum=0.9)
    rates = schedule.bind(optimizer, Plan(max_updates=30))
    rates.apply(4)
    state = rates.state_dict()
    text = repr(state)
    assert is_plain(state)
    rates.apply(9)
    rates.observe({"val_loss": 3.0})
    assert repr(state) == text
    assert "0x" not in text


def test_a_resume_across_the_change_of_a_sequence_keeps_its_milestones():
    reference, optimizer = sgd(), sgd()
    scheduler = milestones(reference)
    rates = TorchSchedule(milestones).bind(optimizer, Plan())
    for update in range(15):
        rates.apply(update)
        assert rate(optimizer) == rate(reference)
        state, optimizer = rates.state_dict(), sgd()
        rates = TorchSchedule(milestones).bind(optimizer, Plan())
        rates.load_state_dict(state)
        reference.step()
        scheduler.step()


def test_changed_settings_are_used_and_reported():
    saved = Cosine(final=0.1).bind(sgd(), Plan(max_updates=30)).state_dict()
    optimizer = sgd()
    rates = Cosine(final=0.2).bind(optimizer, Plan(max_updates=40))
    said = rates.load_state_dict(saved)
    assert said == "schedule changed: Cosine(final=0.1) -> Cosine(final=0.2); schedule re-planned: 30 -> 40 updates"
    assert rates.at(39) == Cosine(final=0.2).bind(sgd(), Plan(max_updates=40)).at(39)


def test_a_changed_patience_is_used_with_the_validations_so_far():
    rates = Plateau("val_loss", patience=9).bind(sgd(), Plan())
    for _ in range(3):
        rates.observe({"val_loss": 1.0})
    optimizer = sgd()
    again = Plateau("val_loss", patience=2).bind(optimizer, Plan())
    assert "patience=9" in again.load_state_dict(rates.state_dict())
    again.observe({"val_loss": 1.0})
    again.apply(0)
    assert rate(optimizer) == 0.1 * 0.1


@pytest.mark.parametrize(
    ("other", "first"),
    ((Plateau("val_score", mode="min", patience=0), 3.0), (Plateau("val_loss", mode="max", patience=0), 0.5)),
)
def test_another_monitor_or_mode_starts_from_the_saved_rate_without_a_best(other, first):
    rates = Plateau("val_loss", patience=0).bind(sgd(), Plan())
    for value in (1.0, 5.0):
        rates.observe({"val_loss": value})
    optimizer = sgd()
    again = other.bind(optimizer, Plan())
    assert "schedule changed" in again.load_state_dict(rates.state_dict())
    again.observe({other.monitor: first})
    again.apply(0)
    assert rate(optimizer) == 0.1 * 0.1


def test_a_number_that_is_not_measured_is_refused_with_the_nearest_name():
    rates = Plateau("val_los", mode="min").bind(sgd(), Plan())
    with pytest.raises(SettingError, match="Did you mean 'val_loss'"):
        rates.observe({"val_loss": 1.0, "loss": 2.0})


@pytest.mark.parametrize("saved", (Plateau("val_loss"), TorchSchedule(lambda o: torchs.StepLR(o, 3))))
def test_the_state_of_another_kind_of_schedule_is_refused(saved):
    state = saved.bind(sgd(), Plan()).state_dict()
    with pytest.raises(CheckpointError, match="does not fit Cosine"):
        Cosine().bind(sgd(), Plan(max_updates=30)).load_state_dict(state)


def test_another_torch_scheduler_is_used_from_where_the_run_is_and_reported():
    saved = TorchSchedule(lambda o: torchs.ExponentialLR(o, 0.9)).bind(sgd(), Plan())
    saved.apply(7)
    optimizer = sgd()
    rates = TorchSchedule(lambda o: torchs.StepLR(o, 3)).bind(optimizer, Plan())
    assert "ExponentialLR -> StepLR" in rates.load_state_dict(saved.state_dict())
    rates.apply(7)
    assert rate(optimizer) == 0.1 * 0.1 * 0.1


def test_the_state_of_an_optimizer_with_other_groups_is_refused():
    two = SGD([{"params": [parameter()]}, {"params": [parameter()]}], lr=0.1)
    for schedule in (StepLR(Updates(3)), Plateau("val_loss")):
        state = schedule.bind(two, Plan()).state_dict()
        with pytest.raises(CheckpointError, match="1 parameter groups"):
            schedule.bind(sgd(), Plan()).load_state_dict(state)


def test_a_stepped_schedule_returns_to_an_earlier_update():
    optimizer = sgd()
    rates = TorchSchedule(partial(torchs.StepLR, step_size=3)).bind(optimizer, Plan())
    for updates, falls in ((5, 1), (2, 0), (7, 2)):
        rates.apply(updates)
        assert rate(optimizer) == pytest.approx(0.1 * 0.1**falls)
    with pytest.raises(SettingError, match="applied so far"):
        Cosine().bind(sgd(), Plan(max_updates=3)).apply(-1)


@pytest.mark.parametrize(
    "damage", [{"seen": [None]}, {"seen": 2}, {"groups": [{}]}, {"base": [{"lr": "high"}]}, {"monitor": 3}]
)
def test_a_damaged_state_is_refused(damage):
    rates = Plateau("val_loss").bind(sgd(), Plan())
    for value in (2.0, 1.0):
        rates.observe({"val_loss": value})
    with pytest.raises(FormError):
        Plateau("val_loss").bind(sgd(), Plan()).load_state_dict({**rates.state_dict(), **damage})
