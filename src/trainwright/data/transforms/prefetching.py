"""`prefetch(...)`: batches that a thread reads ahead, while the one before is trained on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextvars import copy_context
from copy import deepcopy
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from trainwright.core.checks import check_whole
from trainwright.core.errors import DataError
from trainwright.core.suggestions import suggests
from trainwright.data import sharding
from trainwright.data.dataloader.order import moves_random_state
from trainwright.data.dataloader.position import length_of, set_epoch
from trainwright.data.generators import is_stateful
from trainwright.data.row_batches import Batches
from trainwright.distributed.mesh import Shard

_POLL = 0.5
"""Seconds: on Windows a wait without a limit does not hear Ctrl-C."""
_END = object()


@suggests
def prefetch(data: Iterable[Any], ahead: int = 2) -> Prefetched:
    """Batches of any iterable, of which a thread reads up to `ahead` before they are asked for.

    Order, errors and length are those of `data`, and where these have `state_dict` and `load_state_dict`, the state is
    that after the batch given last. The thread ends with the pass, or when nobody reads it any more. Reading may draw
    from the process's random state only up to the first batch: afterwards training draws at the same time, and
    DataError is raised. DataError too for `batches(...)` and a `DataLoader`, which have workers to read ahead.
    """
    check_whole(ahead, f"prefetch(ahead={ahead!r})", what="a number of batches", fix="ahead=2")
    _refuse_what_reads_ahead(data)
    kind = PrefetchedOnce if hasattr(data, "__next__") else Prefetched
    if is_stateful(data):
        kind = ToldOnce if kind is PrefetchedOnce else Told
    return kind(data, ahead)


class Prefetched:
    """An iterable of batches, read ahead in each pass; made by `prefetch`."""

    _tells = False
    """Whether the data tell their own position."""

    def __init__(self, data: Any, ahead: int) -> None:
        self._data = data
        self._ahead = ahead
        self._readers: list[_Reader] = []
        self._reading = threading.Lock()
        """Held while a batch is read: passes that overlap take turns, as they would without threads."""

    def __len__(self) -> int:
        length = length_of(self._data)
        if length is None:
            raise TypeError(f"{type(self._data).__name__} has no length")
        return length

    def __iter__(self) -> Iterator[Any]:
        return self._given(self._begun())

    def __repr__(self) -> str:
        return f"prefetch({self._data!r}, ahead={self._ahead})"

    def set_epoch(self, epoch: int) -> None:
        """Tell the data which epoch begins, where they want to hear it."""
        set_epoch(epoch, self._data)

    def close(self) -> None:
        """End the threads of all passes, each as soon as the batch is there that it is reading."""
        for reader in self._readers:
            reader.close()

    def _begun(self) -> _Reader:
        self._end_others()
        reader = _Reader(iter(self._data), self._ahead, self._reading, telling=self._data if self._tells else None)
        self._readers.append(reader)
        return reader

    def _end_others(self) -> None:
        """Have passes that nobody reads any more be over before another begins."""
        for reader in self._readers:
            if reader.is_closed:
                reader.join()
        self._readers = [reader for reader in self._readers if not reader.is_closed]

    def _given(self, reader: _Reader) -> Iterator[Any]:
        try:
            while (batch := reader.take()) is not _END:
                yield batch
        finally:
            reader.close()


class PrefetchedOnce(Prefetched):
    """Batches that can be read once, by an iterator that is its own."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        reader = self._readers[0] if self._readers else self._begun()
        batch = reader.take()
        if batch is _END:
            raise StopIteration
        return batch

    def __del__(self) -> None:
        for reader in getattr(self, "_readers", ()):
            reader.close()


class _Telling(Prefetched):
    """Data that tell their own position, in one pass at a time; it is told as it was after the batch given last."""

    _tells = True

    def state_dict(self) -> Any:
        """The state of the data after the batch that was given last."""
        return deepcopy(self._readers[-1].state if self._readers else self._data.state_dict())

    def load_state_dict(self, tree: Any) -> None:
        """Give the data a state to go on from; what was read ahead is dropped."""
        self._drop()
        self._data.load_state_dict(tree)

    def _end_others(self) -> None:
        for reader in self._drop():
            if reader.left:  # what nobody was given is read again
                self._data.load_state_dict(deepcopy(reader.state))

    def _drop(self) -> list[_Reader]:
        dropped, self._readers = self._readers, []
        for reader in dropped:
            reader.taken_over = not reader.is_closed and (reader.left or not reader.is_over)
            reader.close()
            reader.join()
        return dropped


class Told(_Telling):
    """Batches of data that tell their own position."""


class ToldOnce(PrefetchedOnce, _Telling):
    """Batches of an iterator that tells its own position."""


