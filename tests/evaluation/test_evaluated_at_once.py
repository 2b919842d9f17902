"""Evaluations and predictions of rows need no batch size: their numbers do not depend on one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from trainwright import DataError, SettingError, Trainer, accuracy, batches
from trainwright.data import together

X = torch.randn(600, 4, generator=torch.Generator().manual_seed(0))
Y = X.argmax(1) % 3


def trainer(**settings):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Trainer(
        model, optimizer, nn.CrossEntropyLoss(), metrics={"accuracy": accuracy}, device="cpu", console=False, **settings
    )


DATA = {
    "a tuple of tensors": (X, Y),
    "arrays": (X.numpy(), Y.numpy()),
    "a data set": TensorDataset(X, Y),
    "a function of the epoch": lambda epoch: (X, Y),
}


@pytest.mark.parametrize("name", DATA)
def test_rows_are_evaluated_predicted_and_reported_without_a_batch_size(name):
    made = trainer()
    with torch.no_grad():
        output = made.model(X)
        loss = nn.functional.cross_entropy(output, Y).item()
    numbers = made.evaluate(DATA[name])
    assert numbers["val_loss"] == pytest.approx(loss, rel=1e-6)
    assert numbers["val_accuracy"] == pytest.approx((output.argmax(1) == Y).double().mean().item(), rel=1e-12)
    torch.testing.assert_close(made.predict(DATA[name]), output)
    assert sum(map(sum, made.report(DATA[name]).to_dict()["confusion_matrix"])) == 600


def test_it_is_256_rows_at_once():
    rows = []

    class Looks(Trainer):
        def predict_step(self, batch):
            rows.append(len(batch[0]))
            return self.model(batch[0])

    Looks(nn.Linear(4, 3), console=False, device="cpu").predict((X, Y))
    assert rows == [256, 256, 88]
    rows.clear()
    Looks(nn.Linear(4, 3), console=False, device="cpu").predict((X, Y), batch_size=400)
    assert rows == [400, 200]


def test_several_sets_and_loaders_side_by_side_need_none_either():
    numbers = trainer().evaluate({"a": (X, Y), "b": batches((X, Y), 7)})
    assert numbers["val_a_loss"] == pytest.approx(numbers["val_b_loss"], rel=1e-6)

    class Both(Trainer):
        def validation_step(self, batch):
            return self.loss(self.model(batch["a"][0]), batch["b"][1])

    both = Both(nn.Linear(4, 3), None, nn.CrossEntropyLoss(), console=False, device="cpu")
    assert both.evaluate(together(a=(X, Y), b=TensorDataset(X, Y)))["val_loss"] > 0


def test_a_set_named_train_is_one_to_evaluate_too():
    assert trainer().evaluate((X, Y), "train")["train_loss"] > 0


def test_validation_data_of_rows_beside_a_loader_need_none():
    made = trainer()
    made.fit(batches((X, Y), 50), (X, Y), epochs=1)
    assert made.history[0]["val_loss"] == pytest.approx(made.evaluate((X, Y), batch_size=600)["val_loss"], rel=1e-6)


def test_rows_to_train_on_need_one():
    with pytest.raises(DataError, match="train data: a tuple is a data set of rows, without a batch size"):
        trainer().fit((X, Y), (X, Y), epochs=1)


@pytest.mark.parametrize("size", [0, 2.5, True])
def test_a_batch_size_that_cannot_be_is_refused(size):
    with pytest.raises(SettingError, match="batch_size"):
        trainer().predict(np.zeros((3, 4), np.float32), batch_size=size)
