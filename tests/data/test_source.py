"""`open_source`: every form of data, bitwise the plain loop, skipped exactly, refused by name."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from trainwright.base.errors import DataError
from trainwright.data.own import batches
from trainwright.data.source import open_source, takes_batch_size
from trainwright.data.stream import Continuing

X = torch.arange(40.0).reshape(20, 2)
Y = torch.arange(20)


class Noisy(Dataset):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return index, random.random(), np.random.rand(2), torch.rand(2)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        for index in range(10):
            yield torch.tensor(index) + torch.rand(1)


class OneTime(IterableDataset):
    def __init__(self) -> None:
        self.rows = iter(range(6))

    def __iter__(self) -> Iterator[Any]:
        return self.rows


def generator(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


LOADERS = {
    "plain": lambda: DataLoader(Noisy(), batch_size=8),
    "shuffle": lambda: DataLoader(Noisy(), batch_size=8, shuffle=True),
    "generator": lambda: DataLoader(Noisy(), batch_size=8, shuffle=True, generator=generator()),
    "drop_last": lambda: DataLoader(Noisy(), batch_size=8, shuffle=True, drop_last=True),
    "sampler": lambda: DataLoader(Noisy(), batch_size=8, sampler=SubsetRandomSampler(range(5, 18), generator())),
    "weighted": lambda: DataLoader(
        Noisy(), batch_size=8, sampler=WeightedRandomSampler(torch.ones(20), 17, generator=generator())
    ),
    "batch_sampler": lambda: DataLoader(
        Noisy(), batch_sampler=BatchSampler(RandomSampler(range(20), generator=generator()), 6, True)
    ),
    "tensors": lambda: DataLoader(TensorDataset(X, Y), batch_size=8, shuffle=True),
    "unbatched": lambda: DataLoader(Noisy(), batch_size=None),
    "iterable": lambda: DataLoader(Stream(), batch_size=4),
    "workers": lambda: DataLoader(Noisy(), batch_size=8, shuffle=True, num_workers=2),
    "persistent": lambda: DataLoader(
        TensorDataset(X, Y), batch_size=8, shuffle=True, generator=generator(), num_workers=1, persistent_workers=True
    ),
    "persistent without a generator": lambda: DataLoader(
        TensorDataset(X, Y), batch_size=8, shuffle=True, num_workers=1, persistent_workers=True
    ),
}


def seeded() -> None:
    torch.manual_seed(1), random.seed(1), np.random.seed(1)


def state() -> str:
    return repr((random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().tolist()))


def text(batch: Any) -> str:
    if isinstance(batch, list | tuple):
        return f"{type(batch).__name__}({', '.join(map(text, batch))})"
    return f"{type(batch).__name__} {batch.dtype} {batch.tolist()}" if hasattr(batch, "tolist") else repr(batch)


@pytest.mark.parametrize("name", LOADERS)
def test_a_loader_gives_what_the_plain_loop_gets_and_draws_what_it_draws(name: str) -> None:
    seeded()
    loader = LOADERS[name]()
    plain = [[text(batch) for batch in loader] for _ in range(2)]
    after = state()
    seeded()
    source = open_source(LOADERS[name]())
    ours = [[text(batch) for batch in source.epoch(epoch)] for epoch in range(2)]
    assert ours == plain
    assert state() == after
    assert source.length == (None if name == "iterable" else len(plain[0]))
    assert source.repeatable
    assert source.draws_global_rng


@pytest.mark.parametrize(
    ("name", "rows", "batch_size"),
    [
        ("plain", 20, 8),
        ("drop_last", 16, 8),
        ("sampler", 13, 8),
        ("batch_sampler", 18, 6),
        ("unbatched", None, None),
        ("iterable", None, 4),
    ],
)
def test_a_loader_knows_its_rows_where_they_can_be_known(name: str, rows: Any, batch_size: Any) -> None:
    source = open_source(LOADERS[name]())
    assert (source.rows, source.batch_size) == (rows, batch_size)


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("name", LOADERS)
def test_a_loader_goes_on_inside_an_epoch_with_the_random_state_of_its_start(name: str, epoch: int) -> None:
    seeded()
    source = open_source(LOADERS[name]())
    for earlier in range(epoch):
        list(source.epoch(earlier))
    start = torch.get_rng_state(), random.getstate(), np.random.get_state()
    iterator = source.epoch(epoch)
    next(iterator)
    kept = source.state_dict()
    rest = [text(batch) for batch in iterator]

    resumed = open_source(LOADERS[name]())
    resumed.load_state_dict(kept)
    assert resumed.state_dict() == kept
    torch.set_rng_state(start[0]), random.setstate(start[1]), np.random.set_state(start[2])
    assert [text(batch) for batch in resumed.epoch(epoch, skip=1)] == rest


def test_a_loader_resumed_between_epochs_draws_the_next_order() -> None:
    source = open_source(LOADERS["generator"]())
    list(source.epoch(0))
    kept = source.state_dict()
    following = [batch[0].tolist() for batch in source.epoch(1)]
    resumed = open_source(LOADERS["generator"]())
    resumed.load_state_dict(kept)
    assert [batch[0].tolist() for batch in resumed.epoch(1)] == following


def test_a_state_of_a_loader_with_other_generators_is_refused() -> None:
    with pytest.raises(DataError, match=r"its random generators differ(.|\n)*no generator(.|\n)*loader.generator"):
        open_source(LOADERS["plain"]()).load_state_dict(open_source(LOADERS["generator"]()).state_dict())


def test_samplers_and_data_set_are_told_the_epoch_once() -> None:
    class Told:
        def __init__(self) -> None:
            self.told: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.told.append(epoch)

    class ToldSampler(Told, SequentialSampler):
        def __init__(self) -> None:
            Told.__init__(self)
            SequentialSampler.__init__(self, range(20))

    class ToldBatches(Told, BatchSampler):
        def __init__(self, sampler: Any) -> None:
            Told.__init__(self)
            BatchSampler.__init__(self, sampler, 4, False)

    class ToldData(Told, Noisy):
        pass

    inner = ToldSampler()
    outer, data = ToldBatches(inner), ToldData()
    source = open_source(DataLoader(data, batch_sampler=outer))
    for epoch in (0, 4):
        next(source.epoch(epoch))
    assert inner.told == outer.told == data.told == [0, 4]
    sampler = ToldSampler()
    next(open_source(DataLoader(data, sampler=sampler)).epoch(2))
    assert sampler.told == [2]


READY = [(X[:5], Y[:5]), (X[5:7], Y[5:7]), (X[7:], Y[7:])]


class Sized:
    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Any]:
        return iter(READY)


class Unsized(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return iter(READY)


@pytest.mark.parametrize(
    ("data", "length", "repeatable"),
    [
        (lambda: READY, 3, True),
        (Sized, 3, True),
        (Unsized, None, True),
        (lambda: iter(READY), None, False),
        (lambda: (batch for batch in READY), None, False),
        (lambda: lambda epoch: READY, 3, True),
        (lambda: lambda epoch: (batch for batch in READY), None, True),
    ],
)
@pytest.mark.parametrize("skip", [0, 1, 3])
def test_ready_batches_are_handed_on_themselves(data: Any, length: Any, repeatable: bool, skip: int) -> None:
    source = open_source(data())
    assert (source.length, source.repeatable) == (length, repeatable)
    given = list(source.epoch(0, skip))
    assert len(given) == 3 - skip
    assert all(one is two for one, two in zip(given, READY[skip:], strict=True))
    if repeatable:
        assert len(list(source.epoch(1))) == 3


def test_a_list_is_iterated_by_its_own_iterator() -> None:
    assert type(open_source(READY).epoch(0)) is type(iter([]))


def test_a_stream_is_asked_only_when_a_batch_is_asked_for() -> None:
    asked: list[int] = []

    def stream() -> Iterator[int]:
        for index in range(5):
            asked.append(index)
            yield index

    iterator = open_source(stream()).epoch(0)
    assert asked == []
    assert [next(iterator), next(iterator), next(iterator)] == asked == [0, 1, 2]


@pytest.mark.parametrize(
    "data", [X, X.numpy(), (X, Y), {"x": X}, TensorDataset(X, Y), Noisy()], ids=lambda data: type(data).__name__
)
def test_a_data_set_takes_the_batch_size_and_the_shuffle(data: Any) -> None:
    assert takes_batch_size(data)
    source = open_source(data, batch_size=8, shuffle=True)
    assert (source.length, source.rows, source.batch_size) == (3, 20, 8)
    assert "shuffled" in source.describe()
    assert "in order" in open_source(data, batch_size=8).describe()
    with pytest.raises(DataError, match=r"val data: an? \w+ is a data set of rows(.|\n)*batches\(data, 64\)"):
        open_source(data, role="val")


def test_batches_are_their_own_source() -> None:
    own = batches(X, 8)
    assert open_source(own) is own
    opened = open_source(READY)
    assert open_source(opened) is opened


def test_a_function_is_called_once_per_epoch() -> None:
    called: list[int] = []

    def make(epoch: int) -> list[int]:
        called.append(epoch)
        return [epoch] * (epoch + 2)

    source = open_source(make)
    assert called == [0]
    assert (source.length, source.describe()) == (2, "a list of 2 batches, made for each epoch")
    assert [list(source.epoch(epoch)) for epoch in (0, 1, 2)] == [[0, 0], [1, 1, 1], [2, 2, 2, 2]]
    assert called == [0, 1, 2]
    assert list(source.epoch(5, skip=6)) == [5]


def test_a_functions_data_get_the_batch_size() -> None:
    source = open_source(lambda epoch: (X + epoch, Y), batch_size=8)
    assert [next(source.epoch(epoch))[0][0, 0].item() for epoch in (0, 1)] == [0.0, 1.0]


@pytest.mark.parametrize("shared", [False, True])
def test_a_functions_data_are_resumed(shared: bool) -> None:
    def make() -> Any:
        own = batches(X, 8, shuffle=True)
        return (lambda epoch: own) if shared else (lambda epoch: batches(X, 8, shuffle=True))

    source = open_source(make())
    list(source.epoch(0))
    between, drawn = source.state_dict(), torch.get_rng_state()
    iterator = source.epoch(1)
    first = next(iterator)
    inside = source.state_dict()
    table = [text(batch) for batch in [first, *iterator]]
    resumed = open_source(make())
    resumed.load_state_dict(inside)
    assert resumed.state_dict() == inside
    assert [text(batch) for batch in resumed.epoch(1, skip=1)] == table[1:]
    resumed = open_source(make())
    resumed.load_state_dict(between)
    torch.set_rng_state(drawn)
    assert [text(batch) for batch in resumed.epoch(1)] == table


def test_epochs_cut_from_a_stream_go_on_where_the_last_one_stopped() -> None:
    source = Continuing(open_source(iter(range(100))))
    assert (source.length, source.rows, source.repeatable) == (None, None, False)
    assert [[next(iterator) for _ in range(3)] for iterator in map(source.epoch, range(3))] == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7, 8],
    ]


def test_a_loop_that_leaves_an_epoch_leaves_the_stream_open() -> None:
    def delegating(iterator: Iterator[int]) -> Iterator[int]:
        yield from iterator

    source = Continuing(open_source(index for index in range(9)))
    outer = delegating(source.epoch(0))
    assert next(outer) == 0
    outer.close()
    assert next(source.epoch(1)) == 1


def test_a_finite_source_begins_again_inside_an_epoch_and_a_generator_ends() -> None:
    source = Continuing(open_source([0, 1, 2]))
    iterator = source.epoch(0)
    assert [next(iterator) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert next(source.epoch(1)) == 1
    once = Continuing(open_source(iter([0, 1, 2])))
    assert list(once.epoch(0)) == [0, 1, 2]
    with pytest.raises(DataError, match="used up"):
        next(once.epoch(1))


def trained(source: Any, iterator: Any, batches_from_to: range) -> list[str]:
    """Batches in epochs of 2, with a draw after each as a training step makes it."""
    table = []
    for index in batches_from_to:
        iterator = source.epoch(index // 2) if index % 2 == 0 or iterator is None else iterator
        table.append(text(next(iterator)))
        torch.rand(3)
    return table


@pytest.mark.parametrize("name", ["shuffle", "generator", "own", "iterable", "plain"])
@pytest.mark.parametrize("at", [0, 1, 2, 3, 4, 5, 9])
def test_a_continuing_stream_resumes_at_any_batch(name: str, at: int) -> None:
    def make() -> Any:
        return Continuing(open_source(batches(Noisy(), 8, shuffle=True) if name == "own" else LOADERS[name]()))

    seeded()
    source = make()
    trained(source, None, range(at))
    kept = source.state_dict()
    boundary, python, numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()
    rest = trained(source, source if at % 2 else None, range(at, at + 6))

    resumed = make()
    resumed.load_state_dict(kept)
    assert resumed.state_dict() is kept
    iterator = resumed.epoch(at // 2, at % 2) if at % 2 else None
    if at % 2 == 0 and at:
        torch.rand(7)  # the state of the boundary is put back before the epoch and after it was begun
    torch.set_rng_state(boundary), random.setstate(python), np.random.set_state(numpy)
    assert trained(resumed, iterator, range(at, at + 6)) == rest


def test_a_continuing_stream_resumes_twice() -> None:
    table = [text(batch) for epoch in range(3) for batch in batches(X, 3, shuffle=True, seed=1).epoch(epoch)]
    given: list[str] = []
    kept, epoch, skip = None, 0, 0
    for taken in (3, 1, 2, 4, 1):  # of epochs of 4, each time in a new process
        source = Continuing(open_source(batches(X, 3, shuffle=True, seed=1)))
        if kept is not None:
            source.load_state_dict(kept)
        iterator = source.epoch(epoch, skip)
        for _ in range(taken):
            if skip == 4:
                epoch, skip = epoch + 1, 0
                iterator = source.epoch(epoch)
            given.append(text(next(iterator)))
            skip += 1
        kept = source.state_dict()
    assert given == table[: len(given)]


def used_up(data: Any) -> Any:
    source = open_source(data)
    list(source.epoch(0))
    return next(source.epoch(1))


class Empty:
    def __iter__(self) -> Iterator[Any]:
        return iter(())


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: used_up(iter(READY)), r"train data: the list_iterator is used up(.|\n)*lambda epoch: make\(epoch\)"),
        (lambda: used_up(batch for batch in READY), "the generator is used up"),
        (lambda: used_up(DataLoader(OneTime(), batch_size=2)), "OneTime.__iter__ to give a fresh iterator"),
        (lambda: next(open_source(Empty()).epoch(0)), "a Empty of batches had no batch"),
        (lambda: open_source([]), "a list of 0 batches had no batch"),
        (lambda: open_source(X[:0], batch_size=2), "data set of 0 rows"),
        (
            lambda: open_source(DataLoader(TensorDataset(X[:0])), role="val"),
            "val data: data set of 0 rows in the DataL",
        ),
        (
            lambda: open_source(DataLoader(Noisy(), batch_size=32, drop_last=True)),
            "20 rows, batch_size 32, drop_last=True leaves 0 batches(.|\n)*batch_size of at most 20",
        ),
        (
            lambda: open_source(DataLoader(Noisy(), batch_sampler=BatchSampler(range(5), 8, True))),
            "5 rows, batch_size 8, drop_last=True leaves 0 batches",
        ),
        (lambda: open_source(DataLoader(Noisy(), batch_sampler=[])), "at least one batch of 20 rows from list"),
        (lambda: open_source(READY).epoch(0, 4), "ended while the batches were skipped(.|\n)*3 batches(.|\n)*4"),
        (lambda: open_source(READY, batch_size=8), r"batch_size=8 beside a list(.|\n)*batches\(data, ...\)"),
        (lambda: open_source(DataLoader(Noisy()), batch_size=8), "batch_size=8 beside a DataLoader"),
        (lambda: open_source(batches(X, 4), batch_size=8), "batch_size=8 beside a Batches"),
        (lambda: open_source(Stream(), batch_size=8), r"DataLoader\(data, batch_size=8\)"),
        (lambda: open_source(tuple(READY)), "a tuple is a data set of rows(.|\n)*a list is batches"),
        (lambda: open_source(tuple(READY), batch_size=8), r"\[0\] of a tuple(.|\n)*a list for ready batches"),
        (lambda: open_source(None), "NoneType(.|\n)*want(.|\n)*DataLoader"),
        (lambda: open_source(3), "an int is nothing that batches come from"),
        (lambda: open_source("runs/data"), "a str is nothing"),
        (lambda: open_source(nn.Sequential(nn.Linear(1, 1))), "a Sequential is nothing"),
        (lambda: open_source(Noisy), r"the class Noisy itself(.|\n)*Noisy\(...\)"),
        (lambda: open_source(lambda: READY), r"cannot be called with the epoch(.|\n)*lambda epoch"),
        (lambda: open_source(lambda epoch: lambda: READY), "gave another function"),
        (lambda: open_source(lambda epoch: []), "a list of 0 batches"),
    ],
)
def test_mistakes_are_refused_with_what_to_write(call: Any, named: str) -> None:
    with pytest.raises(DataError, match=named):
        call()


def test_an_error_of_the_users_own_function_or_data_passes_through() -> None:
    def make(epoch: int) -> Any:
        raise TypeError("mine")

    with pytest.raises(TypeError, match=r"^mine$"):
        open_source(make)

    class Broken(Noisy):
        def __getitem__(self, index: int) -> Any:
            raise KeyError("mine")

    for workers in (0, 1):
        with pytest.raises(KeyError, match="mine"):
            next(open_source(DataLoader(Broken(), num_workers=workers)).epoch(0))
