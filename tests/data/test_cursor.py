"""Every source, killed at every batch of every epoch, continues with the batches of the undisturbed order.

One contract for all of them: `commit` when batches are trained on, `position` when the run is saved, `seek` in a new
process. Windows of two batches: half of the kills come inside a window, whose first batch is then given again.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import pytest
import torch
from passes import ORDERS, Augmented, Globally, Mixed, Passing, rest, trains
from sharded_sources import Stream as Parts
from sources import READY, Noisy, Stream, X, Y, committed, generator, seeded, text
from test_data_states import Remembers, RemembersRows, Rolling
from test_together import CASES as TOGETHER
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

from trainwright.checkpointing import tree
from trainwright.core.rng import random_state, set_random_state
from trainwright.data import bucketed, data_state, row_batches, sharded, streams, together
from trainwright.data.dataloader import workers
from trainwright.data.opening import batches, open_source
from trainwright.data.source import require_resume
from trainwright.data.streams import Continuing
from trainwright.distributed.mesh import Shard

EPOCHS, WINDOW = 3, 2
END = object()


def loader(data: Any = None, **how: Any) -> DataLoader[Any]:
    return DataLoader(Augmented() if data is None else data, **({"batch_size": 4} | how))


def shared(data: Any) -> Callable[[int], Any]:
    return lambda epoch: data


def continuing(make: Callable[[], Any]) -> Callable[[], Any]:
    """The same data, in epochs of four batches that are cut from one stream."""
    return lambda: Continuing(open_source(make()))


class Trailing(IterableDataset[Any]):
    """Draws when it is asked for an iterator, and after its last row; a batch and a part of one for each worker."""

    def __iter__(self) -> Iterator[Any]:
        start = torch.rand(1)
        return self._rows(start)

    def _rows(self, start: torch.Tensor) -> Iterator[Any]:
        for _ in range(5):
            yield start + torch.rand(1), random.random()
        torch.rand(3), random.random()


LOADER_ORDERS = [order for order in ORDERS if order not in ("in order", "shuffle", "generator", "globally", "stateful")]
SOURCES: dict[str, Callable[[], Any]] = {
    "arrays": lambda: batches((X, Y), 6, shuffle=True),
    "rows": lambda: batches(Noisy(), 6, shuffle=True),
    "rows in order, without the rest": lambda: batches(Noisy(), 6, drop_last=True),
    "rows by a sampler": lambda: batches(Noisy(), 6, sampler=RandomSampler(range(20), generator=generator())),
    "rows by a stateful sampler": lambda: batches(Noisy(), 6, sampler=Mixed()),
    "stateful rows": lambda: batches(Rolling(), 6, shuffle=True),
    "rows of workers": lambda: batches(Noisy(), 6, shuffle=True, workers=1),
    "buckets": lambda: bucketed([X[: 1 + n % 5] for n in range(20)], 4, lengths=[1 + n % 5 for n in range(20)]),
    "loader": loader,
    "shuffled loader": lambda: loader(shuffle=True),
    "loader with a generator": lambda: loader(shuffle=True, generator=generator()),
    "loader with a sampler that draws globally": lambda: loader(sampler=Globally()),
    "loader with a stateful sampler": lambda: loader(sampler=Mixed()),
    "recognized loader": lambda: loader(TensorDataset(X, Y), shuffle=True),
    "loader of a stream": lambda: loader(Stream(), batch_size=3),
    "loader of a stateful stream": lambda: loader(RemembersRows(), batch_size=2),
    "loader of a stateful data set": lambda: loader(Rolling(), shuffle=True),
    **{f"loader, {order}": lambda order=order: DataLoader(Augmented(), **ORDERS[order]()) for order in LOADER_ORDERS},
    "loader with an __iter__ of its own, with workers": lambda: Passing(
        Augmented(), batch_size=4, num_workers=2, shuffle=True
    ),
    "loader with workers": lambda: loader(shuffle=True, num_workers=2),
    "loader with one batch ahead, with workers": lambda: loader(shuffle=True, num_workers=2, prefetch_factor=1),
    "loader of a stream with persistent workers": lambda: loader(
        Trailing(), batch_size=3, num_workers=2, persistent_workers=True
    ),
    "loader with persistent workers": lambda: loader(shuffle=True, num_workers=1, persistent_workers=True),
    "loader of a stateful data set in workers": lambda: loader(Rolling(), num_workers=2),
    "list": lambda: READY,
    "iterable": Stream,
    "stateful iterable": Remembers,
    "function of the epoch": lambda: lambda epoch: loader(shuffle=True, batch_size=4 + epoch),
    "function of the epoch, shared data": lambda: shared(batches(X, 6, shuffle=True)),
    **{f"together, {name}": make for name, make in TOGETHER.items()},
    "together, with workers": lambda: together(
        a=loader(shuffle=True, num_workers=2),
        b=loader(batch_size=7, shuffle=True, num_workers=1, persistent_workers=True),
    ),
    "together, stateful": lambda: together(a=Remembers(), b=Remembers(), length="a"),
    "arrays, continuing": continuing(lambda: batches((X, Y), 6, shuffle=True)),
    "stateful rows, continuing": continuing(lambda: batches(Rolling(), 8, shuffle=True)),
    "shuffled loader, continuing": continuing(lambda: loader(shuffle=True, batch_size=7)),
    "stateful iterable, continuing": continuing(Remembers),
    "loader with workers, continuing": continuing(lambda: loader(shuffle=True, num_workers=1, batch_size=7)),
}
RANKS: dict[str, Callable[[], Any]] = {
    "arrays": SOURCES["arrays"],
    "stateful rows": SOURCES["stateful rows"],
    "shuffled loader": SOURCES["shuffled loader"],
    "loader with a generator": SOURCES["loader with a generator"],
    "list": SOURCES["list"],
    "sharded loader": lambda: sharded(loader(shuffle=True)),
    "sharded stream": lambda: sharded(Stream()),
    "sharded stateful iterable": lambda: sharded(Remembers()),
    "function of the epoch": SOURCES["function of the epoch"],
    "loader with workers": SOURCES["loader with workers"],
    "loader with persistent workers": SOURCES["loader with persistent workers"],
    "together": SOURCES["together, batches and a loader"],
    "arrays, continuing": SOURCES["arrays, continuing"],
    "sharded stream, continuing": continuing(lambda: sharded(loader(Parts(12), batch_size=1))),
}


class Kill(NamedTuple):
    """A run killed at a batch: what a checkpoint would hold."""

    epoch: int
    trained: int
    """Batches of the epoch that were trained on: the windows before the one in progress."""
    position: Any
    epoch_start: Any
    boundary: Any


def opened(data: Any, part: Shard | None = None) -> Any:
    source = open_source(data)
    require_resume(source)
    if part is not None:
        source.shard(part)
    return source


def written(position: Any) -> Any:
    """The position as a checkpoint holds it: JSON and tensors."""
    plain, tensors = tree.flatten(position)
    return tree.loads(json.dumps(plain), tensors)


def epoch_of(source: Any, epoch: int, skip: int = 0) -> Iterator[Any]:
    iterator = source.epoch(epoch, skip)
    return islice(iterator, 4 - skip) if isinstance(source, Continuing) else iterator


def trained(source: Any, at: Kill | None = None) -> tuple[list[list[str]], list[Kill]]:
    """All batches of a run, from the start or from where another was killed, and a kill before and after each."""
    table: list[list[str]] = []
    kills: list[Kill] = []
    if at is not None:
        source.seek(at.position)
        set_random_state(at.boundary)
    for epoch in range(0 if at is None else at.epoch, EPOCHS):
        skip = at.trained if at is not None and epoch == at.epoch else 0
        start = boundary = random_state()
        if not skip:
            kills.append(Kill(epoch, 0, written(committed(source)), start, boundary))
            iterator = epoch_of(source, epoch)
        else:
            assert at is not None
            set_random_state(start := at.epoch_start)
            iterator = epoch_of(source, epoch, skip)
            set_random_state(boundary)
        given: list[str] = []
        number = 0
        while True:
            if len(given) % WINDOW == 0:
                source.commit()
                number, boundary = skip + len(given), random_state()
            if number:
                kills.append(Kill(epoch, number, written(source.position()), start, boundary))
            batch = next(iterator, END)
            if batch is END:
                break
            given.append(text(batch))
            if number:
                kills.append(Kill(epoch, number, written(source.position()), start, boundary))
            trains()
        table.append(given)
    return table, kills


def check(make: Callable[[], Any], part: Shard | None = None, *, every: int = 1) -> None:
    """Kill at every batch and compare; every third run that continues is killed once more."""
    seeded()
    table, kills = trained(opened(make(), part))
    assert all(table) and len(kills) >= 2 * EPOCHS
    for index, kill in enumerate(kills[::every]):
        seeded()
        given, again = trained(opened(make(), part), kill)
        assert (given == rest(table, kill.epoch, kill.trained)) is True, kill[:2]
        if index % 3 == 0 and again:
            second = again[len(again) // 2]
            seeded()
            given, _ = trained(opened(make(), part), second)
            assert (given == rest(table, second.epoch, second.trained)) is True, (kill[:2], second[:2])


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_killed_at_any_batch_continues_with_the_undisturbed_order(name: str) -> None:
    check(SOURCES[name], every=5 if "workers" in name else 1)


@pytest.mark.parametrize("name", RANKS)
def test_a_rank_killed_at_any_batch_continues_with_its_part_of_the_order(name: str) -> None:
    check(RANKS[name], Shard(1, 2), every=5 if "workers" in name else 1)


# Each fault makes the property fail.


def order_is_not_drawn_again(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(data_state.Generators, "begin", lambda self, epoch: None)
    return "loader with a generator"


def state_of_the_data_is_that_of_the_kill(patch: pytest.MonkeyPatch) -> str:
    whole = data_state.StatefulData.position

    def position(self: Any) -> Any:
        committed = whole(self)
        return committed and {**committed, "state": self._now()["state"]}

    patch.setattr(data_state.StatefulData, "position", position)
    return "stateful rows"


def states_of_workers_are_those_of_the_kill(patch: pytest.MonkeyPatch) -> str:
    whole = workers.WorkerStates.position
    patch.setattr(
        workers.WorkerStates, "position", lambda self, number: {**whole(self, number), "states": dict(self.states)}
    )
    return "loader with workers"


def a_batch_is_left_out(patch: pytest.MonkeyPatch) -> str:
    whole = row_batches.Batches.epoch
    patch.setattr(
        row_batches.Batches, "epoch", lambda self, epoch, skip=0: whole(self, epoch, skip + (1 if skip else 0))
    )
    return "arrays"


def the_pass_before_is_forgotten(patch: pytest.MonkeyPatch) -> str:
    whole = streams.Continuing._begin_pass

    def begin(self: Any, number: int, skip: int = 0) -> None:
        self._before = None
        whole(self, number, skip)

    patch.setattr(streams.Continuing, "_begin_pass", begin)
    return "shuffled loader, continuing"


@pytest.mark.parametrize(
    "fault",
    [
        order_is_not_drawn_again,
        state_of_the_data_is_that_of_the_kill,
        states_of_workers_are_those_of_the_kill,
        a_batch_is_left_out,
        the_pass_before_is_forgotten,
    ],
)
def test_a_fault_is_seen(fault: Callable[[pytest.MonkeyPatch], str], monkeypatch: pytest.MonkeyPatch) -> None:
    name = fault(monkeypatch)
    with pytest.raises(AssertionError):
        check(SOURCES[name])
