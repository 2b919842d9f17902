"""Whole updates recorded once and replayed are bit for bit the updates carried out one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from laws.emulated_graph import EmulatedGraph

CPU = torch.device("cpu")
UPDATES, MICRO = 10, 3


@dataclass(frozen=True)
class Own:
    """A net, its static inputs and the rate that its step reads."""

    net: nn.Sequential
    x: Tensor
    y: Tensor
    lr: Tensor
    step: Callable[[], None]


def own(make_step: Callable[[list[nn.Parameter], Tensor], Callable[[], None]]) -> Own:
    """Make all of it anew, the same each time."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))
    lr = torch.tensor(0.1)
    return Own(net, torch.zeros(6, 4), torch.zeros(6, dtype=torch.int64), lr, make_step(list(net.parameters()), lr))


def adamw(parameters: list[nn.Parameter], lr: Tensor) -> Callable[[], None]:
    """The kernel of AdamW itself, with a rate that is read from memory, and clipping before it."""
    firsts, seconds = [torch.zeros_like(p) for p in parameters], [torch.zeros_like(p) for p in parameters]
    steps = [torch.zeros(()) for _ in parameters]

    def step() -> None:
        nn.utils.clip_grad_norm_(parameters, 0.5)
        grads = [p.grad for p in parameters]
        torch._foreach_add_(steps, 1)
        settings = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": False, "maximize": False}
        with torch.no_grad():
            torch._fused_adamw_(parameters, grads, firsts, seconds, [], steps, lr=lr, **settings)

    return step


def sgd(parameters: list[nn.Parameter], lr: Tensor) -> Callable[[], None]:
    """The kernel of SGD with momentum itself, with a rate that is read from memory."""
    buffers = [torch.zeros_like(p) for p in parameters]

    def step() -> None:
        grads = [p.grad for p in parameters]
        settings = {"weight_decay": 0.01, "dampening": 0.0, "nesterov": True, "maximize": False, "is_first_step": False}
        with torch.no_grad():
            torch._fused_sgd_(parameters, grads, buffers, lr=lr, momentum=0.9, **settings)

    return step


def torch_sgd(parameters: list[nn.Parameter], lr: Tensor) -> Callable[[], None]:
    """Torch's own optimizer, by tensors in lists."""
    optimizer = torch.optim.SGD(parameters, lr=lr, momentum=0.9, fused=True)
    for parameter in parameters:
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    def step() -> None:
        optimizer.step()

    return step


def feed(given: Own, index: int) -> None:
    """The rows and the rate of one micro-batch, copied in from outside."""
    draw = torch.Generator().manual_seed(index)
    given.x.copy_(torch.randn(6, 4, generator=draw))
    given.y.copy_(torch.randint(3, (6,), generator=draw))
    given.lr.fill_(0.1 / (1 + index))


def backward(given: Own) -> Tensor:
    loss = nn.functional.cross_entropy(given.net(given.x), given.y)
    loss.backward()
    return loss


def state_of(given: Own) -> list[Tensor]:
    return [*given.net.state_dict().values(), torch.get_rng_state()]


def eager(given: Own, micro: int) -> list[float]:
    """Train as one does, and return the losses."""
    losses = list[float]()
    torch.manual_seed(7)
    for update in range(UPDATES):
        given.net.zero_grad(set_to_none=True)
        for index in range(micro):
            feed(given, update * micro + index)
            losses.append(backward(given).item())
        given.step()
    return losses


def recorded(given: Own, micro: int) -> list[float]:
    """Record one graph for the first micro-batch, one for the others and one for the step, then replay them."""
    first, more, step = (EmulatedGraph(CPU) for _ in range(3))
    with first.recording():
        first_loss = backward(given)
    with more.recording():
        more_loss = backward(given)
    with step.recording():
        given.step()
    losses = list[float]()
    torch.manual_seed(7)
    for update in range(UPDATES):
        for index in range(micro):
            feed(given, update * micro + index)
            (more if index else first).replay()
            losses.append((more_loss if index else first_loss).item())
        step.replay()
    return losses


@pytest.mark.parametrize("micro", [1, MICRO])
@pytest.mark.parametrize("make_step", [adamw, sgd, torch_sgd], ids=lambda make: make.__name__)
def test_replayed_updates_are_bitwise_the_eager_ones(
    make_step: Callable[[list[nn.Parameter], Tensor], Callable[[], None]], micro: int
) -> None:
    one, other = own(make_step), own(make_step)
    expected = eager(one, micro)
    at_eager = state_of(one)
    assert recorded(other, micro) == expected
    assert all(torch.equal(a, b) for a, b in zip(at_eager, state_of(other), strict=True))
    assert len(set(expected)) == len(expected)


def test_one_graph_of_a_whole_update_is_bitwise_the_eager_update() -> None:
    one, other = own(adamw), own(adamw)
    expected = eager(one, 1)
    at_eager = state_of(one)
    graph, losses = EmulatedGraph(CPU), list[float]()
    with graph.recording():
        loss = backward(other)
        other.step()
    torch.manual_seed(7)
    for update in range(UPDATES):
        feed(other, update)
        graph.replay()
        losses.append(loss.item())
    assert losses == expected
    assert all(torch.equal(a, b) for a, b in zip(at_eager, state_of(other), strict=True))


def test_a_rate_that_is_a_number_is_not_read_again() -> None:
    """The fault that the graph is there to show: the step goes on at the rate of the recording."""

    def by_number(parameters: list[nn.Parameter], lr: Tensor) -> Callable[[], None]:
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True)

        def step() -> None:
            optimizer.param_groups[0]["lr"] = rates[0]
            optimizer.step()

        for parameter in parameters:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return step

    rates = [0.1]
    given = own(by_number)
    graph = EmulatedGraph(CPU)
    with graph.recording():
        backward(given)
        given.step()
    feed(given, 0)
    rates[0] = 0.0
    before = [parameter.detach().clone() for parameter in given.net[4].parameters()]
    graph.replay()
    assert not any(torch.equal(a, b) for a, b in zip(before, given.net[4].parameters(), strict=True))
