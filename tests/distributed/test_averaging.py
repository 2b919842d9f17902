"""Gradients that are whole are averaged in buckets of the size that was asked for, with few reads of the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distributed.pool import pool
from trainwright import Trainer
from trainwright.distributed.ddp import DDP, GradientBuckets
from trainwright.distributed.world import ProcessGroupWorld

LAYERS = 4
SMALL = 100 / 2**20
"""Megabytes that one layer of weights does not fit into with another."""


@contextmanager
def counted(owner: Any, name: str) -> Iterator[list[int]]:
    """Count the calls of a function of torch's."""
    counts, whole = [0], getattr(owner, name)

    def noted(*given: Any, **named: Any) -> Any:
        counts[0] += 1
        return whole(*given, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, noted)
        yield counts


def gradients(world: ProcessGroupWorld, missing: dict[int, list[int]]) -> list[nn.Parameter]:
    """Parameters whose gradient is 1 + rank; by rank, those that have none."""
    made = [nn.Parameter(torch.zeros(5, 5)) for _ in range(LAYERS)]
    for index, parameter in enumerate(made):
        if index not in missing.get(world.rank, []):
            parameter.grad = torch.full((5, 5), 1.0 + world.rank)
    return made


def average(missing: dict[int, list[int]]) -> dict[str, Any]:
    world = ProcessGroupWorld()
    parameters = gradients(world, missing)
    buckets = GradientBuckets(parameters, world, bucket_mb=SMALL)
    with counted(Tensor, "tolist") as reads, counted(dist, "all_reduce") as sums:
        reported = buckets.average(torch.tensor([2.0 * world.rank, 1.0]))
        during = reads[0]
        unused, again = buckets.unused, buckets.unused
    means = [None if p.grad is None else sorted({float(value) for value in p.grad.flatten()}) for p in parameters]
    assert unused == again
    return {
        "means": means,
        "reads": during,
        "all": reads[0],
        "sums": sums[0],
        "unused": unused,
        "reported": reported.tolist(),
    }


def test_gradients_that_all_processes_have_are_averaged_without_a_read() -> None:
    for one in pool(2).run(average, {}):
        assert one["means"] == LAYERS * [[1.5]] and one["reported"] == [1.0, 1.0]
        assert (one["sums"], one["reads"], one["all"], one["unused"]) == (LAYERS, 0, 1, False)


def test_a_process_that_misses_gradients_reads_once_for_all_buckets() -> None:
    first, second = pool(2).run(average, {0: [3], 1: [0, 2, 3]})
    assert first["means"] == second["means"] == [[0.5], [1.5], [0.5], None]
    assert (first["reads"], second["reads"], first["all"], second["all"]) == (1, 1, 1, 1)
    assert first["unused"] and second["unused"]
    first, second = pool(2).run(average, {1: [1]})
    assert first["means"] == second["means"] == [[1.5], [0.5], [1.5], [1.5]]
    assert (first["reads"], second["reads"]) == (0, 1) and first["unused"] and second["unused"]


class Own(Trainer[nn.Module]):
    """An update of its own, whose gradients nothing wraps; counts what is summed in it."""

    sums: tuple[int, ...] = ()

    def update(self, window: Any) -> Any:
        with counted(dist, "all_reduce") as sums:
            loss = self.compute_gradients(window)
        self.sums = (*self.sums, sums[0])
        self.apply_gradients()
        return loss


def update_by(settings: dict[str, Any]) -> tuple[int, ...]:
    model = nn.Sequential(*(nn.Linear(5, 5, bias=False) for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Own(model, optimizer, nn.MSELoss(), parallel=DDP(**settings), console=False)
    trainer.fit([(torch.randn(4, 5), torch.randn(4, 5))] * 3, epochs=1)
    return trainer.sums


def test_bucket_mb_holds_for_an_update_of_ones_own() -> None:
    assert pool(2).run(update_by, {}) == 2 * [(1, 1, 1)]
    assert pool(2).run(update_by, {"bucket_mb": SMALL}) == 2 * [3 * (LAYERS,)]
