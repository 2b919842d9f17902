"""`workers="auto"`: how many processes fetch a data set's batches, by what fetching and training take here.

Rows draw by (seed, epoch, row) wherever they are fetched. So the choice may fall, and be taken back, between any two
batches: neither the order nor a number depends on it.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import time
import weakref
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import chain
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from trainwright.core.device import usable_cores
from trainwright.data.bits import same_bits
from trainwright.data.dataloader.order import draws_at_most_at_first
from trainwright.data.dataset_fingerprint import Fingerprint, why_not_sent
from trainwright.data.generators import hidden_in, knows_its_state
from trainwright.data.seeded import SeededRows
from trainwright.distributed.batch_layout import Shard

if TYPE_CHECKING:
    from trainwright.data.jobs import JobPool

MEASURED = 1.0
"""Seconds of fetching and training that are measured before the choice."""
CHEAP = 1e-3
"""Seconds: to have a batch sent by a process takes nearly as long."""
WORTH = 0.05
"""Of the whole time, what fetching takes at least for workers to be worth it."""
GAIN = 0.95
"""Of the time without workers, what the time with them is at most; else they are given up."""
HANGS_AFTER = 60.0
"""Seconds without a batch, and 50 times what one takes, after which workers that were chosen are done without."""
_WARM = 2
"""First batches that are left out: caches are filled, kernels chosen."""
_FEWEST = 5
"""Batches that are measured at least."""
_PREFETCHED = 3
"""Batches of a worker that are on their way, and one that is in use."""
_SHARED_MEMORY = "/dev/shm"
_END = object()
_POOLS: weakref.WeakSet[JobPool] = weakref.WeakSet()
"""The workers of all sources: together they are no more than there are cores."""


class Pass(NamedTuple):
    """One pass over the data: what the rows are asked for with."""

    seed: int
    epoch: int
    rows: Iterator[Sequence[int]]
    """The row numbers of each batch."""
    asks_ahead: bool
    """Whether the order stays what it is when it is asked for before the batches are."""
    keeps: bool
    """Whether workers stay for the next pass."""
    name: str
    processes: int = 1
    """How many processes the run has."""


class _Probe(NamedTuple):
    """A batch that was fetched here, and that every worker must give too."""

    rows: Sequence[int]
    batch: Any


class ChosenWorkers:
    """Fetches batches here, measures, and has processes fetch them where that is faster and exact.

    Copies of a source share one; a pass beside another one that has the workers is fetched here.
    """

    def __init__(self, data: SeededRows) -> None:
        self._data = data
        self._times: list[tuple[float, float]] = []
        """Seconds of fetching, and of what is done with the batch, for each batch that was measured."""
        self._sent_times: list[tuple[float, float]] = []
        """Seconds of waiting for a batch of the workers, and of what is done with it."""
        self._is_judged = False
        """Whether these were compared with those."""
        self._warm = _WARM
        self.workers: int | None = None
        """How many; None until it is chosen."""
        self.reason = ""
        """Why so many."""
        self._news = ""
        """What nobody has been told yet."""
        self._pool: JobPool | None = None
        self._seen: Fingerprint | None = None
        """The data set as it was when the workers came."""
        self._is_reading = False
        if knows_its_state(data.dataset) or hidden_in(data.dataset):
            self._settle(0, "it has a state of its own")

    def describe(self) -> str:
        """How many workers there are, where there are any."""
        return f", {self.workers} worker{'s' if self.workers > 1 else ''}" if self.workers else ""

    def take_news(self) -> str:
        """What was chosen and why, in a line; "" where nothing is, or that was told."""
        news, self._news = self._news, ""
        return news

    def begin(
        self,
        rows: Iterator[Sequence[int]],
        *,
        seed: int,
        epoch: int,
        name: str,
        sampler: Any,
        part: Shard | None,
        keeps: bool,
    ) -> Iterator[Any]:
        """The batches of a pass over these `rows` of a `sampler`, or of an order of our own where it is None."""
        # Torch's own samplers, and sequences, give the same order to whoever asks ahead.
        ahead = sampler is None or isinstance(sampler, Tensor) or draws_at_most_at_first(sampler)
        processes = 1 if part is None else part.size
        what = Pass(seed, epoch, rows, asks_ahead=ahead, keeps=keeps, name=name, processes=processes)
        if self.workers == 0 or self._is_reading or not what.asks_ahead:
            return self._here(what, what.rows)
        return self._read(what)

    def end(self) -> None:
        """End the workers; a later pass has others."""
        pool, self._pool = self._pool, None
        if pool is not None:
            _POOLS.discard(pool)
            pool.end()

    def _read(self, what: Pass) -> Iterator[Any]:
        self._is_reading = True
        try:
            probe = None
            if self.workers is None:
                probe = yield from self._measured(what)
            if self.workers:
                yield from self._sent(what, probe)
            else:
                yield from self._here(what, what.rows)
        finally:
            self._is_reading = False
            if not what.keeps:
                self.end()

    def _here(self, what: Pass, rows: Iterator[Sequence[int]]) -> Iterator[Any]:
        fetch = self._data.fetch
        for numbers in rows:
            yield fetch(what.seed, what.epoch, numbers)

    def _measured(self, what: Pass) -> Generator[Any, None, _Probe | None]:
        """Fetch here until enough is known to choose; returns the batch that the workers are tried with."""
        clock = time.perf_counter
        for numbers in what.rows:
            chosen = self._best(what) if self._knows_enough() else 0
            seen = Fingerprint(self._data) if chosen else None
            begun = clock()
            batch = self._data.fetch(what.seed, what.epoch, numbers)
            took = clock() - begun
            kept = None
            if seen is not None:
                self._settle(*self._allowed(chosen, batch, seen))
                kept = self._copied(batch) if self.workers else None
            given = clock()
            yield batch
            if self._warm:
                self._warm -= 1
            else:
                self._times.append((took, clock() - given))
            if self.workers is not None:
                return _Probe(numbers, kept) if self.workers else None
        return None

    def _copied(self, batch: Any) -> Any:
        """The batch as it is before a step may write into it."""
        try:
            return deepcopy(batch)
        except Exception as error:  # copying runs code of any class
            self._settle(0, f"{self.reason}; its batches cannot be copied: {_last_line(error)}")
            return None

    def _knows_enough(self) -> bool:
        number = len(self._times)
        if number < _FEWEST:
            return False
        return sum(map(sum, self._times)) >= MEASURED or (number == _FEWEST and self._median(0) < CHEAP)

    def _median(self, which: int) -> float:
        return median(one[which] for one in self._times)

    def _best(self, what: Pass) -> int:
        """How many workers are worth it; where none is, that is settled."""
        fetching, training = self._median(0), max(self._median(1), 1e-6)
        cores = max(1, usable_cores() // _on_this_machine(what.processes)) - sum(pool.workers for pool in _POOLS)
        took = f"a batch takes {_told(fetching)} to fetch and {_told(training)} to train on"
        if fetching < max(CHEAP, WORTH * (fetching + training)):
            self._settle(0, took, is_news=False)
            return 0
        if cores < 2 or not _forks():
            self._settle(0, f"{took}; no core is free" if cores < 2 else f"{took}; new processes would run the script")
            return 0
        self.reason = took
        # As many as keep up with training, or share the cores with it.
        busy = round(cores * fetching / (fetching + training))
        return max(1, min(math.ceil(fetching / training), busy, cores))

    def _allowed(self, number: int, batch: Any, seen: Fingerprint) -> tuple[int, str]:
        """So many workers, or none where they could not give what is given here; and why."""
        if seen.goes_on:
            return 0, f"{self.reason}; it holds a generator, an iterator or a file"
        if not seen.is_same(closely=True):
            return 0, f"{self.reason}; it changes while it is read"
        why = why_not_sent(self._data)
        if why:
            return 0, f"{self.reason}; it {why}"
        room = _room()
        fitting = number if room is None else room // (2 * _PREFETCHED * max(1, _size(batch)))
        if not fitting:
            return 0, f"{self.reason}; {_SHARED_MEMORY} has {(room or 0) >> 20} MB"
        return min(number, fitting), self.reason

    def _settle(self, workers: int, reason: str, *, is_news: bool = True) -> None:
        self.workers, self.reason = workers, reason
        number = f"{workers or 'no'} worker{'' if workers == 1 else 's'}"
        self._news = f"{self._data.describe()}: {number} ({reason})" if is_news and self._times else ""

    def _sent(self, what: Pass, probe: _Probe | None) -> Iterator[Any]:
        """Have the workers fetch; where they do not give what would be given here, fetch what is left here."""
        clock, pending = time.perf_counter, deque[Sequence[int]]()
        given, why = self._begun(what, _noting(what.rows, pending), probe)
        while not why:
            begun = clock()
            batch, why = self._next(given)
            if batch is _END:
                return
            if why:
                break
            pending.popleft()
            came = clock()
            yield batch
            if not self._is_judged:
                self._sent_times.append((came - begun, clock() - came))
                why = self._judged()
        self._settle(0, why)
        self.end()
        yield from self._here(what, chain(pending, what.rows))

    def _judged(self) -> str:
        """Say whether batches come no faster than they did without workers, as soon as enough of them have come."""
        number = len(self._sent_times)
        if number < _FEWEST * (self.workers or 1) or sum(map(sum, self._sent_times)) < MEASURED:
            return ""
        self._is_judged = True
        now = sum(waited for waited, _ in self._sent_times) / number + median(one[1] for one in self._sent_times)
        before = self._median(0) + self._median(1)
        if now <= GAIN * before:
            return ""
        return f"{self.reason}; with {self.workers} beside it {_told(now)} in place of {_told(before)}"

    def _begun(self, what: Pass, rows: Iterator[Sequence[int]], probe: _Probe | None) -> tuple[Iterator[Any], str]:
        """A pass of the workers, each tried with the probe; and why they are of no use, or ""."""
        assert self.workers
        tried = 0 if probe is None else self.workers
        try:
            pool = self._ready()
            probes = [] if probe is None else [probe.rows] * tried
            given = pool.begin(chain(probes, rows), seed=what.seed, epoch=what.epoch, name=what.name)
        except Exception as error:  # whatever keeps processes from coming: the batches can be fetched here
            return iter(()), f"they did not start: {_last_line(error)}"
        for _ in range(tried):
            batch, why = self._next(given)
            if why or probe is None or not same_bits(batch, probe.batch):
                return given, why or "its rows are not the same in other processes, bit for bit"
        return given, ""

    def _next(self, given: Iterator[Any]) -> tuple[Any, str]:
        """The next batch, and why it is of no use, or ""."""
        assert self._seen is not None
        try:
            batch = next(given, _END)
        except Exception as error:  # fetched here, its rows raise it again where it is theirs
            return None, f"one failed: {_last_line(error)}"
        return batch, "" if self._seen.is_same(closely=False) else "it was changed while they had it"

    def _ready(self) -> JobPool:
        """The workers, new where the data set may be another than they have."""
        from trainwright.data.jobs import JobPool

        if self._pool is not None and self._seen is not None and self._is_surely(self._seen):
            return self._pool
        self.end()
        self._seen = Fingerprint(self._data)
        self._pool = JobPool(self._data, self.workers or 0, timeout=HANGS_AFTER + 50 * self._median(0))
        _POOLS.add(self._pool)
        return self._pool

    def _is_surely(self, seen: Fingerprint) -> bool:
        """Whether the data set is known to be as it was; one that was told the epoch may be another."""
        told = callable(getattr(self._data.dataset, "set_epoch", None))
        return seen.sure and not told and seen.is_same(closely=True)


def _noting(rows: Iterator[Sequence[int]], pending: deque[Sequence[int]]) -> Iterator[Sequence[int]]:
    for numbers in rows:
        pending.append(numbers)
        yield numbers


def _size(batch: Any) -> int:
    """Bytes of the tensors of a batch."""
    if isinstance(batch, Tensor):
        return batch.numel() * batch.element_size()
    inside = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return sum(map(_size, inside))


def _on_this_machine(processes: int) -> int:
    """How many of so many processes of a run may be on this machine; all where nobody tells."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return min(processes, max(1, int(told))) if told.isdecimal() else processes


def _room() -> int | None:
    """Bytes that are free for batches on their way; None where there is no such place."""
    if not hasattr(os, "statvfs") or not os.path.isdir(_SHARED_MEMORY):
        return None
    room = os.statvfs(_SHARED_MEMORY)
    return room.f_bavail * room.f_frsize


def _forks() -> bool:
    """Whether a new process begins as a copy of this one, and this one may have any."""
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    return method == "fork" and not multiprocessing.current_process().daemon


def _last_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[-1][:160]


def _told(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.{0 if seconds >= 0.01 else 1}f} ms"
