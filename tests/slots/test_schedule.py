"""What schedules accept and refuse, what they own, what they leave alone, and what a call costs."""

from __future__ import annotations

import doctest
import sys
from collections import Counter
from functools import partial

import pytest
import torch
from torch.optim import SGD, Adam, AdamW
from torch.optim import lr_scheduler as torchs
from torch.optim.optimizer import register_optimizer_step_post_hook

from trainwright.base.errors import CheckpointError, SettingError
from trainwright.base.plan import Plan
from trainwright.base.spans import Epochs, Seconds, Updates
from trainwright.slots import schedule_cycles
from trainwright.slots.schedule import (
    Cosine,
    Cyclic,
    Exponential,
    FunctionSchedule,
    Linear,
    MultiStep,
    OneCycle,
    Plateau,
    StepLR,
    TorchSchedule,
    WarmupStableDecay,
    as_schedule,
)


def parameter():
    return torch.nn.Parameter(torch.zeros(1))


def sgd(**settings):
    return SGD([parameter()], lr=0.1, **settings)


def rate(optimizer, group=0):
    return optimizer.param_groups[group]["lr"]


def linear(update, total):
    return 1 - update / total


# --- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "both"),
    [
        (lambda: StepLR(30), r"StepLR\(Epochs\(30\)\) or StepLR\(Updates\(30\)\)"),
        (lambda: Cosine(warmup=500), r"Cosine\(warmup=Epochs\(500\)\) or Cosine\(warmup=Updates\(500\)\)"),
        (lambda: MultiStep([30, 60]), r"Epochs\(30\)\]\) or .*Updates\(30\)"),
        (lambda: Exponential(0.9, every=1), r"every=Epochs\(1\)\) or .*every=Updates\(1\)"),
        (lambda: Linear(over=5), r"over=Epochs\(5\)\) or .*over=Updates\(5\)"),
        (lambda: Cyclic(0.1, 0.2, step_size_up=2000), r"step_size_up=Epochs\(2000\)\) or .*=Updates\(2000\)"),
        (lambda: Cyclic(0.1, 0.2, step_size_down=20), r"step_size_down=Epochs\(20\)\) or .*=Updates\(20\)"),
        (lambda: WarmupStableDecay(warmup=5, decay=0.2), r"warmup=Epochs\(5\).* or .*warmup=Updates\(5\)"),
        (lambda: WarmupStableDecay(warmup=0.1, decay=5), r"decay=Epochs\(5\)\) or .*decay=Updates\(5\)"),
        (lambda: OneCycle(0.1, warmup=1), r"warmup=Epochs\(1\)\) or .*warmup=Updates\(1\)"),
        (lambda: FunctionSchedule(linear, warmup=5), r"warmup=Epochs\(5\)\) or .*warmup=Updates\(5\)"),
    ],
)
def test_a_bare_whole_number_is_refused_with_both_ways_to_write_it(make, both):
    with pytest.raises(SettingError, match="has no unit") as error:
        make()
    assert error.match(both)


