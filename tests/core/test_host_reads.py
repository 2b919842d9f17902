"""Numbers are read from tensors in one place, together."""

from __future__ import annotations

import math

import pytest
import torch

from trainwright.core.host_reads import read


def test_numbers_and_tensors_come_back_as_floats_in_their_order():
    values = [1, torch.tensor(2.5), 3.5, torch.tensor([[4]]), torch.tensor(5, dtype=torch.int64), torch.tensor(True)]
    numbers = read(values)
    assert numbers == [1.0, 2.5, 3.5, 4.0, 5.0, 1.0]
    assert read([]) == []


def test_a_float32_is_read_bit_for_bit_and_a_graph_is_no_hindrance():
    value = torch.tensor(0.1, requires_grad=True)
    assert read([value * 1])[0] == value.item()
    big = 2**24 + 1
    assert read([torch.tensor(big)])[0] == big


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_read_and_known(value):
    assert not math.isfinite(read([torch.tensor(value)])[0])
