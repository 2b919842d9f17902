"""A loss that reaches no weight of the optimizer it was given to is refused: a name was mixed up (law Mistakes)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainwright import StepError, Trainer


class Mixed(Trainer):
    def update(self, window):
        for x, target in window:
            self.minimize(self.loss(self.model["a"](x), target), "b")


def test_minimize_refuses_a_loss_that_reaches_no_weight_of_the_one_it_names():
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(2, 1), "b": nn.Linear(2, 1)})
    before = [p.clone() for p in model.parameters()]
    trainer = Mixed(model, {"a": torch.optim.SGD, "b": torch.optim.SGD}, nn.MSELoss(), console=False)
    with pytest.raises(StepError, match="reaches no weight of the optimizer 'b'") as caught:
        trainer.fit([(torch.ones(3, 2), torch.ones(3, 1))], epochs=1)
    assert "name the optimizer that is meant" in str(caught.value)
    assert all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))
    assert trainer.progress.updates == 0
