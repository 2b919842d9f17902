"""`batches(...)`: forms, order, random draws, workers, skipping, state."""

import random
import warnings
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from sources import X, Y, committed
from torch.utils.data import BatchSampler, DataLoader, Dataset, Subset, TensorDataset, random_split

from trainwright.core.errors import DataError, SettingError
from trainwright.data.opening import batches
from trainwright.data.seeded import mixed


class Augmented(Dataset):
    """Rows that draw from every generator of the process."""

    def __init__(self, rows: int = 20) -> None:
        self.rows = rows
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        self.read.append(index)
        return index, random.random(), np.random.rand(3), torch.rand(2), np.random.randn()


class AtOnce(Augmented):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        shared = torch.rand(1)
        return [(index, shared) for index in indices]


class Pair(NamedTuple):
    x: Any
    y: Any


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(a, b))
    if isinstance(a, dict):
        return type(a) is type(b) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and len(a) == len(b) and all(same(one, two) for one, two in zip(a, b, strict=True))


def rng() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state()[1].tobytes(), np.random.get_state()[2:], torch.get_rng_state()


def equal_rng(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return a[:3] == b[:3] and torch.equal(a[3], b[3])


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (X, torch.Tensor),
        (X.numpy(), torch.Tensor),
        ((X, Y), tuple),
        ((X.numpy(), Y.numpy()), tuple),
        (Pair(X, Y.numpy()), Pair),
        ({"x": X, "y": Y.numpy()}, dict),
        (TensorDataset(X, Y), list),
        (Subset(TensorDataset(X, Y), range(20)), list),
        ([(X[i], Y[i]) for i in range(20)], list),
    ],
)
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_batch_keeps_the_container_of_the_data(data: Any, kind: type, shuffle: bool) -> None:
    source = batches(data, 8, shuffle=shuffle, seed=3)
    table = list(source.epoch(0))
    assert len(table) == len(source) == 3
    assert source.rows == 20
    assert all(type(batch) is kind for batch in table)
    columns = [
        batch if kind is torch.Tensor else next(iter(batch.values() if kind is dict else batch)) for batch in table
    ]
    joined = torch.cat(columns)
    order = joined[:, 0].div(2).long()
    assert torch.equal(joined, X[order])
    assert torch.equal(order.sort().values, Y)
    assert torch.equal(order, Y) != shuffle


def test_columns_stay_together() -> None:
    for x, y in batches((X, Y), 6, shuffle=True, seed=1):
        assert torch.equal(x[:, 0], 2.0 * y)


@pytest.mark.parametrize(
    "data", [TensorDataset(X, Y), Subset(Subset(TensorDataset(X, Y), [9, 3, -1, 7, 5]), [4, 2, 0])]
)
def test_in_order_the_batches_are_bitwise_those_of_a_loader(data: Any) -> None:
    ours = list(batches(data, 2))
    assert same(ours, list(DataLoader(data, batch_size=2)))


def test_memory_gives_the_order_that_row_by_row_fetching_gives() -> None:
    def rows(batch: list[Any]) -> Any:
        return tuple(torch.stack(column) for column in zip(*batch, strict=True))

    for epoch in range(2):
        fast = list(batches((X, Y), 8, shuffle=True, seed=5).epoch(epoch))
        assert same(fast, list(batches((X, Y), 8, shuffle=True, seed=5, collate=rows).epoch(epoch)))
        data = Subset(TensorDataset(X, Y), range(20))
        assert same([tuple(one) for one in batches(data, 8, shuffle=True, seed=5).epoch(epoch)], fast)


@pytest.mark.parametrize("data", [(X, Y), Augmented()])
def test_order_depends_on_seed_and_epoch_only(data: Any) -> None:
    first = [list(batches(data, 8, shuffle=True, seed=7).epoch(epoch)) for epoch in (0, 1)]
    torch.rand(5), random.random(), np.random.rand()
    again = batches(data, 8, shuffle=True, seed=7)
    assert same(list(again.epoch(1)), first[1])
    assert same(list(again.epoch(0)), first[0])
    assert not same(first[0], first[1])
    assert not same(list(batches(data, 8, shuffle=True, seed=8).epoch(0)), first[0])


def test_neighboring_seeds_and_epochs_share_no_order() -> None:
    seen = {tuple(next(batches(Y, 20, shuffle=True, seed=s).epoch(e)).tolist()) for s in range(8) for e in range(8)}
    assert len(seen) == 64
    assert len({mixed(a, b) & 0xFFFFFFFF for a in range(-20, 20) for b in range(40)}) == 1600