class _Reader:
    """The thread of one pass, and what it has read that nobody has taken yet."""

    taken_over = False
    """Whether another pass has begun over data that are in one pass at a time."""

    def __init__(self, iterator: Iterator[Any], ahead: int, turn: threading.Lock, *, telling: Any) -> None:
        self._iterator: Iterator[Any] | None = iterator
        self._ahead = ahead
        self._turn = turn
        self._telling = telling
        """What is asked for its state after each batch; None: nothing."""
        self._changed = threading.Condition()
        self._read: deque[tuple[Any, BaseException | None, Any]] = deque()
        self._pulls = 0
        self.is_over = self.is_closed = False
        self._thread: threading.Thread | None = None
        self._part: Shard | None = None
        self._taken = 0
        self.state = self._state_now()
        """What the data told after the batch that was taken last."""

    @property
    def left(self) -> bool:
        """Whether something was read that nobody has taken; asked when the thread has ended."""
        return self._pulls > self._taken

    def take(self) -> Any:
        """The next batch, or `_END`; raises what reading it has raised."""
        if self._thread is None:
            self._start()
        with self._changed:
            # The second batch is read while nobody trains, and so tells whether reading draws.
            self._wait_until(lambda: self.is_over or (len(self._read) > 0 and self._pulls > 1))
            if not self._read:
                if self.taken_over:
                    raise _overlapping()
                return _END
            batch, error, state = self._read.popleft()
            self._taken += 1
            self.state = state if error is None else self.state
            self._changed.notify_all()
        if error is None:
            return batch
        try:
            raise error
        finally:
            del error, batch  # else the error holds this frame, which holds the error

    def close(self) -> None:
        """Have the thread end after the batch in hand, and drop what was read."""
        with self._changed:
            self.is_closed = True
            self._read.clear()
            self._changed.notify_all()

    def join(self) -> None:
        """Wait for the end of the thread."""
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(_POLL)

    def _start(self) -> None:
        self._part = sharding.current_part()
        context = copy_context()
        self._thread = threading.Thread(target=lambda: context.run(self._run), name="prefetch", daemon=True)
        self._thread.start()

    def _wait_until(self, is_so: Callable[[], bool]) -> None:
        assert self._thread is not None
        while not is_so():
            if not self._thread.is_alive():
                what = "the thread that reads batches ahead is gone"
                raise DataError(what, have="a process forked while it ran", fix="prefetch(...) in the child")
            self._changed.wait(_POLL)

    def _run(self) -> None:
        sharding.set_part(self._part)
        goes_on = True
        while goes_on and self._has_room():
            read = self._pulled()
            with self._changed:
                self._pulls += 1
                goes_on = read[0] is not _END and not self.is_closed
                if not self.is_closed:
                    self._read.append(read)
                self.is_over = not goes_on
                self._changed.notify_all()
            del read
        if self.is_closed and isinstance(self._iterator, Generator):
            self._iterator.close()  # its own `finally` runs here, where it was read
        self._iterator = None
        with self._changed:
            self.is_over = True
            self._changed.notify_all()

    def _has_room(self) -> bool:
        """Wait until a batch may be read; False where nobody wants one."""
        with self._changed:
            most = max(self._ahead, 2) if self._pulls < 2 else self._ahead
            self._changed.wait_for(lambda: self.is_closed or len(self._read) < most)
            return not self.is_closed

    def _pulled(self) -> tuple[Any, BaseException | None, Any]:
        """A batch, or `_END`; the error that came in its place; the state behind it."""
        assert self._iterator is not None
        try:
            with self._turn:
                if self._pulls != 1:
                    return next(self._iterator, _END), None, self._state_now()
                batch, moved = moves_random_state(partial(next, self._iterator, _END))
                if moved:
                    raise _draws()
                return batch, None, self._state_now()
        except BaseException as error:
            return _END, error, None

    def _state_now(self) -> Any:
        return None if self._telling is None else deepcopy(self._telling.state_dict())


def _draws() -> DataError:
    return DataError(
        "prefetch(...): the data draw from the process's random state while they are read",
        have="training would draw from it at the same time, in an order that differs from run to run",
        want="data that draw from a generator of their own after their first batch",
        fix="self.generator = torch.Generator().manual_seed(...) in the data; or the data without prefetch",
    )


def _overlapping() -> DataError:
    return DataError(
        "prefetch(...): another pass has begun before this one was over",
        have="data that tell their own position, and have only one",
        want="one pass at a time",
        fix="prefetch(...) over data of their own for each use",
    )


def _refuse_what_reads_ahead(data: Any) -> None:
    from trainwright.data.sources import is_together

    what = fix = ""
    name = type(data).__name__
    if isinstance(data, Batches):
        what, fix = "batches(...) are read ahead by workers", "batches(data, 64, workers=2)"
    elif isinstance(data, DataLoader):
        what, fix = "a DataLoader is read ahead by its workers", "DataLoader(..., num_workers=2)"
    elif isinstance(data, sharding.Sharded):
        what, fix = "the mark belongs outside", "sharded(prefetch(data))"
    elif is_together(data):
        what, fix = "the loaders that are read together read ahead themselves", "together(a=prefetch(data), ...)"
    elif isinstance(data, Prefetched):
        what, fix = "they are read ahead already", "prefetch(data, ahead=4)"
    elif not hasattr(data, "__iter__"):
        what = f"a {name} is no iterable of batches"
        if callable(data):
            fix = "lambda epoch: prefetch(make(epoch))"
        elif hasattr(data, "__getitem__"):
            fix = "batches(data, 64, workers=2)"
    if what:
        raise DataError(f"prefetch({name}): {what}", want="an iterable of batches", fix=fix)
