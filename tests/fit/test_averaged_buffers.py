"""A next fit goes on from the trained weights with their own buffers, also where a best was restored on top."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainwright import EMA, SWA, EarlyStopping, Epochs, Trainer, Updates, batches


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


@pytest.mark.parametrize("data", ["batches", "loader"])
def test_statistics_of_averaged_weights_do_not_depend_on_earlier_evaluations(data):
    """The order of an epoch, a loader's generator and noise before the norm all enter a pass over the data."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 4, generator=generator)
    rows = (x, x.sum(1, keepdim=True))

    def fit(looks):
        class Looking(Trainer):
            def after_update(self):
                if self.progress.updates in looks:
                    self.evaluate(rows, batch_size=8)

        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.BatchNorm1d(6), nn.Linear(6, 1))
        average = SWA(Updates(1), every=Updates(3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        trainer = Looking(model, optimizer, nn.MSELoss(), average=average, console=False)
        draws = torch.Generator().manual_seed(1)
        loader = DataLoader(TensorDataset(*rows), 8, shuffle=True, generator=draws)
        train = loader if data == "loader" else batches(rows, 8, shuffle=True, seed=0)
        return trainer.fit(train, batches(rows, 8), epochs=4).history

    assert fit({3, 4, 6, 9}) == fit(set())


def test_a_batch_that_training_skips_does_not_enter_the_statistics_of_averaged_weights():
    torch.manual_seed(0)
    x = torch.randn(24, 4)
    rows = (x, x.sum(1, keepdim=True))
    clean = list(zip(x.split(8), rows[1].split(8), strict=True))

    def fit(train):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        average = SWA(Updates(1), every=Updates(1))
        trainer = Trainer(model, optimizer, nn.MSELoss(), average=average, on_nonfinite="skip", console=False)
        result = trainer.fit(train, batches(rows, 8), epochs=2)
        assert result.updates == 6
        return [row["val_loss"] for row in result.history], model.state_dict()

    spoiled = [clean[0], (torch.full((8, 4), torch.nan), torch.zeros(8, 1)), *clean[1:]]
    (losses, weights), (expected, those) = fit(spoiled), fit(clean)
    assert losses == expected
    assert all(torch.equal(weights[name], those[name]) for name in those)
