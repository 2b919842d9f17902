"""Epochs of unequal length: schedules that count ends of epochs follow them, a total of others is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import cycle

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from records import Records
from trainwright import (
    SWA,
    Checkpoint,
    Cosine,
    DataError,
    Epochs,
    Observer,
    OneCycle,
    Plateau,
    SettingError,
    StepLR,
    TorchSchedule,
    Trainer,
    Updates,
)
from trainwright.core.plan import Plan
from trainwright.fit.run import EpochLengths
from trainwright.schedules import Cyclic, Exponential, Linear, MultiStep, WarmupStableDecay
from trainwright.update.deferred_check import DeviceLRTable

generator = torch.Generator().manual_seed(0)
X = torch.randn(40, 3, generator=generator)
Y = torch.randn(40, 1, generator=generator)
BATCHES = [(X[at : at + 2], Y[at : at + 2]) for at in range(0, 40, 2)]


class Says:
    """Batches whose `__len__` is not how many they are."""

    def __init__(self, said, number):
        self.said, self.number = said, number

    def __len__(self):
        return self.said

    def __iter__(self):
        return iter(BATCHES[: self.number])


class Sampler:
    """A batch sampler that deals another number of batches in each epoch."""

    def __init__(self, lengths):
        self.lengths, self.epoch = lengths, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.lengths[self.epoch]

    def __iter__(self):
        return iter([[2 * at, 2 * at + 1] for at in range(self.lengths[self.epoch])])


class Quiet(Sampler):
    """One whose length is another only when it has begun to deal: what it said before was the last epoch's."""

    def __init__(self, lengths):
        super().__init__(lengths)
        self.said = lengths[0]

    def __len__(self):
        return self.said

    def __iter__(self):
        self.said = self.lengths[self.epoch]
        return super().__iter__()


SOURCES = {
    "function": lambda lengths: lambda epoch: BATCHES[: lengths[epoch]],
    "sampler": lambda lengths: DataLoader(TensorDataset(X, Y), batch_sampler=Sampler(lengths)),
    "quiet sampler": lambda lengths: DataLoader(TensorDataset(X, Y), batch_sampler=Quiet(lengths)),
    "len": lambda lengths: Says(*lengths),
}
"""Each is made of the batches of each epoch; "len" of what is said, and what is given in all of them."""
RISING, FALLING, MIXED, MORE, FEWER = [2, 5, 3], [5, 2, 2], [3, 3, 6], [3, 5], [5, 3]
CASES = [
    *[(name, lengths) for name in ("function", "sampler", "quiet sampler") for lengths in (RISING, FALLING, MIXED)],
    *[("len", lengths) for lengths in (MORE, FEWER)],
]


def real(name, lengths, epochs=3):
    """The batches that each epoch really has."""
    return [lengths[1]] * epochs if name == "len" else lengths[:epochs]


def net():
    torch.manual_seed(0)
    return nn.Linear(3, 1)


def trained(schedule, data, *, kind=Trainer, optimizer=None, fit=None, **given):
    """The trainer after `fit`, and the rate of each update, whatever `fit` ended by."""
    seen = Records()
    model = net()
    made = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = kind(model, made, nn.MSELoss(), schedule=schedule, observers=[seen], console=False, **given)
    error = None
    try:
        trainer.fit(data, **(fit or {"epochs": 3}))
    except (DataError, Killed) as raised:
        error = raised
    return trainer, seen.rates, error