def test_a_pass_over_the_object_is_the_next_epoch() -> None:
    source = batches((X, Y), 8, shuffle=True, seed=7)
    for epoch in range(3):
        assert same(list(source), list(batches((X, Y), 8, shuffle=True, seed=7).epoch(epoch)))


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_step_may_write_into_a_batch(shuffle: bool) -> None:
    data = X.clone()
    for batch in batches(data, 8, shuffle=shuffle, seed=0):
        batch.zero_()
    assert torch.equal(data, X)


def test_odd_arrays_become_tensors_without_a_warning() -> None:
    frozen = X.numpy().copy()
    frozen.flags.writeable = False
    flipped, swapped = X.numpy()[::-1], X.numpy().astype(">f4")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for data, want in ((frozen, X), (flipped, X.flip(0)), (swapped, X)):
            assert torch.equal(torch.cat(list(batches(data, 8))), want)
    assert batches(frozen, 8)._data.columns[0].data_ptr() == frozen.ctypes.data


def test_memory_draws_nothing_and_a_missing_seed_is_drawn_once() -> None:
    torch.manual_seed(0)
    before = rng()
    list(batches((X, Y), 8)), list(batches((X, Y), 8, shuffle=True, seed=1))
    assert equal_rng(rng(), before)
    source = batches((X, Y), 8, shuffle=True)
    list(source.epoch(0))
    drawn = rng()
    assert not equal_rng(drawn, before)
    torch.manual_seed(0)
    assert int(torch.empty((), dtype=torch.int64).random_()) == committed(source)["seed"]
    list(source.epoch(1))
    assert equal_rng(rng(), drawn)


@pytest.mark.parametrize("data", [Augmented(), AtOnce(), Subset(Augmented(), range(4, 16))])
@pytest.mark.parametrize("workers", [0, 2])
def test_fetching_leaves_the_generators_where_they_were(data: Any, workers: int) -> None:
    np.random.randn()  # leaves a second normal number in NumPy's state
    before = rng()
    for _ in batches(data, 8, shuffle=True, seed=1, workers=workers).epoch(0):
        assert equal_rng(rng(), before)
    assert equal_rng(rng(), before)


def test_an_error_in_the_data_set_leaves_the_generators_too() -> None:
    class Broken(Augmented):
        def __getitem__(self, index: int) -> Any:
            super().__getitem__(index)
            raise KeyError("the user's own")

    before = rng()
    with pytest.raises(KeyError, match="the user's own"):
        next(batches(Broken(), 8, seed=1).epoch(0))
    assert equal_rng(rng(), before)


def noisy(batch: list[Any]) -> Any:
    return torch.tensor([row[0] for row in batch]), torch.rand(1) + random.random() + np.random.rand()


@pytest.mark.parametrize("data", [Augmented(), AtOnce()])
@pytest.mark.parametrize("collate", [None, noisy])
def test_workers_change_no_bit(data: Any, collate: Any) -> None:
    for skip in (0, 1):
        alone = list(batches(data, 8, shuffle=True, seed=2, collate=collate).epoch(1, skip))
        torch.rand(3)
        assert same(alone, list(batches(data, 8, shuffle=True, seed=2, collate=collate, workers=2).epoch(1, skip)))
    assert same(
        list(batches((X, Y), 8, seed=2, shuffle=True)), list(batches((X, Y), 8, seed=2, shuffle=True, workers=1))
    )


def test_draws_depend_on_the_row_and_the_epoch_not_on_the_batch() -> None:
    def drawn(source: Any, epoch: int) -> dict[int, Any]:
        rows = [row for batch in source.epoch(epoch) for row in zip(*batch, strict=True)]
        return {int(row[0]): [column.tolist() for column in row[1:]] for row in rows}

    eights = drawn(batches(Augmented(), 8, shuffle=True, seed=1), 0)
    assert eights == drawn(batches(Augmented(), 3, seed=1), 0)
    assert eights == drawn(batches(Subset(Augmented(), range(20)), 3, seed=1), 0)
    other = drawn(batches(Augmented(), 8, shuffle=True, seed=1), 1)
    assert all(eights[row] != other[row] for row in eights)
    assert len({str(values) for values in eights.values()}) == 20
    swapped = drawn(batches(Augmented(), 8, seed=0), 1)
    assert all(eights[row] != swapped[row] for row in eights)


