"""A part of a sharded model that is called beside its forward: the error says which method to name."""

from __future__ import annotations

import pytest
from torch import nn

from distributed.fsdp_cases import SINGLE, Net, adamw, sharded_net
from distributed.pool import pool
from trainwright import Trainer


class ByMethod(Trainer[Net]):
    def training_step(self, batch):
        return self.model.encode(batch[0]).square().mean()


class ByLayer(Trainer[Net]):
    def training_step(self, batch):
        return self.model.head(batch[0].new_ones(2, 5)).mean()


def note(kind: type[Trainer[Net]]) -> str:
    model = sharded_net()
    trainer = kind(model, adamw(model), nn.MSELoss(), console=False, parallel=None)
    try:
        trainer.fit([batch for window in SINGLE for batch in window], epochs=1)
    except RuntimeError as error:
        return "\n".join(error.__notes__)
    return ""


@pytest.mark.parametrize(
    ("kind", "fix"),
    [
        (ByMethod, "FSDP(..., methods=('encode',)), which has encode() gather them too"),
        (ByLayer, "call the model itself, or FSDP(blocks={..., Linear})"),
    ],
)
def test_a_call_that_gathers_no_weights_is_explained(kind: type[Trainer[Net]], fix: str) -> None:
    (text,) = pool(1).run(note, kind)
    assert "are in shards: only the forward of a sharded module gathers them" in text
    assert fix in text
