"""Batches on their way to an accelerator: what arrives, in which order memory is written, and what is used again."""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from lanes import Stream, moving
from torch import Tensor, nn

from trainwright.acceleration.transfer import SLOTS, SPECS, Moving

SEEDS = range(8)


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Item:
    x: Tensor
    name: str


def batch(number, rows=4):
    return torch.arange(rows * 2, dtype=torch.float32).reshape(rows, 2) + 100 * number, torch.full((rows,), number)


def train(move, lane, batches, seen):
    """What a loop does: each batch is moved, computed with, and let go when the next is there."""
    for one in batches:
        x, y = move(one)
        lane.kernel(x, seen)
        lane.kernel(y, seen)


def wanted(batches):
    return [column.flatten().tolist() for one in batches for column in one]


@pytest.mark.parametrize("seed", SEEDS)
def test_each_kernel_reads_its_own_batch_in_whatever_order_the_streams_run(seed):
    move, lane = moving(seed)
    given, seen = [batch(number) for number in range(20)], []
    train(move, lane, given, seen)
    lane.run()
    assert seen == wanted(given)


def test_nothing_is_allocated_in_steady_state_and_the_host_waits_for_no_kernel():
    move, lane = moving()
    seen = []
    train(move, lane, [batch(number) for number in range(SLOTS)], seen)
    made = lane.pins, lane.memories
    assert made == (2 * SLOTS, 2 * SLOTS) and lane.waits == 0
    train(move, lane, [batch(number) for number in range(50)], seen)
    assert (lane.pins, lane.memories) == made


def test_the_host_runs_no_further_ahead_than_there_are_slots():
    move, lane = moving()
    for number in range(10):
        move(batch(number))
        assert len([kind for kind, *_ in lane.copies.work if kind == "do"]) <= 2 * SLOTS
    assert lane.waits == 10 - SLOTS


def test_a_batch_is_copied_while_the_step_before_computes():
    move, lane = moving()
    lane.eager = lane.copies
    seen = []
    for number in range(8):
        x, _ = move(batch(number))  # the one before is let go only now, as in a loop
        if number == 7:
            lane.run(until=lambda: all(kind != "do" for kind, *_ in lane.copies.work))
        lane.kernel(x, seen)
    # All kernels but that of the batch before could be needed, and of those it is only what the slots ask for.
    assert len(seen) <= 6
    lane.run()
    assert seen == [batch(number)[0].flatten().tolist() for number in range(8)]


@pytest.mark.parametrize("seed", SEEDS)
def test_what_somebody_holds_is_never_written_to(seed):
    move, lane = moving(seed)
    kept, seen = [], []
    for number in range(12):
        x, y = move(batch(number))
        kept.append(x[1:] if number % 2 else y.view(2, 2))  # a view is enough
        lane.kernel(x, seen)
    lane.run()
    for number, one in enumerate(kept):
        x, y = batch(number)
        assert torch.equal(one, x[1:] if number % 2 else y.view(2, 2))
    assert seen == [batch(number)[0].flatten().tolist() for number in range(12)]


def test_what_autograd_has_saved_is_held_and_what_is_held_costs_its_own_memory_alone():
    move, lane = moving()
    losses, weight = [], torch.ones(4, 2, requires_grad=True)
    for number in range(6):
        x, _ = move(batch(number))
        losses.append((weight * x).sum())
    lane.run()
    assert lane.memories == 2 * SLOTS + (6 - SLOTS)  # the targets were let go
    for number, loss in enumerate(losses):
        weight.grad = None
        loss.backward()
        assert torch.equal(weight.grad, batch(number)[0])


