"""Tables of rates: which values of the groups they write and restore, and what a call costs."""

from __future__ import annotations

import sys
import tracemalloc
from collections import Counter

import pytest
import torch
from groups import linear, parameter, rate, sgd
from torch.optim import SGD, Adam, AdamW
from torch.optim import lr_scheduler as torchs
from torch.optim.optimizer import register_optimizer_step_post_hook

from trainwright.core.durations import Epochs, Updates
from trainwright.core.errors import SettingError
from trainwright.core.plan import Plan
from trainwright.schedules.standard import Cosine, Cyclic, FunctionSchedule, OneCycle, StepLR, WarmupStableDecay
from trainwright.schedules.stepped import Plateau, TorchSchedule

# --- values of groups ------------------------------------------------------------------------------------------------


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


def test_a_group_that_is_added_follows_plateau_and_is_refused_by_a_scheduler_that_cannot_take_it():
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
    called = []
    hook = register_optimizer_step_post_hook(lambda *_: called.append(1))
    try:
        optimizer = sgd(momentum=0.9)
        step, keys, state = optimizer.step, set(optimizer.param_groups[0]), torch.get_rng_state()
        rates = schedule.bind(optimizer, Plan(max_updates=30))
        rates.apply(3)
    finally:
        hook.remove()
    assert optimizer.step == step and not hasattr(optimizer.step, "_wrapped_by_lr_sched")
    assert set(optimizer.param_groups[0]) == keys
    assert not called
    assert torch.equal(state, torch.get_rng_state())


class PassesTheEpoch(torchs.ExponentialLR):
    """A scheduler of the user's that calls torch with the deprecated epoch."""

    def step(self, epoch=None):
        super().step(self.last_epoch + 1)


def test_a_warning_that_code_of_the_user_causes_is_shown():
    message = "The epoch parameter in `scheduler.step"
    with pytest.warns(UserWarning, match=message):  # torch steps it when it is made
        rates = TorchSchedule(lambda o: PassesTheEpoch(o, 0.9)).bind(sgd(), Plan(max_updates=30))
    with pytest.warns(UserWarning, match=message):
        rates.apply(1)


@pytest.mark.filterwarnings("error")  # pyproject.toml ignores the warning where a test steps a sequence of its own
def test_a_sequence_of_torchs_steps_over_its_milestone_without_a_warning():
    def sequence(optimizer):
        return torchs.SequentialLR(optimizer, [torchs.LinearLR(optimizer), torchs.ExponentialLR(optimizer, 0.9)], [2])

    for schedule in (TorchSchedule(sequence), Cosine(warmup=Updates(2))):
        rates = schedule.bind(sgd(), Plan(max_updates=30))
        for update in range(4):
            rates.apply(update)


def test_torch_sets_no_momentum_where_there_was_none():
    groups = [{"params": [parameter()], "momentum": 0.9}, {"params": [parameter()]}]
    optimizer = SGD(groups, lr=0.1)
    for schedule in (OneCycle(0.5), Cyclic(0.1, 0.2, step_size_up=Updates(5))):
        rates = schedule.bind(optimizer, Plan(max_updates=30))
        rates.apply(4)
        assert optimizer.param_groups[0]["momentum"] != 0.9
        assert optimizer.param_groups[1]["momentum"] == 0
        rates.restore_groups()
    without = Adam([parameter()], betas=(0.0, 0.99))
    OneCycle(0.5).bind(without, Plan(max_updates=30)).apply(0)
    assert without.param_groups[0]["betas"] == (0.0, 0.99)


@pytest.mark.parametrize("schedule", (OneCycle(0.5), TorchSchedule(lambda o, total: torchs.OneCycleLR(o, 0.5, total))))
def test_restore_groups_gives_the_optimizer_its_own_rates(schedule):
    optimizer = AdamW([parameter()], lr=0.1, betas=(0.8, 0.9))
    rates = schedule.bind(optimizer, Plan(max_updates=30))
    rates.apply(20)
    rates.restore_groups()
    assert rate(optimizer) == 0.1
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)


