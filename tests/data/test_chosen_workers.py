"""`workers="auto"`: neither the order nor a number depends on how many processes are chosen."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from choosing import EPOCHS, ROWS, Augmented, Epochs, check_same, chose, ignore_those_that_run, passes, pids, source
from torch.utils.data import RandomSampler

from trainwright.data import auto_workers
from trainwright.data.bits import same_bits
from trainwright.distributed.batch_layout import Shard


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Choose after few batches, on a machine of two cores, whatever is gained; leave no process."""
    ignore_those_that_run()
    for name, value in {"MEASURED": 0.0, "CHEAP": 0.0, "WORTH": 0.0, "GAIN": 1e9}.items():
        monkeypatch.setattr(auto_workers, name, value)
    monkeypatch.setattr(auto_workers, "usable_cores", lambda: 2)
    yield
    assert pids() == set()


@pytest.mark.sample(3)
@pytest.mark.parametrize("make", [Augmented, Epochs, lambda: torch.utils.data.Subset(Augmented(), range(3, 50))])
@pytest.mark.parametrize("settings", [{}, {"shuffle": False}, {"shuffle": False, "sampler": [5, 3, 9, 0] * 12}])
def test_neither_the_order_nor_a_number_depends_on_the_choice(make: Any, settings: dict[str, Any]) -> None:
    given = check_same(make, **settings)
    assert chose(given) == 2
    assert given.describe().endswith(", 2 workers")
    assert "2 workers (a batch takes" in given.take_news()
    assert given.take_news() == ""


def test_a_fault_in_the_rows_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = auto_workers.ChosenWorkers._begun
    monkeypatch.setattr(
        auto_workers.ChosenWorkers,
        "_begun",
        lambda self, what, *rest: begun(self, what._replace(epoch=7), rest[0], None),
    )
    with pytest.raises(AssertionError):
        check_same(Augmented)


@pytest.mark.parametrize("skip", [0, 9])
@pytest.mark.parametrize(("saved", "resumed"), [("auto", 0), (0, "auto"), ("auto", "auto")])
def test_a_resume_does_not_depend_on_the_choice(saved: Any, resumed: Any, skip: int) -> None:
    expected = passes(source(Augmented(), 0))
    first = source(Augmented(), saved)
    first.keeps_workers = True
    list(first.epoch(0))
    for number, _ in enumerate(first.epoch(1)):
        if number == skip:
            break
    tree = first.state_dict()
    first.end_workers()
    second = source(Augmented(), resumed)
    second.load_state_dict(tree)
    assert same_bits(passes(second, first=1, skip=skip), expected[15 + skip :])


def test_each_of_several_processes_has_its_part_whatever_it_chose() -> None:
    for rank in range(2):
        tables = []
        for workers in (0, "auto"):
            given = source(Augmented(), workers)
            given.deal(Shard(rank, 2))
            tables.append([(one.batch, one.rows, one.whole) for epoch in range(2) for one in given.epoch(epoch)])
        assert same_bits(*tables)
        assert chose(given) == 0  # one core for each
        assert "no core is free" in given.take_news()


class Counting(Augmented):
    """Rows that depend on how many were read."""

    read = 0

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        self.read += 1
        return *super().__getitem__(index), self.read


class Drawing(Augmented):
    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(3)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return *super().__getitem__(index), self.rng.random()


class Keeping(Counting):
    def state_dict(self) -> dict[str, Any]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.read = state["read"]


class Unsent(Augmented):
    def __init__(self) -> None:
        super().__init__()
        self.transform = lambda row: row


class OfFile(Augmented):
    """A file whose position two processes would share."""

    def __init__(self) -> None:
        super().__init__()
        self.file = open(__file__, "rb")  # noqa: SIM115

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        self.file.seek(index)
        return *super().__getitem__(index), ord(self.file.read(1))

    def __del__(self) -> None:
        self.file.close()


class Inside(Augmented):
    """Rows that hardly ever show the draws of a generator that lies somewhere inside."""

    def __init__(self) -> None:
        super().__init__()
        self.augmenter = Augmented()
        self.augmenter.rng = torch.Generator().manual_seed(3)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return *super().__getitem__(index), bool(torch.rand((), generator=self.augmenter.rng) < 0.02)


class Hanging(Augmented):
    """A lock that a copy finds taken, say."""

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        if os.getpid() != Hidden.home:
            time.sleep(60)
        return super().__getitem__(index)


class Caching(Augmented):
    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[int, Any] = {}

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        self.cache[index] = self.cache.get(index) or super().__getitem__(index)
        return self.cache[index]


