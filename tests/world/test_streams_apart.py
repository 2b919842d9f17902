"""Streams of different length on the processes: the batches of an epoch are counted alike on all of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainwright import Checkpoint, Trainer, Updates, sharded
from world.pool import Pool

SHORT, LONG = 8, 24


def stream(epoch: int, *, first_is_short: bool) -> Iterator[tuple[Tensor, Tensor]]:
    batches = SHORT if (dist.get_rank() == 0) == first_is_short else LONG
    rows = torch.Generator().manual_seed(1 + dist.get_rank())
    for _ in range(batches):
        yield torch.randn(2, 4, generator=rows), torch.randint(3, (2,), generator=rows)


def fit(directory: str, first_is_short: bool, *legs: int) -> tuple[list[float], list[float]]:
    """Fit, in as many legs as there are updates given; the weights and the updates of the history."""
    for updates in legs:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        slot = Checkpoint(directory, every=Updates(1))
        trainer = Trainer(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            nn.CrossEntropyLoss(),
            accumulate=3,
            checkpoint=slot,
            console=False,
        )
        data = sharded(lambda epoch: stream(epoch, first_is_short=first_is_short))
        result = trainer.fit(data, max_updates=updates, epoch_updates=5 if first_is_short else None, resume="auto")
    return model.weight.flatten().tolist(), [row["update"] for row in result.history]


@pytest.mark.parametrize("first_is_short", [True, False])
def test_an_epoch_ends_and_goes_on_at_the_same_window_on_all_processes(
    ranks2: Pool, tmp_path: object, first_is_short: bool
) -> None:
    whole = ranks2.run(fit, f"{tmp_path}/a", first_is_short, 7, seconds=30)
    in_legs = ranks2.run(fit, f"{tmp_path}/b", first_is_short, 4, 7, seconds=30)
    assert whole[0] == whole[1]
    assert in_legs[0][0] == in_legs[1][0] == whole[0][0]
