"""`save_weights` is for all ranks: each returns when the file is there, or with the error of the rank that writes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from distributed.pool import Pool, await_path
from trainwright import EMA, CheckpointError, Trainer, load_weights
from trainwright.checkpointing import weights
from trainwright.distributed.world import World


def trained(**settings: Any) -> Trainer[nn.Module]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), console=False, **settings)
    trainer.fit((torch.ones(8, 3), torch.ones(8, 1)), batch_size=4, epochs=1)
    return trainer


def save_late(path: Path, average: bool) -> dict[str, Any]:
    """Save; rank 0 writes when another rank has returned, or when none has for a second."""
    trainer = trained(average=EMA(0.5) if average else None)
    returned, write = path.with_suffix(".returned"), weights.replace_file

    def late(*given: Any) -> Any:
        await_path(returned, seconds=1)
        return write(*given)

    weights.replace_file = late
    try:
        trainer.save_weights(path)
        returned.touch()
    finally:
        weights.replace_file = write
    return dict(load_weights(path))


@pytest.mark.slow
@pytest.mark.parametrize("average", [False, True])
def test_every_rank_can_load_what_save_weights_has_written(ranks2: Pool, tmp_path: Path, average: bool) -> None:
    first, second = ranks2.run(save_late, tmp_path / "net.safetensors", average)
    assert all(torch.equal(first[name], second[name]) for name in first)


def save_into(path: Path) -> str:
    with pytest.raises(CheckpointError) as refused:
        trained().save_weights(path)
    return str(refused.value)


@pytest.mark.slow
def test_a_write_that_fails_is_an_error_of_every_rank(ranks2: Pool, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for text in ranks2.run(save_into, tmp_path / "file" / "net.safetensors"):
        assert text.startswith(f"{tmp_path / 'file' / 'net.safetensors'} could not be written")


class Second(World):
    """Rank 1 of two, which receives `sent` from rank 0 after `before`."""

    rank, size = 1, 2

    def __init__(self, sent: tuple[str, ...], before: Any) -> None:
        self.sent, self.before = sent, before

    def broadcast(self, value: Any) -> Any:
        self.before()
        return self.sent


@pytest.mark.parametrize("fails", [False, True])
def test_another_rank_returns_from_save_weights_when_rank_0_has_written(tmp_path: Path, fails: bool) -> None:
    trainer, path = trained(), tmp_path / "net.safetensors"
    error = ("error", "CheckpointError", "no space")
    trainer.world, trainer.is_main = Second(error if fails else ("result", None, ""), path.touch), False
    if fails:
        with pytest.raises(CheckpointError, match="no space"):
            trainer.save_weights(path)
    else:
        trainer.save_weights(path)
    assert os.listdir(tmp_path) == ["net.safetensors"]
