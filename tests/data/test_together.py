"""A zip of loaders: which gives the epoch, which continue, where a resume begins, what ranks share, what is refused."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from passes import Augmented, Globally, loader
from sharded_sources import Rows, Sized, Stream, rows_of, starts, table
from sources import committed, generator, seeded
from torch.utils.data import DataLoader, TensorDataset

from trainwright import batches
from trainwright.core.errors import DataError, SettingError
from trainwright.core.rng import random_state, set_random_state
from trainwright.data import sharded, together
from trainwright.data.opening import open_source
from trainwright.data.source import require_resume
from trainwright.distributed.mesh import Shard


def numbers(batch: dict[str, Any]) -> dict[str, list[int]]:
    return {name: rows_of(one) for name, one in batch.items()}


def joined(epochs: list[list[dict[str, Any]]], name: str) -> list[int]:
    return [row for epoch in epochs for batch in epoch for row in numbers(batch)[name]]


def epochs(data: Any, number: int) -> list[list[dict[str, Any]]]:
    source = open_source(data)
    return [list(source.epoch(epoch)) for epoch in range(number)]


def two(**how: Any) -> Any:
    return together(a=batches(table(20), 4, shuffle=True, seed=1), b=batches(table(6), 2, shuffle=True, seed=2), **how)


@pytest.mark.parametrize(("length", "batches_of_an_epoch"), [("longest", 5), ("shortest", 3), ("a", 5), ("b", 3)])
def test_one_loader_gives_the_epoch(length: str, batches_of_an_epoch: int) -> None:
    data = two(length=length)
    assert len(data) == open_source(data).length == batches_of_an_epoch
    assert [len(epoch) for epoch in epochs(data, 3)] == 3 * [batches_of_an_epoch]


def test_the_loader_that_gives_the_epoch_is_read_as_alone() -> None:
    alone = batches(table(20), 4, shuffle=True, seed=1)
    given = epochs(two(), 2)
    assert joined(given, "a") == [row for epoch in range(2) for one in alone.epoch(epoch) for row in rows_of(one)]


@pytest.mark.parametrize("length", ["longest", "shortest"])
def test_the_others_go_on_where_they_stopped_with_fresh_passes(length: str) -> None:
    name, alone = ("b", batches(table(6), 2, shuffle=True, seed=2)) if length == "longest" else ("a", None)
    alone = alone or batches(table(20), 4, shuffle=True, seed=1)
    given = joined(epochs(two(length=length), 6), name)
    passes = [row for number in range(10) for one in alone.epoch(number) for row in rows_of(one)]
    assert given == passes[: len(given)]
    assert len(given) > len(alone) * 2


def test_by_hand_it_gives_the_epochs_that_a_run_gets() -> None:
    data = two()
    by_hand = [[numbers(one) for one in data] for _ in range(3)]
    assert by_hand == [[numbers(one) for one in epoch] for epoch in epochs(two(), 3)]


def test_iterating_by_hand_does_not_move_a_run() -> None:
    data = two()
    source = open_source(data)
    run = source.epoch(0)
    first = numbers(next(run))
    for _ in data:
        pass
    assert [first, *map(numbers, run)] == [numbers(one) for one in epochs(two(), 1)[0]]


def test_what_is_read_together_may_be_read_alone_meanwhile() -> None:
    b = batches(table(6), 2, shuffle=True, seed=2)
    source = open_source(together(a=batches(table(20), 4), b=b))
    run = source.epoch(0)
    next(run)
    alone = open_source(b, role="val")
    assert len(list(alone.epoch(0))) == 3
    assert len(list(run)) == 4


def test_the_length_is_that_of_the_epoch_in_hand() -> None:
    source = open_source(together(a=lambda epoch: batches(table(8 + 4 * epoch), 4), b=Sized(7), length="a"))
    given = []
    for epoch in range(3):
        iterator = source.epoch(epoch)
        given.append((source.length, source.rows, len(list(iterator))))
    assert given == [(2, 8, 2), (3, 12, 3), (4, 16, 4)]


def test_a_batch_counts_as_the_first_loader_does() -> None:
    source = open_source(two())
    assert (source.rows, source.batch_size, source.length) == (20, 4, 5)
    source = open_source(together(b=batches(table(6), 2), a=batches(table(20), 4)))
    assert (source.rows, source.batch_size, source.length) == (None, 2, 5)


# Resume.

CASES: dict[str, Callable[[], Any]] = {
    "batches": two,
    "batches and a loader": lambda: together(
        a=batches(table(20), 5, shuffle=True), b=DataLoader(Augmented(), 8, shuffle=True)
    ),
    "shortest": lambda: two(length="shortest"),
    "drawn seeds": lambda: together(
        a=batches(table(12), 4, shuffle=True),
        b=batches(table(6), 4, shuffle=True),
        c=batches(table(5), 2, shuffle=True),
    ),
    "rows that draw": lambda: together(a=batches(Augmented(), 4, shuffle=True), b=batches(Augmented(), 6, seed=3)),
    "loaders": lambda: together(a=loader("shuffle", "0"), b=DataLoader(Augmented(), 7, shuffle=True)),
    "generators": lambda: together(
        a=loader("generator", "0"), b=DataLoader(Augmented(), 7, True, generator=generator())
    ),
    "samplers": lambda: together(a=loader("python", "0"), b=loader("globally", "0"), length="b"),
    "loaders named": lambda: together(
        a=DataLoader(Augmented(), 11, shuffle=True), b=loader("shuffle", "0"), length="a"
    ),
    "ready": lambda: together(a=loader("shuffle", "0"), b=[torch.arange(4), torch.arange(3), torch.arange(2)]),
    "sized": lambda: together(a=Sized(20), b=Sized(7)),
    "of the epoch": lambda: together(a=lambda epoch: batches(table(20), 4, shuffle=True), b=Sized(7), length="a"),
    "a stream named": lambda: together(a=batches(table(20), 4), b=DataLoader(Stream(20), 4), length="a"),
    "nested": lambda: together(a=two(), b=batches(table(9), 4, shuffle=True)),
}


def started(make: Callable[[], Any]) -> Any:
    seeded()
    source: Any = open_source(make())
    require_resume(source)
    return source


def test_a_state_of_other_loaders_is_refused() -> None:
    state = open_source(two()).position()
    with pytest.raises(DataError, match=r"not what they were(.|\n)*epochs of=b(.|\n)*epochs of=a"):
        open_source(two(length="b")).seek(state)
    other = together(a=batches(table(21), 4, shuffle=True, seed=1), b=batches(table(6), 2, shuffle=True, seed=2))
    with pytest.raises(DataError, match="rows=21"):
        open_source(other).seek(state)


def test_orders_that_are_drawn_together_are_not_one_order() -> None:
    for make in (
        lambda: DataLoader(Rows(20), 20, shuffle=True),
        lambda: batches(table(20), 20, shuffle=True),
        lambda: DataLoader(Rows(20), 20, sampler=Globally()),
    ):
        source = started(lambda make=make: together(a=make(), b=make(), c=make()))
        given = [tuple(one) for epoch in range(2) for batch in source.epoch(epoch) for one in numbers(batch).values()]
        assert len(set(given)) == 6


# Evaluation.


def test_a_pass_beside_training_begins_anew_and_leaves_it_where_it_is() -> None:
    source = open_source(two())
    run = source.epoch(0)
    first = [numbers(next(run)) for _ in range(2)]
    aside = [[numbers(one) for one in source.independent_copy().epoch(0)] for _ in range(2)]
    assert aside[0] == aside[1] == [*first, *map(numbers, run)]


@pytest.mark.parametrize("length", ["a", "b"])
def test_a_pass_beside_tells_no_data_set_of_another_epoch(length: str) -> None:
    class Reported(Rows):
        def set_epoch(self, epoch: int) -> None:
            reported.append(epoch)

    reported: list[int] = []
    source = open_source(together(a=DataLoader(Reported(9), 4), b=DataLoader(Reported(9), 4), length=length))
    list(source.epoch(2))
    before = list(reported)
    list(source.independent_copy().epoch(0))
    assert reported == before != []


# Several processes.

DEALT = ["batches", "shortest", "drawn seeds", "loaders", "generators", "samplers", "ready"]
FULL: dict[str, Callable[[], Any]] = {
    **{name: CASES[name] for name in DEALT},
    "drawn seeds": lambda: together(a=batches(table(12), 4, shuffle=True), b=batches(table(8), 4, shuffle=True)),
    "loaders": lambda: together(a=DataLoader(Rows(20), 4, shuffle=True), b=DataLoader(Rows(20), 10, shuffle=True)),
    "generators": lambda: together(
        a=DataLoader(Rows(20), 4, True, generator=generator()), b=DataLoader(Rows(9), 3, True, generator=generator())
    ),
    "samplers": lambda: together(
        a=DataLoader(Rows(20), 4), b=batches(table(20), 5, sampler=list(range(10))), length="b"
    ),
}


SHARED = [(name, size) for name in FULL for size in (2, 3) if size == 2 or name not in ("batches", "shortest", "ready")]


@pytest.mark.parametrize(("name", "size"), SHARED)
def test_processes_share_the_rows_of_every_loader(name: str, size: int) -> None:
    """Begun with the state of the first process, gone on with their own: the order is that of one process."""
    starts()
    alone = open_source(FULL[name]())
    begun, whole = [], []
    for epoch in range(3):
        begun.append((random_state(), [one.get_state() for one in alone.generators]))
        whole.append([numbers(one) for one in alone.epoch(epoch)])
    ranks = []
    for rank in range(size):
        starts()
        source: Any = open_source(FULL[name]())
        source.shard(Shard(rank, size))
        ranks.append([of_rank(source, begun[epoch], epoch=epoch, rank=rank) for epoch in range(3)])
    for epoch, expected in enumerate(whole):
        shared = [
            {key: [row for one in slices for row in rows_of(one.batch[key])] for key in expected[0]}
            for slices in zip(*(rank[epoch] for rank in ranks), strict=True)
        ]
        assert shared == expected, epoch


@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("cut", [(0, 1), (1, 1), (2, 0)])
def test_a_state_of_one_process_goes_on_over_two_and_back(name: str, cut: tuple[int, int]) -> None:
    epoch, skip = cut
    starts()
    alone: Any = open_source(FULL[name]())
    whole, saved = [], None
    for number in range(3):
        begun = (random_state(), [one.get_state() for one in alone.generators])
        if cut == (number, 0):
            saved = committed(alone)
        iterator = alone.epoch(number)
        whole.append([numbers(one) for one in itertools.islice(iterator, skip if number == epoch else None)])
        if number == epoch:
            saved = saved or committed(alone)
            break
    expected = [numbers(one) for one in iterator]
    ranks, states = [], []
    for rank in range(2):
        starts()
        source: Any = open_source(FULL[name]())
        source.shard(Shard(rank, 2))
        source.seek(saved, other_size=True)
        set_random_state(begun[0])
        slices = source.epoch(epoch, skip)
        given = [next(slices)]
        states.append(committed(source))
        ranks.append([*given, *slices])
    for slices, rows in zip(zip(*ranks, strict=True), expected, strict=True):
        assert {key: [row for one in slices for row in rows_of(one.batch[key])] for key in rows} == rows
    starts()
    back: Any = open_source(FULL[name]())
    back.seek(states[0])
    set_random_state(begun[0])
    assert [numbers(one) for one in back.epoch(epoch, skip + 1)] == expected[1:]


def of_rank(source: Any, begun: tuple[Any, list[Any]], *, epoch: int, rank: int) -> list[Any]:
    """An epoch on a process: begun with the first one's random states, and gone on with its own."""
    state, generators = begun
    set_random_state(state)
    for one, at in zip(source.generators, generators, strict=True):
        one.set_state(at)
    iterator = source.epoch(epoch)
    torch.manual_seed(100 + rank), random.seed(100 + rank)
    return list(iterator)


