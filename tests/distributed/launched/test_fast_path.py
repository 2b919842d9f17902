"""`fast_path` names how the gradients of several ranks are averaged."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from distributed.pool import Pool
from trainwright import FSDP, Trainer
from trainwright.distributed.ddp import DDP


class Own(Trainer[nn.Module]):
    """An update of its own."""

    def update(self, window: Any) -> Any:
        loss = self.compute_gradients(window)
        self.apply_gradients()
        return loss


def paths() -> list[str]:
    """Of each kind of run of several processes, and of one that is alone among them."""
    kinds: list[tuple[type[Trainer[nn.Module]], Any]] = [
        (Trainer, None),
        (Trainer, "auto"),
        (Trainer, DDP(compress="fp16")),
        (Own, "auto"),
        (Trainer, FSDP(blocks={nn.Linear})),
    ]
    paths = []
    for kind, parallel in kinds:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
        make = partial(torch.optim.SGD, lr=0.1)
        paths.append(kind(model, make, nn.CrossEntropyLoss(), parallel=parallel, console=False).fast_path)
    return paths


def test_the_path_names_how_gradients_are_averaged(ranks2: Pool) -> None:
    for alone, default, rounded, own, shards in ranks2.run(paths):
        assert alone.startswith("L0, eager on cpu: ") and "processes" not in alone
        assert default == f"{alone}; gradients of 2 processes are averaged during backward"
        assert rounded == f"{default} and one small sum more"
        assert own.endswith(
            "; gradients of 2 processes are averaged after backward: an `update` of your own reads them"
        )
        assert shards.endswith(
            "; gradients of 2 processes are reduced to shards during backward and one small sum more"
        )
