"""A DataLoader as a source: bitwise the plain loop, skipped and resumed exactly."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from sources import LOADERS, Noisy, seeded, text
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from trainwright.core.errors import DataError
from trainwright.data.opening import open_source


def state() -> str:
    return repr((random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().tolist()))


@pytest.mark.parametrize("name", LOADERS)
def test_a_loader_gives_what_the_plain_loop_gets_and_draws_what_it_draws(name: str) -> None:
    seeded()
    loader = LOADERS[name]()
    plain = [[text(batch) for batch in loader] for _ in range(2)]
    after = state()
    seeded()
    source = open_source(LOADERS[name]())
    ours = [[text(batch) for batch in source.epoch(epoch)] for epoch in range(2)]
    assert ours == plain
    assert state() == after
    assert source.length == (None if name == "iterable" else len(plain[0]))
    assert source.repeatable
    assert source.draws_global_rng


@pytest.mark.parametrize(
    ("name", "rows", "batch_size"),
    [
        ("plain", 20, 8),
        ("drop_last", 16, 8),
        ("sampler", 13, 8),
        ("batch_sampler", 18, 6),
        ("unbatched", None, None),
        ("iterable", None, 4),
    ],
)
def test_a_loader_knows_its_rows_where_they_can_be_known(name: str, rows: Any, batch_size: Any) -> None:
    source = open_source(LOADERS[name]())
    assert (source.rows, source.batch_size) == (rows, batch_size)


def test_a_state_of_a_loader_with_other_generators_is_refused() -> None:
    with pytest.raises(DataError, match=r"its random generators differ(.|\n)*no generator(.|\n)*loader.generator"):
        open_source(LOADERS["shuffle"]()).seek(open_source(LOADERS["generator"]()).position())


def test_samplers_and_data_set_receive_the_epoch_once() -> None:
    class Reported:
        def __init__(self) -> None:
            self.reported: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.reported.append(epoch)

    class ReportedSampler(Reported, SequentialSampler):
        def __init__(self) -> None:
            Reported.__init__(self)
            SequentialSampler.__init__(self, range(20))

    class ReportedBatches(Reported, BatchSampler):
        def __init__(self, sampler: Any) -> None:
            Reported.__init__(self)
            BatchSampler.__init__(self, sampler, 4, False)

    class ReportedData(Reported, Noisy):
        pass

    inner = ReportedSampler()
    outer, data = ReportedBatches(inner), ReportedData()
    source = open_source(DataLoader(data, batch_sampler=outer))
    for epoch in (0, 4):
        next(source.epoch(epoch))
    assert inner.reported == outer.reported == data.reported == [0, 4]
    sampler = ReportedSampler()
    next(open_source(DataLoader(data, sampler=sampler)).epoch(2))
    assert sampler.reported == [2]
