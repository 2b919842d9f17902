"""A next fit goes on from the trained weights with their own buffers, also where a best was restored on top."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainwright import EMA, SWA, EarlyStopping, Epochs, Trainer, batches


@pytest.mark.parametrize("average", [EMA(0.5), SWA(Epochs(1))], ids=["EMA", "SWA"])
def test_the_trained_batchnorm_statistics_return_after_a_restored_best(average):
    seen, last = [], []

    class Looking(Trainer):
        def begin_epoch(self, epoch):
            seen.append(self.model[1].running_mean.clone())

        def after_update(self):
            last.append(self.model[1].running_mean.clone())

    torch.manual_seed(0)
    x = torch.randn(24, 4)
    rows = (x, x.sum(1, keepdim=True))
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
    early = EarlyStopping("val_loss", patience=1, min_delta=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    trainer = Looking(model, optimizer, nn.MSELoss(), average=average, early_stopping=early, console=False)
    result = trainer.fit(batches(rows, 8), batches(rows, 8), epochs=6)
    assert result.weights.startswith("averaged, best of epoch")
    trained, epochs = last[-1], len(seen)
    assert not torch.equal(model[1].running_mean, trained)
    trainer.fit(batches(rows, 8), batches(rows, 8), epochs=1)
    assert torch.equal(seen[epochs], trained)


def test_a_plan_refuses_an_average_that_would_never_be_taken():
    model = nn.Linear(2, 1)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), average=SWA(Epochs(5)))
    with pytest.raises(ValueError, match="SWA"):
        trainer.plan([(torch.ones(3, 2), torch.ones(3, 1))], epochs=3)