def by_hand(make, lengths, accumulate=lambda epoch: 1):
    """The plain loop, with a scheduler of torch's that is stepped at the end of each epoch."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler, rates = make(optimizer), []
    for epoch, length in enumerate(lengths):
        k = accumulate(epoch)
        for at in range(0, length, k):
            window = BATCHES[at : min(at + k, length)]
            optimizer.zero_grad()
            for x, y in window:
                (nn.functional.mse_loss(model(x), y) / len(window)).backward()
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
        scheduler.step()
    return model, rates


def equal(one, other):
    return all(torch.equal(*pair) for pair in zip(one.parameters(), other.parameters(), strict=True))


COUNTING = {
    "StepLR": (StepLR(Epochs(1), gamma=0.5), lambda o: lr_scheduler.StepLR(o, 1, gamma=0.5)),
    "StepLR of two": (StepLR(Epochs(2), gamma=0.3), lambda o: lr_scheduler.StepLR(o, 2, gamma=0.3)),
    "MultiStep": (
        MultiStep([Epochs(1), Epochs(2), Epochs(2)], gamma=0.3),
        lambda o: lr_scheduler.MultiStepLR(o, [1, 2, 2], gamma=0.3),
    ),
    "Exponential": (Exponential(0.7), lambda o: lr_scheduler.ExponentialLR(o, 0.7)),
    "TorchSchedule": (
        TorchSchedule(lambda o: lr_scheduler.ExponentialLR(o, 0.7), unit="epoch"),
        lambda o: lr_scheduler.ExponentialLR(o, 0.7),
    ),
}


_turns = [list(COUNTING)[at % len(COUNTING)] for at in range(2 * len(CASES))]


@pytest.mark.parametrize(
    ("counting", "name", "lengths"), [(turn, *case) for turn, case in zip(_turns, CASES * 2, strict=True)]
)
def test_what_counts_the_ends_of_epochs_follows_the_epochs_that_really_were(counting, name, lengths):
    schedule, make = COUNTING[counting]
    trainer, rates, error = trained(schedule, SOURCES[name](lengths))
    model, expected = by_hand(make, real(name, lengths))
    assert error is None
    assert rates == expected
    assert equal(trainer.model, model)


@pytest.mark.parametrize("accumulate", [2, {0: 1, 1: 2}, {0: 3, 2: 1}])
@pytest.mark.parametrize(("name", "lengths"), [("function", RISING), ("quiet sampler", MIXED), ("len", MORE)])
def test_it_follows_them_with_accumulation(name, lengths, accumulate):
    schedule, make = COUNTING["StepLR"]
    trainer, rates, _ = trained(schedule, SOURCES[name](lengths), accumulate=accumulate)
    table = accumulate if isinstance(accumulate, dict) else {0: accumulate}
    k = lambda epoch: next(k for first, k in reversed(table.items()) if first <= epoch)  # noqa: E731
    model, expected = by_hand(make, real(name, lengths), k)
    assert rates == expected
    for mine, theirs in zip(trainer.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


class Skips(Trainer):
    def training_step(self, batch):
        loss = super().training_step(batch)
        return loss * float("nan") if self.progress.epoch == 0 and self.progress.batch == 1 else loss


def test_an_epoch_in_which_an_update_is_held_back_ends_where_it_ends():
    _, rates, _ = trained(COUNTING["StepLR"][0], BATCHES[:3], kind=Skips, on_nonfinite="skip", fit={"epochs": 2})
    assert rates == [0.1, 0.1, 0.1, 0.05, 0.05, 0.05]  # the second, which is held back, is among them


class Two(Trainer):
    def update(self, window):
        loss = self.compute_gradients(window)
        self.apply_gradients("a")
        self.apply_gradients("b")
        return loss


def test_each_of_several_optimizers_follows():
    model = net()
    made = {name: torch.optim.SGD([p], lr=0.1) for name, p in zip("ab", model.parameters(), strict=True)}
    schedule = {"a": StepLR(Epochs(1), gamma=0.5), "b": Exponential(0.7)}
    trainer = Two(model, made, nn.MSELoss(), schedule=schedule, console=False)
    trainer.fit(lambda epoch: BATCHES[: RISING[epoch]], epochs=3)
    assert [row["lr_a"] for row in trainer.history] == [0.1, 0.05, 0.025]
    assert [row["lr_b"] for row in trainer.history] == pytest.approx([0.1, 0.07, 0.049])


def test_after_a_warm_up_in_epochs_of_the_planned_length_the_steps_follow():
    _, rates, error = trained(StepLR(Epochs(1), gamma=0.5, warmup=Epochs(1)), lambda epoch: BATCHES[: MIXED[epoch]])
    assert error is None
    assert rates == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1, *[0.05] * 6])
    _, again, _ = trained(MultiStep([Epochs(1), Epochs(2)], gamma=0.5, warmup=Epochs(1)), SOURCES["function"](MIXED))
    assert again == pytest.approx([0.025, 0.05, 0.075, 0.05, 0.05, 0.05, *[0.025] * 6])


PLANNED = {
    "OneCycle": OneCycle(max_lr=0.1),
    "OneCycle in epochs": OneCycle(max_lr=0.1, warmup=Epochs(2)),
    "Cosine": Cosine(),
    "Cosine with a warm-up": Cosine(warmup=0.2),
    "Cosine with a warm-up in updates": Cosine(warmup=Updates(1)),
    "Linear": Linear(),
    "WarmupStableDecay": WarmupStableDecay(warmup=0.2, decay=0.2),
    "decay in epochs": WarmupStableDecay(warmup=Updates(1), decay=Epochs(1)),
    "function": lambda update, total: 1 - update / total,
    "TorchSchedule": TorchSchedule(lambda optimizer, total: lr_scheduler.PolynomialLR(optimizer, total + 1)),
    "a fraction": StepLR(0.5),
    "milestones": MultiStep([Epochs(1), 0.9]),
    "half epochs": Exponential(0.9, every=Epochs(1.5)),
    "cycles in epochs": Cyclic(0.01, 0.1, step_size_up=Epochs(1)),
    "epochs after updates": StepLR(Epochs(1), warmup=Updates(1)),
}
_made = {"function": RISING, "sampler": FALLING, "quiet sampler": RISING, "len": MORE}


def until_known(name, lengths):
    """Updates that may be made before a wrong length is known."""
    if name == "len":
        return min(lengths)
    first = next(epoch for epoch, length in enumerate(lengths) if length != lengths[0])
    after = 0 if name != "quiet sampler" else min(lengths[0], lengths[first])
    return sum(lengths[:first]) + after


@pytest.mark.parametrize(
    ("planned", "name", "lengths"),
    [("Cosine", *case) for case in CASES]
    + [
        (planned, name, _made[name])
        for planned, name in zip(PLANNED, cycle(["function", "len", "quiet sampler"]), strict=False)
        if planned != "Cosine"
    ],
)
def test_what_was_planned_by_the_length_is_refused_before_another_update(planned, name, lengths):
    _, rates, error = trained(PLANNED[planned], SOURCES[name](lengths))
    assert isinstance(error, DataError)
    assert len(rates) == until_known(name, lengths)
    first = 0 if name == "len" else next(at for at, length in enumerate(lengths) if length != lengths[0])
    assert f"epoch {first + 1} of the training data is not as long as planned" in str(error)
    assert f"{lengths[0]} batches" in str(error)
    assert "max_updates=" in str(error) or "Updates(n)" in str(error)


def test_the_law_sees_a_length_that_is_never_compared(monkeypatch):
    monkeypatch.setattr(EpochLengths, "_compare", lambda *_, **__: None)
    with pytest.raises(AssertionError):
        test_what_was_planned_by_the_length_is_refused_before_another_update("Cosine", "function", RISING)


@pytest.mark.parametrize(("name", "lengths"), CASES)
def test_the_number_of_updates_that_the_error_gives_is_the_cure(name, lengths):
    _, made, error = trained(Cosine(), SOURCES[name](lengths))
    given = re.search(r"max_updates=(\w+)\) in the place of epochs=3", str(error))[1]
    first = 0 if name == "len" else next(at for at, length in enumerate(lengths) if length != lengths[0])
    found = real(name, lengths)[first]
    too_long = name in ("quiet sampler", "len") and found > lengths[0]  # how long, is not known
    updates = sum(lengths[:first]) + found * (3 - first)
    assert given == ("n" if too_long else str(updates))
    assert len(made) <= updates
    kept = [*lengths, *lengths[-1:] * 9] if name != "len" else lengths
    _, rates, error = trained(Cosine(), SOURCES[name](kept), fit={"max_updates": updates})
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torchs, expected = lr_scheduler.CosineAnnealingLR(optimizer, updates), []
    for _ in range(updates):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        torchs.step()
    assert error is None
    assert rates == expected


FREE = {
    "no schedule": (None, {"epochs": 3}),
    "Plateau": (Plateau("loss"), {"epochs": 3}),
    "steps in updates": (StepLR(Updates(2)), {"epochs": 3}),
    "epochs of torch's": (
        TorchSchedule(lambda o, total: lr_scheduler.PolynomialLR(o, total + 1), unit="epoch"),
        {"epochs": 3},
    ),
    "max_updates": (Cosine(warmup=0.2), {"max_updates": 7}),
    "OneCycle, max_updates": (OneCycle(0.1, warmup=Updates(2)), {"max_updates": 7}),
    "an end in updates before that of the epochs": (Cosine(), {"max_updates": 5, "epochs": 9}),
}


@pytest.mark.parametrize("free", FREE)
@pytest.mark.parametrize(("name", "lengths"), [("function", [3, 4, 2, 3, 3]), ("len", MORE), ("len", FEWER)])
def test_nothing_is_refused_where_nothing_depends_on_the_length(free, name, lengths):
    schedule, fit = FREE[free]
    trainer, _, error = trained(schedule, SOURCES[name](lengths), fit=fit)
    assert error is None
    assert trainer.result.updates == fit.get("max_updates", sum(real(name, lengths)))


def test_a_length_that_makes_as_many_updates_is_not_refused():
    _, rates, error = trained(Cosine(), SOURCES["function"]([7, 8, 5]), accumulate=4)
    assert error is None
    assert len(rates) == 6
    _, rates, error = trained(Cosine(), SOURCES["len"]([7, 8]), accumulate=4)
    assert error is None
    assert len(rates) == 6
    _, rates, error = trained(Cosine(), SOURCES["len"]([8, 9]), accumulate=4)
    assert isinstance(error, DataError)
    assert len(rates) == 2


def test_a_warm_up_in_epochs_is_refused_where_its_own_epochs_are_others_whatever_ends_the_run():
    warm, fit = Cosine(warmup=Epochs(2)), {"max_updates": 12}
    assert trained(warm, SOURCES["function"]([3, 3, 5, 4]), fit=fit)[2] is None
    _, rates, error = trained(warm, SOURCES["function"]([3, 4, 3, 3]), fit=fit)
    assert len(rates) == 3
    assert "Updates(n) in the place of epochs in Cosine(warmup=)" in str(error)


def test_an_average_that_starts_at_a_fraction_is_refused_and_one_at_an_epoch_follows():
    data = SOURCES["function"](RISING)
    assert "SWA(start=)" in str(trained(None, data, average=SWA(0.5, Updates(1)))[2])
    assert trained(None, data, average=SWA(Epochs(2)))[2] is None
    assert trained(None, data, average=SWA(0.5, Updates(1)), fit={"max_updates": 7})[2] is None


def test_epochs_that_a_stream_cannot_fill_are_refused():
    stream = (batch for batch in BATCHES[:5])
    _, rates, error = trained(Cosine(), stream, fit={"epochs": 2, "epoch_updates": 3})
    assert len(rates) == 5
    assert "epoch_updates=n" in str(error)


class Own:
    """A schedule of the user's own, whose rates depend on the total of the plan."""

    def bind(self, optimizer, plan):
        return Cosine().bind(optimizer, Plan(max_updates=plan.updates))


