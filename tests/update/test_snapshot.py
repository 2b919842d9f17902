"""A snapshot restores its parts as they were at its last capture, or at an earlier one that is still held."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainwright.update.snapshot import Buffers, RngStates, Snapshot, StateDicts, Tensors, UserState


def test_earlier_captures_are_restored_as_far_as_there_are_slots() -> None:
    value = torch.zeros(3)
    before = Snapshot(Tensors([value], slots=3))
    for step in range(5):
        value.fill_(step)
        before.capture()
    value.fill_(-1)
    before.restore(ago=2)
    assert value.tolist() == [2, 2, 2]
    before.restore()
    assert value.tolist() == [4, 4, 4]
    with pytest.raises(AssertionError, match="overwritten"):
        before.restore(ago=3)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_the_buffers_of_a_compiled_script_are_restored() -> None:
    class Scripted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.seen.add_(x.sum())
            return x

    model: Any = torch.jit.script(Scripted())
    before = Snapshot(Buffers(lambda: [model]))
    before.capture()
    model(torch.ones(2))
    assert float(model.seen) == 2
    before.restore_nonfinite()
    assert float(model.seen) == 2  # finite: an overflow leaves it advanced
    model(torch.full((1,), torch.inf))
    before.restore_nonfinite()
    assert float(model.seen) == 0


def test_state_random_states_and_objects_with_a_state_dict_come_back_more_than_once() -> None:
    trainer: Any = SimpleNamespace(state={"sum": torch.zeros(2), "names": ["a"]})
    layer, random_states = nn.Linear(1, 1), RngStates()
    state, weight = trainer.state, layer.weight.detach().clone()
    before = Snapshot(UserState(trainer), StateDicts({"layer": layer}), random_states)
    before.capture()
    assert not random_states.changed
    draws = []
    for _ in range(2):
        state["sum"].add_(1)
        state["names"].append("b")
        nn.init.constant_(layer.weight, 7.0)
        draws.append((random.random(), float(torch.rand(()))))
        assert random_states.changed
        before.restore()
        assert trainer.state is state and state["names"] == ["a"] and state["sum"].tolist() == [0, 0]
        assert torch.equal(layer.weight, weight)
    assert draws[0] == draws[1]


def test_a_block_restores_after_an_error_too() -> None:
    value = torch.zeros(1)
    with pytest.raises(KeyError), Snapshot(Tensors([value])):
        value.fill_(1)
        raise KeyError
    assert float(value) == 0


def test_a_part_is_restored_where_it_has_become_infinite_alone() -> None:
    value, other = torch.zeros(2), torch.zeros(2)
    before = Snapshot(Tensors([value]), Tensors([other]))
    before.capture()
    value[0], other[0] = torch.nan, 1.0
    before.restore_nonfinite()
    assert (value.tolist(), other.tolist()) == ([0, 0], [1, 0])
