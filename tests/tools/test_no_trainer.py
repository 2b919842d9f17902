"""A tool that is given something else in the place of a Trainer says so before it does anything."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainwright import Trainer, advise, find_batch_size, find_lr
from trainwright.tools import overfit_batches, smoke_run


@pytest.mark.parametrize("tool", [advise, smoke_run, find_batch_size, find_lr, overfit_batches])
@pytest.mark.parametrize("exchanged", [True, False])
def test_data_or_a_class_in_the_place_of_a_trainer(tool, exchanged):
    model = nn.Linear(3, 1)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), console=False)
    rows = [(torch.randn(4, 3), torch.randn(4, 1))]
    given = (rows, trainer) if exchanged else (Trainer, rows)
    with pytest.raises(TypeError) as caught:
        tool(*given)
    text, name = str(caught.value), tool.__name__
    assert text.startswith(f"{name}({'list' if exchanged else 'Trainer'}, ...)\n")
    assert f"{name}(trainer, train)" in text