class Hidden(Augmented):
    """Rows that a copy in another process gives otherwise."""

    home = os.getpid()

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return *super().__getitem__(index), os.getpid() == self.home


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (Counting, "it changes while it is read"),
        (Drawing, ""),
        (Keeping, ""),
        (OfFile, "it holds a generator, an iterator or a file"),
        (Inside, "it holds a generator, an iterator or a file"),
        (Unsent, "it cannot be sent to a process"),
        (Hanging, "one failed: RuntimeError: DataLoader timed out"),
        (Caching, "it changes while it is read"),
        (Hidden, "not the same in other processes, bit for bit"),
    ],
)
def test_what_no_other_process_could_give_is_fetched_here(make: Any, named: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(auto_workers, "HANGS_AFTER", 5 if make is not Hanging else 0.5)
    given = check_same(make)
    assert chose(given) == 0
    news = given.take_news()
    assert named in news
    assert bool(news) == bool(named)


def test_a_sampler_that_draws_while_it_is_asked_is_not_asked_ahead() -> None:
    class Lazily(RandomSampler):
        def __iter__(self) -> Iterator[int]:
            return (int(torch.randint(ROWS, ())) for _ in range(40))

    tables = []
    for workers in (0, "auto"):
        torch.manual_seed(1)
        given = source(Augmented(), workers, shuffle=False, sampler=Lazily(range(ROWS)))
        tables.append(passes(given, lambda _: torch.rand(1)))
    assert same_bits(*tables)
    assert chose(given) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda data: setattr(data, "shift", data.shift + 1),
        lambda data: data.scale.add_(1),
        lambda data: setattr(data, "names", data.names[::-1]),
    ],
)
def test_a_data_set_that_is_changed_under_way_is_seen_from_the_next_batch_on(change: Any) -> None:
    given = check_same(Augmented, lambda data: lambda number: change(data) if number == 11 else None)
    assert chose(given) == 0
    assert "changed while they had it" in given.take_news()


@pytest.mark.parametrize(
    "change",
    [
        lambda data: setattr(data, "shift", data.shift + 1),
        lambda data: data.names.reverse(),
        lambda data: data.weights.__imul__(2),
        lambda data: setattr(data, "big", np.zeros(1 << 20)),
    ],
)
def test_a_data_set_that_is_changed_between_epochs_is_seen_by_workers(change: Any) -> None:
    tables = []
    for workers in (0, "auto"):
        data = Augmented()
        given, table = source(data, workers), []
        given.keeps_workers = True
        for epoch in range(EPOCHS):
            table.append([[one.clone() for one in batch] for batch in given.epoch(epoch)])
            change(data)
        given.end_workers()
        tables.append(table)
    assert same_bits(*tables)
    assert chose(given) == 2


def test_workers_stay_from_epoch_to_epoch_of_a_run_and_end_with_a_pass_elsewhere() -> None:
    given = source(Augmented())
    list(given)
    assert pids() == set()
    given.keeps_workers = True
    list(given)
    first = pids()
    list(given)
    assert pids() == first
    assert len(first) == 2
    given.end_workers()
    assert pids() == set()
    given.keeps_workers = False
    for number, _ in enumerate(given):
        if number == 3:
            assert len(pids()) == 2
            break
    assert pids() == set()


def test_a_pass_beside_another_one_is_fetched_here() -> None:
    given = source(Augmented())
    list(given.epoch(0))
    under_way = given.epoch(1)
    table = [next(under_way)]
    assert same_bits(list(given.epoch(2)), list(source(Augmented(), 0).epoch(2)))
    table += under_way
    assert same_bits(table, list(source(Augmented(), 0).epoch(1)))


def test_a_worker_that_dies_is_done_without() -> None:
    def kill(_: Any) -> Any:
        return lambda number: number == 20 and [os.kill(pid or 0, signal.SIGKILL) for pid in pids()]

    given = check_same(Augmented, kill)
    assert chose(given) == 0
    assert "one failed: " in given.take_news()


class Broken(Augmented):
    def __getitem__(self, index: int) -> tuple[Any, ...]:
        if index == 50:
            raise KeyError("the user's own")
        return super().__getitem__(index)


def test_an_error_in_a_row_is_the_users_own_in_this_process() -> None:
    given = source(Broken(), shuffle=False)
    with pytest.raises(KeyError, match="the user's own") as caught:
        list(given)
    assert caught.traceback[-1].name == "__getitem__"
    assert not getattr(caught.value, "__notes__", ())


def shifted_under_way(data: Any) -> Any:
    return lambda number: setattr(data, "shift", data.shift + 1) if number == 11 else None


def reversed_at_the_end(data: Any) -> Any:
    return lambda number: data.names.reverse() if number == 15 else None


FAULTS = {
    "workers are not tried": (auto_workers, "same_bits", lambda *_: True, (Hidden,)),
    "a change is not looked for": (
        auto_workers.Fingerprint,
        "is_same",
        lambda *_, **__: True,
        (Augmented, shifted_under_way),
    ),
    "workers keep an old copy": (
        auto_workers.ChosenWorkers,
        "_is_surely",
        lambda *_: True,
        (Augmented, reversed_at_the_end),
    ),
    "rows asked ahead are lost": (auto_workers, "_noting", lambda rows, _: rows, (Augmented, shifted_under_way)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, instead, case = FAULTS[fault]
    check_same(*case)
    monkeypatch.setattr(owner, name, instead)
    with pytest.raises((AssertionError, IndexError)):
        check_same(*case)
    for pool in list(auto_workers._POOLS):
        pool.end()
    auto_workers._POOLS.clear()