@pytest.mark.parametrize("length", (0.0, -0.5, float("nan"), True, "30", None, Seconds(5)))
def test_what_is_no_length_is_refused(length):
    with pytest.raises(SettingError, match="StepLR"):
        StepLR(length)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: OneCycle(0), "max_lr=0"),
        (lambda: OneCycle([0.1, -1]), "max_lr"),
        (lambda: OneCycle(0.1, anneal_strategy="sin"), "'cos' or 'linear'"),
        (lambda: OneCycle(0.1, cycle_momentum=1), "cycle_momentum=1"),
        (lambda: OneCycle(0.1, max_momentum=1.5), "max_momentum=1.5"),
        (lambda: StepLR(0.1, gamma=0), "gamma=0"),
        (lambda: MultiStep([]), "milestones"),
        (lambda: Cosine(final=-0.1), "final=-0.1"),
        (lambda: Cosine(final=2), "at most 1"),
        (lambda: Linear(start=0), "start=0"),
        (lambda: WarmupStableDecay(warmup=0.1, decay=0.1, shape="round"), "shape='round'"),
        (lambda: Cyclic(0.1, 0.2, mode="square"), "mode='square'"),
        (lambda: Plateau("val_accuracy"), 'mode="max"'),
        (lambda: Plateau("val_loss", mode="down"), "mode='down'"),
        (lambda: Plateau("val_loss", patience=-1), "patience=-1"),
        (lambda: Plateau("val_loss", factor=1.0), "factor=1.0"),
        (lambda: Plateau("val_loss", warmup=Updates(5)), "no warm-up"),
        (lambda: TorchSchedule(torchs.ExponentialLR, warmup=0.1), "too many|TorchSchedule"),
        (lambda: TorchSchedule(lambda o: torchs.ExponentialLR(o, 0.9), warmup=0.1), "no warm-up"),
        (lambda: TorchSchedule(lambda o: None, unit="batch"), "unit='batch'"),
        (lambda: TorchSchedule(lambda o: None, monitor="val_loss"), 'unit="validation"'),
        (lambda: TorchSchedule(torchs.OneCycleLR), "optimizer, total"),
        (lambda: TorchSchedule(lambda: None), "optimizer, total"),
        (lambda: TorchSchedule(torchs.StepLR(sgd(), 3)), "a function that builds"),
        (lambda: FunctionSchedule(lambda update: 1.0), "update, total"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_when_it_is_given(make, named):
    with pytest.raises(SettingError, match=named):
        make()


@pytest.mark.parametrize(
    ("schedule", "plan", "named"),
    [
        (OneCycle(0.1), Plan(train="the stream"), "the stream has no length"),
        (Cosine(), Plan(), "max_updates"),
        (FunctionSchedule(linear), Plan(), "max_updates"),
        (StepLR(0.3), Plan(), "max_updates"),
        (StepLR(Epochs(1)), Plan(max_updates=10), "has no length"),
        (StepLR(Epochs(0.1)), Plan(batches=5, epochs=2), "shorter than one update"),
        (Cosine(warmup=Updates(10)), Plan(max_updates=10), "leaves nothing"),
        (MultiStep([0.5, 0.2]), Plan(max_updates=10), "rise"),
        (MultiStep([0.2], warmup=0.4), Plan(max_updates=10), "inside the warm-up"),
        (WarmupStableDecay(warmup=0.6, decay=0.6), Plan(max_updates=10), "longer than the run"),
        (OneCycle(0.1, warmup=0.1), Plan(max_updates=10), "divides by zero"),
        (OneCycle(0.1, warmup=0.6, three_phase=True), Plan(max_updates=10), "0.5"),
        (OneCycle(0.1, warmup=Updates(11)), Plan(max_updates=10), "within the run"),
        (OneCycle([0.1, 0.2]), Plan(max_updates=10), "2 values for 1 parameter groups"),
        (OneCycle(0.1, cycle_momentum=True), Plan(max_updates=10), "group 0 has no momentum"),
        (Cyclic(0.1, 0.2, cycle_momentum=True), Plan(), "group 0 has no momentum"),
        (
            Cyclic(0.1, 0.2, step_size_up=Epochs(1)),
            Plan(batches=8, epochs=9, accumulate=((0, 1), (5, 4))),
            "no fixed number",
        ),
        (FunctionSchedule(lambda update, total: -1.0), Plan(max_updates=10), "-1.0 for update=0"),
        (FunctionSchedule(lambda update, total: float("nan")), Plan(max_updates=10), "nan for update=0"),
        (TorchSchedule(lambda o: None), Plan(), "NoneType"),
        (TorchSchedule(lambda o: torchs.StepLR(sgd(), 3)), Plan(), "another optimizer"),
        (TorchSchedule(torchs.ReduceLROnPlateau), Plan(), "val_loss"),
        (
            TorchSchedule(lambda o: torchs.StepLR(o, 3), unit="validation", monitor="val_loss"),
            Plan(),
            "reads no number",
        ),
        (
            TorchSchedule(lambda o, total: torchs.StepLR(o, step_size=total), unit="validation"),
            Plan(max_updates=10),
            "number of validations",
        ),
    ],
)
def test_what_contradicts_the_plan_or_the_optimizer_is_refused_when_it_is_bound(schedule, plan, named):
    with pytest.raises(SettingError, match=named):
        schedule.bind(sgd(), plan)


def test_a_function_is_a_schedule_and_a_schedule_is_itself():
    assert as_schedule(None) is None
    assert as_schedule(linear) == FunctionSchedule(linear)
    cosine = Cosine()
    assert as_schedule(cosine) is cosine


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (torchs.StepLR(sgd(), 3), r"does not say when it steps(.|\n)*TorchSchedule\(lambda optimizer: StepLR"),
        (torchs.ReduceLROnPlateau(sgd()), "does not say when it steps"),
        (torchs.StepLR, r"is a class(.|\n)*TorchSchedule"),
        (OneCycle, r"is a class(.|\n)*OneCycle\(\)"),
        ("cosine", "Cosine"),
        (0.1, "no schedule"),
        (lambda update: 1.0, "update, total"),
    ],
)
def test_what_is_no_schedule_is_refused_with_the_line_to_write(value, named):
    with pytest.raises(SettingError, match=named):
        as_schedule(value)


