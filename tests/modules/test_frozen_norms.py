"""What `freeze` holds stays through a whole run, whatever is switched on: weights, statistics, modes, states."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from trainwright import EMA, SWA, Checkpoint, Fast, Trainer, adamw, batches, freeze, unfreeze


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.body(self.stem(x)))


def rows(shift=3.0):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(32, 6, generator=generator) * 2 + shift, torch.randint(0, 3, (32,), generator=generator)


def changed(model, start):
    return {name for name, value in model.state_dict().items() if not torch.equal(value, start[name])}


def stem(names):
    return {name for name in names if name.startswith("stem.")}


RUNS = {
    "plain": {},
    "an average": {"average": EMA(0.5)},
    "averages with statistics of their own": {"average": SWA(start=0.5)},
    "windows": {"accumulate": 2},
    "skipped updates": {"on_nonfinite": "skip"},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "compiled": {"fast": Fast(compile={"backend": "eager", "regions": "full"})},
}


@pytest.mark.parametrize("name", RUNS)
def test_nothing_of_a_frozen_part_moves_in_a_run(name):
    model = Net()
    freeze(model, "stem")
    start = copy.deepcopy(model.state_dict())
    trainer = Trainer(model, adamw(lr=0.05, weight_decay=0.5), nn.CrossEntropyLoss(), console=False, **RUNS[name])
    trainer.fit(batches(rows(), 8), batches(rows(), 16), epochs=2)
    moved = changed(model, start)
    assert stem(moved) == set()
    assert moved >= {"body.0.weight", "body.1.weight", "body.1.running_mean", "head.bias"}
    assert all(p not in trainer.optimizer.state for p in model.stem.parameters())
    model.train()
    assert not model.stem[1].training and model.body[1].training


def test_a_batch_that_is_skipped_puts_back_what_is_trained_and_touches_nothing_else():
    class Once(Trainer):
        def training_step(self, batch):
            loss = super().training_step(batch)
            return loss * float("nan") if self.progress.updates == 1 and self.progress.batch < 3 else loss

    model = Net()
    freeze(model, "stem")
    start = copy.deepcopy(model.state_dict())
    trainer = Once(model, adamw(lr=0.05), nn.CrossEntropyLoss(), on_nonfinite="skip", console=False)
    trainer.fit(batches(rows(), 8), epochs=2)
    assert stem(changed(model, start)) == set()


class Stages(Trainer):
    """The body is set free in the second epoch, the stem in the third."""

    def begin_epoch(self, epoch):
        if part := {1: "body", 2: "stem"}.get(epoch):
            unfreeze(self.model, part)


def staged(directory=None, kind=Stages, **settings):
    model = Net()
    freeze(model, "stem")
    freeze(model, "body")
    checkpoint = None if directory is None else Checkpoint(directory)
    optimizer = adamw(lr=0.05, layer_decay=0.5, layers=["stem", "body"])
    return kind(model, optimizer, nn.CrossEntropyLoss(), checkpoint=checkpoint, console=False, **settings)


@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_each_stage_trains_what_it_has_set_free(epochs):
    trainer = staged()
    start = copy.deepcopy(trainer.model.state_dict())
    trainer.fit(batches(rows(), 8), epochs=epochs)
    parts = {name.split(".")[0] for name in changed(trainer.model, start)}
    assert parts == {1: {"head"}, 2: {"head", "body"}, 3: {"head", "body", "stem"}}[epochs]
