"""The role of a rank is decided in one place: shards with copies (HSDP) are another mesh, and train as one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distributed.fsdp_cases import Block, differ
from distributed.pool import pool
from distributed.test_fsdp_trainer import EXACT, close, trained
from trainwright import ClipNorm, load_weights
from trainwright.distributed import fsdp, start, world
from trainwright.distributed.fsdp import FSDP
from trainwright.distributed.mesh import Mesh, Shard, device_mesh, of_ranks

SETTINGS: dict[str, Any] = {"accumulate": 2, "clip": ClipNorm(0.05)}


def test_ddp_replicates_and_fsdp_shards_over_all_ranks() -> None:
    assert of_ranks(1, 3, shards=False) == Mesh(rank=1, data=3, replicate=3, shard=1)
    assert of_ranks(1, 3, shards=True) == Mesh(rank=1, data=3, replicate=1, shard=3)
    assert of_ranks(0, 1, shards=True) == Mesh()


def test_the_slices_of_all_ranks_are_the_batch() -> None:
    for rows in range(9):
        slices = [Shard(rank, 3).of(rows) for rank in range(3)]
        assert [row for one in slices for row in one] == list(range(rows))


def two_by_two(rank: int, size: int, *, shards: bool) -> Mesh:
    return Mesh(rank, size, replicate=2, shard=2)


def trained_by_hsdp(path: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "of_ranks", two_by_two)
        patch.setattr(world, "of_ranks", two_by_two)
        made: list[Any] = []
        patch.setattr(fsdp, "device_mesh", lambda *given: made.append(device_mesh(*given)) or made[-1])
        return trained(FSDP({Block}), path, 13, SETTINGS)[0], tuple(made[0].shape)


@pytest.mark.slow
def test_shards_with_copies_train_as_one_process(tmp_path: Path) -> None:
    one, four = str(tmp_path / "one.safetensors"), str(tmp_path / "four.safetensors")
    numbers, _ = trained(None, one, 13, SETTINGS)
    (found, shape), *_ = pool(4).run(trained_by_hsdp, four)
    assert shape == (2, 2)
    close(found, numbers)
    assert differ(load_weights(four), load_weights(one)) < EXACT
