"""An optimizer's state goes on in the dtypes that it was kept in, which need not be those of the weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainwright import Checkpoint, Trainer, Updates, batches


class Fine(torch.optim.Optimizer):
    """Momentum in float32, whatever the weights are."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p, dtype=torch.float32))
                momentum.mul_(0.9).add_(p.grad)
                p.sub_((group["lr"] * momentum).to(p.dtype))


def trained(directory, cls, dtype, *, to=None, **ends):
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(24, 5, generator=generator), torch.randint(4, (24,), generator=generator)
    torch.manual_seed(0)
    model = nn.Linear(5, 4, dtype=dtype)
    optimizer = {"only": cls(model.parameters(), lr=0.05)} if to == "named" else cls(model.parameters(), lr=0.05)
    checkpoint = Checkpoint(directory, every=Updates(1))
    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), console=False, checkpoint=checkpoint)
    trainer.fit(batches((x.to(dtype), y), 4, shuffle=True, seed=1), epochs=2, resume="auto", **ends)
    return trainer


def kept(trainer):
    (optimizer,) = trainer.optimizers.values()
    each = (value for p in trainer.model.parameters() for value in optimizer.state[p].values())
    return [*trainer.model.parameters(), *(value for value in each if isinstance(value, torch.Tensor))]


@pytest.mark.parametrize("names", ["alone", "named"])
@pytest.mark.parametrize("cls", [Fine, torch.optim.NAdam, torch.optim.ASGD])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_resumed_optimizer_goes_on_in_its_own_dtypes(tmp_path, dtype, cls, names):
    whole = trained(tmp_path / "whole", cls, dtype, to=names)
    trained(tmp_path / "cut", cls, dtype, to=names, max_updates=5)
    resumed = trained(tmp_path / "cut", cls, dtype, to=names)
    assert resumed.progress.updates == 12
    for one, other in zip(kept(whole), kept(resumed), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_weights_in_another_dtype_take_the_state_with_them(tmp_path):
    trained(tmp_path, torch.optim.Adam, torch.float32, max_updates=5)
    resumed = trained(tmp_path, torch.optim.Adam, torch.float64)
    assert all(value.dtype == torch.float64 for value in kept(resumed) if value.dim())
