"""A sharded model makes the updates of one process: accumulated, clipped, averaged, gathered and dealt out."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from distributed.fsdp_cases import (
    CPU,
    PAIRS,
    SINGLE,
    Block,
    backward_of,
    differ,
    group,
    net,
    plain_loop,
    sharded_loop,
    sharded_net,
)
from distributed.pool import pool
from trainwright.distributed.fsdp import FSDP, follow, full_state_dict, recover, retake, set_sync, shard
from trainwright.modules.dtensors import full_tensor, is_sharded

EXACT = 1e-12


def reductions(last: bool) -> tuple[int, int]:
    """How often a micro-batch reduces gradients, and how many weights are whole after it."""
    model = sharded_net(reshard_after_forward=False)
    set_sync(model, last)
    with torch.profiler.profile(acc_events=True) as profile:
        model(torch.randn(2, 3).double()).sum().backward()
    counted = [event.name for event in profile.events() if event.name.startswith("FSDP::post_backward_reduce")]
    return len(counted), sum(not is_sharded(parameter) for parameter in model.parameters())


def test_gradients_are_reduced_at_the_last_micro_batch_only() -> None:
    assert pool(2).run(reductions, True) == [(3, 0)] * 2  # two blocks and the model
    assert pool(2).run(reductions, False) == [(0, 8)] * 2  # and nothing is gathered anew for the next one


def gradient_of_float32() -> float:
    """The largest gradient of two ranks with the same rows over that of one process."""
    torch.manual_seed(0)
    model, x = net().float(), torch.randn(6, 3)
    alone = copy.deepcopy(model)
    shard(model, FSDP({Block}), group(), device=CPU)
    for one in (model, alone):
        one(x).square().mean().backward()
    return float(full_tensor(model.first.weight.grad).abs().max() / alone.first.weight.grad.abs().max())


def test_gradients_in_float32_are_means_over_the_ranks() -> None:
    assert pool(2).run(gradient_of_float32) == [pytest.approx(1.0, abs=1e-6)] * 2


def begun(seed_of_rank: bool) -> Any:
    world = group()
    model = sharded_net(world, seed=world.rank if seed_of_rank else 0)
    model.seen.fill_(1.0)
    return full_state_dict(model, world)


def test_the_weights_begin_as_the_first_processes() -> None:
    assert differ(pool(2).run(begun, True)[0], net(0).state_dict()) == 0


def on_meta(seed: int) -> Any:
    world = group()
    torch.manual_seed(seed + world.rank)
    with torch.device("meta"):
        model = Made()
        model.tied.weight = model.first.weight
    shard(model.double(), FSDP({Block}), world, device=CPU)
    return full_state_dict(model, world), model.tied.weight is model.first.weight


class Made(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.tied = nn.Linear(5, 5), Block(), nn.Linear(5, 5)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.tied(self.block(self.first(x))))


def test_a_model_on_meta_is_made_block_by_block_and_is_the_same_on_all() -> None:
    (state, tied), _ = pool(2).run(on_meta, 3)
    assert tied and all(bool(torch.isfinite(value).all()) for value in state.values())
    assert float(state["norm.running_var"].sum()) == 5.0
    assert 0 < float(state["block.linear.weight"].abs().max()) <= 5**-0.5  # what reset_parameters draws
    assert state["tied.weight"] is state["first.weight"]


def moved_between() -> float:
    """An evaluation leaves the model's own weights whole; a step comes before the next forward."""
    world, x = group(), torch.ones(2, 3).double()
    model = sharded_net(world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    follow(model, {"optimizer": optimizer})
    backward_of(model, SINGLE[0], world)
    with torch.no_grad():
        model(x)
    optimizer.step()
    with torch.no_grad():
        stepped = model(x)
        copy = net()
        copy.load_state_dict(world.broadcast(full_state_dict(model, world)))
        return float((stepped - copy(x)).abs().max())


def test_a_forward_without_a_backward_does_not_hide_the_step() -> None:
    assert max(pool(2).run(moved_between)) < EXACT


@contextmanager
def older_torch() -> Iterator[None]:
    """As on a torch whose models cannot be made to forget what was under way."""
    from torch.distributed.fsdp import FSDPModule

    known = vars(FSDPModule).get("reset_iter_state")
    if known is not None:
        del FSDPModule.reset_iter_state
    try:
        yield
    finally:
        if known is not None:
            FSDPModule.reset_iter_state = known


def broken_off(by_hand: bool, where: str) -> Any:
    """A window ends in an error after its first micro-batch; the next run must not find its gradient."""
    world = group()
    model = sharded_net(world)
    set_sync(model, False)
    model(torch.randn(3, 3).double()).sum().backward()
    failing = {"forward": model.blocks[1], "backward": model}[where]
    handle = failing.register_forward_pre_hook(lambda *_: 1 / 0) if where == "forward" else None
    try:
        output = model(torch.randn(3, 3).double())
        output.register_hook(lambda _: 1 / 0)
        output.sum().backward()
    except ZeroDivisionError:
        with older_torch() if by_hand else nullcontext():
            recover(model)
    if handle is not None:
        handle.remove()
    assert is_sharded(*model.parameters()) and all(map(is_sharded, model.parameters()))
    return sharded_loop(PAIRS, model=model)


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_window_that_was_broken_off_leaves_nothing_behind(where: str, by_hand: bool) -> None:
    expected, _ = plain_loop(PAIRS)
    assert differ(pool(2).run(broken_off, by_hand, where)[0][0], expected) < EXACT


def set_free(**settings: Any) -> Any:
    """Blocks that are frozen when the model is sharded and first run, and trained afterwards."""
    world = group()
    model = net()
    model.blocks.requires_grad_(False)
    shard(model, FSDP({Block}, **settings), world, device=CPU)
    model(torch.randn(2, 3).double()).sum().backward()
    model.zero_grad()
    model.blocks.requires_grad_(True)
    retake(model)
    return model


def trained_after_all() -> Any:
    return sharded_loop(PAIRS, model=set_free())


def reduced_after_all() -> set[torch.dtype]:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
    model = set_free(policy=policy)
    backward_of(model, SINGLE[0], group())
    return {parameter.grad.to_local().dtype for parameter in model.parameters()}


def test_layers_that_are_set_free_later_are_trained() -> None:
    expected, _ = plain_loop(PAIRS)
    assert differ(pool(2).run(trained_after_all)[0][0], expected) < EXACT


def test_layers_that_are_set_free_later_are_reduced_in_the_type_of_the_policy() -> None:
    assert pool(2).run(reduced_after_all) == [{torch.float64}] * 2


def by_method() -> tuple[float, bool]:
    world = group()
    model = sharded_net(world, methods=("encode",))
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).double()
    plain = net()
    plain.encode(x).square().sum().backward()
    model.blocks[0](torch.ones(1, 5).double()).sum().backward()  # a block alone, before the model was ever called
    model.zero_grad()
    model.encode(x).square().sum().backward()
    there = full_tensor(model.first.weight.grad)
    return float((there - plain.first.weight.grad).abs().max()), plain.head.weight.grad is None


