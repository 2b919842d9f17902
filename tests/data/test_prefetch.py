"""`prefetch(...)`: what a thread reads ahead, when it ends, and that nothing but the time of reading changes."""

from __future__ import annotations

import gc
import random
import threading
import time
import traceback
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from trainwright import DataError, SettingError, Trainer, batches
from trainwright.data import prefetch, shard, sharded

HERE = threading.get_ident


def readers():
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def ended(seconds=5.0):
    """Whether all threads that read are gone, in time."""
    until = time.monotonic() + seconds
    while readers() and time.monotonic() < until:
        time.sleep(0.005)
    return not readers()


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    gc.collect()
    assert ended()


class Numbers:
    """Counts, notes who reads what, and may break."""

    def __init__(self, number=10, *, breaks_at=None):
        self.number, self.breaks_at = number, breaks_at
        self.read, self.threads, self.epochs = [], set(), []

    def __len__(self):
        return self.number

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __iter__(self):
        for number in range(self.number):
            if number == self.breaks_at:
                raise OSError("the disk is gone")
            self.read.append(number)
            self.threads.add(HERE())
            yield number


def settled(data, number):
    """Wait until `number` were read, and see that no more are."""
    until = time.monotonic() + 5
    while len(data.read) < number and time.monotonic() < until:
        time.sleep(0.002)
    time.sleep(0.02)
    return data.read == list(range(number))


@pytest.mark.parametrize("ahead", [1, 2, 7, 50])
def test_batches_come_in_their_order_from_a_thread_and_in_each_pass_anew(ahead):
    data = Numbers()
    read = prefetch(data, ahead)
    for _ in range(3):
        assert list(read) == list(range(10))
    assert len(read) == 10 and HERE() not in data.threads


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_no_more_are_read_than_asked_for(ahead):
    data = Numbers(20)
    given = iter(prefetch(data, ahead))
    assert not data.read
    assert next(given) == 0 and len(data.read) >= 2  # the second is read before: it tells whether reading draws
    assert settled(data, max(2, 1 + ahead))
    for taken in range(1, 6):
        assert next(given) == taken and settled(data, max(2, taken + 1 + ahead))


def test_an_error_comes_in_its_place_with_the_lines_that_raised_it_and_ends_the_pass():
    given = iter(prefetch(Numbers(breaks_at=4), ahead=3))
    assert [next(given) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(OSError, match="the disk is gone") as caught:
        next(given)
    lines = traceback.extract_tb(caught.value.__traceback__)
    assert lines[-1].filename == __file__ and lines[-1].line == 'raise OSError("the disk is gone")'
    with pytest.raises(StopIteration):
        next(given)


def test_an_error_that_was_raised_is_held_by_nobody_else():
    class Broken(Exception):
        pass

    def breaks():
        yield 0
        raise Broken

    gc.disable()
    try:
        given = iter(prefetch(breaks()))
        next(given)
        try:
            next(given)
        except Broken as error:
            raised = weakref.ref(error)
        assert raised() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("once", [False, True])
def test_the_thread_ends_when_nobody_reads_any_more(once):
    data = Numbers(1000)
    read = prefetch(iter(data) if once else data)
    given = iter(read)
    next(given)
    assert len(readers()) == 1
    del given, read
    gc.collect()
    assert ended() and len(data.read) < 10


def test_a_generator_is_closed_when_its_reader_stops():
    closed = []

    def generate():
        try:
            yield from range(100)
        finally:
            closed.append(True)

    read = prefetch(generate())
    next(read)
    read.close()
    assert ended() and closed == [True]
    with pytest.raises(StopIteration):
        next(read)


def test_what_can_be_read_once_goes_on_where_it_was_left():
    read = prefetch(iter(Numbers()))
    assert [next(iter(read)) for _ in range(4)] == [0, 1, 2, 3]
    assert list(read) == [4, 5, 6, 7, 8, 9] and list(read) == []


def test_two_passes_at_a_time_do_not_know_of_each_other():
    read = prefetch(Numbers())
    assert list(zip(read, read, strict=True)) == [(number, number) for number in range(10)]


def test_a_batch_that_was_given_is_held_by_nobody_else():
    read = iter(prefetch([torch.zeros(3) + number for number in range(3)][:0] or (torch.zeros(3) for _ in range(9))))
    first = weakref.ref(next(read))
    gc.collect()
    assert first() is None


def drawing(draw, *, first_only):
    yield 0
    for number in range(1, 5):
        if not first_only or number > 4:
            draw()
        yield number


@pytest.mark.parametrize(
    "draw", [random.random, np.random.rand, lambda: torch.rand(())], ids=["python", "numpy", "torch"]
)
def test_data_that_draw_from_the_process_while_they_are_read_are_refused(draw):
    read = prefetch(drawing(draw, first_only=False))
    assert next(read) == 0
    with pytest.raises(DataError, match="draw from the process's random state"):
        next(read)
    assert list(prefetch(drawing(draw, first_only=True))) == [0, 1, 2, 3, 4]


def test_what_is_drawn_up_to_the_first_batch_is_drawn_as_without_a_thread():
    def shuffled():
        rows = torch.randperm(20)
        yield from rows.split(4)

    torch.manual_seed(1)
    wanted = torch.cat(list(shuffled()))
    torch.manual_seed(1)
    found = torch.cat([(row, torch.rand(()))[0] for row in prefetch(shuffled())])
    assert torch.equal(found, wanted)


class Standing:
    """A stream that tells where it stands."""

    def __init__(self, number=12):
        self.number, self.at = number, 0

    def __iter__(self):
        while self.at < self.number:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, tree):
        self.at = tree["at"]


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_the_state_is_that_after_the_batch_given_last(ahead):
    read, plain = prefetch(Standing(), ahead), Standing()
    assert read.state_dict() == {"at": 0}
    for number, other in zip(read, plain, strict=True):
        assert number == other and read.state_dict() == plain.state_dict()
    assert read.state_dict() == plain.state_dict() == {"at": 0}


