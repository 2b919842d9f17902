"""`finetune.py` keeps its promises: each block waits until it is unfrozen, and the digits are learned."""

from __future__ import annotations

import pytest
import torch


def backbone(model):
    return {name: tensor.clone() for name, tensor in model.backbone.state_dict().items()}


@pytest.fixture(scope="module")
def start(example):
    torch.manual_seed(0)
    low, few, held_out = example.digits()
    return example.pretrained(low, epochs=5).state_dict(), few, held_out


def tuned(example, start, epochs):
    weights, few, held_out = start
    model = example.Network()
    model.load_state_dict(weights)
    before = backbone(model)
    report = example.fine_tune(model, few, held_out, epochs=epochs)
    after = backbone(model)
    return report, [name for name in before if not torch.equal(before[name], after[name])]


def test_the_backbone_and_its_statistics_wait_until_their_stage(example, start):
    assert tuned(example, start, 6)[1] == []
    last = set(tuned(example, start, 7)[1])
    assert last >= {"1.0.weight", "1.1.running_mean"} and not any(name.startswith("0.") for name in last)
    assert set(tuned(example, start, 11)[1]) >= {"0.0.weight", "0.1.running_mean"}


def test_the_promised_share_of_digits_is_learned(example, start):
    report, _ = tuned(example, start, 20)
    assert report.to_dict()["accuracy"] >= 0.94
