"""Data with a state of their own are asked for it; what cannot be resumed exactly is said, or refused."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from passes import Globally, Passing, alike, rest, resumed, trained
from sources import READY, Noisy, Stream, X, Y, committed, seeded
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from trainwright import Checkpoint, Trainer
from trainwright.core.errors import DataError
from trainwright.data.opening import batches, open_source
from trainwright.data.source import require_resume
from trainwright.data.streams import Continuing


class Remembers:
    """Batches that know their own position, and draw from a generator of their own."""

    def __init__(self) -> None:
        self.at = 0
        self.own = [random.Random(2)]

    def __iter__(self) -> Iterator[Any]:
        while self.at < 5:
            self.at += 1
            yield torch.tensor([self.at + self.own[0].random()])
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "own": self.own[0].getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]
        self.own[0].setstate(state["own"])


class RemembersRows(Remembers, IterableDataset):
    """The same as a data set of rows."""


class Rolling(Noisy):
    """Rows that draw from a generator of the data set's own, which it gives when asked."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(4)

    def __getitem__(self, index: int) -> Any:
        if get_worker_info() is not None and not hasattr(self, "begun"):
            self.begun = self.rng.random(get_worker_info().id + 1)
        return index, self.rng.random()

    def state_dict(self) -> dict[str, Any]:
        return {"rng": self.rng.bit_generator.state, "begun": hasattr(self, "begun")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rng.bit_generator.state = state["rng"]
        if state["begun"]:
            self.begun = True


def opened(data: Any) -> Any:
    source = open_source(data)
    require_resume(source)
    return source


def test_a_half_fetched_window_of_an_iterable_is_not_lost() -> None:
    table, saved = trained(opened(Remembers()), [(1, 3)], window=2)
    assert alike(resumed(opened(Remembers()), saved[1, 3], 1, 2), rest(table, 1, 2))
    for elsewhere in (1, 3):
        with pytest.raises(DataError, match=rf"cannot continue after {elsewhere} batches(.|\n)*resume_data=False"):
            resumed(opened(Remembers()), saved[1, 3], 1, elsewhere)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_of_torchdata_is_asked_for_its_position(workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> Any:
        return stateful.StatefulDataLoader(Rolling(), batch_size=4, num_workers=workers)

    seeded()
    table, saved = trained(opened(make()), [(0, 1), (1, 2), (2, 0)])
    for at in saved:
        assert alike(resumed(opened(make()), saved[at], *at), rest(table, *at)), at


class Restless(Globally):
    """A sampler that draws from Python's own generator all the time."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(20):
            yield random.randrange(20)


def test_a_sampler_that_keeps_drawing_is_refused_with_workers_and_warned_of_without() -> None:
    def make(workers: int) -> Any:
        return DataLoader(TensorDataset(X, Y), batch_size=4, sampler=Restless(), num_workers=workers)

    with pytest.raises(
        DataError, match=r"the sampler Restless draws from(.|\n)*with 2 workers no resume(.|\n)*Generator"
    ):
        list(opened(make(2)).epoch(0))
    with pytest.warns(
        UserWarning, match="the sampler Restless draws from(.|\n)*only where training itself draws nothing"
    ):
        list(opened(make(0)).epoch(0))
    with pytest.warns(UserWarning, match="the sampler Restless draws from"):
        source = batches((X, Y), 4, sampler=Restless())
        require_resume(source)
        list(source.epoch(0))
    for workers in (0, 2):  # nobody asked for a checkpoint
        assert len(list(open_source(make(workers)).epoch(0))) == 5


def test_a_sampler_that_keeps_drawing_is_read_past_without_workers() -> None:
    def make() -> Any:
        return opened(DataLoader(Noisy(), batch_size=4, sampler=Restless()))

    seeded()
    source = make()
    start = random.getstate(), torch.get_rng_state(), np.random.get_state()
    with pytest.warns(UserWarning, match="draws from"):
        iterator = source.epoch(0)
        table = [repr(next(iterator)) for _ in range(2)]
        kept = committed(source)
        table += [repr(batch) for batch in iterator]
    again = make()
    again.seek(kept)
    random.setstate(start[0]), torch.set_rng_state(start[1]), np.random.set_state(start[2])
    with pytest.warns(UserWarning, match="draws from"):
        assert ([repr(batch) for batch in again.epoch(0, skip=2)] == table[2:]) is True


class Hides(Noisy):
    """A data set with a generator that nobody can ask for."""

    def __init__(self) -> None:
        self.transform = type("Jitter", (), {})()
        self.transform.rng = np.random.default_rng()


class Jitters:
    """A collate function with a generator of its own."""

    def __init__(self) -> None:
        self.rng = random.Random(1)

    def __call__(self, rows: list[Any]) -> Any:
        return default_collate(rows)


class Wraps(Sampler[int]):
    """A sampler around another one, which has a generator of its own."""

    def __init__(self) -> None:
        self.inner = RandomSampler(range(20), generator=torch.Generator())

    def __iter__(self) -> Iterator[int]:
        return iter(self.inner)


def started() -> Any:
    loader = DataLoader(Noisy(), num_workers=1, persistent_workers=True)
    next(iter(loader))
    return loader


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (lambda: READY, ""),
        (lambda: batches(X, 4, shuffle=True), ""),
        (lambda: DataLoader(Noisy(), shuffle=True, num_workers=2, persistent_workers=True), ""),
        (Remembers, ""),
        (lambda: DataLoader(Rolling(), num_workers=2), ""),
        (lambda: (batch for batch in READY), "reads a new generator up to the saved position"),
        (Stream, "reads Stream up to the saved position: exact only if it yields the same batches again"),
        (lambda: DataLoader(Stream()), "reads the training data (Stream) up to the saved position: exact only if"),
        (lambda: DataLoader(Noisy(), num_workers=1, in_order=False), "write in_order=True"),
        (lambda: Passing(Noisy()), "reads the training data again (Passing iterates in its own way): exact"),
        (
            lambda: DataLoader(Hides()),
            r"dataset.transform.rng is a generator that no checkpoint holds; draw from",
        ),
        (lambda: batches(Hides(), 4), r"dataset.transform.rng is a generator that no checkpoint holds; draw from"),
        (lambda: DataLoader(Subset(Rolling(), [1, 2])), "dataset.dataset.rng is a generator that no checkpoint holds"),
        (lambda: DataLoader(Noisy(), collate_fn=Jitters()), "collate_fn.rng is a generator that no checkpoint holds"),
        (lambda: batches(Noisy(), 4, collate=Jitters().__call__), "collate_fn.rng is a generator that no checkpoint"),
        (lambda: DataLoader(Noisy(), sampler=Wraps()), "sampler.inner.generator is a generator that no checkpoint"),
        (lambda: batches(X, 4, sampler=Wraps()), "sampler.inner.generator is a generator that no checkpoint holds"),
        (lambda: batches(Rolling(), 4, workers=2), "the state of Rolling in workers is not saved; write workers=0"),
        (started, "the persistent workers were started before fit"),
        (lambda: lambda epoch: Stream(), "reads Stream up to"),
    ],
)
def test_what_is_not_known_to_resume_exactly_is_said_before_training(data: Any, said: str) -> None:
    source = open_source(data())
    assert said in source.resume_caveat
    assert bool(said) == bool(source.resume_caveat)
    if source.length is None or source.repeatable:
        assert Continuing(source).resume_caveat == source.resume_caveat


def test_the_header_of_a_run_with_checkpoints_says_it(tmp_path: Path, capsys: Any) -> None:
    for checkpoint in (None, Checkpoint(tmp_path / "run")):
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(torch.rand(20, 3), torch.rand(20, 2)), batch_size=4, sampler=Wraps())
        Trainer(model, optimizer, nn.MSELoss(), checkpoint=checkpoint).fit(loader, epochs=1)
        said = "sampler.inner.generator is a generator that no checkpoint holds"
        assert (said in " ".join(capsys.readouterr().out.split())) == (checkpoint is not None)


@pytest.mark.parametrize(
    ("make", "other", "named"),
    [
        (
            lambda: DataLoader(Noisy(), batch_size=4),
            lambda: DataLoader(Noisy(), batch_size=5),
            r"have  batch_size=5(.|\n)*want  batch_size=4",
        ),
        (lambda: DataLoader(Noisy()), lambda: DataLoader(TensorDataset(X[:7])), r"have  rows=7(.|\n)*want  rows=20"),
        (
            lambda: DataLoader(Noisy(), shuffle=True),
            lambda: DataLoader(Noisy()),
            "have  sampler=SequentialSampler/BatchSampler(.|\n)*want  sampler=RandomSampler/BatchSampler",
        ),
        (lambda: READY, lambda: READY[:2], r"have  batches=2(.|\n)*want  batches=3"),
        (lambda: batches(X, 4), lambda: batches(X, 5), r"have  batch_size=5"),
        (
            lambda: Continuing(open_source(DataLoader(Noisy(), batch_size=4))),
            lambda: Continuing(open_source(DataLoader(Noisy(), batch_size=5))),
            r"have  batch_size=5",
        ),
    ],
)
def test_other_data_are_refused_with_the_difference(make: Any, other: Any, named: str) -> None:
    with pytest.raises(DataError, match=named + r"(.|\n)*or fit\(..., resume_data=False\)"):
        open_source(other()).seek(open_source(make()).position())


def test_another_number_of_workers_is_said() -> None:
    two, three = (open_source(DataLoader(Noisy(), num_workers=n)) for n in (1, 2))
    said = three.seek(committed(two))
    assert said == "resumed with num_workers=2, saved with 1: the rows are the same, their random draws are not"


class Picklable(Dataset[Any]):
    """Rows for workers that are not forked."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index) + torch.rand(1)


@pytest.mark.slow
def test_workers_that_are_spawned_resume_too() -> None:
    def make() -> Any:
        return opened(DataLoader(Picklable(), batch_size=3, num_workers=1, multiprocessing_context="spawn"))

    seeded()
    source = make()
    start = torch.get_rng_state()
    iterator = source.epoch(0)
    next(iterator)
    kept = committed(source)
    table = [batch.tolist() for batch in iterator]
    torch.set_rng_state(start)
    again = make()
    again.seek(kept)
    assert [batch.tolist() for batch in again.epoch(0, skip=1)] == table


def test_a_pass_leaves_the_loader_as_the_plain_loop_leaves_it() -> None:
    loader = DataLoader(Noisy(), batch_size=4, num_workers=2, persistent_workers=True, generator=torch.Generator())
    before = {name: value for name, value in vars(loader).items() if name != "_iterator"}
    list(opened(loader).epoch(0))
    assert {name: value for name, value in vars(loader).items() if name != "_iterator"} == before
    workers = [process.pid for process in loader._iterator._workers]
    assert all(type(batch) is list for batch in loader)  # the user's own pass, by the same workers
    assert [process.pid for process in loader._iterator._workers] == workers
    list(opened(loader).epoch(0))
    assert [process.pid for process in loader._iterator._workers] == workers