def test_a_registered_method_and_a_block_may_be_called_in_a_step() -> None:
    assert max(difference for difference, _ in pool(2).run(by_method)) < EXACT


def gathered() -> float:
    world = group()
    return differ(world.broadcast(full_state_dict(sharded_net(world), world)), net().state_dict())


def test_whole_weights_are_gathered_from_uneven_shards() -> None:
    assert pool(3).run(gathered) == [0.0] * 3


def by_the_user() -> Any:
    from torch.distributed.fsdp import fully_shard

    model = net()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    before = list(model.parameters())
    shard(model, FSDP({Block}), group(), device=CPU)
    assert all(one is other for one, other in zip(before, model.parameters(), strict=True))
    return sharded_loop(PAIRS, model=model)


def test_a_model_that_is_sharded_already_is_taken_as_it_is() -> None:
    expected, _ = plain_loop(PAIRS)
    assert differ(pool(2).run(by_the_user)[0][0], expected) < EXACT


def in_bfloat16() -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float64)
    world = group()
    model = sharded_net(world, policy=policy)
    seen = []
    model.blocks[0].register_forward_hook(lambda module, given, out: seen.append(out.dtype))
    backward_of(model, SINGLE[0], world)
    dtypes = {parameter.grad.dtype for parameter in model.parameters()}
    return seen, dtypes, [full_tensor(parameter.grad) / 2 for parameter in model.parameters()]


def test_a_policy_computes_in_its_type_and_reduces_in_another() -> None:
    ((x, y),) = SINGLE[0]
    total: list[Any] = [0.0] * len(list(net().parameters()))
    for mine in (slice(0, 3), slice(3, 6)):  # each process in bfloat16, their sum in float64
        model = net().bfloat16()
        (nn.functional.mse_loss(model(x[mine].bfloat16()).to(y.dtype), y[mine]) * 0.5).backward()
        total = [sum_ + p.grad.double() for sum_, p in zip(total, model.parameters(), strict=True)]
    for seen, dtypes, gradients in pool(2).run(in_bfloat16):
        assert seen == [torch.bfloat16] and dtypes == {torch.float64}
        for ours, plain in zip(gradients, total, strict=True):
            torch.testing.assert_close(ours, plain, rtol=0, atol=EXACT)
