"""`resume_fresh` starts the named parts anew: a run goes on after a slot was added, removed or replaced."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainwright import (
    EMA,
    SWA,
    Checkpoint,
    CheckpointError,
    Cosine,
    EarlyStopping,
    Plateau,
    SettingError,
    StepLR,
    Trainer,
    Updates,
    batches,
)

X = torch.randn(24, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = X.sum(1, keepdim=True)


def network(seed=1):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()


def trainer(directory, *, seed=1, optimizer=torch.optim.SGD, extra=None, **slots):
    model = network(seed)
    settings = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
    checkpoint = None if directory is None else Checkpoint(directory, keep="all")
    made = Trainer(
        model,
        optimizer(model.parameters(), lr=0.05, **settings),
        nn.MSELoss(),
        checkpoint=checkpoint,
        console=False,
        device="cpu",
        **slots,
    )
    made.state.update(extra or {})
    return made


def data():
    return batches((X, Y), 6, shuffle=True, seed=3)


def halfway(directory, **slots):
    """A run of 2 of 4 epochs, saved; 8 of 16 updates."""
    trainer(directory, **slots).fit(data(), epochs=2)


def goes_on(directory, *, fresh=(), **slots):
    """The same run with other slots, from other weights, resumed and run to its end."""
    again = trainer(directory, seed=9, **slots)
    result = again.fit(data(), epochs=4, resume="auto", resume_fresh=fresh)
    return again, result


def weights(made):
    return [one.detach().clone() for one in (*made.model.parameters(), *made.model.buffers())]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(weights(one), weights(other), strict=True))


def whole(**slots):
    made = trainer(None, **slots)
    made.fit(data(), epochs=4)
    return made


def test_the_refusal_prints_the_line_and_the_line_works(tmp_path):
    halfway(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        goes_on(tmp_path, schedule=Cosine(), average=EMA(0.9))
    text = str(caught.value)
    assert "missing ['average', 'schedule'], not used []" in text
    line = 'fit(..., resume_fresh=("average", "schedule"))'
    assert f"  fix   {line}, which starts them anew; or build the Trainer as when it was saved" in text
    _, result = goes_on(tmp_path, fresh=("average", "schedule"), schedule=Cosine(), average=EMA(0.9))
    assert result.updates == 16


def test_a_single_name_is_printed_as_a_tuple(tmp_path):
    halfway(tmp_path)
    with pytest.raises(CheckpointError, match=r'resume_fresh=\("average",\)\)'):
        goes_on(tmp_path, average=EMA(0.9))


def test_an_average_that_is_removed_leaves_the_run_that_never_had_one(tmp_path):
    halfway(tmp_path, average=EMA(0.9))
    without, _ = goes_on(tmp_path, fresh=("average",))
    assert same(without, whole())


def test_tied_weights_are_the_trained_ones_too(tmp_path):
    def tied(directory, seed, **slots):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh(), nn.Linear(3, 3, bias=False)).double()
        model[2].weight = model[0].weight
        checkpoint = None if directory is None else Checkpoint(directory)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return Trainer(model, optimizer, nn.MSELoss(), checkpoint=checkpoint, console=False, device="cpu", **slots)

    rows = batches((X, X), 6)
    tied(tmp_path, 1, average=EMA(0.5)).fit(rows, epochs=2)
    again = tied(tmp_path, 7)
    again.fit(rows, epochs=4, resume="auto", resume_fresh=("average",))
    never = tied(None, 1)
    never.fit(rows, epochs=4)
    assert torch.equal(again.model[2].weight, never.model[0].weight)


def test_an_average_that_is_added_is_that_of_the_updates_from_there_on(tmp_path):
    halfway(tmp_path)
    again, _ = goes_on(tmp_path, fresh=("average",), average=EMA(0.5))
    seen = []

    class Seen(Trainer):
        def after_update(self):
            seen.append([p.detach().clone() for p in self.model.parameters()])

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    Seen(model, optimizer, nn.MSELoss(), console=False, device="cpu").fit(data(), epochs=4)
    averages = seen[8]
    for now in seen[9:]:
        averages = [a.lerp(b, 0.5) for a, b in zip(averages, now, strict=True)]
    for mine, expected in zip(again.model.parameters(), averages, strict=True):
        torch.testing.assert_close(mine.detach(), expected, rtol=1e-12, atol=1e-12)


def test_an_average_of_another_kind_starts_anew_on_the_trained_weights(tmp_path):
    halfway(tmp_path, average=EMA(0.9))
    with pytest.raises(CheckpointError, match=r'another kind of average(.|\n)*resume_fresh=\("average",\)'):
        goes_on(tmp_path, average=SWA(0.75))
    replaced, _ = goes_on(tmp_path, fresh=("average",), average=SWA(0.75))
    assert same(replaced, whole(average=SWA(0.75)))


def by_hand(rates):
    """The plain loop at these rates."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = data()
    made = iter([batch for epoch in range(4) for batch in loader])
    for rate in rates:
        optimizer.param_groups[0]["lr"] = rate
        x, y = next(made)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def test_a_schedule_that_is_removed_leaves_the_rates_that_the_optimizer_was_built_with(tmp_path):
    halfway(tmp_path, schedule=StepLR(Updates(2), gamma=0.5))
    again, _ = goes_on(tmp_path, fresh=("schedule",))
    assert again.optimizer.param_groups[0]["lr"] == 0.05
    expected = by_hand([0.05 * 0.5 ** (update // 2) for update in range(8)] + [0.05] * 8)
    assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), expected, strict=True))


