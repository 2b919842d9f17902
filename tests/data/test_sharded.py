"""Streams of which each process reads a part of its own, marked as such, and what cannot be sharded at all."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from sharded_sources import Lists, Ordered, Pair, Rows, Sized, Stream, opened, rows_of, starts
from sources import committed
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from trainwright.core.errors import DataError
from trainwright.data.opening import batches, open_source
from trainwright.data.sharding import shard, sharded, slice_rows
from trainwright.data.sharding import sliceable_rows as counted
from trainwright.data.source import Source
from trainwright.data.streams import Continuing
from trainwright.distributed.mesh import Shard, Slice


def of_one_process(make: Callable[[], Any], rank: int, *, size: int = 2, epoch: int = 0) -> list[Any]:
    """An epoch of a process: begun with the random state of the first, gone on with its own."""
    source = opened(lambda: sharded(make()), Shard(rank, size))
    starts()
    iterator = source.epoch(epoch)
    torch.manual_seed(50 + rank)
    return list(iterator)


STREAMS: dict[str, Callable[[], Any]] = {
    "rows": lambda: DataLoader(Stream(13), batch_size=None),
    "batches": lambda: DataLoader(Stream(13), batch_size=2),
    "iterable": lambda: lambda epoch: (row[None] for row in Stream(13)),
    "own": lambda: lambda epoch: batches(torch.arange(13)[shard()[0] :: shard()[1]], 2, shuffle=True),
}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", STREAMS)
def test_parts_of_a_stream_are_the_whole_over_all_processes(name: str, size: int) -> None:
    slices = [one for rank in range(size) for one in of_one_process(STREAMS[name], rank, size=size)]
    assert all(type(one) is Slice and one.rows is None and one.all_rows is None for one in slices)
    rows = [row for one in slices for row in np.atleast_1d(one.batch).tolist()]
    assert sorted(rows) == list(range(13))


def test_workers_receive_their_part_too() -> None:
    slices = [
        one
        for rank in range(2)
        for one in of_one_process(lambda: DataLoader(Ordered(11), batch_size=2, num_workers=2), rank)
    ]
    assert sorted(row for one in slices for row in one.batch.tolist()) == list(range(11))


@pytest.mark.slow
def test_workers_that_inherit_nothing_receive_it_too() -> None:
    def make() -> Any:
        return DataLoader(Ordered(7), batch_size=None, num_workers=1, multiprocessing_context="spawn")

    assert [one.batch for one in of_one_process(make, 1)] == [1, 3, 5]


def test_on_one_process_the_mark_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for make in (STREAMS["batches"], STREAMS["iterable"]):
        marked, plain = open_source(sharded(make())), open_source(make())
        starts()
        whole = [rows_of(batch) for batch in plain.epoch(0)]
        starts()
        assert [rows_of(batch) for batch in marked.epoch(0)] == whole
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    assert shard() == (1, 2)  # nobody reads: the environment tells
    for source in (open_source(STREAMS["batches"]()), open_source(sharded(STREAMS["iterable"]()))):
        assert sorted(row for batch in source.epoch(0) for row in rows_of(batch)) == list(range(13))
    assert shard() == (1, 2)


def test_alone_there_is_one_shard() -> None:
    assert shard() == (0, 1)


def test_a_process_whose_part_is_empty_gives_no_batch_and_no_error() -> None:
    for name in ("batches", "iterable"):
        assert sum(len(of_one_process(STREAMS[name], rank, size=15)) for rank in (13, 14)) == 0
        with pytest.raises(DataError, match="no batch"):
            list(open_source(DataLoader(Stream(0), batch_size=2)).epoch(0))


def test_lengths_of_parts_are_not_those_of_the_whole() -> None:
    made = batches(torch.arange(10), 2)
    for data, own in ((made, 5), ([torch.arange(3)] * 4, 4), (DataLoader(Rows(9), batch_size=2), 5)):
        source: Any = opened(lambda data=data: sharded(data), Shard(0, 2))
        assert (source.length, source.rows, source._own_length) == (None, None, own)
        source.shard(None)
        assert source.length == own
    assert not made.is_own_part and len(made) == 5


def test_a_stream_goes_on_only_on_as_many_processes_inside_an_epoch() -> None:
    for name in ("batches", "iterable"):
        source = opened(lambda name=name: sharded(STREAMS[name]()), Shard(0, 2))
        expected = [rows_of(one.batch) for one in of_one_process(STREAMS[name], 0)]
        starts()
        next(source.epoch(0))
        saved = committed(source)
        for other_size, skip in ((False, 1), (True, 0), (True, 1)):
            again = opened(lambda name=name: sharded(STREAMS[name]()), Shard(0, 2))
            again.seek(saved, other_size=other_size)
            starts()
            if other_size and skip:
                with pytest.raises(DataError, match="each process has a part of its own"):
                    again.epoch(0, skip)
            else:
                assert [rows_of(one.batch) for one in again.epoch(0, skip)] == expected[skip:]
        endless = Continuing(opened(lambda name=name: sharded(STREAMS[name]()), Shard(0, 2)))
        endless.shard(Shard(0, 2))
        next(endless.epoch(0))
        endless.seek(committed(endless), other_size=True)
        with pytest.raises(DataError, match="each process has a part of its own"):
            endless.epoch(0, 1)


def test_an_endless_stream_begins_each_pass_alike_on_all_processes() -> None:
    ranks = []
    for rank in range(2):
        source = Continuing(open_source(sharded(DataLoader(Stream(12), batch_size=1))))
        source.shard(Shard(rank, 2))
        starts()
        given = []
        for epoch in range(3):
            iterator = source.epoch(epoch)
            torch.manual_seed(70 + 10 * epoch + rank)
            given += [one.batch.item() for one in itertools.islice(iterator, 4)]
        ranks.append(given)
    for number in range(2):
        both = [row for given in ranks for row in given[6 * number : 6 * number + 6]]
        assert sorted(both) == list(range(12))


class Knows(Lists):
    def __init__(self) -> None:
        self.num_processes, self.process_index = 2, 1


class Endless(Lists):
    def __iter__(self) -> Iterator[list[int]]:
        return itertools.repeat([1])


class Unmeasured(Lists):
    __len__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (lambda: DataLoader(Stream(9), batch_size=2), r"Stream is a stream(.|\n)*shard\(\)(.|\n)*sharded\(loader\)"),
        (lambda: iter([torch.ones(2)]), r"stream(.|\n)*itertools.islice\(batches, index, None, total\)"),
        (lambda: Sized(3).__iter__(), r"generator is a stream"),
        (
            lambda: DataLoader(Rows(9), batch_size=2, sampler=DistributedSampler(Rows(9), 2, 0, shuffle=False)),
            r"DistributedSampler shards rows(.|\n)*DataLoader\(data, batch_size=4, shuffle=False\)",
        ),
        (lambda: DataLoader(Rows(9), batch_sampler=Knows()), r"Knows\(num_processes=2, process_index=1\)"),
        (lambda: batches(Rows(9), 2, sampler=DistributedSampler(Rows(9), 2, 0)), "DistributedSampler shards rows"),
        (lambda: DataLoader(Rows(9), batch_sampler=Unmeasured()), "Unmeasured has no length"),
        (lambda: DataLoader(Rows(9), batch_size=2, num_workers=1, in_order=False), "in_order=False"),
    ],
)
def test_what_cannot_be_sharded_is_refused_with_what_to_write(data: Any, named: str) -> None:
    with pytest.raises(DataError, match=named):
        open_source(data()).shard(Shard(0, 2))  # type: ignore[attr-defined]


def test_a_loader_that_shards_itself_is_read_as_it_is_where_it_is_marked_or_shards_to_one() -> None:
    rows = []
    for rank in range(2):
        sampler = DistributedSampler(Rows(10), 2, rank, shuffle=True)
        slices = of_one_process(lambda sampler=sampler: DataLoader(Rows(10), batch_size=2, sampler=sampler), rank)
        rows += [row for one in slices for row in rows_of(one.batch)]
    assert sorted(rows) == list(range(10))
    alone = DistributedSampler(Rows(10), 1, 0)
    opened(lambda: DataLoader(Rows(10), batch_size=2, sampler=alone), Shard(1, 2))


def test_an_order_without_an_end_is_refused_when_it_is_drawn() -> None:
    source = opened(lambda: DataLoader(Rows(9), batch_sampler=Endless()), Shard(0, 2))
    with pytest.raises(DataError, match="has no end"):
        source.epoch(0)


def test_a_source_of_the_users_own_that_cannot_deal_is_refused() -> None:
    class Own(Source):
        length = rows = batch_size = None
        repeatable, draws_global_rng = True, False

        def describe(self) -> str:
            return "own"

        def epoch(self, epoch: int, skip: int = 0) -> Iterator[Any]:
            return iter([])

        def state_dict(self) -> Any:
            return None

        def load_state_dict(self, tree: Any) -> None:
            pass

    with pytest.raises(DataError, match=r"Own does not shard(.|\n)*def shard\(self, part\)"):
        Continuing(open_source(Own())).shard(Shard(0, 2))
    with pytest.raises(DataError, match="a source of your own"):
        open_source(sharded(Own()))


@dataclass(frozen=True)
class Batch:
    rows: torch.Tensor
    weight: float


def test_a_ready_batch_keeps_its_types_when_it_is_cut() -> None:
    a = torch.arange(6)
    batch = OrderedDict(
        pair=Pair(a, a.numpy()), both=[a, (a,)], batch=Batch(a, 0.5), names=list("abcdef"), scale=torch.tensor(2.0)
    )
    part = slice_rows(batch, range(2, 4), of=counted(batch, "it"))
    assert type(part) is OrderedDict and type(part["pair"]) is Pair and type(part["batch"]) is Batch
    assert part["pair"].rows.tolist() == part["pair"].twice.tolist() == part["both"][1][0].tolist() == [2, 3]
    assert (part["names"], part["batch"].weight, part["scale"].item()) == (["c", "d"], 0.5, 2.0)
    assert part["batch"].rows.tolist() == [2, 3] and len(batch["names"]) == 6


@pytest.mark.parametrize(
    ("batch", "named"),
    [
        ((torch.ones(3), torch.ones(4)), r"batch\[0\] has 3 rows, batch\[1\] has 4 rows"),
        ({"x": torch.ones(3), "graph": object()}, r"batch\['graph'\] is a object"),
        ([torch.tensor(1.0)], "no tensor in it"),
    ],
)
def test_a_ready_batch_of_unknown_rows_is_refused(batch: Any, named: str) -> None:
    source = opened(lambda: [batch], Shard(0, 2))
    with pytest.raises(DataError, match=named):
        list(source.epoch(0))
