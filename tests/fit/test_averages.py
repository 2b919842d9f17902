"""Averages in a fit: what the next stage trains, what a resumed run does, what is said."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainwright import EMA, SWA, Checkpoint, EarlyStopping, Epochs, Trainer, Updates, batches

EACH = [EMA(0.9), EMA(0.9, warmup=True), SWA(), SWA(Epochs(1)), SWA(Updates(3), Updates(2))]


def data():
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    y = x.sum(1, keepdim=True)
    return batches((x, y), 16, shuffle=True, seed=0), batches((x, y), 64)


class Watched(Trainer[nn.Module]):
    """Keeps the weights after the last update and at the start of the last epoch; stops after update `until`."""

    until = 0

    def begin_epoch(self, epoch):
        self.first = self.model[0].weight.detach().clone()

    def after_update(self):
        self.trained = self.model[0].weight.detach().clone()
        if self.progress.updates == self.until:
            self.stop("cut")


def watched(average, **settings):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return Watched(model, optimizer, nn.MSELoss(), average=average, console=False, **settings)


@pytest.mark.parametrize("average", EACH)
@pytest.mark.parametrize("early", [None, EarlyStopping("val_loss", patience=9)])
def test_the_next_stage_trains_the_raw_weights_after_a_restored_best(average, early):
    trainer = watched(average, early_stopping=early)
    result = trainer.fit(*data(), epochs=4)
    left, trained = trainer.model[0].weight.detach().clone(), trainer.trained
    assert result.weights.startswith("averaged") and not torch.equal(left, trained)
    trainer.fit(*data(), epochs=1)
    assert torch.equal(trainer.first, trained)


def test_weights_that_were_loaded_between_two_stages_are_trained():
    trainer = watched(EMA(0.9))
    trainer.fit(*data(), epochs=2)
    trainer.model.load_state_dict(trainer.model.state_dict())
    left = trainer.model[0].weight.detach().clone()
    trainer.fit(*data(), epochs=1)
    assert torch.equal(trainer.first, left)


def test_a_resume_reports_other_settings_of_the_average(tmp_path):
    first = watched(EMA(0.9), checkpoint=Checkpoint(tmp_path))
    first.fit(*data(), epochs=2)
    second = watched(EMA(0.5), checkpoint=Checkpoint(tmp_path))
    with pytest.warns(UserWarning, match=r"average changed: EMA\(0.9\) -> EMA\(0.5\)"):
        second.fit(*data(), epochs=3, resume="auto")