def test_the_example_in_the_docstring_runs():
    assert doctest.testmod(schedule_cycles).attempted >= 5
    assert doctest.testmod(schedule_cycles).failed == 0


# --- lengths --------------------------------------------------------------------------------------------------------


def test_a_decay_of_epochs_is_the_last_epochs_of_the_run():
    plan = Plan(batches=8, epochs=6, accumulate=((0, 1), (4, 4)))
    optimizer = sgd()
    rates = WarmupStableDecay(warmup=0.0, decay=Epochs(3)).bind(optimizer, plan)
    table = [rates.at(update)[0] for update in range(plan.updates)]
    assert max(u for u, value in enumerate(table) if value == 0.1) == plan.updates_until(3)


def test_a_milestone_is_a_point_of_the_run_also_with_warmup():
    plan = Plan(batches=5, epochs=10)
    rates = MultiStep([Epochs(4), 0.8], warmup=Epochs(1)).bind(sgd(), plan)
    table = [rates.at(update)[0] for update in range(50)]
    assert [u for u in range(6, 50) if table[u] < table[u - 1]] == [20, 40]


def test_without_a_total_the_table_has_no_end():
    optimizer = sgd()
    rates = StepLR(Updates(1000), gamma=0.5).bind(optimizer, Plan())
    rates.apply(5000)
    assert rate(optimizer) == 0.1 * 0.5**5


@pytest.mark.parametrize("schedule", (OneCycle(0.5), Cosine(warmup=0.1, final=0.1), Linear(), FunctionSchedule(linear)))
def test_the_last_rate_of_the_run_holds_after_its_end(schedule):
    optimizer = sgd()
    rates = schedule.bind(optimizer, Plan(max_updates=30))
    rates.apply(29)
    last = rate(optimizer)
    for update in (30, 31, 1000):
        rates.apply(update)
        assert rate(optimizer) == last
    assert rates.at(10_000) == [last]


# --- who owns what --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", (Cosine(), Plateau("val_loss"), TorchSchedule(lambda o: torchs.StepLR(o, 3))))
def test_a_rate_set_by_hand_is_refused_with_the_groups_name(schedule):
    optimizer = SGD([{"params": [parameter()]}, {"params": [parameter()], "name": "head"}], lr=0.1)
    rates = schedule.bind(optimizer, Plan(max_updates=30))
    rates.apply(0)
    optimizer.param_groups[1]["lr"] = 0.5
    with pytest.raises(SettingError, match=r"lr of group 1 \('head'\) was set by hand(.|\n)*lr=0.5"):
        rates.apply(1)


def test_a_rate_set_by_hand_before_the_first_update_is_refused_too():
    optimizer = sgd()
    rates = Cosine().bind(optimizer, Plan(max_updates=30))
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(SettingError, match="group 0"):
        rates.apply(0)


def test_a_momentum_set_by_hand_is_refused_where_it_is_cycled():
    optimizer = sgd(momentum=0.9)
    rates = OneCycle(0.5).bind(optimizer, Plan(max_updates=30))
    rates.apply(0)
    optimizer.param_groups[0]["momentum"] = 0.1
    with pytest.raises(SettingError, match="momentum of group 0"):
        rates.apply(1)


def test_loading_the_optimizer_is_no_change_by_hand():
    optimizer = sgd()
    rates = Cosine().bind(optimizer, Plan(max_updates=30))
    rates.apply(0)
    saved = optimizer.state_dict()
    rates.apply(20)
    optimizer.load_state_dict(saved)
    rates.apply(1)
    assert [rate(optimizer)] == rates.at(1)


def test_a_group_that_is_added_follows_from_its_own_rate_and_survives_a_resume():
    optimizer = sgd(momentum=0.9)
    rates = Cosine().bind(optimizer, Plan(max_updates=30))
    rates.apply(10)
    optimizer.add_param_group({"params": [parameter()], "lr": 0.02})
    rates.apply(11)
    factor = rate(optimizer) / 0.1
    assert rate(optimizer, 1) == pytest.approx(0.02 * factor)

    resumed = sgd(momentum=0.9)
    again = Cosine().bind(resumed, Plan(max_updates=30))
    resumed.add_param_group({"params": [parameter()], "lr": 0.02})
    resumed.load_state_dict(optimizer.state_dict())
    again.load_state_dict(rates.state_dict())
    again.apply(12)
    assert [rate(resumed), rate(resumed, 1)] == rates.at(12)


