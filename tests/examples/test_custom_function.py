"""The example of a function with its own gradient: gradcheck tells the wrong one from the right one."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch


def test_gradcheck_refuses_the_wrong_gradient_and_takes_the_right_one(
    example: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not example.check(example.WrongLog)
    assert "a slope of 1000, and the function is flat there" in capsys.readouterr().out
    assert example.check(example.ClippedLog)


def test_the_right_gradient_is_the_one_of_torch_and_the_values_of_both_are_the_same(example: ModuleType) -> None:
    floor = example.FLOOR
    probability = torch.rand(1000, generator=torch.Generator().manual_seed(0)).pow(8).requires_grad_()
    assert (probability < floor).any() and (probability > floor).any()
    plain = probability.clamp(min=floor).log()
    (expected,) = torch.autograd.grad(plain.sum(), probability)
    for name, equal in (("ClippedLog", True), ("WrongLog", False)):
        value = getattr(example, name).apply(probability)
        (slope,) = torch.autograd.grad(value.sum(), probability)
        assert torch.equal(value, plain)
        assert torch.allclose(slope, expected, rtol=1e-6) == equal