def test_a_schedule_that_is_added_gives_the_rates_of_the_updates_that_are_left(tmp_path):
    halfway(tmp_path)
    again, _ = goes_on(tmp_path, fresh=("schedule",), schedule=StepLR(Updates(4), gamma=0.5))
    expected = by_hand([0.05] * 8 + [0.05 * 0.5 ** (update // 4) for update in range(8, 16)])
    assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), expected, strict=True))


def test_the_line_names_the_parts_that_start_anew_already(tmp_path):
    halfway(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        goes_on(tmp_path, fresh=("optimizer",), schedule=Cosine())
    assert 'resume_fresh=("optimizer", "schedule")' in str(caught.value)
    _, result = goes_on(tmp_path, fresh=("optimizer", "schedule"), schedule=Cosine())
    assert result.updates == 16


def test_a_schedule_of_another_kind_is_refused_with_the_line_and_replaced_by_it(tmp_path):
    halfway(tmp_path, schedule=Plateau("loss"))
    with pytest.raises(CheckpointError, match=r'resume_fresh=\("schedule",\)'):
        goes_on(tmp_path, schedule=StepLR(Updates(4)))
    _, result = goes_on(tmp_path, fresh=("schedule",), schedule=StepLR(Updates(4)))
    assert result.updates == 16


def test_early_stopping_that_is_added_or_removed(tmp_path):
    stopping = EarlyStopping("loss", patience=50, restore_best=False)
    halfway(tmp_path / "a")
    added, _ = goes_on(tmp_path / "a", fresh=("early_stopping",), early_stopping=stopping)
    halfway(tmp_path / "b", early_stopping=stopping)
    removed, _ = goes_on(tmp_path / "b", fresh=("early_stopping",))
    assert same(added, removed) and same(added, whole())


def test_an_optimizer_of_another_class_goes_on_without_the_state(tmp_path):
    halfway(tmp_path)
    with pytest.raises(CheckpointError, match=r'saved with SGD(.|\n)*resume_fresh=\("optimizer",\)'):
        goes_on(tmp_path, optimizer=torch.optim.Adam)
    again, result = goes_on(tmp_path, fresh=("optimizer",), optimizer=torch.optim.Adam)
    assert result.updates == 16
    assert {int(state["step"]) for state in again.optimizer.state.values()} == {8}


def test_state_of_the_users_own_stays_as_it_was_built(tmp_path):
    halfway(tmp_path, extra={"seen": 1})
    again, _ = goes_on(tmp_path, fresh=("state",), extra={"other": 2})
    assert again.state == {"other": 2}


def test_a_part_that_neither_has_is_no_mistake_where_it_is_a_slots(tmp_path):
    halfway(tmp_path)
    again, _ = goes_on(tmp_path, fresh=("schedule", "average"))
    assert same(again, whole())


@pytest.mark.parametrize(
    ("fresh", "said"),
    [
        ("schedule", r"fix   resume_fresh=\('schedule',\)"),
        ((1,), "names of parts"),
        (("model",), r"a resume is not possible without the saved 'model'(.|\n)*load_weights"),
        (("data",), "resume_data=False"),
        (("progress",), "leave resume out"),
        (("shedule",), r"there is no part 'shedule'\. Did you mean 'schedule'\?"),
    ],
)
def test_a_name_that_cannot_be_is_refused_before_anything_is_loaded(fresh, said, tmp_path):
    halfway(tmp_path)
    with pytest.raises(SettingError, match=said):
        goes_on(tmp_path, fresh=fresh)


def test_it_needs_a_resume():
    with pytest.raises(SettingError, match=r"resume_fresh=\('schedule',\)\) without resume"):
        trainer(None).fit(data(), epochs=1, resume_fresh=("schedule",))


def test_nothing_is_started_anew_where_there_is_nothing_to_resume(tmp_path):
    made = trainer(tmp_path)
    made.fit(data(), epochs=4, resume="auto", resume_fresh=("schedule",))
    assert same(made, whole())
