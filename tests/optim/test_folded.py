"""Law Same: clipping, and the factor of the gradients, in the kernels of a step are the same before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainwright import ClipNorm, ClipValue
from trainwright.update.optimizer_steps import OptimizerStep

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def gradients(number: int) -> list[Tensor]:
    torch.manual_seed(number)
    return [torch.randn_like(parameter) for parameter in net().parameters()]


def folding(model: nn.Module, name: str, flag: Tensor | None, *, max_norm: float) -> OptimizerStep:
    step = OptimizerStep("optimizer", OPTIMIZERS[name](model.parameters()), clip=ClipNorm(max_norm), wants_norm=False)
    assert step.can_fuse_clipping()
    step.bind_kernels(flag, None, fuses_clipping=True)
    return step


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    moments = [value for one in optimizer.state.values() for value in one.values() if isinstance(value, Tensor)]
    return [value.detach().clone() for value in [*model.parameters(), *moments]]


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("factor", [1.0, 0.25, torch.tensor(0.125, dtype=torch.float64)])
@pytest.mark.parametrize("max_norm", [0.5, 100.0])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_clipped_in_the_kernel_is_clipped_before_it(name: str, max_norm: float, factor: Any, hooked: bool) -> None:
    plain, folded, flag = net(), net(), torch.zeros(())
    optimizer, step = OPTIMIZERS[name](plain.parameters()), folding(folded, name, flag, max_norm=max_norm)
    if hooked:
        step.optimizer.register_step_pre_hook(lambda *_: None)
    for number in range(5):
        for one, other, gradient in zip(plain.parameters(), folded.parameters(), gradients(number), strict=True):
            one.grad, other.grad = gradient * factor, gradient.clone()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
        optimizer.step()
        step.factor = factor
        step.measure_and_clip()
        step.step()
        assert isinstance(step.norm, Tensor)
        torch.testing.assert_close(step.norm.float(), norm, rtol=1e-6, atol=0)
        for one, other in zip(plain.parameters(), folded.parameters(), strict=True):
            torch.testing.assert_close(other.grad, one.grad, rtol=1e-6, atol=1e-8)  # what the weights were moved by
    for a, b in zip(state(plain, optimizer), state(folded, step.optimizer), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-7)
    if max_norm == 100.0 and factor == 1.0:
        pairs = zip(state(plain, optimizer), state(folded, step.optimizer), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs), "where nothing is clipped, bit for bit"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_that_is_held_back_moves_nothing(name: str) -> None:
    model, flag = net(), torch.zeros(())
    step = folding(model, name, flag, max_norm=0.5)
    for number in range(3):
        for parameter, gradient in zip(model.parameters(), gradients(number), strict=True):
            parameter.grad = gradient
        before = state(model, step.optimizer)
        if number == 2:
            next(model.parameters()).grad[0, 0] = float("nan")  # type: ignore[index]
        step.measure_and_clip()
        assert isinstance(step.norm, Tensor)
        step.gradients.check_too([step.norm], flag)
        step.step()
    assert flag == 1.0
    assert all(torch.equal(a, b) for a, b in zip(before, state(model, step.optimizer), strict=True))


def can_fuse(model: nn.Module, clip: Any, **settings: Any) -> bool:
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    return OptimizerStep("optimizer", optimizer, clip=clip, wants_norm=False).can_fuse_clipping()


def test_only_what_the_kernels_can_do_is_left_to_them() -> None:
    assert can_fuse(net(), ClipNorm(1.0), fused=True)
    assert not can_fuse(net(), ClipNorm(1.0))
    assert not can_fuse(net(), ClipNorm(1.0, norm_type=1.0), fused=True)
    assert not can_fuse(net(), ClipValue(1.0), fused=True)
    assert not can_fuse(net(), None, fused=True)
    assert not can_fuse(net().double(), ClipNorm(1.0), fused=True), "the kernels divide by a float32"