def test_a_group_that_is_added_is_met_by_plateau_and_refused_by_a_scheduler_that_cannot():
    for schedule in (Plateau("val_loss", patience=0), TorchSchedule(lambda o: torchs.StepLR(o, 3))):
        optimizer = sgd()
        rates = schedule.bind(optimizer, Plan())
        rates.apply(0)
        optimizer.add_param_group({"params": [parameter()], "lr": 0.02})
        if isinstance(schedule, TorchSchedule):
            with pytest.raises(SettingError, match="was added"):
                rates.apply(1)
            continue
        rates.apply(1)
        for _ in range(2):
            rates.observe({"val_loss": 1.0})
        rates.apply(2)
        assert rate(optimizer, 1) == 0.02 * 0.1


def test_groups_that_were_removed_are_refused():
    optimizer = SGD([{"params": [parameter()]}, {"params": [parameter()]}], lr=0.1)
    rates = Cosine().bind(optimizer, Plan(max_updates=30))
    optimizer.param_groups.pop()
    with pytest.raises(SettingError, match="removed"):
        rates.apply(0)


@pytest.mark.parametrize(
    "schedule", (OneCycle(0.5), Cosine(warmup=0.1), Plateau("val_loss"), TorchSchedule(lambda o: torchs.StepLR(o, 3)))
)
def test_nothing_but_rates_and_momenta_of_the_optimizer_is_touched(schedule):
    heard = []
    hook = register_optimizer_step_post_hook(lambda *_: heard.append(1))
    try:
        optimizer = sgd(momentum=0.9)
        step, keys, state = optimizer.step, set(optimizer.param_groups[0]), torch.get_rng_state()
        rates = schedule.bind(optimizer, Plan(max_updates=30))
        rates.apply(3)
    finally:
        hook.remove()
    assert optimizer.step == step and not hasattr(optimizer.step, "_wrapped_by_lr_sched")
    assert set(optimizer.param_groups[0]) == keys
    assert not heard
    assert torch.equal(state, torch.get_rng_state())


def test_torch_sets_no_momentum_where_there_was_none():
    groups = [{"params": [parameter()], "momentum": 0.9}, {"params": [parameter()]}]
    optimizer = SGD(groups, lr=0.1)
    for schedule in (OneCycle(0.5), Cyclic(0.1, 0.2, step_size_up=Updates(5))):
        rates = schedule.bind(optimizer, Plan(max_updates=30))
        rates.apply(4)
        assert optimizer.param_groups[0]["momentum"] != 0.9
        assert optimizer.param_groups[1]["momentum"] == 0
        rates.put_back()
    without = Adam([parameter()], betas=(0.0, 0.99))
    OneCycle(0.5).bind(without, Plan(max_updates=30)).apply(0)
    assert without.param_groups[0]["betas"] == (0.0, 0.99)


@pytest.mark.parametrize("schedule", (OneCycle(0.5), TorchSchedule(lambda o, total: torchs.OneCycleLR(o, 0.5, total))))
def test_put_back_gives_the_optimizer_its_own_rates_again(schedule):
    optimizer = AdamW([parameter()], lr=0.1, betas=(0.8, 0.9))
    rates = schedule.bind(optimizer, Plan(max_updates=30))
    rates.apply(20)
    rates.put_back()
    assert rate(optimizer) == 0.1
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)


def test_a_rate_that_is_a_tensor_is_filled_in_place_and_watched_without_reading_it():
    held = torch.tensor(0.1, dtype=torch.float64)
    optimizer = AdamW([parameter()], lr=held, foreach=False, capturable=True)
    rates = FunctionSchedule(linear).bind(optimizer, Plan(max_updates=10))
    rates.apply(0)
    rates.apply(5)
    assert rate(optimizer) is held
    assert held.item() == 0.1 * 0.5
    held.fill_(0.1 * 0.5)
    with pytest.raises(SettingError, match="a tensor that was written to"):
        rates.apply(6)