def test_a_change_in_place_is_the_users_own_and_another_batch_does_not_show_it():
    move, lane = moving()
    weight = torch.ones(4, 2, requires_grad=True)
    x, _ = move(batch(0))
    lane.run()
    x.add_(1)
    loss = (weight * x).sum()
    move(batch(1))
    loss.backward()
    assert torch.equal(weight.grad, batch(0)[0] + 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_batches_of_several_kinds_have_slots_of_their_own(seed):
    move, lane = moving(seed)
    given = [batch(number, rows=(4, 2, 4)[number % 3]) for number in range(18)]
    seen = []
    train(move, lane, given, seen)
    made = lane.memories
    train(move, lane, given, seen)
    assert made == lane.memories == 2 * 2 * SLOTS
    lane.run()
    assert seen == wanted(given + given)


@pytest.mark.parametrize("seed", SEEDS)
def test_more_kinds_than_are_kept_are_moved_rightly_too(seed):
    move, lane = moving(seed)
    given = [batch(number, rows=1 + number % (SPECS + 3)) for number in range(40)]
    seen = []
    train(move, lane, given, seen)
    lane.run()
    assert seen == wanted(given)
    assert len(move._rings) == SPECS


@pytest.mark.parametrize(
    "nested",
    [
        lambda x, y: (x, y),
        lambda x, y: [x, [y, (x,)]],
        lambda x, y: {"x": x, "meta": {"y": y, "names": ["a", "b"]}},
        lambda x, y: OrderedDict(x=x, y=y),
        Pair,
        lambda x, y: (Item(x, "a"), 3, None, "text"),
        lambda x, y: nn.utils.rnn.PackedSequence(x, torch.tensor([4])),
        lambda x, y: (x.t(), x.to(memory_format=torch.contiguous_format)[:, None, None].expand(4, 3, 1, 2)),
        lambda x, y: (torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.empty(0), torch.tensor(3)),
        lambda x, y: (x.clone().requires_grad_(), nn.Parameter(y.float()), x.to_sparse()),
        lambda x, y: x,
    ],
)
def test_a_nested_batch_keeps_its_types_values_and_layout(nested):
    move, lane = moving()
    given = nested(*batch(3))
    for _ in range(SLOTS + 2):
        moved = move(given)
        lane.run()
        assert same(given, moved)


def same(one, other):
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        plain = one.to_dense() if one.is_sparse else one
        alike = torch.equal(plain, other.to_dense() if other.is_sparse else other)
        dense = one.is_sparse or torch.empty_like(one).stride() == other.stride() or one.requires_grad
        return alike and dense and one.requires_grad == other.requires_grad
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return all(map(same, vars(one).values(), vars(other).values())) if isinstance(one, Item) else one == other


@pytest.mark.parametrize("seed", SEEDS)
def test_a_batch_that_is_pinned_already_is_copied_as_it_is(seed, monkeypatch):
    move, lane = moving(seed)
    monkeypatch.setattr(lane, "is_pinned", lambda tensor: tensor.dtype == torch.float32)
    given, seen = [batch(number) for number in range(9)], []
    train(move, lane, given, seen)
    lane.run()
    assert seen == wanted(given) and lane.pins == SLOTS


def test_a_batch_may_be_written_to_as_soon_as_it_is_moved():
    move, lane = moving()
    x, y = batch(0)
    seen = []
    for number in range(7):
        x.fill_(number)
        moved = move((x, y))
        lane.kernel(moved[0], seen)
        x.fill_(-1)
    lane.run()
    assert seen == [[float(number)] * 8 for number in range(7)]


def test_an_error_while_a_batch_is_moved_leaves_the_batches_before_and_after_right(monkeypatch):
    move, lane = moving()
    seen, stage = [], lane.stage

    def breaks(pinned, source):
        if source.dtype == torch.int64 and int(source[0]) == 4:
            raise RuntimeError("no")
        stage(pinned, source)

    monkeypatch.setattr(lane, "stage", breaks)
    for number in range(12):
        try:
            train(move, lane, [batch(number)], seen)
        except RuntimeError:
            assert number == 4
    lane.run()
    assert seen == wanted([batch(number) for number in range(12) if number != 4])


@pytest.mark.parametrize("seed", SEEDS)
def test_a_stream_that_computes_from_now_on_waits_for_the_one_before(seed):
    move, lane = moving(seed)
    given, seen = [batch(number) for number in range(5)], []
    train(move, lane, given, seen)
    lane.others, lane.compute = [lane.compute], Stream()
    train(move, lane, given, seen)
    lane.run()
    assert sorted(map(str, seen)) == sorted(map(str, wanted(given + given)))


def test_a_copy_of_the_mover_has_no_slot_of_the_first_and_freed_slots_come_back():
    move, lane = moving()
    move(batch(0))
    assert not copy.deepcopy(move)._rings and copy.deepcopy(move).device == move.device
    move.free()
    seen = []
    train(move, lane, [batch(1)], seen)
    lane.run()
    assert seen == wanted([batch(1)])


def test_without_a_count_of_holders_every_batch_gets_memory_of_its_own(monkeypatch):
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    move, lane = moving()
    given, seen = [batch(number) for number in range(9)], []
    train(move, lane, given, seen)
    lane.run()
    assert seen == wanted(given) and lane.memories > 2 * SLOTS


def test_an_accelerator_is_asked_for_nothing_before_the_first_batch():
    assert Moving(torch.device("cuda", 99))("text") == "text"
