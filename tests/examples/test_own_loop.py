"""`own_loop.py`, the slots in a loop of one's own, ends with the Trainer's numbers and weights, bit for bit."""

from __future__ import annotations

import ast

import pytest
import torch
from loading import EXAMPLES
from torch import nn

from trainwright import EMA, EarlyStopping, MixedPrecision, OneCycle, Trainer, accuracy, load_weights

EPOCHS = 12


@pytest.fixture(scope="module")
def both(example, tmp_path_factory):
    """History and weights of the loop, and the Trainer's result and weights."""
    path = tmp_path_factory.mktemp("own") / "best.safetensors"
    history = example.train(path, epochs=EPOCHS)
    trainer = Trainer(
        example.network(),
        torch.optim.AdamW,
        nn.CrossEntropyLoss(),
        metrics={"accuracy": accuracy},
        precision=MixedPrecision("fp16", init_scale=2.0**22),
        accumulate=2,
        clip=1.0,
        schedule=OneCycle(max_lr=1e-2),
        average=EMA(0.95),
        early_stopping=EarlyStopping("val_accuracy", mode="max", patience=5),
        console=False,
    )
    return history, load_weights(path), trainer.fit(*example.digits(), epochs=EPOCHS), trainer.model.state_dict()


@pytest.mark.slow
def test_every_epoch_has_the_trainers_numbers(both):
    history, _, result, _ = both
    assert [{name: row[name] for name in history[0]} for row in result.history] == history


def test_the_best_averaged_weights_are_the_trainers_bit_for_bit(both):
    _, weights, result, theirs = both
    assert weights.keys() == theirs.keys() and all(torch.equal(weights[name], theirs[name]) for name in theirs)
    assert result.weights.startswith("averaged, best of epoch")


def test_updates_overflowed_and_were_held_back_in_both(both):
    history, _, result, _ = both
    assert result.skipped > 0 and max(row["val_accuracy"] for row in history) >= 0.96


def test_the_loop_itself_takes_at_most_60_lines():
    source = (EXAMPLES / "own_loop.py").read_text()
    loop = next(node for node in ast.parse(source).body if getattr(node, "name", "") == "train")
    assert len(ast.get_source_segment(source, loop).splitlines()) <= 60
