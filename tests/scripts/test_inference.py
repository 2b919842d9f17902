"""Inference: a Trainer without an optimizer evaluates, predicts and reports with weights from a file."""

from __future__ import annotations

import pytest
import torch
from plain_scripts import assert_no_longer, digits, made
from safetensors.torch import load_file
from sklearn.metrics import classification_report
from torch import nn
from torch.nn import functional as F

from trainwright import CheckpointError, SettingError, Trainer, accuracy, adamw, batches, load_weights, top_k


def network():
    return nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 10))


def by_trainer(path, data):
    load_weights(path, model := network())
    metrics = {"accuracy": accuracy, "top_3": top_k(3)}
    trainer = Trainer(model, loss=nn.CrossEntropyLoss(), metrics=metrics, console=False)
    return trainer.evaluate(data, name="test"), trainer.predict(data), str(trainer.report(data))


def by_hand(path, data):
    model = network()
    model.load_state_dict(load_file(path))
    model.eval()
    total = hits = near = rows = 0
    outputs, targets = [], []
    with torch.no_grad():
        for x, y in data:
            output = model(x)
            total += F.cross_entropy(output, y, reduction="sum").item()
            hits += (output.argmax(1) == y).sum().item()
            near += (output.topk(3).indices == y[:, None]).sum().item()
            rows += len(y)
            outputs.append(output)
            targets.append(y)
    output = torch.cat(outputs)
    text = classification_report(torch.cat(targets), output.argmax(1), zero_division=0)
    return {"test_loss": total / rows, "test_accuracy": hits / rows, "test_top_3": near / rows}, output, text


@pytest.fixture
def trained(tmp_path):
    x, y = digits(500)
    trainer = Trainer(made(network), adamw(lr=0.01), nn.CrossEntropyLoss(), console=False)
    trainer.fit(batches((x, y), 32, shuffle=True, seed=0), epochs=3)
    trainer.save_weights(tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors", trainer.model


def data():
    x, y = digits(900)
    return batches((x[500:], y[500:]), 64)


def test_inference_is_its_plain_loop(trained):
    path, _ = trained
    numbers, output, text = by_trainer(path, data())
    plain, plain_output, plain_text = by_hand(path, data())
    assert numbers == plain and torch.equal(output, plain_output) and text.strip() == plain_text.strip()
    assert numbers["test_accuracy"] > 0.8


def test_a_file_of_torch_save_is_named_with_what_reads_it(trained, tmp_path):
    torch.save(trained[1].state_dict(), tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"torch\.load\(path, weights_only=True\) reads it"):
        load_weights(tmp_path / "model.pt", network())


def test_prediction_needs_no_targets(trained):
    x, _ = digits(100)
    trainer = Trainer(trained[1], console=False)
    both = batches((x, torch.zeros(100)), 32)
    assert torch.equal(trainer.predict(x, batch_size=32), trainer.predict(both))


def test_metrics_need_no_loss(trained):
    trainer = Trainer(trained[1], metrics={"accuracy": accuracy}, console=False)
    whole = Trainer(trained[1], loss=nn.CrossEntropyLoss(), metrics={"accuracy": accuracy}, console=False)
    numbers = trainer.evaluate(data(), name="test")
    assert numbers == {"test_accuracy": whole.evaluate(data(), name="test")["test_accuracy"]}


def test_fit_without_an_optimizer_is_refused_with_the_line_to_write(trained):
    trainer = Trainer(trained[1], loss=nn.CrossEntropyLoss(), console=False)
    with pytest.raises(SettingError, match=r"without an optimizer(.|\n)*AdamW\(model.parameters\(\)\)"):
        trainer.fit(data(), epochs=1)


def test_inference_is_no_longer_than_its_plain_loop():
    assert_no_longer([by_trainer], [by_hand])
