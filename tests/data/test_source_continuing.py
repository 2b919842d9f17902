"""A source that goes on over the ends of epochs resumes at any batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from trainwright.core.errors import DataError
from trainwright.data.opening import open_source
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
