"""Gradients of an optimizer: multiplied once, checked by torch's own kernel, measured."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from trainwright.optim import Gradients


def parameters(*dtypes):
    torch.manual_seed(0)
    made = [nn.Parameter(torch.randn(3, 2).to(dtype)) for dtype in dtypes]
    for parameter in made:
        parameter.grad = torch.randn(3, 2).to(parameter.dtype)
    return made


def of(made):
    return Gradients(torch.optim.SGD(made, lr=0.1))


KINDS = [(torch.float32,), (torch.float32, torch.float32), (torch.float32, torch.float64), (torch.float64,)]


@pytest.mark.parametrize("dtypes", KINDS)
@pytest.mark.parametrize("factor", [1.0, 0.25, 1 / 3, torch.tensor(1 / 3, dtype=torch.float64)])
def test_every_gradient_is_multiplied_once(dtypes, factor):
    made = parameters(*dtypes)
    before = [p.grad.clone() for p in made]
    flag = of(made).multiply_and_check(factor)
    assert flag.item() == 0.0
    for parameter, gradient in zip(made, before, strict=True):
        expected = gradient.double() * float(factor)
        exact = parameter.dtype == torch.float64
        torch.testing.assert_close(parameter.grad.double(), expected, rtol=1e-15 if exact else 2e-7, atol=0)
    made = parameters(*dtypes)
    of(made).multiply(factor)
    for parameter, gradient in zip(made, before, strict=True):
        torch.testing.assert_close(parameter.grad.double(), gradient.double() * float(factor), rtol=2e-7, atol=0)


@pytest.mark.parametrize("dtypes", KINDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_any_value_that_is_not_finite_raises_the_flag_to_one(dtypes, bad, factor):
    for index in range(len(dtypes)):
        made = parameters(*dtypes)
        gradients = of(made)
        assert gradients.multiply_and_check(factor).item() == 0.0
        made[index].grad[1, 1] = bad
        assert gradients.multiply_and_check(factor).item() == 1.0
        gradients.lower_flags()
        made[index].grad[1, 1] = 0.0
        assert gradients.multiply_and_check(factor).item() == 0.0


@pytest.mark.parametrize("raised", [(1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (0.0, 0.0)])
def test_flags_of_two_devices_never_add_up(raised):
    """A fused kernel takes 1.0 for a bad update, and nothing else."""
    gradients = of(parameters(torch.float32))
    flags = {"first": torch.tensor(raised[0]), "second": torch.tensor(raised[1])}
    gradients._uniform_device = None  # as with parameters on two devices
    gradients._flags = {**gradients._flags, **flags}
    assert gradients.multiply_and_check().item() == max(raised)


def test_parameters_without_a_gradient_are_passed_over():
    made = parameters(torch.float32, torch.float32)
    made[0].grad = None
    gradients = of(made)
    assert gradients.multiply_and_check().item() == 0.0
    made[1].grad[0, 0] = math.nan
    assert gradients.multiply_and_check().item() == 1.0
    made[1].grad = None
    gradients.lower_flags()
    assert gradients.multiply_and_check().item() == 0.0


@pytest.mark.parametrize("sparse_first", [True, False])
def test_sparse_gradients_are_multiplied_once_and_judged(sparse_first):
    table = nn.Embedding(5, 2, sparse=True)
    linear = nn.Linear(2, 1)
    made = [table.weight, *linear.parameters()]
    gradients = of(made if sparse_first else made[::-1])
    linear(table(torch.tensor([1, 1, 3]))).sum().backward()
    dense = table.weight.grad.to_dense().clone()
    assert gradients.multiply_and_check(0.5).item() == 0.0
    torch.testing.assert_close(table.weight.grad.to_dense(), dense * 0.5)
    assert gradients.multiply_and_check().item() == 0.0
    table.weight.grad._values()[0, 0] = math.nan
    assert gradients.multiply_and_check().item() == 1.0


def test_the_norm_is_that_of_all_gradients_together():
    made = parameters(torch.float32, torch.float32)
    expected = torch.cat([p.grad.flatten() for p in made]).norm()
    torch.testing.assert_close(of(made).norm(), expected)


def test_zero_drops_the_gradients_by_the_optimizers_own_method_where_it_has_one():
    made = parameters(torch.float32)
    of(made).zero()
    assert made[0].grad is None
    called = []

    class Own(torch.optim.SGD):
        def zero_grad(self, set_to_none=True):
            called.append(set_to_none)
            super().zero_grad(set_to_none)

    made = parameters(torch.float32)
    Gradients(Own(made, lr=0.1)).zero()
    assert called == [True]
    assert made[0].grad is None


def test_zero_drops_the_gradients_of_a_plain_optimizer_beside_one_with_its_own_method():
    class Own(torch.optim.SGD):
        def zero_grad(self, set_to_none=True):
            super().zero_grad(set_to_none=False)

    first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    gradients = Gradients(Own([first], lr=0.1), torch.optim.SGD([second], lr=0.1))
    first.grad, second.grad = torch.ones(2), torch.ones(2)
    gradients.zero()
    assert torch.equal(first.grad, torch.zeros(2)) and second.grad is None
