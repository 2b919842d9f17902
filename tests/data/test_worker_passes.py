"""Persistent workers that read an iterable data set resume with what they drew after the last batch that they gave."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from passes import alike, rest, resumed, trained
from sources import seeded
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from trainwright.data.opening import open_source


class Drawn(IterableDataset):
    """Rows of noise; a full batch and a part of one for each worker."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        for _ in range(10):
            yield torch.rand(1), random.random(), info.id


class Trailing(Drawn):
    """Draws when it is asked for an iterator, and after its last row."""

    def __iter__(self) -> Iterator[Any]:
        start = torch.rand(1)
        return self._rows(start)

    def _rows(self, start: torch.Tensor) -> Iterator[Any]:
        for _ in range(9):
            yield start + torch.rand(1), random.random()
        torch.rand(3), random.random()


CUTS = [(0, 2), (1, 0), (1, 1), (1, 4), (2, 0), (2, 3)]


@pytest.mark.slow
@pytest.mark.parametrize(("data", "drop"), [(Drawn, True), (Drawn, False), (Trailing, True), (Trailing, False)])
def test_a_stream_in_persistent_workers_resumes_wherever_it_is_cut(data: Any, drop: bool) -> None:
    def source() -> Any:
        loader: Any = DataLoader(data(), 3, num_workers=2, persistent_workers=True, drop_last=drop)
        opened = open_source(loader)
        opened.must_resume = True
        return opened

    seeded()
    table, saved = trained(source(), CUTS)
    for at in CUTS:
        torch.rand(7)
        assert alike(resumed(source(), saved[at], *at), rest(table, *at)), at
