"""Devices: chosen once, batches moved with their types kept."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from types import MappingProxyType

import pytest
import torch
from torch import nn

from trainwright import SettingError
from trainwright.core.device import choose_device, move, place
from trainwright.optim.named import place_state

META = torch.device("meta")
Pair = namedtuple("Pair", "x y")


@dataclasses.dataclass(frozen=True)
class Record:
    x: torch.Tensor
    name: str


class Own:
    def __init__(self, x):
        self.x = x

    def to(self, device):
        return Own(self.x.to(device))


def x():
    return torch.ones(2, 3)


@pytest.mark.parametrize(
    "batch",
    [
        x(),
        (x(), 1),
        [x(), "name"],
        Pair(x(), x()),
        {"x": x(), "n": 1},
        OrderedDict(x=x(), n=(x(), None)),
        Record(x(), "name"),
        [{"x": Pair(x(), [x()])}],
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_a_batch_keeps_its_types_when_it_is_moved(batch):
    def check(before, after):
        assert type(after) is type(before)
        if isinstance(before, torch.Tensor):
            assert after.device == META
            assert before.device.type == "cpu"
        elif isinstance(before, dict):
            assert list(before) == list(after)
            for key in before:
                check(before[key], after[key])
        elif isinstance(before, tuple | list):
            for pair in zip(before, after, strict=True):
                check(*pair)
        elif dataclasses.is_dataclass(before):
            check(before.x, after.x)
            assert before.name == after.name
        else:
            assert before == after

    check(batch, move(batch, META))


def test_an_object_moves_itself_and_a_read_only_mapping_becomes_a_dict():
    assert move(Own(x()), META).x.device == META
    moved = move(MappingProxyType({"x": x()}), META)
    assert moved["x"].device == META


def test_auto_is_where_the_model_lies_and_a_name_is_checked():
    assert choose_device("cpu", nn.Linear(2, 2)) == torch.device("cpu")
    assert choose_device("auto", nn.Linear(2, 2, device="meta")) == META
    with pytest.raises(SettingError, match="gpu"):
        choose_device("gpu", nn.Linear(2, 2))


def test_a_model_is_placed_in_place_unless_it_lies_on_several_devices():
    one = nn.Linear(2, 2)
    weight = one.weight
    place(one, META)
    assert one.weight.device == META
    two = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    place(two, torch.device("cpu"))
    assert [module.weight.device.type for module in two] == ["cpu", "meta"]
    assert weight.device.type in ("cpu", "meta")


def test_an_optimizer_whose_state_already_lies_right_is_left_alone():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    groups = optimizer.param_groups
    place_state(optimizer)
    assert optimizer.param_groups is groups
