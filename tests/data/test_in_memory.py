"""`batches(..., in_memory=True)`: a data set that is read once gives what its rows give, or says why it cannot."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from sources import committed
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from trainwright.core.errors import DataError, SettingError
from trainwright.data import seeded
from trainwright.data.opening import batches, open_source

ROWS = 600
X = torch.randn(ROWS, 2, 3, generator=torch.Generator().manual_seed(0))


class Rows(Dataset):
    """Counts how often it is asked."""

    def __init__(self, row: Any, rows: int = ROWS) -> None:
        self.row, self.rows, self.asked = row, rows, 0

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> Any:
        self.asked += 1
        return self.row(index)


class Pair(NamedTuple):
    x: Any
    y: Any


class AtOnce(Rows):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self.row(index) for index in indices]


KINDS = {
    "pair": lambda i: (X[i], i),
    "array": lambda i: X[i].numpy(),
    "tensor": lambda i: X[i],
    "number": float,
    "named": lambda i: Pair(X[i].half(), np.float32(i)),
    "dict": lambda i: {"x": X[i].numpy(), "target": bool(i % 2)},
    "list": lambda i: [X[i, 0], X[i] > 0],
    "nested": lambda i: ({"a": (X[i], i), "b": [np.int16(i)]}, Pair(i, [X[i].numpy().astype(np.float64)])),
    "nothing in a row": lambda i: (X[i, :0], i),
    "not a number": lambda i: torch.tensor([float("nan"), -0.0, i]),
}


def exactly(batch: Any) -> str:
    if isinstance(batch, dict):
        return f"{type(batch).__name__}({', '.join(f'{key}={exactly(one)}' for key, one in batch.items())})"
    if isinstance(batch, list | tuple):
        return f"{type(batch).__name__}({', '.join(map(exactly, batch))})"
    return f"{type(batch)} {batch.dtype} {tuple(batch.shape)} {batch.contiguous().view(torch.uint8).tolist()}"


def check_same(row: Any, **settings: Any) -> None:
    """Batches of rows that are read once, against those that are fetched row by row."""
    fetched = batches(Rows(row), 50, seed=3, workers=0, **settings)
    read = batches(Rows(row), 50, seed=3, in_memory=True, **settings)
    for epoch in range(2):
        assert [exactly(one) for one in read.epoch(epoch)] == [exactly(one) for one in fetched.epoch(epoch)]
    assert [exactly(one) for one in read.epoch(1, 3)] == [exactly(one) for one in fetched.epoch(1, 3)]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_once_gives_the_batches_that_its_rows_give(kind: str) -> None:
    check_same(KINDS[kind], shuffle=True)


@pytest.mark.parametrize("settings", [{}, {"drop_last": True}, {"sampler": [5, 5, 599, 0] * 50}])
def test_it_does_so_in_every_order(settings: dict[str, Any]) -> None:
    check_same(KINDS["pair"], **settings)


@pytest.mark.parametrize("fault", ["a part of the rows is forgotten", "columns are exchanged"])
def test_a_fault_in_the_reading_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault.startswith("a part"):
        monkeypatch.setattr(seeded._Reading, "_check_same", lambda self, part, *_, **__: part.zero_())
    else:
        packed = seeded._packed
        monkeypatch.setattr(seeded, "_packed", lambda form, columns: packed(form, columns[::-1]))
    with pytest.raises(AssertionError):
        check_same(KINDS["dict"])


def test_a_data_set_is_read_twice_at_the_start_and_never_again() -> None:
    data = Rows(KINDS["pair"])
    source = batches(data, 50, shuffle=True, in_memory=True)
    assert data.asked == 2 * ROWS
    for _ in range(3):
        list(source)
    assert data.asked == 2 * ROWS
    assert source.describe() == "600 rows in batches of 50 from memory (Rows, read once), shuffled"


def test_reading_leaves_the_generators_and_a_run_without_it_goes_on_with_it() -> None:
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    read = batches(AtOnce(KINDS["pair"]), 50, shuffle=True, seed=1, in_memory=True)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    fetched = batches(AtOnce(KINDS["pair"]), 50, shuffle=True, seed=1)
    iterator = fetched.epoch(0)
    next(iterator)
    read.seek(committed(fetched))
    assert [exactly(one) for one in read.epoch(0, 1)] == [exactly(one) for one in iterator]


def test_what_is_in_memory_already_is_taken_as_it_is() -> None:
    for data in (X, (X, X), {"x": X}, TensorDataset(X)):
        ours = [exactly(one) for one in batches(data, 50, in_memory=True)]
        assert ours == [exactly(one) for one in batches(data, 50)]
    source = batches(X, 50, in_memory=True)
    assert open_source(source) is source


def calls(index: int, kept: list[int] | None = None) -> Any:
    kept = calls.kept if kept is None else kept
    kept.append(index)
    return index, len(kept)


calls.kept = []


class Epochs(Rows):
    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class States(Rows):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(X)


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (Rows(lambda i: (X[i], random.random())), r"row 0 is not the same in two readings(.|\n)*\[1\]: 0\.\d+, then 0"),
        (Rows(lambda i: X[i] + torch.rand(()) * (i == 300)), "row 300 is not the same"),
        (Rows(lambda i: np.random.rand(2)), r"row 0(.|\n)*have  it: \[0(.|\n)*in_memory out"),
        (Rows(calls), r"row 0 is not the same in two readings(.|\n)*\[1\]: 1, then 257"),
        (Rows(lambda i: X[i, :, : 3 - i % 2]), r"row 1 differs in kind(.|\n)*\(2, 2\) Tensor(.|\n)*\(2, 3\) Tensor"),
        (Rows(lambda i: (X[i], i if i < 500 else float(i))), r"row 500(.|\n)*\[1\] float(.|\n)*\[1\] int"),
        (Rows(lambda i: (X[i],) * (1 + i // 400)), r"row 400(.|\n)*have  2 values(.|\n)*want  1 values"),
        (Rows(lambda i: {"x": X[i], "name": "a"}), r"\['name'\] is a str(.|\n)*tensors, numbers and arrays"),
        (Rows(lambda i: np.array(["a"])), "a row is a ndarray"),
        (Rows(lambda i: X[i].clone().requires_grad_()), "a row is a Tensor"),
        (Rows(lambda i: X[i].to_sparse()), "a row is a Tensor"),
        (Rows(lambda i: None), "a row is a NoneType"),
        (Rows(lambda i: X[i], 0), "data set of 0 rows"),
        (Epochs(KINDS["pair"]), "Epochs(.|\n)*may change, for it has set_epoch"),
        (States(KINDS["pair"]), "may change, for it has state_dict"),
        (Stream(), "no data set of rows"),
        (DataLoader(TensorDataset(X)), "use it as it is"),
        (Rows(lambda i: torch.empty((1 << 30,), device="meta")), "a row is a Tensor"),
    ],
)
def test_what_cannot_be_read_once_is_refused_with_the_difference(data: Any, named: str) -> None:
    calls.kept.clear()
    with pytest.raises(DataError, match=named):
        batches(data, 50, in_memory=True)


def test_more_than_the_machine_has_is_refused_before_there_is_room_for_it() -> None:
    with pytest.raises(DataError, match=r"10,000,000,000 rows need [0-9,]+ MB(.|\n)*memory of this machine"):
        batches(Rows(lambda i: X[i % ROWS], 10_000_000_000), 50, in_memory=True)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"collate": list}, r"in_memory=True, collate=\.\.\.(.|\n)*one of the two(.|\n)*batches\(rows, 64, collate"),
        ({"workers": 2}, r"in_memory=True, workers=2(.|\n)*leave workers out"),
        ({"in_memory": 1}, r"in_memory=1(.|\n)*True or False"),
    ],
)
def test_settings_that_cannot_be_honored_are_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(SettingError, match=named):
        batches(Rows(KINDS["pair"]), 50, **{"in_memory": True, **settings})