def test_a_torch_scheduler_may_change_other_settings_of_a_group():
    class Decay(torchs.StepLR):
        def get_lr(self):
            for group in self.optimizer.param_groups:
                group["weight_decay"] = 0.1 * self.last_epoch
            return super().get_lr()

    schedule = TorchSchedule(lambda o: Decay(o, 3))
    optimizer = sgd(weight_decay=0.0)
    rates = schedule.bind(optimizer, Plan())
    rates.apply(2)
    assert optimizer.param_groups[0]["weight_decay"] == 0.2
    resumed = sgd(weight_decay=0.0)
    again = schedule.bind(resumed, Plan())
    again.load_state_dict(rates.state_dict())
    again.apply(2)
    assert resumed.param_groups[0]["weight_decay"] == 0.2


# --- cost -----------------------------------------------------------------------------------------------------------


def test_applying_costs_one_python_call():
    optimizer = sgd(momentum=0.9)
    rates = Cosine(warmup=0.1).bind(optimizer, Plan(max_updates=200))
    rates.apply(1)  # fills the table
    calls = []
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
    try:
        for update in range(2, 102):
            rates.apply(update)
    finally:
        sys.setprofile(None)
    assert Counter(calls) == {"apply": 100}


def test_groups_that_start_alike_share_a_table():
    optimizer = SGD([{"params": [parameter()], "lr": 0.1 if i % 2 else 0.2} for i in range(10)])
    made = []
    schedule = FunctionSchedule(lambda update, total: made.append(update) or 1.0)
    schedule.bind(optimizer, Plan(max_updates=10))
    assert made == [0, 0]


# --- state ----------------------------------------------------------------------------------------------------------


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


def test_a_state_that_no_checkpoint_can_hold_is_refused_when_it_is_bound():
    class Odd(torchs.StepLR):
        def __init__(self, optimizer):
            self.seen = object()
            super().__init__(optimizer, 3)

    with pytest.raises(SettingError, match="keeps a object in its state"):
        TorchSchedule(Odd).bind(sgd(), Plan())


def test_changed_settings_are_used_and_reported():
    saved = Cosine(final=0.1).bind(sgd(), Plan(max_updates=30)).state_dict()
    optimizer = sgd()
    rates = Cosine(final=0.2).bind(optimizer, Plan(max_updates=40))
    said = rates.load_state_dict(saved)
    assert said == "schedule changed: Cosine(final=0.1) -> Cosine(final=0.2); schedule re-planned: 30 -> 40 updates"
    assert rates.at(39) == Cosine(final=0.2).bind(sgd(), Plan(max_updates=40)).at(39)


def test_a_changed_patience_is_used_and_what_was_seen_is_kept():
    rates = Plateau("val_loss", patience=9).bind(sgd(), Plan())
    for _ in range(3):
        rates.observe({"val_loss": 1.0})
    optimizer = sgd()
    again = Plateau("val_loss", patience=2).bind(optimizer, Plan())
    assert "patience=9" in again.load_state_dict(rates.state_dict())
    again.observe({"val_loss": 1.0})
    again.apply(0)
    assert rate(optimizer) == 0.1 * 0.1


@pytest.mark.parametrize("other", (Plateau("val_score", mode="min"), Plateau("val_loss", mode="max")))
def test_another_monitor_or_mode_forgets_the_best_and_keeps_the_rate(other):
    rates = Plateau("val_loss", patience=0).bind(sgd(), Plan())
    for value in (1.0, 5.0):
        rates.observe({"val_loss": value})
    optimizer = sgd()
    again = other.bind(optimizer, Plan())
    assert "schedule changed" in again.load_state_dict(rates.state_dict())
    again.observe({other.monitor: 3.0})
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


def test_the_state_of_an_optimizer_with_other_groups_is_refused():
    two = SGD([{"params": [parameter()]}, {"params": [parameter()]}], lr=0.1)
    for schedule in (StepLR(Updates(3)), Plateau("val_loss")):
        state = schedule.bind(two, Plan()).state_dict()
        with pytest.raises(CheckpointError, match="1 parameter groups"):
            schedule.bind(sgd(), Plan()).load_state_dict(state)


def test_a_stepped_schedule_does_not_go_back():
    rates = TorchSchedule(partial(torchs.StepLR, step_size=3)).bind(sgd(), Plan())
    rates.apply(5)
    with pytest.raises(SettingError, match="cannot go back"):
        rates.apply(4)
    with pytest.raises(SettingError, match="applied so far"):
        Cosine().bind(sgd(), Plan(max_updates=3)).apply(-1)