def test_a_schedule_of_the_users_own_that_reads_the_total_is_refused_too():
    assert isinstance(trained(Own(), SOURCES["function"](RISING))[2], DataError)
    assert trained(Own(), SOURCES["function"](RISING), fit={"max_updates": 7})[2] is None


class Rows(Observer):
    def __init__(self):
        self.updates = []

    def on_validate(self, record):
        self.updates.append(record.update)


@pytest.mark.parametrize(("name", "lengths"), CASES)
def test_validations_and_saves_come_at_the_ends_of_the_real_epochs(name, lengths, tmp_path):
    model, rows = net(), Rows()
    trainer = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        nn.MSELoss(),
        checkpoint=Checkpoint(tmp_path, every=Epochs(2), keep=9),
        observers=[rows],
        console=False,
    )
    trainer.fit(SOURCES[name](lengths), BATCHES[:2], epochs=3, validate=Epochs(2))
    one, two, three = real(name, lengths)
    assert rows.updates == [one + two, one + two + three]
    assert sorted(int(path.name.split("-")[1]) for path in tmp_path.glob("update-*")) == rows.updates


class Killed(Exception):
    pass


def killed_at(update):
    class Kills(Trainer):
        def update(self, window):
            if self.progress.updates == update:
                raise Killed
            return super().update(window)

    return Kills


