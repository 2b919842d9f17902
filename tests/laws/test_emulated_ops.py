"""Every kind of op is carried out again by a replay of the emulated graph, whatever is around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from laws.emulated_graph import EmulatedGraph, graph_of


@pytest.fixture(autouse=True)
def own_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """No memory of other tests' graphs to be taken."""
    monkeypatch.setattr(EmulatedGraph, "made", [])


def _views(x: Tensor) -> Any:
    rows = x.view(2, 6).t()
    first, second = rows.chunk(2, dim=1)
    first.add_(second)
    return rows.sum(0), x.unsqueeze(0).expand(2, 12).select(0, 1)


def _outs(x: Tensor) -> Any:
    out, late = torch.zeros(12), torch.empty(0)
    torch.add(x, 1, out=out)
    torch.mul(out, 2, out=late)
    return out, late, out.t_(), out.resize_(3)


def _tuples(x: Tensor) -> Any:
    values, order = x.sort(descending=True)
    return values, order, *torch.var_mean(x), *x.view(3, 4).max(dim=1)


def _lists(x: Tensor) -> Any:
    parts = list(x.split([5, 7]))
    norms = torch._foreach_norm(parts)
    torch._foreach_mul_(parts, [norms[1], norms[0]])
    return *norms, *torch._foreach_add(parts, 1.0), torch.stack(norms)


def _indexed(x: Tensor) -> Any:
    x[torch.tensor([0, 3])] = x[[1, 2]]
    x[x > 1] = 0.0
    return x.index_select(0, torch.tensor([5, 3])), torch.repeat_interleave(x, 2), x.where(x > 0, -x)


def _overflow(x: Tensor) -> Any:
    scale, growth, found = torch.full((1,), 4.0), torch.zeros(1, dtype=torch.int32), torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_([x], found, scale.reciprocal())
    torch._amp_update_scale_(scale, growth, found, 2.0, 0.5, 1)
    return scale, growth, found


def _autocast(x: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = nn.functional.linear(x.view(3, 4), torch.ones(4, 4))
        return y, y.float().softmax(-1)


def _inference(x: Tensor) -> Any:
    with torch.inference_mode():
        return nn.functional.linear(x.view(3, 4), torch.ones(4, 4)).reshape(12).clone().add_(1)


def _convolution(x: Tensor) -> Any:
    weight = torch.ones(2, 1, 2, 2, requires_grad=True)
    y = nn.functional.conv2d(x.view(1, 1, 3, 4), weight)
    (y * y).sum().backward()
    return y.detach(), weight.grad


WORKS = (_views, _outs, _tuples, _lists, _indexed, _overflow, _autocast, _inference, _convolution)


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.__name__[1:])
def test_kinds_of_ops_are_carried_out_again(work: Callable[[Tensor], Any]) -> None:
    x = torch.randn(12)
    graph, results = graph_of(lambda: work(x))
    for _ in range(2):
        x.normal_()
        own = x.clone()
        graph.replay()
        expected = work(own)
        assert torch.equal(x, own)
        torch.testing.assert_close(results, expected, rtol=0, atol=0)


def test_what_returns_nothing_is_carried_out_again() -> None:
    given = torch.ones(())
    graph, _ = graph_of(lambda: torch._assert_async(given))
    graph.replay()
    given.zero_()
    with pytest.raises(RuntimeError, match="Expected Tensor with single nonzero value"):
        graph.replay()


class _Ops(TorchDispatchMode):
    seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


class _Calls(TorchFunctionMode):
    seen = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


def test_a_replay_is_the_same_whatever_is_around_it() -> None:
    x = torch.randn(3, 3)
    graph, y = graph_of(lambda: torch.ones(3).mul_(2) + (x @ x))
    with _Ops() as ops, _Calls() as calls, torch.autocast("cpu", dtype=torch.bfloat16):
        graph.replay()
    assert torch.equal(y, 2 + x @ x) and not ops.seen and not calls.seen
    with torch.inference_mode():
        inner, z = graph_of(x.clone)
        inner.replay()
    inner.replay()
    assert torch.equal(x, z)
    with torch.inference_mode():
        graph.replay()
    later, _ = graph_of(lambda: x.add_(1))
    del z
    with torch.inference_mode():
        taker, _ = graph_of(lambda: x.add_(1))
    taker.replay()
    later.replay()


def test_memory_that_torch_makes_unseen_is_kept() -> None:
    x = torch.zeros(2)
    graph, y = graph_of(lambda: x + torch.frombuffer(bytearray(b"\0\0\x80?" * 2), dtype=torch.float32))
    graph.replay()
    assert y.tolist() == [1, 1]


def test_memory_of_another_graph_stays_though_nobody_holds_it() -> None:
    x = torch.ones(2, requires_grad=True)
    first = graph_of(lambda: (x * 2).sum().backward())[0]
    more = graph_of(lambda: (x * 3).sum().backward())[0]
    x.grad = None
    for graph in (first, more):
        graph.replay()
    assert (first.replays, more.replays) == (1, 1)
