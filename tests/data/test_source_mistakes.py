"""Data that cannot be opened or are used up are refused by name; the user's own errors pass through."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sources import READY, Noisy, Stream, X
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset

from trainwright.core.errors import DataError
from trainwright.data.opening import batches, open_source


class OneTime(IterableDataset):
    def __init__(self) -> None:
        self.rows = iter(range(6))

    def __iter__(self) -> Iterator[Any]:
        return self.rows


def used_up(data: Any) -> Any:
    source = open_source(data)
    list(source.epoch(0))
    return next(source.epoch(1))


class Empty:
    def __iter__(self) -> Iterator[Any]:
        return iter(())


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: used_up(iter(READY)), r"train data: the list_iterator is exhausted(.|\n)*lambda epoch: make\(epoch\)"),
        (lambda: used_up(batch for batch in READY), "the generator is exhausted"),
        (lambda: used_up(DataLoader(OneTime(), batch_size=2)), "OneTime.__iter__ to give a new iterator"),
        (lambda: next(open_source(Empty()).epoch(0)), "a Empty of batches had no batch"),
        (lambda: open_source([]), "a list of 0 batches had no batch"),
        (lambda: open_source(X[:0], batch_size=2), "data set of 0 rows"),
        (
            lambda: open_source(DataLoader(TensorDataset(X[:0])), role="val"),
            "val data: data set of 0 rows in the DataL",
        ),
        (
            lambda: open_source(DataLoader(Noisy(), batch_size=32, drop_last=True)),
            "20 rows, batch_size 32, drop_last=True leaves 0 batches(.|\n)*batch_size of at most 20",
        ),
        (
            lambda: open_source(DataLoader(Noisy(), batch_sampler=BatchSampler(range(5), 8, True))),
            "5 rows, batch_size 8, drop_last=True leaves 0 batches",
        ),
        (lambda: open_source(DataLoader(Noisy(), batch_sampler=[])), "at least one batch of 20 rows from list"),
        (lambda: open_source(READY).epoch(0, 4), "ended while the batches were skipped(.|\n)*3 batches(.|\n)*4"),
        (lambda: open_source(READY, batch_size=8), r"batch_size=8 with a list(.|\n)*batches\(data, ...\)"),
        (lambda: open_source(DataLoader(Noisy()), batch_size=8), "batch_size=8 with a DataLoader"),
        (lambda: open_source(batches(X, 4), batch_size=8), "batch_size=8 with a Batches"),
        (lambda: open_source(Stream(), batch_size=8), r"DataLoader\(data, batch_size=8\)"),
        (lambda: open_source(tuple(READY)), "a tuple is a data set of rows(.|\n)*a list is batches"),
        (lambda: open_source(tuple(READY), batch_size=8), r"\[0\] of a tuple(.|\n)*a list for ready batches"),
        (lambda: open_source(None), "NoneType(.|\n)*want(.|\n)*DataLoader"),
        (lambda: open_source(3), "an int is no source of batches"),
        (lambda: open_source("runs/data"), "a str is no source"),
        (lambda: open_source(nn.Sequential(nn.Linear(1, 1))), "a Sequential is no source"),
        (lambda: open_source(Noisy), r"the class Noisy itself(.|\n)*Noisy\(...\)"),
        (lambda: open_source(lambda: READY), r"cannot be called with the epoch(.|\n)*lambda epoch"),
        (lambda: open_source(lambda epoch: lambda: READY), "returned another function"),
        (lambda: open_source(lambda epoch: []), "a list of 0 batches"),
    ],
)
def test_mistakes_are_refused_with_what_to_write(call: Any, named: str) -> None:
    with pytest.raises(DataError, match=named):
        call()


def test_an_error_of_the_users_own_function_or_data_passes_through() -> None:
    def make(epoch: int) -> Any:
        raise TypeError("mine")

    with pytest.raises(TypeError, match=r"^mine$"):
        open_source(make)

    class Broken(Noisy):
        def __getitem__(self, index: int) -> Any:
            raise KeyError("mine")

    for workers in (0, 1):
        with pytest.raises(KeyError, match="mine"):
            next(open_source(DataLoader(Broken(), num_workers=workers)).epoch(0))
