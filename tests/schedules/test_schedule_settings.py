"""What schedules accept and refuse, and what their lengths mean."""

from __future__ import annotations

import doctest

import pytest
from groups import linear, rate, sgd
from torch.optim import lr_scheduler as torchs

from trainwright.core.durations import Epochs, Seconds, Updates
from trainwright.core.errors import SettingError
from trainwright.core.plan import Plan
from trainwright.schedules import standard
from trainwright.schedules.bound import BoundSchedule, bind_schedules
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
    as_schedule,
)
from trainwright.schedules.stepped import Plateau, TorchSchedule

# --- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "both"),
    [
        (lambda: StepLR(30), r"StepLR\(step=Epochs\(30\)\) or StepLR\(step=Updates\(30\)\)"),
        (lambda: Cosine(warmup=500), r"Cosine\(warmup=Epochs\(500\)\) or Cosine\(warmup=Updates\(500\)\)"),
        (lambda: MultiStep([30, 60]), r"Epochs\(30\)\]\) or .*Updates\(30\)"),
        (lambda: Exponential(0.9, every=1), r"every=Epochs\(1\)\) or .*every=Updates\(1\)"),
        (lambda: Linear(over=5), r"over=Epochs\(5\)\) or .*over=Updates\(5\)"),
        (lambda: Cyclic(0.1, 0.2, step_size_up=2000), r"step_size_up=Epochs\(2000\)\) or .*=Updates\(2000\)"),
        (lambda: Cyclic(0.1, 0.2, step_size_down=20), r"step_size_down=Epochs\(20\)\) or .*=Updates\(20\)"),
        (lambda: WarmupStableDecay(warmup=5, decay=0.2), r"warmup=Epochs\(5\).* or .*warmup=Updates\(5\)"),
        (lambda: WarmupStableDecay(warmup=0.1, decay=5), r"decay=Epochs\(5\)\) or .*decay=Updates\(5\)"),
        (lambda: OneCycle(0.1, warmup=1), r"warmup=Epochs\(1\)\) or .*warmup=Updates\(1\)"),
    ],
)
def test_a_bare_integer_is_refused_with_both_ways_to_write_it(make, both):
    with pytest.raises(SettingError, match="has no unit") as error:
        make()
    assert error.match(both)


@pytest.mark.parametrize("length", (0.0, -0.5, float("nan"), True, "30", None, Seconds(5)))
def test_a_value_that_is_no_length_is_refused(length):
    with pytest.raises(SettingError, match="StepLR"):
        StepLR(length)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: OneCycle(0), "max_lr=0"),
        (lambda: OneCycle([0.1, -1]), "max_lr"),
        (lambda: OneCycle(0.1, anneal_strategy="sin"), '"cos" or "linear"'),
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
        (lambda: TorchSchedule(torchs.ExponentialLR), "TorchSchedule"),
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
        (TorchSchedule(lambda o, total: None, unit="epoch"), Plan(max_updates=10), "has no length"),
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
def test_settings_that_contradict_the_plan_or_the_optimizer_are_refused_at_bind(schedule, plan, named):
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
def test_a_value_that_is_no_schedule_is_refused_with_the_line_to_write(value, named):
    with pytest.raises(SettingError, match=named):
        as_schedule(value)


def test_the_example_in_the_docstring_runs():
    assert doctest.testmod(standard).attempted >= 5
    assert doctest.testmod(standard).failed == 0


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


def test_a_length_of_epochs_begins_where_the_warmup_ends_and_may_outlast_the_run():
    plan = Plan(batches=8, epochs=4, accumulate=((0, 1), (2, 4)))
    rates = Linear(0.5, over=Epochs(2), warmup=Epochs(1)).bind(sgd(), plan)
    table = [rates.at(update)[0] for update in range(plan.updates)]
    assert min(u for u, value in enumerate(table) if value == pytest.approx(0.05) and u >= 8) == plan.updates_until(3)
    rates = Linear(0.0, over=Updates(20)).bind(sgd(), Plan(max_updates=10))
    assert rates.at(15)[0] == pytest.approx(0.1 * 0.25)


def test_a_scheduler_of_unit_epoch_gets_the_number_of_epochs_that_the_run_begins():
    totals = []
    schedule = TorchSchedule(lambda o, total: totals.append(total) or torchs.StepLR(o, total), unit="epoch")
    for plan in (
        Plan(batches=3, max_updates=7),
        Plan(batches=3, max_updates=6),
        Plan(epochs=5),
        Plan(batches=3, epochs=4),
    ):
        schedule.bind(sgd(), plan)
    assert totals == [3, 2, 5, 4]


def test_a_rate_that_overflows_is_refused():
    with pytest.raises(SettingError, match="update=2 is inf"):
        Exponential(1e200, every=Updates(1)).bind(sgd(), Plan())


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


# --- schedules of the user's own --------------------------------------------------------------------------------------


class Own:
    """A schedule of the user's own, which returns what it was given."""

    def __init__(self, bound):
        self.bound = bound

    def bind(self, optimizer, plan):
        return self.bound


@pytest.mark.parametrize("named", (False, True))
def test_a_bind_that_returns_no_rates_is_refused_with_the_class_to_derive_from(named):
    optimizer = sgd()
    schedule = {"a": Own(0.1)} if named else Own(0.1)
    with pytest.raises(SettingError, match=r"Own.bind\(optimizer, plan\) returned float(.|\n)*schedules.BoundSchedule"):
        bind_schedules(schedule, {"a": optimizer}, Plan())
    mine = BoundSchedule()
    assert bind_schedules(Own(mine), {"a": optimizer}, Plan()) == {"a": mine}


def test_the_schedules_of_several_optimizers_are_bound_by_name():
    schedules = {"a": Plateau("val_loss"), "b": Cosine(), "c": Plateau("val_score", mode="max")}
    rates = bind_schedules(schedules, {name: sgd() for name in schedules}, Plan(max_updates=5))
    assert {name: one.monitor for name, one in rates.items()} == {"a": "val_loss", "b": None, "c": "val_score"}
    assert bind_schedules(None, {"a": sgd()}, Plan()) == {} == bind_schedules({"a": None}, {"a": sgd()}, Plan())