def test_in_order_without_a_seed_the_draws_of_a_data_set_are_kept_in_the_state() -> None:
    first, second = batches(Augmented(), 8), batches(Augmented(), 8)
    kept = list(first.epoch(0))
    second.seek(committed(first))
    assert same(list(second.epoch(0)), kept)
    assert not same(list(batches(Augmented(), 8).epoch(0)), kept)


@pytest.mark.parametrize("skip", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "settings", [{}, {"shuffle": True}, {"sampler": [5, 2, 9, 9, 1, 0, 7, 3, 4]}, {"drop_last": True}]
)
@pytest.mark.parametrize("data", [(X, Y), "augmented"])
def test_skipping_is_exact_and_reads_nothing(data: Any, settings: dict[str, Any], skip: int) -> None:
    data = Augmented() if data == "augmented" else data
    source = batches(data, 4, seed=1, **settings)
    whole = list(source.epoch(2))
    if isinstance(data, Augmented):
        data.read.clear()
    assert same(list(source.epoch(2, skip)), whole[skip:])
    if isinstance(data, Augmented):
        assert len(data.read) == sum(len(batch[0]) for batch in whole[skip:])
    assert list(source.epoch(2, len(whole))) == []


def test_a_sampler_gives_the_rows_and_receives_the_epoch() -> None:
    class Shifted:
        shift = 0

        def set_epoch(self, epoch: int) -> None:
            self.shift = epoch

        def __iter__(self) -> Any:
            return iter(np.arange(5) + self.shift)

    source = batches(Y, 2, sampler=Shifted())
    assert [batch.tolist() for batch in source.epoch(3)] == [[3, 4], [5, 6], [7]]
    assert source.length is None
    assert source.rows is None
    assert source.draws_global_rng
    with pytest.raises(TypeError, match="has no length"):
        len(source)
    assert batches(Y, 2, sampler=[1, 2, 3]).rows == 3
    assert batches(Y, 2, sampler=[1, 2, 3], drop_last=True).rows == 2


def test_state_restores_the_seed_and_the_passes() -> None:
    source = batches((X, Y), 8, shuffle=True)
    list(source)
    state = committed(source)
    resumed = batches((X, Y), 8, shuffle=True)
    resumed.seek(state)
    assert same(list(resumed), list(source))


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (lambda: batches((X[:19], Y[:19]), 8, shuffle=True), "rows=19"),
        (lambda: batches((X, Y), 4, shuffle=True), "batch_size=4"),
        (lambda: batches((X, Y), 8), "shuffle=False"),
        (lambda: batches((X, Y), 8, shuffle=True, drop_last=True), "drop_last=True"),
        (lambda: batches((X, Y), 8, shuffle=True, seed=2), "seed=2"),
        (lambda: batches((X, Y), 8, sampler=[1]), "sampler=True"),
    ],
)
def test_a_state_of_other_batches_is_refused_with_the_difference(other: Any, named: str) -> None:
    source = batches((X, Y), 8, shuffle=True, seed=1)
    with pytest.raises(DataError, match=f"not what they were(.|\n)*{named}(.|\n)*want"):
        other().seek(committed(source))


def test_random_split_of_tensors_stays_in_memory() -> None:
    first, _ = random_split(TensorDataset(X, Y), [12, 8], torch.Generator().manual_seed(0))
    before = rng()
    assert same(list(batches(first, 5)), list(DataLoader(first, batch_size=5, generator=torch.Generator())))
    assert equal_rng(rng(), before)


def test_the_data_set_receives_the_epoch() -> None:
    class Reported(Augmented):
        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __getitem__(self, index: int) -> int:
            return self.epoch

    for workers in (0, 1):
        assert [batch.tolist() for batch in batches(Reported(2), 2, seed=1, workers=workers).epoch(5)] == [[5, 5]]


def test_descriptions_say_rows_batches_and_order() -> None:
    assert batches((X, Y), 8, shuffle=True).describe() == "20 rows in batches of 8 from memory, shuffled"
    assert batches(Augmented(), 8, drop_last=True).describe() == "16 rows in batches of 8 from Augmented, in order"