def test_a_short_batch_that_leaves_a_process_without_rows_of_one_loader_is_refused() -> None:
    source: Any = open_source(together(a=batches(table(20), 4), b=batches(table(7), 3)))
    with pytest.raises(DataError, match=r"rows for some of 2 processes only(.|\n)*1 rows of b(.|\n)*drop_last=True"):
        source.shard(Shard(0, 2))
    source = open_source(together(a=batches(table(20), 4), b=[torch.arange(3), torch.arange(1)]))
    source.shard(Shard(0, 2))
    with pytest.raises(DataError, match=r"4 rows of a, 1 rows of b"):
        list(source.epoch(0))


def test_parts_of_ones_own_are_marked_for_all_or_none() -> None:
    source: Any = open_source(together(a=sharded(batches(table(20), 4)), b=batches(table(8), 4)))
    with pytest.raises(DataError, match=r"a: its own, b: shared(.|\n)*together\(a=sharded"):
        source.shard(Shard(0, 2))
    for data in (together(a=sharded(table_batches()), b=sharded(table_batches())), sharded(two())):
        source = open_source(data)
        source.shard(Shard(1, 2))
        one = next(source.epoch(0))
        assert (one.rows, one.all_rows, source.length, source.is_own_part) == (None, None, None, True)


def table_batches() -> Any:
    return batches(table(20), 4)


