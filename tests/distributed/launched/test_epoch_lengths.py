"""Streams of different length on the processes: the batches of an epoch are counted alike on all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distributed.pool import Pool
from trainwright import Checkpoint, Trainer, Updates
from trainwright.data import sharded

SHORT, LONG = 8, 24


def stream(epoch: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """The first process has fewer batches, so that its windows are shorter from the third on."""
    rows = torch.Generator().manual_seed(1 + dist.get_rank())
    for _ in range(LONG if dist.get_rank() else SHORT):
        yield torch.randn(2, 4, generator=rows), torch.randint(3, (2,), generator=rows)


def trainer(checkpoint: Checkpoint | None = None) -> Trainer[nn.Module]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Trainer(model, optimizer, nn.CrossEntropyLoss(), accumulate=3, checkpoint=checkpoint, console=False)


def in_legs(directory: str, *legs: int) -> list[float]:
    """The weights after a fit in as many legs as there are updates given."""
    for updates in legs:
        fitted = trainer(Checkpoint(directory, every=Updates(1)))
        fitted.fit(sharded(stream), max_updates=updates, resume="auto")
    return [float(weight) for weight in fitted.model.state_dict()["weight"].flatten()]


def cut_into_epochs() -> list[tuple[float, float]]:
    """A stream that is read once; the epoch and the update of each row of the history."""
    slow = trainer()
    result = slow.fit(
        sharded(stream()),
        max_updates=7,
        epoch_updates=4,
        val=[(torch.ones(2, 4), torch.ones(2).long())],
        validate=Updates(1),
    )
    return [(row["epoch"], row["update"]) for row in result.history]


def test_a_resume_inside_an_epoch_continues_at_the_position_of_each_rank(ranks2: Pool, tmp_path: Path) -> None:
    whole = ranks2.run(in_legs, str(tmp_path / "whole"), 7)
    resumed = ranks2.run(in_legs, str(tmp_path / "legs"), 4, 7)
    assert whole[0] == whole[1] == resumed[0] == resumed[1]


def test_an_epoch_ends_at_the_same_update_on_all_ranks(ranks2: Pool) -> None:
    first, second = ranks2.run(cut_into_epochs)
    assert first == second
    assert first[-1] == (1, 7)
