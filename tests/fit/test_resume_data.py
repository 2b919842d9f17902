"""Data that are not what they were: refused with the difference, or taken from an epoch's beginning on request."""

from __future__ import annotations

import pytest
import torch
from cut import Cut, Seen, send
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainwright import Checkpoint, DataError, Observer, OneCycle, SettingError, Trainer, Updates, batches


class Header(Observer):
    def on_fit_start(self, plan):
        self.notes = plan.notes


class Drawing(Trainer):
    cut = Cut()

    def begin_epoch(self, epoch):
        self.state["epochs"] = [*self.state.get("epochs", []), epoch]

    def training_step(self, batch):
        x, y = batch
        self.log("rows seen", float(len(x)), count=1)
        self.cut.at("step")
        return super().training_step((x + 0.1 * torch.randn_like(x), y))


def rows(n=24, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 3, generator=generator), torch.randn(n, 1, generator=generator)


def own(n=24, size=4, seed=0):
    return batches(rows(n, seed), size, shuffle=True, seed=seed)


def loader(n=24, size=4, seed=0):
    return DataLoader(TensorDataset(*rows(n, seed)), size, shuffle=True)


def fit(directory, train, *, cut=None, resume=None, resume_data=True, epochs=2, schedule=None, val=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 1))
    torch.manual_seed(1)
    seen, header = Seen(Cut()), Header()
    trainer = Drawing(
        model,
        torch.optim.Adam(model.parameters(), lr=0.01),
        nn.MSELoss(),
        schedule=schedule,
        checkpoint=Checkpoint(directory, every=Updates(100)),
        observers=[seen, header],
        console=False,
    )
    trainer.cut = Cut() if cut is None else cut
    try:
        trainer.fit(train, val, epochs=epochs, resume=resume, resume_data=resume_data)
    except SystemExit:
        assert cut is not None
    return trainer, seen, header


def ended(directory, train, at=3, **settings):
    """A run that a signal has ended after `at` of 6 updates of its first epoch."""
    return fit(directory, train, cut=Cut("step", at, send(15)), **settings)


@pytest.mark.parametrize("kind", [own, loader])
@pytest.mark.parametrize(
    ("other", "difference"),
    [(dict(n=20), ("24", "20")), (dict(size=6), ("4", "6")), (dict(n=12, size=2), ("24", "12"))],
)
def test_other_data_are_refused_with_the_difference_and_the_way_on(kind, other, difference, tmp_path):
    ended(tmp_path, kind())
    with pytest.raises(DataError) as caught:
        fit(tmp_path, kind(**other), resume="auto")
    text = str(caught.value)
    assert all(one in text for one in difference)
    assert "fit(..., resume_data=False)" in text


@pytest.mark.parametrize("kind", [own, loader])
@pytest.mark.parametrize("other", [dict(n=20, seed=3), dict(size=6), dict(n=8, size=3)])
def test_with_resume_data_false_the_epoch_begins_anew_with_the_new_data_alone(kind, other, tmp_path):
    before, _, _ = ended(tmp_path, kind())
    updates, weights = before.result.updates, [one.clone() for one in before.model.parameters()]
    assert updates == 3

    trainer, seen, header = fit(tmp_path, kind(**other), resume="auto", resume_data=False)
    size = other.get("size", 4)
    per_epoch = -(-other.get("n", 24) // size)
    assert "resume_data=False: epoch 1 begins anew, with other data" in header.notes
    assert trainer.result.updates == 3 + 2 * per_epoch
    assert [row["update"] for row in trainer.result.history] == [3 + per_epoch, 3 + 2 * per_epoch]
    assert [reported[1] for reported in seen.reported if reported[0] == "on_update"] == list(
        range(4, 4 + 2 * per_epoch)
    )
    sizes = [reported[5] for reported in seen.reported if reported[0] == "on_update"][:per_epoch]
    assert sum(sizes) == other.get("n", 24) and sizes[0] == size
    assert trainer.result.history[0]["rows seen"] == sum(sizes) / per_epoch  # nothing of the data before
    assert not any(torch.equal(*pair) for pair in zip(weights, trainer.model.parameters(), strict=True))


def test_weights_optimizer_and_random_state_go_on(tmp_path):
    ended(tmp_path, own())
    first = fit(tmp_path, own(n=20), resume="auto", resume_data=False, epochs=1)
    optimizer = first[0].optimizer.state_dict()["state"]
    assert {int(state["step"]) for state in optimizer.values()} == {3 + 5}
    assert first[0].state["epochs"] == [0]  # what begin_epoch has done to the state is not done twice


def test_between_two_epochs_the_next_one_begins_with_the_new_data(tmp_path):
    fit(tmp_path, own(), epochs=1)
    trainer, _, header = fit(tmp_path, own(n=20), resume="auto", resume_data=False, epochs=3)
    assert "resume_data=False: epoch 2 begins anew, with other data" in header.notes
    assert [row["update"] for row in trainer.result.history] == [6, 11, 16]
    assert [row["epoch"] for row in trainer.result.history] == [1, 2, 3]


def test_the_schedule_is_planned_again_aloud(tmp_path):
    ended(tmp_path, own(), schedule=OneCycle(0.1))
    with pytest.warns(UserWarning, match=r"schedule re-planned: 12 -> 1[03] updates"):
        fit(tmp_path, own(n=20), resume="auto", resume_data=False, schedule=OneCycle(0.1))


def test_it_can_be_ended_and_resumed_in_its_turn(tmp_path):
    ended(tmp_path / "a", own())
    whole, seen, _ = fit(tmp_path / "b", own(n=20), resume=copied(tmp_path), resume_data=False)

    _, cut_seen, _ = fit(tmp_path / "a", own(n=20), resume="auto", resume_data=False, cut=Cut("step", 3, send(15)))
    resumed, rest, _ = fit(tmp_path / "a", own(n=20), resume="auto")
    assert cut_seen.reported + rest.reported == seen.reported
    assert resumed.result.history == whole.result.history
    assert all(torch.equal(*pair) for pair in zip(whole.model.parameters(), resumed.model.parameters(), strict=True))


def copied(tmp_path):
    """The checkpoint of run a, by its path."""
    (found,) = (tmp_path / "a").glob("update-*")
    return found


def test_a_pause_that_was_due_where_the_data_changed_is_still_done(tmp_path):
    ended(tmp_path, own(), at=6, val=own(8))
    trainer, _, _ = fit(tmp_path, own(n=20), val=own(8), resume="auto", resume_data=False)
    assert all("val_loss" in row for row in trainer.result.history)


def test_it_is_refused_without_a_resume_and_as_no_bool(tmp_path):
    with pytest.raises(SettingError, match=r'(?s)resume_data=False\) without resume.*resume="auto"'):
        fit(tmp_path, own(), resume_data=False)
    with pytest.raises(SettingError, match="True or False"):
        fit(tmp_path, own(), resume="auto", resume_data="no")
