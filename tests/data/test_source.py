"""`open_source`: data in every form that is no loader: ready batches, data sets, functions of the epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sources import READY, Noisy, X, Y, committed, generator, text
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

from trainwright.core.errors import DataError
from trainwright.core.rng import rng_preserved
from trainwright.data.opening import batches, open_source, takes_batch_size


class Sized:
    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Any]:
        return iter(READY)


class Unsized(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return iter(READY)


@pytest.mark.parametrize(
    ("data", "length", "repeatable"),
    [
        (lambda: READY, 3, True),
        (Sized, 3, True),
        (Unsized, None, True),
        (lambda: iter(READY), None, False),
        (lambda: (batch for batch in READY), None, False),
        (lambda: lambda epoch: READY, 3, True),
        (lambda: lambda epoch: (batch for batch in READY), None, True),
    ],
)
@pytest.mark.parametrize("skip", [0, 1, 3])
def test_ready_batches_are_handed_on_themselves(data: Any, length: Any, repeatable: bool, skip: int) -> None:
    source = open_source(data())
    assert (source.length, source.repeatable) == (length, repeatable)
    given = list(source.epoch(0, skip))
    assert len(given) == 3 - skip
    assert all(one is two for one, two in zip(given, READY[skip:], strict=True))
    if repeatable:
        assert len(list(source.epoch(1))) == 3


def test_a_list_is_iterated_by_its_own_iterator() -> None:
    assert type(open_source(READY).epoch(0)) is type(iter([]))


def test_a_stream_is_asked_only_when_a_batch_is_asked_for() -> None:
    asked: list[int] = []

    def stream() -> Iterator[int]:
        for index in range(5):
            asked.append(index)
            yield index

    iterator = open_source(stream()).epoch(0)
    assert asked == []
    assert [next(iterator), next(iterator), next(iterator)] == asked == [0, 1, 2]


@pytest.mark.parametrize(
    "data", [X, X.numpy(), (X, Y), {"x": X}, TensorDataset(X, Y), Noisy()], ids=lambda data: type(data).__name__
)
def test_a_data_set_takes_the_batch_size_and_the_shuffle_and_only_training_needs_a_batch_size(data: Any) -> None:
    assert takes_batch_size(data)
    source = open_source(data, batch_size=8, shuffle=True)
    assert (source.length, source.rows, source.batch_size) == (3, 20, 8)
    assert "shuffled" in source.describe()
    assert "in order" in open_source(data, batch_size=8).describe()
    with pytest.raises(DataError, match=r"train data: an? \w+ is a data set of rows(.|\n)*batches\(data, 64\)"):
        open_source(data, shuffle=True)
    evaluated = open_source(data, role="val")
    assert (evaluated.length, evaluated.batch_size) == (1, 256)
    assert "in order" in evaluated.describe()


def test_batches_are_their_own_source() -> None:
    own = batches(X, 8)
    assert open_source(own) is own
    opened = open_source(READY)
    assert open_source(opened) is opened


def test_a_function_is_called_once_per_epoch() -> None:
    called: list[int] = []

    def make(epoch: int) -> list[int]:
        called.append(epoch)
        return [epoch] * (epoch + 2)

    source = open_source(make)
    assert called == [0]
    assert (source.length, source.describe()) == (2, "a list of 2 batches, made for each epoch")
    assert [list(source.epoch(epoch)) for epoch in (0, 1, 2)] == [[0, 0], [1, 1, 1], [2, 2, 2, 2]]
    assert called == [0, 1, 2]
    assert list(source.epoch(5, skip=6)) == [5]


def test_a_functions_data_get_the_batch_size() -> None:
    source = open_source(lambda epoch: (X + epoch, Y), batch_size=8)
    assert [next(source.epoch(epoch))[0][0, 0].item() for epoch in (0, 1)] == [0.0, 1.0]


@pytest.mark.parametrize("kind", ["batches", "loader"])
def test_data_that_are_train_and_val_at_once_resume_with_the_order_of_both(kind: str) -> None:
    def make() -> Any:
        sampler = RandomSampler(range(20), generator=generator())
        return batches(X, 8, sampler=sampler) if kind == "batches" else DataLoader(X, batch_size=8, sampler=sampler)

    def validated(source: Any) -> list[str]:
        with rng_preserved(source.generators):
            return [text(batch) for batch in source.independent_copy().epoch(0)]

    source = open_source(make())
    list(source.epoch(0))
    kept = committed(source)
    table = [validated(source), [text(batch) for batch in source.epoch(1)], validated(source)]
    again = open_source(make())
    again.seek(kept)
    assert [validated(again), [text(batch) for batch in again.epoch(1)], validated(again)] == table
