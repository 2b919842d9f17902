"""Data that fail, or are waited for, when an epoch opens them: the run goes on from there as if it had never ended."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainwright import Checkpoint, Stopped, Trainer, Updates, latest_checkpoint


class BrokenError(Exception):
    """An error of the user's own code."""


def rows():
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(12, 3, generator=generator), torch.ones(12, 1))


class Sampler:
    """Draws when it is opened, and then does what is asked of it."""

    def __init__(self, then, at):
        self.then, self.left = then, at

    def __len__(self):
        return 12

    def __iter__(self):
        order = torch.randperm(12).tolist()
        self.left -= 1
        if self.left == 0:
            self.then()
        return iter(order)


def fit(directory, then=None, at=0, *, workers=0, resume=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(), nn.Linear(3, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    slot = Checkpoint(directory, every=Updates(4))
    trainer = Trainer(model, optimizer, nn.MSELoss(), checkpoint=slot, console=False)
    generator = torch.Generator().manual_seed(1)
    data = DataLoader(rows(), 2, sampler=Sampler(then, at), num_workers=workers, generator=generator)
    error = None
    try:
        trainer.fit(data, epochs=3, resume=resume)
    except (BrokenError, Stopped) as raised:
        error = raised
    return trainer, error


def breaks():
    raise BrokenError


def hangs_until_it_is_stopped():
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
    time.sleep(60)
    raise AssertionError("nothing has ended the wait")


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("then", [breaks, hangs_until_it_is_stopped])
def test_a_run_that_ends_while_its_data_are_opened_goes_on_exactly(then, workers, tmp_path):
    whole, _ = fit(tmp_path / "whole", workers=workers)
    broken, error = fit(tmp_path / "broken", then, 2, workers=workers)
    assert error is not None and broken.result.updates == 6
    assert latest_checkpoint(tmp_path / "broken").name == "update-0000000006"
    resumed, _ = fit(tmp_path / "broken", workers=workers, resume="auto")
    assert resumed.result.history == whole.result.history
    assert all(torch.equal(*pair) for pair in zip(whole.model.parameters(), resumed.model.parameters(), strict=True))


def test_a_resume_that_ends_while_its_data_are_opened_can_be_made_again(tmp_path):
    whole, _ = fit(tmp_path / "whole")
    fit(tmp_path / "broken", breaks, 2)
    assert type(fit(tmp_path / "broken", breaks, 1, resume="auto")[1]) is BrokenError
    resumed, _ = fit(tmp_path / "broken", resume="auto")
    assert resumed.result.history == whole.result.history
