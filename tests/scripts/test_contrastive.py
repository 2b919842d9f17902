"""Contrastive learning with a queue of negatives and a second encoder that follows the first (MoCo)."""

from __future__ import annotations

import copy

import pytest
import torch
from plain_scripts import assert_near_history, assert_no_longer, assert_same_weights, digits, made
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from trainwright import Checkpoint, Trainer, Updates


def start():
    x, _ = digits(200, torch.float64)
    model = made(lambda: nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 8)), dtype=torch.float64)
    queue = F.normalize(torch.randn(64, 8, dtype=torch.float64), dim=1)
    return model, queue, DataLoader(TensorDataset(x), 32, shuffle=True)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def view(x):
    """The same pictures with some pixels darkened."""
    return x * (torch.rand_like(x) > 0.2)


def by_hand(model, queue, loader, epochs):
    key_model = copy.deepcopy(model)
    for p in key_model.parameters():
        p.requires_grad_(False)
    optimizer, history = sgd(model), []
    for _ in range(epochs):
        total, rows = 0.0, 0
        for (x,) in loader:
            query = F.normalize(model(view(x)), dim=1)
            with torch.no_grad():
                keys = F.normalize(key_model(view(x)), dim=1)
            logits = torch.cat([(query * keys).sum(1, keepdim=True), query @ queue.T], 1)
            loss = F.cross_entropy(logits / 0.2, torch.zeros(len(x), dtype=torch.long))
            queue = torch.cat([keys, queue])[: len(queue)]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for key, p in zip(key_model.parameters(), model.parameters(), strict=True):
                    key.lerp_(p, 0.05)
            total, rows = total + loss.item() * len(x), rows + len(x)
        history.append({"loss": total / rows})
    return history, queue


class Contrast(Trainer):
    """Two views of each picture shall agree, and differ from those in the queue."""

    def training_step(self, batch):
        (x,), queue = batch, self.state["queue"]
        query = F.normalize(self.model(view(x)), dim=1)
        with torch.no_grad():
            keys = F.normalize(self.frozen["key"](view(x)), dim=1)
        logits = torch.cat([(query * keys).sum(1, keepdim=True), query @ queue.T], 1)
        self.state["queue"] = torch.cat([keys, queue])[: len(queue)]
        return F.cross_entropy(logits / 0.2, torch.zeros(len(x), dtype=torch.long))

    @torch.no_grad()
    def after_update(self):
        for key, p in zip(self.frozen["key"].parameters(), self.model.parameters(), strict=True):
            key.lerp_(p, 0.05)

    def parts(self):
        return super().parts() | {"key": self.frozen["key"]}


def by_trainer(model, queue, loader, epochs):
    trainer = Contrast(model, sgd(model), frozen={"key": copy.deepcopy(model)}, console=False)
    trainer.state["queue"] = queue
    return trainer.fit(loader, epochs=epochs).history, trainer.state["queue"]


def test_contrast_with_a_queue_gives_what_its_plain_loop_gives():
    plain, queue, loader = start()
    reported, theirs = by_hand(plain, queue, loader, 4)
    model, queue, loader = start()
    history, ours = by_trainer(model, queue, loader, 4)
    assert_near_history(history, reported)
    assert_same_weights(model, plain)
    assert torch.equal(ours, theirs)


class StoppedError(Exception):
    """Ends a run in the middle."""


def test_queue_and_key_encoder_resume_in_the_middle(tmp_path):
    def run(cls, directory):
        model, queue, loader = start()
        settings = {"checkpoint": Checkpoint(directory, every=Updates(3)), "console": False}
        trainer = cls(model, sgd(model), frozen={"key": copy.deepcopy(model)}, **settings)
        trainer.state["queue"] = queue
        trainer.fit(loader, epochs=3, resume="auto")
        return trainer

    class Killed(Contrast):
        def training_step(self, batch):
            if self.progress.updates == 11:
                raise StoppedError
            return super().training_step(batch)

    whole = run(Contrast, tmp_path / "whole")
    with pytest.raises(StoppedError):
        run(Killed, tmp_path / "killed")
    resumed = run(Contrast, tmp_path / "killed")
    assert_same_weights(resumed.model, whole.model)
    assert_same_weights(resumed.frozen["key"], whole.frozen["key"])
    assert torch.equal(resumed.state["queue"], whole.state["queue"])


def test_contrast_with_a_queue_is_no_longer_than_its_plain_loop():
    assert_no_longer([Contrast, by_trainer], [by_hand])
