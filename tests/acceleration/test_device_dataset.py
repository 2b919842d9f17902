"""Data on the accelerator: what is copied there and what is not, in the same order, and only while a run lasts."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from trainwright import Fast, SettingError, batches
from trainwright.acceleration import device_dataset
from trainwright.acceleration.transfer import Moving
from trainwright.data.arrays import Table
from trainwright.data.source import Source
from trainwright.distributed.mesh import Shard

META = torch.device("meta")
X, Y = torch.arange(60.0).reshape(20, 3), torch.arange(20)


def data(given=None, **settings):
    return batches((X, Y) if given is None else given, 6, **{"shuffle": True, "seed": 1, **settings})


class Streamed(Source):
    """Data that lie in no memory."""

    def describe(self):
        return "a stream"


@pytest.fixture
def elsewhere(monkeypatch):
    """Copies are said to lie elsewhere, and hold other numbers by which they are known."""

    def on(table, device):
        there = TABLE_ON(table, torch.device("cpu"))
        there.columns = [column + 1000 for column in there.columns]
        return there

    monkeypatch.setattr(Table, "on", on)


TABLE_ON = Table.on


@pytest.mark.parametrize(
    "given", [None, Subset(TensorDataset(X, Y), [3, 9, -1, 4, 4, 0, 11, 7])], ids=["all", "subset"]
)
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("part", [None, Shard(0, 2), Shard(1, 3)])
@pytest.mark.usefixtures("elsewhere")
def test_batches_of_a_copy_have_the_rows_and_the_order_of_the_data(given, shuffle, part):
    settings = {"shuffle": shuffle, **({} if shuffle else {"seed": None})}
    plain, ours = data(given, **settings), data(given, **settings)
    for source in (plain, ours):
        source.shard(part)
    ours.reside(META)
    for epoch, skip in ((0, 0), (1, 1), (2, 0)):
        for one, other in zip(plain.epoch(epoch, skip), ours.epoch(epoch, skip), strict=True):
            one, other = (one.batch, other.batch) if part else (one, other)  # noqa: PLW2901
            assert type(one) is type(other)
            assert all(torch.equal(column + 1000, copied) for column, copied in zip(one, other, strict=True))


@pytest.mark.usefixtures("elsewhere")
def test_who_iterates_by_hand_gets_batches_on_the_host_and_so_does_everybody_afterwards():
    source = data()
    source.reside(META)
    assert all(int(y.max()) < 1000 for _, y in source) and all(int(y.min()) >= 1000 for _, y in source.epoch(0))
    source.reside(None)
    assert all(int(y.max()) < 1000 for _, y in source.epoch(0))


def test_batches_lie_on_the_device_and_their_order_is_drawn_on_the_host():
    source = data({"x": X, "y": Y})
    state = torch.get_rng_state()
    source.reside(META)
    given = list(source.epoch(0))
    assert [(one["x"].device, tuple(one["x"].shape), one["y"].dtype) for one in given] == [
        (META, (rows, 3), torch.int64) for rows in (6, 6, 6, 2)
    ]
    assert torch.equal(state, torch.get_rng_state())


def test_bytes_are_counted_of_rows_that_lie_elsewhere():
    assert data().bytes_on(META) == 20 * (3 * 4 + 8) and data().bytes_on(torch.device("cpu")) == 0
    assert data(Subset(TensorDataset(X, Y), [1, 2])).bytes_on(META) == 2 * (3 * 4 + 8)
    assert data(Subset(TensorDataset(X, Y), [1, 2]))._data.on(META).columns[0].shape == (2, 3)
    for other in ([(x, y) for x, y in zip(X, Y, strict=True)], (X, Y)):
        settings = {"workers": 1} if isinstance(other, tuple) else {}
        assert batches(other, 6, **settings).bytes_on(META) is None
    assert batches((X, Y), 6, sampler=range(4)).bytes_on(META) is None


def trainer(device_data="auto", *, device=META, move=None, counts=False, accumulate=((0, 1),)):
    hooks = SimpleNamespace(move=move, overrides_count=counts)
    return SimpleNamespace(
        device=torch.device(device), fast=Fast(device_data=device_data), _hooks=hooks, accumulate=accumulate
    )


def lines(monkeypatch, one, source, val=None, *, free=None):
    """The header's lines, and the sets that are on the device meanwhile."""
    monkeypatch.setattr(device_dataset, "free_memory", lambda device: free)
    sets = {"training": source, **(val or {})}
    with ExitStack() as undo:
        notes = device_dataset.place_data(one, source, val or {}, undo=undo)
        placed = [name for name, each in sets.items() if getattr(each, "_resident", None) is not None]
    assert all(getattr(each, "_resident", None) is None for each in sets.values())
    return notes, placed


CUDA = {"device": "meta", "move": Moving(META)}
"""What a trainer on CUDA has, but for the device."""


@pytest.fixture
def auto():
    return trainer(**CUDA)


def test_auto_copies_what_fits_into_its_share_of_free_memory_training_data_first(monkeypatch, auto):
    train, val = data(), data()
    needs = 400 + 400 * 6 // 20
    notes, placed = lines(monkeypatch, auto, train, {"val": val}, free=4 * (400 + needs))
    assert placed == ["training", "val"] and notes == ["training and val data are on meta: 800 B"]
    notes, placed = lines(monkeypatch, auto, train, {"val": val}, free=4 * (400 + needs) - 4)
    assert placed == ["training"] and "val data stay on the host" in notes[0] and len(notes) == 2
    notes, placed = lines(monkeypatch, auto, train, {"val": val}, free=4 * needs - 4)
    assert placed == [] and len(notes) == 2


def test_the_micro_batches_of_a_window_are_counted_with_the_data(monkeypatch):
    several = trainer(**CUDA, accumulate=((0, 1), (3, 3)))
    assert lines(monkeypatch, several, data(), free=4 * 760)[1] == ["training"]
    assert lines(monkeypatch, several, data(), free=4 * 759)[1] == []


def test_the_same_data_under_two_names_are_copied_once(monkeypatch, auto):
    train = data()
    notes, _ = lines(monkeypatch, auto, train, {"val": train}, free=10**9)
    assert notes == ["training data are on meta: 400 B"]


@pytest.mark.parametrize(
    "one",
    [
        trainer(False, **CUDA),
        trainer(move=None),  # on the CPU
        trainer(device="meta", move=lambda batch: batch),  # a `to_device` of the user's own
        trainer(**CUDA, counts=True),
    ],
    ids=["False", "no accelerator", "to_device", "count"],
)
def test_nothing_is_copied_where_it_is_not_wanted_or_the_users_code_meets_host_batches(monkeypatch, one):
    assert lines(monkeypatch, one, data(), free=10**9) == ([], [])


def test_true_copies_whoever_meets_the_batches_and_is_refused_where_that_cannot_be(monkeypatch):
    wanted = trainer(True, move=lambda batch: batch, counts=True)
    assert lines(monkeypatch, wanted, data(), free=520)[1] == ["training"]
    assert lines(monkeypatch, wanted, data(), free=None)[1] == ["training"]
    with pytest.raises(SettingError, match=r"the training data do not fit on meta"):
        lines(monkeypatch, wanted, data(), free=519)
    with pytest.raises(SettingError, match="not completely in memory"):
        lines(monkeypatch, wanted, Streamed(), free=10**9)


def test_auto_looks_at_nothing_else_than_data_that_can_reside(monkeypatch, auto):
    assert lines(monkeypatch, auto, Streamed(), {"val": data()}, free=10**9)[1] == ["val"]
