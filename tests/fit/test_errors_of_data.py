"""Errors that come out of the data: the state before them is saved, and they stay what they are."""

from __future__ import annotations

import traceback

import pytest
import torch
from cut import BreaksError, Cut, breaks, check_equal, go
from torch import nn

from trainwright import (
    Checkpoint,
    Trainer,
)


def check_same(one, other):
    assert all(torch.equal(*pair) for pair in zip(one.model.parameters(), other.model.parameters(), strict=True))
    assert (one.state, one.result.history) == (other.state, other.result.history)


@pytest.mark.parametrize("kind", ["loader", "generator"])
@pytest.mark.parametrize("n", [1, 9])
def test_an_error_of_the_data_is_saved_in_any_case(kind, n, directory):
    kept = dict(kind=kind, ends=dict(epochs=None, max_updates=8))
    broken = go(directory / "a", Cut("row", n, breaks), **kept)
    assert type(broken[2]) is BreaksError
    assert traceback.extract_tb(broken[2].__traceback__)[-1].name == "breaks"
    resumed = go(directory / "a", resume="auto", **kept)
    check_equal(go(directory / "b", **kept), resumed, reported=broken[1].reported + resumed[1].reported)


class Some(torch.utils.data.Dataset):
    def __init__(self, bad=None):
        self.bad = bad

    def __len__(self):
        return 12

    def __getitem__(self, index):
        if index == self.bad:
            raise BreaksError(f"row {index}")
        return torch.full((3,), float(index)) + torch.rand(1), torch.ones(1)


def with_workers(directory, bad=None, resume=None):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    trainer = Trainer(model, optimizer, nn.MSELoss(), checkpoint=Checkpoint(directory), console=False)
    loader = torch.utils.data.DataLoader(Some(bad), 2, num_workers=2)
    try:
        trainer.fit(loader, epochs=1, resume=resume)
    except BreaksError as error:
        return trainer, error
    return trainer, None


def test_an_error_in_a_loaders_worker_is_saved_and_unchanged(directory):
    trainer, error = with_workers(directory / "a", bad=7)
    assert "row 7" in str(error) and trainer.result.updates == 3
    resumed, _ = with_workers(directory / "a", resume="auto")
    one, _ = with_workers(directory / "b")
    check_same(one, resumed)