@pytest.mark.parametrize(
    ("call", "kind", "named"),
    [
        (lambda: batches((X, Y)), SettingError, r"batch_size=None(.|\n)*at least 1(.|\n)*batches\(data, 64\)"),
        (lambda: batches((X, Y), 0), SettingError, "batch_size=0"),
        (lambda: batches((X, Y), True), SettingError, "batch_size=True"),
        (lambda: batches((X, Y), 8, workers=-1), SettingError, "workers=-1"),
        (lambda: batches((X, Y), 8, seed=1.5), SettingError, "seed=1.5"),
        (lambda: batches((X, Y), 8, shuffle="yes"), SettingError, "shuffle='yes'"),
        (lambda: batches((X, Y), 8, collate=3), SettingError, "collate=3"),
        (lambda: batches((X, Y), 8, per_rank=8), SettingError, "batch_size=8, per_rank=8(.|\n)*one of the two"),
        (lambda: batches(X, per_rank=0), SettingError, "per_rank=0"),
        (lambda: batches(X, 8, shuffle=True, sampler=[1]), SettingError, "one of the two"),
        (lambda: batches(X, 8, sampler=iter([1])), SettingError, "iterated again in each epoch"),
        (lambda: batches(X, 8, sampler=[]), DataError, "has 0 rows"),
        (lambda: list(batches(X, 8, sampler=[3, 20])), DataError, "gave 20(.|\n)*from 0 to 19"),
        (lambda: list(batches(X, 8, sampler=[[3, 4]])), DataError, r"batch_sampler=\.\.\."),
        (lambda: list(batches(X, 8, sampler={}.keys())), DataError, "has 0 rows"),
        (lambda: list(batches(X, 8, sampler=BatchSampler(range(4), 2, False))), DataError, r"gave \[0, 1\]"),
        (lambda: batches(X[:0], 8), DataError, "data set of 0 rows"),
        (lambda: batches(Augmented(0), 8), DataError, "data set of 0 rows"),
        (lambda: batches(X, 32, drop_last=True), DataError, "20 rows, batch_size 32, drop_last=True leaves 0 batches"),
        (lambda: batches((X, Y[:3]), 8), DataError, r"number of rows(.|\n)*\(20, 2\)(.|\n)*\(3,\)(.|\n)*list"),
        (lambda: batches((X, [1, 2]), 8), DataError, r"\[1\](.|\n)*no array(.|\n)*np.asarray"),
        (lambda: batches({"x": X, "y": 3}, 8), DataError, r"\['y'\](.|\n)*int"),
        (lambda: batches(torch.tensor(3.0), 8), DataError, "has no rows"),
        (lambda: batches(np.array(["a"]), 8), DataError, "no tensor of this array(.|\n)*<U1"),
        (lambda: batches([X, Y], 8), DataError, r"batches\(\(x, y\)"),
        (lambda: batches(DataLoader(TensorDataset(X)), 8), DataError, "use it as it is"),
        (lambda: batches((x for x in X), 8), DataError, "generator(.|\n)*map-style"),
        (lambda: batches("text", 8), DataError, "no data set of rows"),
    ],
)
def test_mistakes_are_refused_with_what_to_write(call: Any, kind: type[Exception], named: str) -> None:
    with pytest.raises(kind, match=named):
        call()


class Looked(Dataset):
    """Rows that are the same one by one and many at once."""

    def __init__(self, rows: Any = None) -> None:
        self.asked: list[list[int]] = []
        self.rows = rows

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return X[index] + 1, 3 * index

    def __getitems__(self, indices: list[int]) -> Any:
        self.asked.append(indices)
        return [self[index] for index in indices] if self.rows is None else self.rows(indices)


class OneByOne(Looked):
    __getitems__ = None


@pytest.mark.parametrize("shuffle", [False, True])
def test_rows_that_are_fetched_many_at_once_are_what_they_are_one_by_one(shuffle: bool) -> None:
    data = Looked()
    for several in (data, Subset(data, range(20))):
        data.asked.clear()
        ours = list(batches(several, 8, shuffle=shuffle, seed=1))
        assert same(ours, list(batches(OneByOne(), 8, shuffle=shuffle, seed=1)))
        assert [len(asked) for asked in data.asked] == [8, 8, 4]
        assert same(list(batches(several, 8, shuffle=shuffle, seed=1, workers=2)), ours)
    assert same(list(batches(Looked(), 8)), list(DataLoader(Looked(), batch_size=8)))


@pytest.mark.parametrize("rows", [lambda indices: (X[indices], Y[indices]), lambda indices: [(X[0], 1)]])
def test_many_rows_at_once_that_are_none_are_refused_with_what_to_write(rows: Any) -> None:
    named = r"given 8 row numbers(.|\n)*a (tuple of 2|list of 1)(.|\n)*a list of 8 rows(.|\n)*collate=collate"
    with pytest.raises(DataError, match=named):
        next(iter(batches(Looked(rows), 8)))
    whole = batches(Looked(rows), 8, collate=lambda batch: batch)
    assert len(next(iter(whole))) == len(rows([0, 1]))