def test_a_loaded_state_drops_what_was_read_ahead_and_goes_on_from_there():
    read = prefetch(Standing(), 3)
    given = iter(read)
    for _ in range(5):
        next(given)
    time.sleep(0.02)
    read.load_state_dict({"at": 8})
    assert list(read) == [8, 9, 10, 11]


def test_a_pass_that_was_left_early_is_gone_on_with_where_it_was_left():
    read = prefetch(Standing(), 3)
    for number in read:
        if number == 4:
            break
    assert list(read) == [5, 6, 7, 8, 9, 10, 11]


def test_a_pass_over_data_with_one_position_says_so_when_another_has_begun():
    read = prefetch(Standing(), 2)
    first = iter(read)
    next(first)
    assert next(iter(read)) == 1
    with pytest.raises(DataError, match="another pass has begun"):
        list(first)


def test_a_shard_is_told_in_the_thread_as_outside():
    class Stream:
        def __iter__(self):
            for _ in range(4):
                yield shard()

    from trainwright.data.sharding import reading_part
    from trainwright.distributed.mesh import Shard

    with reading_part(Shard(2, 5)):
        read = iter(prefetch(Stream(), 3))
        assert next(read) == (2, 5)
    assert list(read) == [(2, 5)] * 3


class Rows(IterableDataset):
    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize(
    ("data", "fix"),
    [
        (lambda: batches(torch.zeros(4, 2), 2), "workers=2"),
        (lambda: DataLoader(TensorDataset(torch.zeros(4, 2))), "num_workers=2"),
        (lambda: DataLoader(Rows()), "num_workers=2"),
        (lambda: sharded([1, 2]), "sharded(prefetch(data))"),
        (lambda: prefetch([1, 2]), "ahead=4"),
        (lambda: lambda epoch: [1], "lambda epoch: prefetch(make(epoch))"),
        (lambda: 3, "iterable of batches"),
    ],
)
def test_what_cannot_be_read_ahead_is_refused_with_what_to_write(data, fix):
    with pytest.raises(DataError) as refused:
        prefetch(data())
    assert fix in str(refused.value)


@pytest.mark.parametrize("ahead", [0, -1, True, 2.0, None])
def test_ahead_is_a_number_of_batches(ahead):
    with pytest.raises(SettingError, match="ahead"):
        prefetch([1], ahead)


def test_an_epoch_is_told_to_the_data_and_a_fit_reads_them():
    class Data(Numbers):
        def __iter__(self):
            for number in super().__iter__():
                yield torch.full((4, 3), float(number)), torch.arange(4) % 2

    data, model = Data(6), nn.Linear(3, 2)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), nn.CrossEntropyLoss(), console=False)
    result = trainer.fit(prefetch(data), prefetch(data), epochs=2)
    assert result.updates == 12 and data.epochs == [0, 1]
