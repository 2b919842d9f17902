"""What is sent to another process: as it was, in as many bytes as it has, on the receiver's device."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from trainwright.distributed.world import World, packed, unpacked
from trainwright.metrics.metric_set import MetricSet
from trainwright.metrics.metrics import accuracy
from trainwright.metrics.reduce import reduce_to_rank0
from trainwright.metrics.scores import F1, R2


@dataclass
class Held:
    tensor: torch.Tensor
    more: Any


class Two(World):
    """Two processes of which the second gives what was packed beforehand."""

    size = 2

    def __init__(self, second: Any) -> None:
        self._second = second

    def gather_on_rank0(self, value: Any) -> list[Any]:
        return [value, self._second]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_values_come_back_as_they_were(dtype: torch.dtype) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    sent = {"a": [tensor, (tensor.T, None)], 3: Held(tensor[1:], "text"), "empty": tensor[:0], "one": tensor[0, 0]}
    back = unpacked(packed(sent))
    assert torch.equal(back["a"][0], tensor) and torch.equal(back["a"][1][0], tensor.T) and back["a"][1][1] is None
    assert torch.equal(back[3].tensor, tensor[1:]) and back[3].more == "text"
    assert back["empty"].shape == (0, 3) and torch.equal(back["one"], tensor[0, 0])
    assert back["a"][0].dtype is dtype


def test_a_view_is_sent_without_the_memory_it_is_a_view_of() -> None:
    large = torch.zeros(1000, 1000)
    assert len(packed(large[:, -1])) < 10_000 < len(pickle.dumps(large[:, -1]))
    assert len(packed(large)) > large.numel() * 4


def test_a_gradient_is_not_sent() -> None:
    made = torch.ones(3, requires_grad=True) * 2
    back = unpacked(packed(made))
    assert torch.equal(back, made) and not back.requires_grad


@pytest.mark.gpu
def test_what_lies_on_an_accelerator_comes_to_the_receivers_and_the_rest_stays_on_the_host() -> None:
    there = Held(torch.ones(3, device="cuda"), torch.zeros(2))
    data = packed(there)
    assert unpacked(data).tensor.device.type == "cpu"
    back = unpacked(data, torch.device("cuda", 0))
    assert back.tensor.device.type == "cuda" and back.more.device.type == "cpu"


@pytest.mark.gpu
@pytest.mark.parametrize(("mine", "theirs"), [("cuda", "cuda"), ("cpu", "cuda")])
def test_sums_of_metrics_meet_wherever_they_lie(mine: str, theirs: str) -> None:
    class Lists:
        def __init__(self) -> None:
            self.reset()

        def update(self, output: Any, target: Any) -> None:
            self.rows.append(target)
            self.host.append(target.cpu())

        def compute(self) -> float:
            return float(torch.cat(self.rows).sum() + torch.cat(self.host).sum())

        def reset(self) -> None:
            self.rows, self.host = list[torch.Tensor](), list[torch.Tensor]()

        def merge(self, other: Any) -> None:
            self.rows, self.host = self.rows + other.rows, self.host + other.host

    class Values(R2):
        def update(self, output: Any, target: Any) -> None:
            super().update(output[:, 0], target.float())

    output, target = torch.randn(9, 3), torch.arange(9) % 3
    of = {"accuracy": accuracy, "f1": F1(), "r2": Values(), "lists": Lists()}
    whole, one, other = (MetricSet(of, spread=True) for _ in range(3))
    whole.update(output, target, 9)
    one.update(output[:4].to(mine), target[:4].to(mine), 4)
    other.update(output[4:].to(theirs), target[4:].to(theirs), 5)
    reduce_to_rank0(Two(packed([other.state_dict()])), [one], device=one.device)
    assert one.compute() == pytest.approx(whole.compute(), rel=1e-12)
    assert one.errors() == pytest.approx(whole.errors(), rel=1e-12)
