"""A data set in two parts at random: each row once, the same parts for one seed, no draw from the process."""

from __future__ import annotations

import random
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from trainwright import DataError, SettingError, Trainer, batches
from trainwright.data import random_split

X, Y = torch.arange(50.0).reshape(25, 2), torch.arange(25)
Pair = namedtuple("Pair", ["x", "y"])


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 25

    def __getitem__(self, index: int) -> Any:
        return X[index], Y[index]


FORMS: dict[str, tuple[Any, Any]] = {  # the data, and the numbers of the rows of a part
    "tensor": (Y, lambda part: part.tolist()),
    "array": (Y.numpy(), lambda part: part.tolist()),
    "tuple": ((X, Y), lambda part: part[1].tolist()),
    "named tuple": (Pair(X, Y), lambda part: part.y.tolist()),
    "dict": ({"x": X.numpy(), "y": Y}, lambda part: part["y"].tolist()),
    "list": (list(range(25)), list),
    "data set": (Rows(), lambda part: [int(y) for _, y in part]),
    "tensors": (TensorDataset(X, Y), lambda part: [int(y) for _, y in part]),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_row_is_in_one_part_of_the_same_kind_and_in_order(form: str) -> None:
    data, rows = FORMS[form]
    first, second = random_split(data, 0.2, seed=3)
    assert len(rows(first)) == 20 and len(rows(second)) == 5
    assert sorted(rows(first) + rows(second)) == list(range(25))
    assert rows(first) == sorted(rows(first)) and rows(second) == sorted(rows(second))
    if not isinstance(data, Dataset):
        assert type(first) is type(second) is type(data)


def test_all_forms_of_a_data_set_are_split_alike_and_seeds_differ() -> None:
    parts = {form: rows(random_split(data, 0.2, seed=3)[1]) for form, (data, rows) in FORMS.items()}
    assert len(set(map(tuple, parts.values()))) == 1
    assert parts["list"] != random_split(list(range(25)), 0.2, seed=4)[1]
    assert parts["list"] != list(range(5)) and parts["list"] != list(range(20, 25))


def test_the_parts_are_copies_and_no_generator_of_the_process_moves() -> None:
    before = torch.get_rng_state(), str(np.random.get_state()), random.getstate()
    first, second = random_split((X, Y), 0.5)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (str(np.random.get_state()), random.getstate())
    first[0].zero_()
    assert X[1:].all() and second[0].any()


@pytest.mark.parametrize(("rows", "fraction", "second"), [(2, 0.01, 1), (2, 0.99, 1), (10, 0.25, 2), (100, 0.07, 7)])
def test_the_second_part_has_the_rounded_share_and_no_part_is_empty(rows: int, fraction: float, second: int) -> None:
    parts = random_split(torch.arange(rows), fraction)
    assert [len(part) for part in parts] == [rows - second, second]


def test_the_parts_are_trained_and_validated_on() -> None:
    for data in ((X / 50, Y.float()[:, None] / 25), TensorDataset(X / 50, Y.float()[:, None] / 25)):
        train, val = random_split(data, 0.2)
        model = nn.Linear(2, 1)
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), console=False)
        assert "val_loss" in trainer.fit(train, val, batch_size=5, epochs=1).history[0]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(Rows())


@pytest.mark.parametrize(
    ("data", "fix"),
    [
        (DataLoader(Rows(), 5), "it has batches already"),
        (batches((X, Y), 5), "it has batches already"),
        (Stream(), ""),
        (iter([1, 2]), ""),
        ((X, Y[:3]), "write a list for ready batches"),
        (torch.zeros(1), ""),
    ],
)
def test_data_without_rows_to_split_are_refused(data: Any, fix: str) -> None:
    with pytest.raises(DataError) as caught:
        random_split(data, 0.5)
    assert fix in str(caught.value)


@pytest.mark.parametrize("fraction", [0.0, 1.0, 20, True, -0.2, "0.2", [0.8, 0.2], float("nan")])
def test_a_share_that_is_none_is_refused_with_the_line_to_write(fraction: Any) -> None:
    with pytest.raises(SettingError, match=r"fix   random_split\(data, 0.2\)"):
        random_split((X, Y), fraction)


def test_a_seed_that_is_none_is_refused() -> None:
    with pytest.raises(SettingError, match="seed"):
        random_split((X, Y), 0.2, seed=0.5)  # type: ignore[arg-type]
