"""What of a data set is looked at to know that it is what it was, and bits that are compared."""

from __future__ import annotations

import copy
import io
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from trainwright.data.bits import same_bits
from trainwright.data.dataset_fingerprint import Fingerprint, why_not_sent


class Held:
    def __init__(self) -> None:
        self.size, self.steps, self.inner = 3, [1, 2], None


class Data:
    def __init__(self) -> None:
        self.number, self.name, self.nothing, self.nan = 1, "a", None, float("nan")
        self.paths = ["a", "b", ("c", 1)]
        self.labels = {"a": 1}
        self.tensor, self.array = torch.zeros(3), np.zeros(3)
        self.transform = Held()
        self.transforms = [Held(), Held()]


CHANGES = {
    "a number": lambda data: setattr(data, "number", 2),
    "its type": lambda data: setattr(data, "number", True),
    "a text": lambda data: setattr(data, "name", "b"),
    "an attribute more": lambda data: setattr(data, "more", 1),
    "a tensor": lambda data: data.tensor.add_(1),
    "another tensor": lambda data: setattr(data, "tensor", data.tensor.clone()),
    "a list grows": lambda data: data.paths.append("d"),
    "a dict grows": lambda data: data.labels.update(b=2),
    "inside": lambda data: setattr(data.transform, "size", 4),
    "inside a list": lambda data: setattr(data.transforms[1], "size", 4),
    "inside what is inside": lambda data: setattr(data.transform, "inner", Held()),
}
CLOSELY = {
    "an item": lambda data: data.paths.__setitem__(0, "z"),
    "a value": lambda data: data.labels.update(a=2),
    "in an array": lambda data: data.array.__setitem__(0, 1),
    "an item inside": lambda data: data.transform.steps.reverse(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("closely", [False, True])
def test_a_change_of_an_attribute_is_seen(change: str, closely: bool) -> None:
    data = Data()
    seen = Fingerprint(data)
    assert seen.sure
    assert seen.is_same(closely=closely)
    CHANGES[change](data)
    assert not seen.is_same(closely=closely)


@pytest.mark.parametrize("change", CLOSELY)
def test_a_change_inside_is_seen_by_a_closer_look(change: str) -> None:
    data = Data()
    seen = Fingerprint(data)
    CLOSELY[change](data)
    assert seen.is_same(closely=False)
    assert not seen.is_same(closely=True)


@pytest.mark.parametrize(
    "value", [np.zeros(1 << 18), [np.zeros(3)], {"a": [1]}, iter([1]), io.BytesIO(b"a"), list(range(200_000)), object()]
)
def test_nothing_is_sure_where_something_was_not_looked_at(value: Any) -> None:
    data = Data()
    data.other = value
    seen = Fingerprint(data)
    assert not seen.sure
    assert seen.is_same(closely=True)


def test_what_holds_itself_is_looked_at_once() -> None:
    data = Data()
    data.transform.inner = data
    assert Fingerprint(data).is_same(closely=True)


@pytest.mark.parametrize("value", [lambda: 1, threading.Lock(), memoryview(b"a"), (one for one in [1])])
def test_what_cannot_be_sent_is_told(value: Any) -> None:
    data = Data()
    assert why_not_sent(data) == ""
    data.other = value
    assert "cannot be sent to a process: " in why_not_sent(data)


def test_a_tensor_on_a_device_is_not_sent() -> None:
    data = Data()
    data.other = torch.zeros(1, device="meta")
    assert "a tensor on meta" in why_not_sent(data)


@dataclass
class Pair:
    x: Any
    y: Any


BATCHES = [
    torch.tensor([1.0, float("nan")]),
    torch.tensor([1.0, -0.0]),
    torch.tensor([1.0, 0.0]),
    torch.tensor([1, 0]),
    torch.zeros(2, 3),
    torch.zeros(3, 2).t(),
    torch.tensor([True]),
    torch.tensor([1j]),
    np.array([1.0]),
    np.float32(1),
    {"a": torch.ones(1)},
    {"b": torch.ones(1)},
    [torch.ones(1), "a"],
    [torch.ones(1), "b"],
    (torch.ones(1), "a"),
    Pair(torch.ones(1), None),
    Pair(torch.ones(1), 1.0),
    1,
    True,
    float("nan"),
]


def test_batches_are_the_same_only_where_every_bit_is() -> None:
    for number, one in enumerate(BATCHES):
        for other, two in enumerate(copy.deepcopy(BATCHES)):
            assert same_bits(one, two) == (number == other), (one, two)
    assert not same_bits(object(), object())
    assert not same_bits([object()], [object()])
    assert not same_bits(torch.ones(2).to_sparse(), torch.ones(2).to_sparse())