class Plain(Trainer):
    """As the killed one: an update of its own."""

    def update(self, window):
        return super().update(window)


RESUMED = [
    ("StepLR", "function", RISING),
    ("MultiStep", "quiet sampler", RISING),
    ("Exponential", "len", MORE),
    ("StepLR of two", "len", FEWER),
    ("TorchSchedule", "sampler", FALLING),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("counting", "name", "lengths"), RESUMED)
def test_resumed_at_any_update_it_goes_on_as_the_run_that_never_ended(counting, name, lengths, tmp_path):
    schedule = COUNTING[counting][0]
    never, rates, _ = trained(schedule, SOURCES[name](lengths), kind=Plain)
    for update in range(1, sum(real(name, lengths))):
        given = {"checkpoint": Checkpoint(tmp_path / str(update), every=Updates(99)), "on_error": "save"}
        _, before, error = trained(schedule, SOURCES[name](lengths), kind=killed_at(update), **given)
        assert isinstance(error, Killed)
        fit = {"epochs": 3, "resume": "auto"}
        again, after, _ = trained(schedule, SOURCES[name](lengths), kind=Plain, fit=fit, **given)
        assert before + after == rates
        assert equal(again.model, never.model)
        assert again.history == never.history


def test_a_resume_counts_the_epochs_that_are_over_whatever_the_plan_says_now(tmp_path):
    schedule, saves = COUNTING["StepLR"][0], Checkpoint(tmp_path, every=Epochs(1))
    trained(schedule, BATCHES[:4], kind=killed_at(8), checkpoint=saves)  # after two epochs
    fit = {"epochs": 3, "resume": "auto"}
    with pytest.warns(UserWarning, match="re-planned"):
        _, rates, _ = trained(schedule, BATCHES[:4], kind=Plain, checkpoint=saves, accumulate=2, fit=fit)
    assert rates == [0.025, 0.025]
    _, rates, _ = trained(Cosine(), BATCHES[:4], kind=killed_at(8), checkpoint=Checkpoint(tmp_path / "cosine"))
    again = Checkpoint(tmp_path / "cosine")
    with pytest.warns(UserWarning, match="re-planned: 12 -> 10 updates"):
        _, after, _ = trained(Cosine(), BATCHES[:4], kind=Plain, checkpoint=again, accumulate=2, fit=fit)
    expected = Cosine().bind(torch.optim.SGD(net().parameters(), lr=0.1), Plan(max_updates=10))
    assert after == [expected.at(8)[0], expected.at(9)[0]]


