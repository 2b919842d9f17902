"""A source that goes on over the ends of epochs resumes at any batch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from sources import LOADERS, Noisy, X, committed, seeded, text

from trainwright.core.errors import DataError
from trainwright.data.opening import batches, open_source
from trainwright.data.streams import Continuing


def test_epochs_cut_from_a_stream_go_on_where_the_last_one_stopped() -> None:
    source = Continuing(open_source(iter(range(100))))
    assert (source.length, source.rows, source.repeatable) == (None, None, False)
    assert [[next(iterator) for _ in range(3)] for iterator in map(source.epoch, range(3))] == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7, 8],
    ]


def test_a_loop_that_leaves_an_epoch_leaves_the_stream_open() -> None:
    def delegating(iterator: Iterator[int]) -> Iterator[int]:
        yield from iterator

    source = Continuing(open_source(index for index in range(9)))
    outer = delegating(source.epoch(0))
    assert next(outer) == 0
    outer.close()
    assert next(source.epoch(1)) == 1


def test_a_finite_source_begins_again_inside_an_epoch_and_a_generator_ends() -> None:
    source = Continuing(open_source([0, 1, 2]))
    iterator = source.epoch(0)
    assert [next(iterator) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert next(source.epoch(1)) == 1
    once = Continuing(open_source(iter([0, 1, 2])))
    assert list(once.epoch(0)) == [0, 1, 2]
    with pytest.raises(DataError, match="exhausted"):
        next(once.epoch(1))


def trained(source: Any, iterator: Any, batches_from_to: range) -> list[str]:
    """Batches in epochs of 2, with a draw after each as a training step makes it."""
    table = []
    for index in batches_from_to:
        iterator = source.epoch(index // 2) if index % 2 == 0 or iterator is None else iterator
        table.append(text(next(iterator)))
        torch.rand(3)
    return table


@pytest.mark.parametrize("name", ["shuffle", "generator", "own", "iterable", "plain"])
@pytest.mark.parametrize("at", [0, 1, 2, 3, 4, 5, 9])
def test_a_continuing_stream_resumes_at_any_batch(name: str, at: int) -> None:
    def make() -> Any:
        return Continuing(open_source(batches(Noisy(), 8, shuffle=True) if name == "own" else LOADERS[name]()))

    seeded()
    source = make()
    trained(source, None, range(at))
    kept = committed(source)
    boundary, python, numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()
    rest = trained(source, source if at % 2 else None, range(at, at + 6))

    resumed = make()
    resumed.seek(kept)
    assert resumed.position() is kept
    iterator = resumed.epoch(at // 2, at % 2) if at % 2 else None
    if at % 2 == 0 and at:
        torch.rand(7)  # the state of the boundary is put back before the epoch and after it was begun
    torch.set_rng_state(boundary), random.setstate(python), np.random.set_state(numpy)
    assert trained(resumed, iterator, range(at, at + 6)) == rest


def test_a_continuing_stream_resumes_twice() -> None:
    table = [text(batch) for epoch in range(3) for batch in batches(X, 3, shuffle=True, seed=1).epoch(epoch)]
    given: list[str] = []
    kept, epoch, skip = None, 0, 0
    for taken in (3, 1, 2, 4, 1):  # of epochs of 4, each time in a new process
        source = Continuing(open_source(batches(X, 3, shuffle=True, seed=1)))
        if kept is not None:
            source.seek(kept)
        iterator = source.epoch(epoch, skip)
        for _ in range(taken):
            if skip == 4:
                epoch, skip = epoch + 1, 0
                iterator = source.epoch(epoch)
            given.append(text(next(iterator)))
            skip += 1
        kept = committed(source)
    assert given == table[: len(given)]
