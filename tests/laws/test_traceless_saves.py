"""The law Traceless for saves: one that goes well and one that fails leave the run as it is without any."""

from __future__ import annotations

import errno
import random
import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from trainwright import EMA, SWA, Checkpoint, EarlyStopping, OneCycle, Trainer, Updates, batches
from trainwright.checkpointing import commit as commits
from trainwright.core.errors import CheckpointError
from trainwright.core.rng import random_state
from trainwright.evaluation.weights import AverageWeights


class Rows(Dataset):
    """Rows that draw from every random state of the process."""

    def __len__(self):
        return 24

    def __getitem__(self, row):
        noise = torch.rand(4) + random.random() + np.random.normal()
        return torch.full((4,), float(row)) / 24 + 0.01 * noise, torch.tensor([row / 24])


def trained(checkpoint, average=None, precision=None, ends_in=None):
    """The weights, the optimizer's state, the history and the random state after a run."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
    trainer = Trainer(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.01),
        nn.MSELoss(),
        schedule=OneCycle(max_lr=0.02),
        accumulate=2,
        average=average,
        precision=precision,
        early_stopping=EarlyStopping("val_loss", patience=50),
        checkpoint=checkpoint,
        console=False,
    )
    val = batches((torch.rand(8, 4, generator=torch.Generator().manual_seed(1)), torch.zeros(8, 1)), 4)
    with nullcontext() if ends_in is None else pytest.raises(ends_in):
        trainer.fit(DataLoader(Rows(), 4, shuffle=True), val, epochs=3, validate=Updates(2))
    optimizer = [value.tolist() for state in trainer.optimizer.state.values() for value in state.values()]
    weights = {name: value.tolist() for name, value in model.state_dict().items()}
    drawn = (random.random(), np.random.normal(), torch.rand(3).tolist())
    return weights, optimizer, trainer.result.history, drawn


SLOTS = {"plain": {}, "EMA": {"average": EMA(0.5)}, "SWA": {"average": SWA()}, "fp16": {"precision": "fp16"}}


@pytest.mark.parametrize("slots", SLOTS.values(), ids=SLOTS)
@pytest.mark.parametrize("async_save", [True, False])
def test_a_run_that_saves_is_the_run_that_does_not(tmp_path, slots, async_save):
    saving = Checkpoint(tmp_path, best="val_loss", every=Updates(1), async_save=async_save)
    assert trained(saving, **slots) == trained(None, **slots)


@pytest.mark.parametrize("async_save", [True, False])
def test_a_run_whose_saves_all_fail_is_the_run_that_does_not_save(tmp_path, monkeypatch, async_save):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(commits, "write_file", full)
    with pytest.warns(UserWarning, match="the disk is full"):
        saved = trained(Checkpoint(tmp_path, every=Updates(1), async_save=async_save), ends_in=CheckpointError)
    assert saved == trained(None)
    assert not list(tmp_path.glob("update-*")) and not list(tmp_path.glob(".tmp-*"))


def test_a_save_that_leaves_a_trace_is_seen(tmp_path, monkeypatch):
    def draws(state=AverageWeights.state_dict):
        return lambda self: (random_state(), torch.rand(1), state(self))[2]

    monkeypatch.setattr(AverageWeights, "state_dict", draws())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved = trained(Checkpoint(tmp_path, every=Updates(1)), average=EMA(0.5))
    assert saved != trained(None, average=EMA(0.5))
