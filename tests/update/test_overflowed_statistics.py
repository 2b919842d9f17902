"""BatchNorm statistics stay finite where an update of one's own walks along a gradient that overflowed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainwright import MixedPrecision, Trainer


class Sharp(Trainer):
    """SAM: the gradient is taken again a step up the first one."""

    def update(self, window):
        loss = self.compute_gradients(window)
        weights = list(self.model.parameters())
        before = [weight.detach().clone() for weight in weights]
        norm = torch.stack([weight.grad.norm() for weight in weights]).norm()
        with torch.no_grad():
            for weight in weights:
                weight.add_(weight.grad * (0.05 / norm))
        self.compute_gradients(window)
        with torch.no_grad():
            for weight, value in zip(weights, before, strict=True):
                weight.copy_(value)
        self.apply_gradients()
        return loss


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_an_overflow_under_sam_leaves_no_nan_in_batchnorm(policy):
    torch.manual_seed(0)
    x = torch.randn(32, 4)
    data = list(zip(x.split(8), x.sum(1, keepdim=True).split(8), strict=True))
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    precision = MixedPrecision("fp16", init_scale=2.0**24)
    trainer = Sharp(
        model, optimizer, nn.MSELoss(), precision=precision, on_nonfinite=policy, device="cpu", console=False
    )
    result = trainer.fit(data, data, epochs=4)
    assert result.skipped and result.updates
    assert all(value.isfinite().all() for value in model.state_dict().values())
    assert result.history[-1]["val_loss"] < result.history[0]["val_loss"]
