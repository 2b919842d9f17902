"""Data of a validation that raise: the state is saved as it is where training's do."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainwright import Checkpoint, Trainer, Updates, latest_checkpoint


class BrokenError(Exception):
    """An error of the user's own code."""


def test_an_error_of_the_validation_data_is_saved_in_any_case_and_one_of_a_step_is_not(tmp_path):
    class Validated(Trainer):
        broken = ""

        def rows(self):
            if self.broken == "data" and self.progress.updates:
                raise BrokenError
            yield torch.ones(2, 3), torch.ones(2, 1)

        def validation_step(self, batch):
            if self.broken == "step" and self.progress.updates:
                raise BrokenError
            return super().validation_step(batch)

    def fit(name, broken="", resume=None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Dropout(), nn.Linear(3, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        slot = Checkpoint(tmp_path / name, every=Updates(2))
        trainer = Validated(model, optimizer, nn.MSELoss(), checkpoint=slot, console=False)
        trainer.broken = broken
        data = DataLoader(TensorDataset(torch.randn(12, 3), torch.ones(12, 1)), 2, shuffle=True)
        with suppress(BrokenError):
            trainer.fit(data, lambda epoch: trainer.rows(), max_updates=9, validate=Updates(5), resume=resume)
        return trainer

    fit("step", broken="step")
    assert latest_checkpoint(tmp_path / "step").name == "update-0000000004"
    fit("data", broken="data")
    assert latest_checkpoint(tmp_path / "data").name == "update-0000000005"
    whole, resumed = fit("whole"), fit("data", resume="auto")
    assert whole.result.history == resumed.result.history
    assert all(torch.equal(*pair) for pair in zip(whole.model.parameters(), resumed.model.parameters(), strict=True))