@pytest.mark.parametrize(
    ("schedule", "key"),
    (
        (Cosine(), "lr"),
        (Plateau("val_loss", patience=0), "lr"),
        (TorchSchedule(lambda o, total: torchs.OneCycleLR(o, 0.5, total)), "betas"),
    ),
)
def test_restore_groups_after_loading_a_finished_run_gives_the_saved_rates(schedule, key):
    def optimizer():
        return AdamW([parameter()], lr=0.1, betas=(0.8, 0.9))

    finished, loaded = optimizer(), optimizer()
    rates = schedule.bind(finished, Plan(max_updates=30))
    rates.observe({"val_loss": 1.0})
    rates.observe({"val_loss": 2.0})
    rates.apply(29)
    again = schedule.bind(loaded, Plan(max_updates=30))
    loaded.load_state_dict(finished.state_dict())
    again.load_state_dict(rates.state_dict())
    assert loaded.param_groups[0][key] not in (0.1, (0.8, 0.9))
    again.restore_groups()
    assert loaded.param_groups[0]["lr"] == 0.1
    assert loaded.param_groups[0]["betas"] == (0.8, 0.9)


def test_a_rate_that_is_a_tensor_is_filled_in_place_and_checked_without_a_read():
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


@pytest.mark.usefixtures("no_garbage")
def test_applying_costs_one_python_call_for_any_number_of_groups_and_cycled_momenta():
    groups = [{"params": [parameter()], "lr": 0.1 * (1 + index % 2)} for index in range(4)]
    optimizer = AdamW(groups, betas=(0.9, 0.99))
    rates = OneCycle(0.5).bind(optimizer, Plan(max_updates=64))
    rates.apply(1)
    calls = []
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
    try:
        for update in range(2, 62):
            rates.apply(update)
    finally:
        sys.setprofile(None)
    assert Counter(calls) == {"apply": 60}


SPANNING = {
    **{"one cycle": OneCycle(0.5), "cosine": Cosine(warmup=0.1), "function": FunctionSchedule(linear)},
    "steps of epochs": StepLR(Epochs(1)),
    "decay of epochs": WarmupStableDecay(warmup=Epochs(2), decay=Epochs(3)),
}


@pytest.mark.parametrize("schedule", SPANNING.values(), ids=SPANNING)
def test_a_run_of_a_thousand_million_updates_starts_with_a_short_table(schedule):
    optimizer, steps = sgd(momentum=0.9), Counter()
    tracemalloc.start()
    sys.setprofile(lambda frame, event, _: steps.update([event]))
    try:
        rates = schedule.bind(optimizer, Plan(max_updates=10**9, epoch_updates=1))
        for update in range(3):
            rates.apply(update)
    finally:
        sys.setprofile(None)
        grown = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert steps["call"] < 20_000  # one block of rows
    assert grown < 1_000_000


def test_a_table_of_steps_fills_a_million_rows_with_few_calls():
    rates = StepLR(Epochs(100), gamma=0.5).bind(sgd(), Plan(batches=10**3, epochs=10**6))
    calls = []
    sys.setprofile(lambda frame, event, _: calls.append(event) if event == "call" else None)
    try:
        (rate,) = rates.at(10**6)
    finally:
        sys.setprofile(None)
    assert rate == 0.1 * 0.5**10
    assert len(calls) < 2_000


def test_groups_that_start_alike_share_a_table():
    optimizer = SGD([{"params": [parameter()], "lr": 0.1 if i % 2 else 0.2} for i in range(10)])
    made = []
    schedule = FunctionSchedule(lambda update, total: made.append(update) or 1.0)
    schedule.bind(optimizer, Plan(max_updates=10))
    assert made.count(0) == 2
