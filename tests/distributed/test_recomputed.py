"""Recomputed blocks train over several processes as kept ones do, whole or in shards, and as on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distributed.pool import pool
from trainwright import DDP, FSDP, Trainer, batches
from trainwright.modules import checkpoint_activations
from trainwright.modules.dtensors import full_tensor


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


def settings_of(name: str) -> Any:
    return {"ddp": DDP(), "fsdp": FSDP({Block}), "kept": FSDP({Block}, reshard_after_forward=False)}.get(name)


def trained(name: str, recomputes: bool) -> tuple[Any, dict[str, Tensor]]:
    """The history and the whole weights of a small training."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)), nn.Linear(6, 1)).double()
    if recomputes:
        checkpoint_activations(model, {Block})
    x, y = torch.randn(22, 6).double(), torch.randn(22, 1).double()
    trainer = Trainer(
        model, torch.optim.AdamW, nn.MSELoss(), console=False, parallel=settings_of(name), accumulate=2, clip=0.5
    )
    result = trainer.fit(batches((x, y), 4, shuffle=True, seed=0), epochs=2)
    return result.history, {key: full_tensor(value).clone() for key, value in model.state_dict().items()}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["ddp", "fsdp", "kept"])
def test_two_processes_recompute_to_the_same_bits(name: str) -> None:
    kept = pool(2).run(trained, name, False)
    recomputed = pool(2).run(trained, name, True)
    alone, weights = trained("none", True)
    for rank in range(2):
        assert [e["loss"] for e in kept[rank][0]] == [e["loss"] for e in recomputed[rank][0]]
        for key, value in recomputed[rank][1].items():
            assert torch.equal(value, kept[rank][1][key])
            assert torch.allclose(value, weights[key], rtol=0, atol=1e-12)
    assert [e["loss"] for e in alone] == pytest.approx([e["loss"] for e in recomputed[0][0]], abs=1e-12)
