"""A step that returns no loss is named, with the place where it is written."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from trainwright import StepError, Trainer


class Forgets(Trainer):
    def training_step(self, batch):
        self.model(batch[0])


class ForgetsInValidation(Trainer):
    def validation_step(self, batch):
        return "a word"


@pytest.mark.parametrize(("cls", "name"), [(Forgets, "training_step"), (ForgetsInValidation, "validation_step")])
def test_the_step_that_returned_it_is_named_with_its_line(cls, name):
    model = nn.Linear(2, 1)
    before = [p.clone() for p in model.parameters()]
    trainer = cls(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), console=False)
    rows = [(torch.ones(3, 2), torch.ones(3, 1))]
    with pytest.raises(StepError) as caught:
        trainer.fit(rows, rows if name == "validation_step" else None, epochs=1)
    line = inspect.getsourcelines(getattr(cls, name))[1]
    assert caught.value.__notes__ == [f"trainwright: {cls.__name__}.{name} (test_no_loss_returned.py:{line})"]
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
