"""Batches of neighboring lengths: every row once, an order of seed and epoch, a budget that holds, less padding."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sharded_sources import joined, rows_of
from sources import committed
from torch import Tensor

from trainwright import batches
from trainwright.core.errors import DataError, SettingError
from trainwright.data import bucketed, pad, sharded
from trainwright.data.opening import open_source
from trainwright.data.transforms.bucketing import Bucketed
from trainwright.distributed.mesh import Shard

DRAWN = torch.Generator().manual_seed(5)
LENGTHS = (torch.rand(300, generator=DRAWN) ** 2 * 60).long().tolist()
ROWS = [(torch.full((length,), index), index) for index, length in enumerate(LENGTHS)]


def made(batch_size: int | None = 16, **how: Any) -> Bucketed:
    how = {"shuffle": True, "seed": 4, "lengths": LENGTHS, "collate": pad(), **how}
    return bucketed(ROWS, batch_size, **how)


def numbers(batch: Any) -> list[int]:
    given: Tensor = batch[-1]
    return given.tolist()


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=80),
    st.one_of(st.none(), st.integers(1, 20)),
    st.one_of(st.none(), st.integers(40, 200)),
    st.floats(0, 1),
    st.booleans(),
)
def test_every_row_comes_once_in_batches_of_the_asked_size(
    lengths: list[int], size: int | None, tokens: int | None, slack: float, shuffle: bool
) -> None:
    size = 7 if size is None and tokens is None else size
    given = bucketed(
        list(range(len(lengths))), size, lengths=lengths, tokens=tokens, slack=slack, shuffle=shuffle, seed=1
    )
    for epoch in range(3):
        order = given.order(epoch)
        assert len(order) == len(given), "as many batches in every epoch"
        assert sorted(itertools.chain(*order)) == list(range(len(lengths)))
        assert all(len(rows) <= (size or len(rows)) for rows in order)
        longest = [max(lengths[row] for row in rows) for rows in order]
        assert tokens is None or all(len(rows) * most <= tokens for rows, most in zip(order, longest, strict=True))
        if tokens is None:
            assert sum(len(rows) < (size or 0) for rows in order) <= 1


def test_rows_of_a_batch_differ_by_the_slack_or_are_neighbors() -> None:
    """In a batch that mixes more than neighbors no row is shorter than the slack allows."""
    ranked = sorted(range(300), key=lambda row: LENGTHS[row])
    place = {row: rank for rank, row in enumerate(ranked)}
    for rows in made(slack=0.2).order():
        lengths = [LENGTHS[row] for row in rows]
        ties = sum(min(lengths) <= length <= max(lengths) for length in LENGTHS)
        spread = max(map(place.__getitem__, rows)) - min(map(place.__getitem__, rows)) + 1
        assert min(lengths) >= 0.8 * max(lengths) or spread <= max(16, ties)


def test_the_order_follows_from_seed_and_epoch_alone() -> None:
    data = made()
    state = torch.get_rng_state()
    orders = [data.order(epoch) for epoch in (0, 1, 2)]
    assert torch.equal(state, torch.get_rng_state())
    assert orders[0] != orders[1] != orders[2]
    torch.manual_seed(9)
    assert [made().order(epoch) for epoch in (2, 1, 0)] == orders[::-1]
    assert made(seed=5).order() != orders[0]
    assert [numbers(one) for one in data] == orders[0], "and is the order of the first pass"
    assert [numbers(one) for one in data] == orders[1]


def test_rows_are_mixed_anew_in_every_epoch() -> None:
    """Not the same batches in another order, where rows of one length have neighbors."""
    batches_of = [{frozenset(rows) for rows in made().order(epoch)} for epoch in range(2)]
    assert len(batches_of[0] & batches_of[1]) < len(batches_of[0]) / 2


def test_rows_of_like_lengths_are_mixed_where_no_two_are_equal() -> None:
    data = bucketed(list(range(300)), 10, lengths=range(1000, 1300), shuffle=True, seed=1)
    orders = [[sorted(rows) for rows in data.order(epoch)] for epoch in range(2)]
    assert not [rows for rows in orders[0] if rows in orders[1]]


def test_without_shuffle_the_longest_come_first() -> None:
    order = made(shuffle=False, seed=None).order()
    lengths = [LENGTHS[row] for rows in order for row in rows]
    assert lengths == sorted(lengths, reverse=True)
    ties = [row for rows in order for row in rows if LENGTHS[row] == 0]
    assert ties == sorted(ties)


def test_padding_is_reported_as_it_is() -> None:
    data = made()
    for epoch in (0, 1):
        masks = [mask for _, mask, _ in data.epoch(epoch)]
        padded = sum(mask.numel() for mask in masks)
        assert data.padding(epoch) == pytest.approx(1 - sum(int(mask.sum()) for mask in masks) / padded, abs=1e-12)
    anyhow = [mask for _, mask, _ in batches(ROWS, 16, shuffle=True, seed=1, collate=pad())]
    share = 1 - sum(int(mask.sum()) for mask in anyhow) / sum(mask.numel() for mask in anyhow)
    assert data.padding_mixed() == pytest.approx(share, abs=0.05)
    assert data.padding() < 0.12 < 0.5 < data.padding_mixed()
    shares = f"{data.padding():.1%} of a batch is padding, {data.padding_mixed():.1%} without"
    assert data.note == f"bucketed by length: {shares}"


@pytest.mark.parametrize("how", [{}, {"tokens": 200, "batch_size": None}, {"drop_last": True}], ids=str)
def test_a_resume_reads_nothing_again_and_goes_on(how: dict[str, Any]) -> None:
    read: list[int] = []

    class Counted(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            read.append(index)
            return super().__getitem__(index)

    def made_of(rows: Any) -> Any:
        settings = {"batch_size": 16, **how}
        return open_source(bucketed(rows, lengths=LENGTHS, collate=pad(), shuffle=True, workers=0, **settings))

    torch.manual_seed(1)
    source = made_of(ROWS)
    whole = [[numbers(one) for one in source.epoch(epoch)] for epoch in range(2)]
    for skip in (0, 1, 5, len(whole[1]) - 1, len(whole[1])):
        again = made_of(Counted(ROWS))
        again.seek(committed(source))
        read.clear()
        assert [numbers(one) for one in again.epoch(1, skip)] == whole[1][skip:]
        assert sorted(read) == sorted(itertools.chain(*whole[1][skip:]))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("how", [{}, {"tokens": 200, "batch_size": None}, {"workers": 1}], ids=str)
def test_processes_share_every_batch(how: dict[str, Any], size: int) -> None:
    settings = {"batch_size": 16, **how}
    whole = made(**settings).order(1)
    ranks = []
    for rank in range(size):
        source: Any = open_source(made(**settings))
        source.shard(Shard(rank, size))
        ranks.append([one._replace(batch=one.batch[-1]) for one in source.epoch(1)])
    assert [joined(list(slices)) for slices in zip(*ranks, strict=True)] == whole
    assert all(len(rows_of(one.batch)) == (one.rows or len(rows_of(one.batch))) for rank in ranks for one in rank)


def test_drop_last_leaves_out_any_rows_and_not_the_shortest() -> None:
    data = made(32, drop_last=True)
    assert len(data) == 9
    left = [set(range(300)) - set(itertools.chain(*data.order(epoch))) for epoch in range(4)]
    assert all(len(rows) == 12 for rows in left)
    assert len(set.union(*left)) > 36
    assert max(LENGTHS[row] for rows in left for row in rows) > 10


def test_lengths_may_come_from_the_rows_and_draw_nothing() -> None:
    class Drawing(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            torch.rand(1)
            return super().__getitem__(index)

    state = torch.get_rng_state()
    data = bucketed(Drawing(ROWS), 16, lengths=lambda row: len(row[0]), shuffle=True, seed=4, collate=pad())
    assert torch.equal(state, torch.get_rng_state())
    assert data.order() == made().order()
    columns = bucketed((torch.arange(5), torch.tensor([3, 1, 4, 1, 5])), 2, lengths=lambda row: int(row[1]))
    assert columns.order() == [[4, 2], [0, 1], [3]]


def test_rows_of_this_process_s_own_have_no_length_for_all() -> None:
    source: Any = open_source(sharded(made()))
    source.shard(Shard(1, 2))
    one = next(source.epoch(0))
    assert (source.length, source.rows, source.batch_size, one.all_rows) == (None, None, None, None)


def test_other_lengths_are_other_data() -> None:
    state = open_source(made()).position()
    other = [length + (index == 0) for index, length in enumerate(LENGTHS)]
    for how, named in (
        ({"lengths": other}, "lengths="),
        ({"slack": 0.5}, "slack=0.5"),
        ({"tokens": 999}, "tokens=999"),
    ):
        with pytest.raises(DataError, match=named):
            open_source(made(**how)).seek(state)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: made(None), r"without a size of a batch(.|\n)*bucketed\(data, 64, lengths=...\)"),
        (lambda: made(0), r"batch_size=0"),
        (lambda: made(tokens=1.5), r"tokens=1.5"),
        (lambda: made(slack=2), r"slack=2(.|\n)*slack=0.1"),
        (lambda: made(slack=True), r"slack=True"),
        (lambda: made(tokens=50), r"is 5\d long, and no batch has more than 50(.|\n)*rows\[:50\]"),
        (lambda: made(tokens=100, drop_last=True), r"drop_last=True, tokens=...\)"),
        (lambda: made(lengths=LENGTHS[1:]), r"not the lengths(.|\n)*\(299,\)(.|\n)*300 whole numbers"),
        (lambda: made(lengths=[0.5] * 300), r"float32"),
        (lambda: made(lengths=[-1] * 300), r"not the lengths of the rows"),
        (lambda: made(lengths=[True] * 300), r"bool"),
        (lambda: made(lengths="long"), r"not the lengths(.|\n)*a str"),
        (lambda: made(lengths=iter(LENGTHS)), r"a list_iterator"),
        (lambda: made(collate=3), r"collate=3"),
        (lambda: made(shuffle=1), r"shuffle=1"),
        (lambda: made(500, drop_last=True), r"leaves 0 batches"),
        (lambda: bucketed([], 4, lengths=[]), r"data set of 0 rows"),
    ],
)
def test_mistakes_are_refused_by_name(call: Callable[[], Any], named: str) -> None:
    with pytest.raises((SettingError, DataError), match=named):
        call()
