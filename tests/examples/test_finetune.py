"""`finetune.py` keeps its promises: the first block waits until it is unfrozen, and a trained body is ahead."""

from __future__ import annotations

import copy

import pytest
import torch


@pytest.fixture(scope="module")
def start(example):
    torch.manual_seed(0)
    good, worse = example.digits()
    return example.train(example.Network(), good, tuned=False), worse


@pytest.mark.parametrize("epochs", [2, 3])
def test_the_first_block_and_its_statistics_wait_for_the_third_epoch(example, start, epochs, monkeypatch):
    monkeypatch.setattr(example, "EPOCHS", epochs)
    model, (images, classes) = start
    tuned = example.train(copy.deepcopy(model), (images[:50], classes[:50]), tuned=True)
    before, after = model.backbone[0].state_dict(), tuned.backbone[0].state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before) == (epochs == 2)


def test_fine_tuning_is_ahead_of_a_start_from_scratch(example, start):
    model, (images, classes) = start
    few, test = (images[:50], classes[:50]), (images[50:], classes[50:])
    scratch = example.right(example.train(example.Network(), few, tuned=False), test)
    tuned = example.right(example.train(copy.deepcopy(model), few, tuned=True), test)
    assert tuned > scratch + 0.05
    assert tuned > example.right(model, test) + 0.2
