"""Data sets with `__getitems__`: asked once for a batch, for the rows that they would give one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset

from trainwright.core.errors import DataError
from trainwright.data.opening import batches

X = torch.arange(40.0).reshape(20, 2)
Y = torch.arange(20)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and bool(torch.equal(a, b))
    return type(a) is type(b) and len(a) == len(b) and all(same(one, two) for one, two in zip(a, b, strict=True))


class Looked(Dataset):
    """Rows that are the same one by one and many at once."""

    def __init__(self, rows: Any = None) -> None:
        self.asked: list[list[int]] = []
        self.rows = rows

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return X[index] + 1, 3 * index

    def __getitems__(self, indices: list[int]) -> Any:
        self.asked.append(indices)
        return [self[index] for index in indices] if self.rows is None else self.rows(indices)


class OneByOne(Looked):
    __getitems__ = None


@pytest.mark.parametrize("shuffle", [False, True])
def test_rows_that_are_fetched_many_at_once_are_what_they_are_one_by_one(shuffle: bool) -> None:
    data = Looked()
    for several in (data, Subset(data, range(20))):
        data.asked.clear()
        ours = list(batches(several, 8, shuffle=shuffle, seed=1))
        assert same(ours, list(batches(OneByOne(), 8, shuffle=shuffle, seed=1)))
        assert [len(asked) for asked in data.asked] == [8, 8, 4]
        assert same(list(batches(several, 8, shuffle=shuffle, seed=1, workers=2)), ours)
    assert same(list(batches(Looked(), 8)), list(DataLoader(Looked(), batch_size=8)))


@pytest.mark.parametrize("rows", [lambda indices: (X[indices], Y[indices]), lambda indices: [(X[0], 1)]])
def test_many_rows_at_once_that_are_none_are_refused_with_what_to_write(rows: Any) -> None:
    named = r"given 8 row numbers(.|\n)*a (tuple of 2|list of 1)(.|\n)*a list of 8 rows(.|\n)*collate=collate"
    with pytest.raises(DataError, match=named):
        next(iter(batches(Looked(rows), 8)))
    whole = batches(Looked(rows), 8, collate=lambda batch: batch)
    assert len(next(iter(whole))) == len(rows([0, 1]))