@pytest.mark.parametrize(("name", "lengths"), [("function", RISING), ("len", MORE), ("len", FEWER)])
def test_resumed_after_the_refusal_it_is_refused_again_and_goes_on_with_the_cure(name, lengths, tmp_path):
    saves = Checkpoint(tmp_path)
    _, before, error = trained(Cosine(), SOURCES[name](lengths), checkpoint=saves)
    assert isinstance(error, DataError)
    fit = {"epochs": 3, "resume": "auto"}
    _, more, error = trained(Cosine(), SOURCES[name](lengths), checkpoint=saves, fit=fit)
    assert isinstance(error, DataError)
    assert more == []
    total = sum(real(name, lengths))
    with pytest.warns(UserWarning, match=f"re-planned: .* -> {total} updates"):
        trainer, after, error = trained(
            Cosine(), SOURCES[name](lengths), checkpoint=saves, fit={"max_updates": total, "resume": "auto"}
        )
    assert error is None
    assert len(before) + len(after) == trainer.result.updates == total
    expected = Cosine().bind(torch.optim.SGD(net().parameters(), lr=0.1), Plan(max_updates=total))
    assert after == [expected.at(update)[0] for update in range(len(before), total)]


def test_a_table_on_a_device_is_sent_anew_when_the_plan_is_another():
    plan = Plan(batches=3, epochs=9)
    rates = StepLR(Epochs(1), gamma=0.5).bind(torch.optim.SGD(net().parameters(), lr=0.1), plan)
    table = DeviceLRTable(rates, torch.device("cpu"))
    table.resize(1)
    table.reach(0)
    read = lambda update: table.at(torch.tensor(update))[0].item()  # noqa: E731
    assert [read(update) for update in (2, 3)] == pytest.approx([0.1, 0.05])
    rates.replan(Plan(batches=3, epochs=9, past=((0, 0), (5, 5))))
    table.reach(3)
    assert [read(update) for update in (4, 5, 8)] == pytest.approx([0.1, 0.05, 0.025])


def test_a_plan_in_a_run_has_the_epochs_that_are_over_as_they_were_and_those_to_come_as_planned():
    plan = Plan(batches=7, accumulate=((0, 2), (3, 7)), epochs=5, past=((0, 0), (5, 4), (6, 5)))
    assert [plan.updates_in(epoch) for epoch in range(5)] == [5, 1, 4, 1, 1]
    assert [plan.updates_until(epoch) for epoch in range(6)] == [0, 5, 6, 10, 11, 12]
    assert [plan.clock_after(epoch) for epoch in range(6)] == [0, 4, 5, 9, 10, 11]  # one update was held back
    assert plan.updates == 12
    longer = replace(plan, now=6)
    assert [longer.updates_until(epoch) for epoch in range(2, 6)] == [6, 12, 13, 14]
    assert (plan.planned.updates, longer.planned.updates) == (14, 14)
    stream = Plan(max_updates=9, past=((0, 0), (5, 5)))
    assert (stream.updates_until(1), stream.updates_until(2), stream.clock_after(2)) == (5, None, None)


def test_milestones_that_fall_into_the_warm_up_of_a_shorter_epoch_are_refused():
    schedule = MultiStep([Epochs(1)], warmup=Updates(4))
    with pytest.raises(SettingError, match="inside the warm-up"):
        trained(schedule, SOURCES["function"](FALLING[::-1]))
    assert trained(schedule, SOURCES["function"]([5, 2, 2]))[2] is None