def test_a_batch_size_is_for_the_loaders_that_are_rows() -> None:
    source = open_source(together(a=table(9), b=TensorDataset(*table(4)), c=[torch.arange(2)]), batch_size=3)
    assert [len(one) for one in numbers(next(source.epoch(0))).values()] == [3, 3, 2]


def test_the_header_tells_every_loader() -> None:
    assert open_source(two()).describe() == (
        "a: 20 rows in batches of 4 from memory, shuffled; b: 6 rows in batches of 2 from memory, shuffled, continuing"
    )


class Once:
    def __iter__(self) -> Iterator[Any]:
        return iter(table(4))


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: together(a=Sized(4)), r"fewer than two loaders(.|\n)*have  a(.|\n)*together\(a=first, b=second\)"),
        (together, r"fewer than two loaders(.|\n)*have  none"),
        (lambda: together(**{"a b": Sized(4), "c": Sized(4)}), r"'a b'(.|\n)*names that are identifiers"),
        (lambda: together(**{"class": Sized(4), "c": Sized(4)}), r"'class'(.|\n)*identifiers"),
        (lambda: together(longest=Sized(4), c=Sized(4)), r"'longest'(.|\n)*no length"),
        (lambda: two(length="longset"), r"length='longset'(.|\n)*Did you mean 'longest'(.|\n)*'a', 'b'"),
        (lambda: two(lenght="a"), r"lenght='a'(.|\n)*no loader. Did you mean 'length'"),
        (lambda: two(length=3), r"length=3(.|\n)*'longest', 'shortest', 'a', 'b'"),
        (lambda: together(**dict.fromkeys("ab", Sized(4))), r"a=..., b=...\) are the same loader"),
        (lambda: open_source(together(a=Sized(4), b=iter(table(4)))), r"b=...\) can be iterated only once"),
        (lambda: open_source(together(a=Sized(4), b=Once())), r"b has no length(.|\n)*length='a'"),
        (lambda: open_source(together(a=Sized(4), b=Sized(4)), batch_size=3), r"batch_size=3 with a Sized"),
        (lambda: open_source(together(a=table(9), b=Sized(4))), r"a data set of rows, without a batch size"),
    ],
)
def test_mistakes_are_refused_by_name(call: Callable[[], Any], named: str) -> None:
    with pytest.raises((SettingError, DataError), match=named):
        call()
