"""Averages of sharded weights: taken, shown, left and put back as those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from distributed.fsdp_cases import (
    CPU,
    PAIRS,
    Block,
    adamw,
    backward_of,
    differ,
    group,
    net,
    plain_loop,
    sharded_loop,
    sharded_net,
)
from distributed.pool import pool
from trainwright import EMA, SWA
from trainwright.core.durations import Updates
from trainwright.distributed.fsdp import FSDP, full_state_dict, shard
from trainwright.modules.dtensors import is_sharded
from trainwright.modules.modes import evaluating, untouched

EXACT = 1e-12
AVERAGES = {"ema": EMA(0.5), "swa": SWA(Updates(1), every=Updates(1))}


def expected(name: str) -> dict[str, Any]:
    """The averaged weights by torch's own AveragedModel, of one process."""
    kept: list[Any] = []

    def take(model: nn.Module) -> None:
        if not kept:
            multi = get_ema_multi_avg_fn(0.5) if name == "ema" else None
            kept.append(AveragedModel(model, multi_avg_fn=multi))
        kept[0].update_parameters(model)

    plain_loop(PAIRS, each=take)
    return dict(kept[0].module.state_dict())


def averaged(name: str) -> Any:
    """Train with an average; its weights, the outputs while it is shown, and whether the trained ones came back."""
    world, x = group(), torch.ones(2, 3).double()
    model = sharded_net(world)
    average = AVERAGES[name].bind(model)
    updates = iter(range(1, 100))
    trained, _ = sharded_loop(PAIRS, model=model, each=lambda model: average.take(next(updates)))
    with torch.no_grad():
        model(x)  # leaves the model's own weights whole
    with average.swapped(), torch.no_grad():
        output = model(x)
        shown = full_state_dict(model, world)
        model(x)  # leaves averaged weights whole
    with torch.no_grad():
        after = model(x)
    copy = net()
    copy.load_state_dict(world.broadcast(trained))
    back = differ(full_state_dict(model, world), trained) if world.is_main else len(full_state_dict(model, world))
    return shown, output, back, float((after - copy(x)).detach().abs().max())


@pytest.mark.parametrize("name", AVERAGES)
def test_the_average_of_shards_is_that_of_one_process_and_leaves_no_trace(name: str) -> None:
    states = pool(2).run(averaged, name)
    weights = expected(name)
    assert differ(states[0][0], weights) < EXACT
    plain = net()
    plain.load_state_dict(weights)
    for _, output, back, after in states:
        torch.testing.assert_close(output, plain(torch.ones(2, 3).double()), rtol=0, atol=EXACT)
        assert back == 0 and after < EXACT


def left_and_put_back(changes: str) -> Any:
    """Leave the averages in the model; one process's shard may then be changed, and all must agree on it."""
    world = group()
    model = sharded_net(world)
    average = EMA(0.5).bind(model)
    updates = iter(range(1, 100))
    trained, _ = sharded_loop(PAIRS, model=model, each=lambda model: average.take(next(updates)))
    average.apply()
    if changes == "one shard" and world.rank == 1:
        model.first.weight.to_local().data.add_(1.0)
    if changes == "all":
        model.load_state_dict(model.state_dict())
    done = average.revert()
    return done, differ(full_state_dict(model, world), trained) if world.is_main else len(full_state_dict(model, world))


def test_the_trained_weights_are_put_back_on_all_processes_or_on_none() -> None:
    assert pool(2).run(left_and_put_back, "") == [(True, 0.0), (True, 0)]
    for changes in ("one shard", "all"):
        (first, difference), (second, _) = pool(2).run(left_and_put_back, changes)
        assert first is second is False and difference > 1e-3


def resumed(whole_raw: bool) -> Any:
    """The state of an average goes into another one, as shards or as whole tensors."""
    world = group()
    model, other = sharded_net(world), sharded_net(world, seed=3)
    average, taken_over = EMA(0.5).bind(model), EMA(0.5).bind(other)
    updates = iter(range(1, 100))
    trained, _ = sharded_loop(PAIRS, model=model, each=lambda model: average.take(next(updates)))
    with average.swapped():
        tree = average.state_dict()
        other.load_state_dict(model.state_dict())
        if whole_raw:
            tree = tree | {"raw": {name: raw.full_tensor() for name, raw in tree["raw"].items()}}
        taken_over.load_state_dict(tree)
    with taken_over.swapped():
        shown = full_state_dict(other, world)
    back = full_state_dict(other, world)
    return (shown, differ(back, trained)) if world.is_main else None


@pytest.mark.parametrize("whole_raw", [False, True])
def test_the_state_of_an_average_is_taken_over(whole_raw: bool) -> None:
    (shown, back), _ = pool(2).run(resumed, whole_raw)
    assert differ(shown, expected("ema")) < EXACT and back == 0


def evaluated() -> Any:
    """A pass without gradients between two updates; gradients and the weights that are held come back."""
    world, x = group(), torch.ones(2, 3).double()
    model = sharded_net(world)
    held = list(model.parameters())
    backward_of(model, PAIRS[0], world)
    gradients = [parameter.grad for parameter in held]
    with untouched(model), evaluating(model), torch.no_grad():
        model(x)
    now = list(model.parameters())
    same = all(one is other for one, other in zip(held, now, strict=True))
    return same, all(parameter.grad is gradient for parameter, gradient in zip(now, gradients, strict=True))


def test_an_evaluation_leaves_shards_and_gradients_as_they_were() -> None:
    assert pool(2).run(evaluated) == [(True, True)] * 2


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.block = nn.Linear(3, 5), nn.BatchNorm1d(5), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.norm(self.first(x)))


def estimated() -> Any:
    """Statistics of averaged weights, and the weights that are trained again afterwards."""
    world = group()
    torch.manual_seed(0)
    model = Normed().double()
    shard(model, FSDP({Block}), world, device=CPU)
    average = SWA(Updates(1), every=Updates(1)).bind(model)
    optimizer = adamw(model)
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)).double()
    for update in (1, 2):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.take(update)
    before = full_state_dict(model, world)
    with average.swapped(lambda: model(x)), torch.no_grad():
        assert all(map(is_sharded, model.parameters()))
        shown = full_state_dict(model, world)
    after = full_state_dict(model, world)
    return (shown, differ(before, after)) if world.is_main else None


def test_statistics_of_averaged_shards_are_estimated_and_put_back() -> None:
    (shown, back), _ = pool(2).run(estimated)
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)).double()
    hidden = nn.functional.linear(x, shown["first.weight"], shown["first.bias"])
    assert back == 0
    torch.testing.assert_close(shown["norm.running_mean"], hidden.mean(0), rtol=0, atol=EXACT)
