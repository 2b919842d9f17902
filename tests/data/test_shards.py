"""The batches of one process are what several processes run together, whatever the data are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sharded_sources import ALL, LOADERS, Alone, joined, opened, read, rows_of
from sources import committed

from trainwright.data.opening import batches, open_source
from trainwright.distributed.mesh import Shard, Slice

CASES = [(name, size) for name in ALL for size in (2, 3, 4) if size == 2 or ("2" not in name and "workers" not in name)]
"""Workers take their time, and know nothing of how many processes there are."""


@pytest.mark.sample(24)
@pytest.mark.parametrize(("name", "size"), CASES)
def test_slices_of_all_processes_are_the_batch_of_one(name: str, size: int) -> None:
    alone = Alone(ALL[name])
    sources = [opened(ALL[name], Shard(rank, size)) for rank in range(size)]
    for epoch, whole in enumerate(alone.table):
        ranks = [read(one, alone.begun[epoch], epoch=epoch, rank=rank) for rank, one in enumerate(sources)]
        assert [joined(list(slices)) for slices in zip(*ranks, strict=True)] == whole
        for slices, rows in zip(zip(*ranks, strict=True), whole, strict=True):
            assert [one.all_rows for one in slices] == [len(rows)] * size
            assert sum(one.rows for one in slices) == len(rows)
            for one in slices:
                assert len(rows_of(one.batch)) == (one.rows or slices[0].rows)
                assert one.rows or rows_of(one.batch) == rows_of(slices[0].batch)


@pytest.mark.parametrize("name", ALL)
def test_what_a_sharded_source_tells_of_the_whole_is_as_on_one_process(name: str) -> None:
    alone, sharded = open_source(ALL[name]()), opened(ALL[name], Shard(1, 3))
    for reported in ("length", "rows", "batch_size", "repeatable", "draws_global_rng"):
        assert getattr(sharded, reported) == getattr(alone, reported), reported
    assert sharded.fingerprint() == alone.fingerprint()
    assert set(sharded.position()) == set(alone.position())


@pytest.mark.sample(20)
@pytest.mark.parametrize(("skip", "size"), [(1, 3), (2, 2)])
@pytest.mark.parametrize("name", [name for name in ALL if "persistent" not in name])
def test_a_resume_goes_on_with_the_batches_of_one_process(name: str, skip: int, size: int) -> None:
    alone = Alone(ALL[name])
    skip = min(skip, len(alone.table[1]) - 1)
    saved: dict[str, Any] = {}
    source = Alone(ALL[name], epochs=1).source
    iterator = source.epoch(1)
    for _ in range(skip):
        next(iterator)
    saved = committed(source)
    ranks = []
    for rank in range(size):
        source = opened(ALL[name], Shard(rank, size))
        source.seek(saved, other_size=True)
        ranks.append(read(source, alone.begun[1], epoch=1, rank=rank, skip=skip))
    assert [joined(list(slices)) for slices in zip(*ranks, strict=True)] == alone.table[1][skip:]


@pytest.mark.parametrize("name", ["shuffled", "rows", "generator, 0", "generator, 2 persistent", "sized", "per epoch"])
def test_an_independent_copy_stays_sharded(name: str) -> None:
    alone = Alone(ALL[name])
    ranks = []
    for rank in range(2):
        source = opened(ALL[name], Shard(rank, 2))
        training = source.epoch(0)
        next(training)
        ranks.append(read(source.independent_copy(), alone.begun[0], epoch=0, rank=rank))
        assert isinstance(next(training), Slice)
    assert [joined(list(slices)) for slices in zip(*ranks, strict=True)] == alone.table[0]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 70), st.integers(1, 6), st.integers(1, 3))
def test_parts_are_even_slices_in_order_without_a_gap(rows: int, size: int, least: int) -> None:
    parts = [Shard(rank, size, least) for rank in range(size)]
    slices = [part.of(rows) for part in parts]
    assert [row for one in slices for row in one] == list(range(rows))
    served = [len(one) for one in slices if one]
    assert not served or max(served) - min(served) <= 1
    assert rows < least or all(one >= least for one in served)
    assert sum(map(bool, slices)) == min(size, max(rows // least, rows > 0))
    for part, one in zip(parts, slices, strict=True):
        assert part.run(rows) == (one or slices[0])
    assert parts[0].sizes(rows) == [len(one) for one in slices]


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 4), st.integers(1, 2), st.booleans(), st.integers(-9, 9))
def test_any_table_is_sharded_without_a_row_twice(
    rows: int, batch: int, size: int, least: int, shuffle: bool, seed: int
) -> None:
    def make() -> Any:
        return batches((torch.arange(rows),), batch, shuffle=shuffle, seed=seed)

    whole = [rows_of(one) for one in open_source(make()).epoch(3)]
    for skip in range(len(whole)):
        ranks = [list(opened(make, Shard(rank, size, least)).epoch(3, skip)) for rank in range(size)]
        assert [joined(list(slices)) for slices in zip(*ranks, strict=True)] == whole[skip:]


def test_rows_draw_the_same_on_any_number_of_processes() -> None:
    class Noisy(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> Any:
            return index, torch.rand(2)

    def make() -> Any:
        return batches(Noisy(), 8, shuffle=True, seed=1)

    whole = [noise for _, noise in open_source(make()).epoch(0)]
    ranks = [list(opened(make, Shard(rank, 3)).epoch(0)) for rank in range(3)]
    for slices, noise in zip(zip(*ranks, strict=True), whole, strict=True):
        assert torch.equal(torch.cat([one.batch[1][: one.rows] for one in slices]), noise)


def test_the_workers_of_each_process_draw_for_themselves_and_those_of_the_first_as_alone() -> None:
    class Noisy(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> Any:
            return index, torch.rand(1)

    def make() -> Any:
        return torch.utils.data.DataLoader(Noisy(), batch_size=4, num_workers=1)

    torch.manual_seed(1)
    alone = next(open_source(make()).epoch(0))[1]
    drawn = []
    for rank in range(3):
        source = opened(make, Shard(rank, 3))
        torch.manual_seed(1)
        drawn.append(next(source.epoch(0)).batch[1])
    assert drawn[0].tolist() == alone[:1].tolist()
    assert len({noise[0].item() for noise in drawn}) == 3


def test_who_iterates_sharded_batches_by_hand_gets_whole_ones() -> None:
    made = batches((torch.arange(10),), 4)
    opened(lambda: made, Shard(1, 2))
    assert [rows_of(batch) for batch in made] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert not isinstance(next(open_source(made).epoch(0)), Slice)  # a later run of one process


def test_the_header_says_how_a_batch_is_shared() -> None:
    for size, reported in ((2, "64 = 2 x 32"), (3, "64 = 22 + 21 + 21"), (5, "64 = 4 x 13 + 1 x 12")):
        source = opened(lambda: batches((torch.arange(1000),), 64, shuffle=True), Shard(0, size))
        assert source.describe() == f"1,000 rows in batches of {reported} from memory, shuffled"
    source = opened(LOADERS["dropped"], Shard(1, 2))
    assert source.describe() == "20 rows in batches of 4 = 2 x 2 from a DataLoader"


def test_per_rank_counts_the_rows_of_each_process() -> None:
    def make() -> Any:
        return batches((torch.arange(20),), per_rank=4)

    alone = open_source(make())
    assert (alone.batch_size, alone.length, alone.fingerprint()["processes"]) == (4, 5, 1)
    ranks = [opened(make, Shard(rank, 2)) for rank in range(2)]
    assert (ranks[0].batch_size, ranks[0].length, ranks[0].rows) == (8, 3, 20)
    assert ranks[0].describe() == "20 rows in batches of 8 = 2 x 4 from memory, in order"
    assert [[one.rows for one in source.epoch(0)] for source in ranks] == [[4, 4, 2], [4, 4, 2]]
    with pytest.raises(ValueError, match="processes=1"):
        make().seek(ranks[0].position())


def test_per_rank_that_leaves_no_batch_is_refused_when_it_is_sharded() -> None:
    made = batches((torch.arange(10),), per_rank=4, drop_last=True)
    with pytest.raises(ValueError, match="drop_last=True leaves 0 batches"):
        made.shard(Shard(0, 3))
