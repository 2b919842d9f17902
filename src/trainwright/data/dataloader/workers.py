"""Worker processes of a loader, which send their random states with the batches; notes on their errors."""

from __future__ import annotations

import array
import atexit
import os
import re
import signal
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from multiprocessing import parent_process
from typing import Any
from warnings import warn

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from trainwright.core.errors import NOTE, DataError, listed
from trainwright.core.rng import host_random_state, set_random_state
from trainwright.core.torch_private import (
    EndOfIterable,
    ExceptionWrapper,
    LoaderWorkers,
    ResumeIteration,
    error_if_any_worker_fails,
    forget_workers,
    index_queues,
    is_shut_down,
    is_started,
    replace_worker_messages,
)
from trainwright.core.trees import leaves_of
from trainwright.data.data_state import is_stateful, no_state_error
from trainwright.data.seeded import mixed
from trainwright.data.sharding import set_part
from trainwright.distributed.mesh import Shard

HANGS_AFTER = 600.0
"""Seconds without a batch from any worker after which a loader without `timeout` counts as hanging."""


class WorkerStates:
    """The random states of the workers of one pass: now, and after the committed batches."""

    def __init__(self, given: int = 0) -> None:
        self.states: dict[int, State] = {}
        """By worker: the states that have changed since its start."""
        self.seed: int | None = None
        """The seed of the workers; None without workers, or if they were not started by this module."""
        self.given = self.committed = given
        """The number of batches of the epoch that were yielded, and of those that were trained."""
        self.before: dict[int, State | None] = {}
        """The states at the last commit, of workers whose states have changed since."""
        self.start: dict[int, State] = {}
        """The states of persistent workers at the start of the pass."""
        self.persisted = False
        """Whether the workers were started before the pass."""
        self.ended: dict[int, State] = {}
        """The states of workers whose pass over an iterable data set has ended."""

    def commit(self) -> None:
        """Record that all batches yielded so far were trained."""
        self.committed = self.given
        self.before.clear()

    def update(self, worker: int, changed: State) -> None:
        """Record the states that came with a batch."""
        self.before.setdefault(worker, self.states.get(worker))
        self.states[worker] = {**self.states.get(worker, {}), **changed}

    def begin_pass(self, worker: int, state: State) -> None:
        """Record the state of a worker at the start of its next pass."""
        self.start[worker] = self.states[worker] = state
        self.ended.pop(worker, None)

    def position(self, number: int) -> dict[str, Any]:
        """Return the states after the committed batches, for a loader with this number of workers."""
        committed = {worker: state for worker, state in {**self.states, **self.before}.items() if state is not None}
        return {
            "number": number,
            "seed": self.seed,
            "given": self.committed,
            "persisted": self.persisted,
            "states": committed,
            "start": dict(self.start),
            "ended": dict(self.ended),
        }

    def restore(self, position: dict[str, Any], *, given: int | None, inside: bool) -> None:
        """Restore the states after `given` batches of the pass; None: its start, or its end if not `inside`."""
        if given not in (None, position["given"]):
            raise no_state_error(position["given"], given)
        if not inside:
            self.states = {**position["states"], **position["ended"]}
        else:
            self.states = dict(position["start"] if given is None else position["states"])


class Workers(LoaderWorkers):  # type: ignore[misc]
    """torch's iterator over the worker processes of a loader, with a given seed and first worker.

    `first`: the worker that fetches the first batch of the next pass; in later passes it is worker 0 again.
    """

    _failed: tuple[int, int] | None = None
    """The task that failed, and the worker that sent the error."""

    _broken = False
    """Whether a worker has died or hangs, so that workers are killed at the end, not joined."""

    def __init__(
        self, loader: Any, record: WorkerStates, *, seed: int | None = None, first: int = 0, rank: int = 0
    ) -> None:
        self.record, self.first, self._own_rank = record, first, rank
        self._sends_states = isinstance(loader.collate_fn, StateSendingCollate)
        self._given_seed = seed
        self._task_rows: dict[int, Any] = {}
        self._idle = 0.0
        self._process = os.getpid()
        try:
            with _signals_blocked(loader.multiprocessing_context):
                super().__init__(loader)
        except BaseException:
            self._broken = True
            if is_started(self):
                self._shutdown_workers()  # now, since the error keeps a reference to this object
            raise
        record.seed = self._base_seed
        _POOLS.add(self)

    def __next__(self) -> Any:
        try:
            error_if_any_worker_fails()  # a worker may have died between two batches
            given = super().__next__()
        except StopIteration:
            raise
        except Exception as error:
            self.explain(error)
            raise
        self.record.given += 1
        if not self._sends_states:
            return given
        batch, (worker, changed) = given
        if changed:
            self.record.update(worker, changed)
        return batch

    def begin_next_pass(self, record: WorkerStates, order: Any, *, first: int) -> None:
        """Begin the next pass with this order and a new record, which continues with the states of the last one."""
        record.states, record.seed, record.persisted = self.record.states, self.record.seed, True
        record.start = dict(record.states)
        self.record, self._index_sampler, self.first = record, order, first

    def explain(self, error: Exception) -> None:
        """Add a note to an error, with the worker, the rows requested from it, and a fix."""
        pids = [process.pid or 0 for process in self._workers]
        if self._failed is not None:
            task, worker = self._failed
            release_frames(error)
            explain_worker_error(error, pids=pids, worker=worker, requested=[self._task_rows.get(task)])
            return
        self._broken = True
        waited = self._task_info.get(self._rcvd_idx, (None,))
        named = worker_in_message(error, pids, waited=waited[0])
        tasks = sorted(task for task, info in self._task_info.items() if info[0] == named and len(info) == 1)
        explain_worker_error(error, pids=pids, worker=named, requested=[self._task_rows.get(task) for task in tasks])

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self._task_rows.clear()
        self._failed, self._idle = None, 0.0
        super()._reset(loader, first_iter)
        if self.first:  # otherwise a worker would silently continue from the random state of another
            raise DataError(f"torch {torch.__version__} has no setting for the first worker of a loader")

    def _next_index(self) -> Any:
        rows = super()._next_index()
        if len(self._task_rows) > 4 * (len(self._task_info) + 1):
            self._task_rows = {task: self._task_rows[task] for task in self._task_info}
        self._task_rows[self._send_idx] = rows
        return rows

    def _process_data(self, data: Any, *worker: int) -> Any:
        if isinstance(data, ExceptionWrapper):
            self._failed = (self._rcvd_idx - 1, worker[0] if worker else -1)
        return super()._process_data(data, *worker)

    def _try_get_data(self, timeout: float = 5.0) -> tuple[bool, Any]:
        found: tuple[bool, Any] = super()._try_get_data(timeout)
        self._idle = 0.0 if found[0] else self._idle + timeout
        if found[0] and isinstance(found[1][0], PassBegun) and found[1][0].worker_state is not None:
            self.record.begin_pass(*found[1][0].worker_state)
        elif found[0] and isinstance(found[1][1], PassEnded):
            worker, state = found[1][1].worker_state
            self.record.ended[worker] = state
        if not self._timeout and self._idle >= HANGS_AFTER:
            raise RuntimeError(f"DataLoader timed out after {HANGS_AFTER:g} seconds")
        return found

    def _shutdown_workers(self) -> None:
        if self._broken or any(_is_closed(queue) for queue in index_queues(self)):
            self.kill()
        super()._shutdown_workers()
        if is_shut_down(self, default=False):
            self.kill()  # a hanging worker ignores torch's SIGTERM

    def kill(self) -> None:
        """Kill the workers that are still alive."""
        if os.getpid() != self._process:
            return
        forget_workers(self)
        for process in self._workers:
            if process.is_alive():
                process.kill()

    # Torch always draws a seed; workers that continue a saved pass use the seed of that pass instead.
    @property
    def _base_seed(self) -> int:
        return self._seed

    @_base_seed.setter
    def _base_seed(self, drawn: int) -> None:
        # All ranks draw the same seed here, but their workers fetch different rows: mix in the rank.
        own = mixed(drawn, self._own_rank) >> 2 if self._own_rank else drawn
        self._seed = own if self._given_seed is None else self._given_seed

    @property
    def _worker_queue_idx_cycle(self) -> Iterator[int]:
        return self._cycle

    @_worker_queue_idx_cycle.setter
    def _worker_queue_idx_cycle(self, cycle: Iterator[int]) -> None:
        for _ in range(self.first):
            next(cycle)
        self._cycle, self.first = cycle, 0


def _is_closed(queue: Any) -> bool:
    """Return whether garbage collection has closed a queue before its iterator, so that workers never get the end."""
    finalizer = getattr(queue, "_close", None)
    return finalizer is not None and not finalizer.still_active()


@contextmanager
def _signals_blocked(context: Any) -> Iterator[None]:
    """Block signals inside the block, until new workers have set their handlers.

    For forked workers only: with other start methods, the signals would stay blocked in the workers.
    """
    method = (torch.multiprocessing if context is None else context).get_start_method()
    if method != "fork" or not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_POOLS: weakref.WeakSet[Workers] = weakref.WeakSet()


def _end_all() -> None:
    """Kill the remaining workers at exit; multiprocessing would send SIGTERM once and join them."""
    for pool in list(_POOLS):
        if not is_shut_down(pool, default=True):
            pool.kill()


atexit.register(_end_all)


SIGTERM_DELAY = 30.0
"""Seconds from a first SIGTERM to the end of a worker; the main process needs up to 20 s for its last save."""
SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGUSR1", "SIGTERM") if hasattr(signal, name))
"""Signals that a scheduler or a terminal sends to all processes of a run."""

State = dict[str, Any]
"""The changed random states of a worker as plain data: "torch", "python", "numpy" and "dataset"."""


class StateSendingCollate:
    """A collate function that adds the changed states to each batch: (batch, (worker, `State`))."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate
        self._sent: State = {}
        self._worker = 0
        self._data: Any = None
        self._ready: State = {}

    def begin(self, worker: int) -> None:
        """Record the state of a worker before its first batch, which a new worker has without a restore."""
        info = get_worker_info()
        data = None if info is None else info.dataset
        self._worker, self._data = worker, data if is_stateful(data) else None
        self._sent = self._ready = _packed(host_random_state())

    def start_pass(self) -> tuple[int, State]:
        """Return the number of this worker and its state; before its first batch, that of its start."""
        _restore_states(self._ready)  # torch has already made one iterator of the data set, which may have drawn
        return self.now()

    def __call__(self, rows: Any) -> Any:
        """Return the batch of these rows, and the states that have changed since the last batch."""
        batch = self._collate(rows)
        self._ready = {}
        now = _packed(host_random_state())
        changed = {name: state for name, state in now.items() if self._sent.get(name) != state}
        self._sent = now
        if self._data is not None:
            changed["dataset"] = self._data.state_dict()
        return batch, (self._worker, changed)

    def now(self) -> tuple[int, State]:
        """Return the number of this worker and its complete state."""
        self._ready = {}
        state = _packed(host_random_state())
        return self._worker, state if self._data is None else {**state, "dataset": self._data.state_dict()}


class PassBegun(ResumeIteration):  # type: ignore[misc]
    """A worker's message at the start of its next pass, with its state.

    Unpickled in the worker from torch's request, before the data set is iterated; an iterable data set may have drawn
    after its last batch, for rows that were dropped.
    """

    worker_state: tuple[int, State] | None = None

    def __setstate__(self, kept: dict[str, Any]) -> None:
        self.__dict__.update(kept)
        if self.worker_state is None and _sending:
            self.__dict__["worker_state"] = _sending[-1].start_pass()


class PassEnded(EndOfIterable):  # type: ignore[misc]
    """A worker's message at the end of its pass, with its state."""

    worker_state: tuple[int, State]

    def __init__(self, worker: int) -> None:
        super().__init__(worker)
        self.__dict__["worker_state"] = _sending[-1].now()


_sending: list[StateSendingCollate] = []
"""The collate function, in a worker that reads an iterable data set."""


class InitWorker:
    """A `worker_init_fn` that calls the user's, restores the random state, and leaves signals to the main process.

    A worker ends `SIGTERM_DELAY` seconds after a first SIGTERM, or at a second one. `part`: the part that `shard()`
    uses in the worker.
    """

    def __init__(
        self, given: Any, states: dict[int, State], collate: StateSendingCollate | None, *, part: Shard | None = None
    ) -> None:
        self._given = given
        self._part = part
        self._states = states
        self._collate = collate

    def __call__(self, worker: int) -> None:
        """Initialize the worker of this number."""
        leave_signals_to_main()
        if self._part is not None:
            set_part(self._part)
        if self._given is not None:
            self._given(worker)
        _restore_states(self._states.get(worker, {}))
        if self._collate is not None:
            self._collate.begin(worker)
            info = get_worker_info()
            if info is not None and isinstance(info.dataset, IterableDataset) and parent_process() is not None:
                _sending[:] = [self._collate]
                replace_worker_messages(PassBegun, PassEnded)


def leave_signals_to_main() -> None:
    """Ignore signals, since the main process may need more batches for the current update."""
    for number in SIGNALS:
        signal.signal(number, _delay_sigterm if number == signal.SIGTERM else signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _delay_sigterm(number: int, _: Any) -> None:
    signal.signal(number, signal.SIG_DFL)
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, SIGTERM_DELAY)
    else:
        os.kill(os.getpid(), number)


def _packed(state: dict[str, Any]) -> State:
    """Return the random states of torch, Python and NumPy as plain data."""
    version, words, cached = state["python"]
    packed = {
        "torch": state["torch"].numpy().tobytes(),
        "python": [version, array.array("I", words).tobytes() if words else b"", cached],
    }
    numpy = state["numpy"]
    if isinstance(numpy, tuple):
        packed["numpy"] = [numpy[0], numpy[1].tobytes(), *(float(numpy[index]) for index in (2, 3, 4))]
    return packed


def _restore_states(state: State) -> None:
    now = host_random_state()
    if "torch" in state:
        now["torch"] = torch.frombuffer(bytearray(state["torch"]), dtype=torch.uint8)
    if "python" in state:
        version, words, cached = state["python"]
        now["python"] = (version, tuple(array.array("I", words)), cached)
    if "numpy" in state:
        name, words, at, has_cached, cached = state["numpy"]
        now["numpy"] = (name, np.frombuffer(words, dtype=np.uint32), int(at), int(has_cached), cached)
    if state:
        set_random_state(now)
    info = get_worker_info()
    if "dataset" in state and info is not None:
        dataset: Any = info.dataset
        dataset.load_state_dict(state["dataset"])


_MOST_ROWS = 16
_SHARED_MEMORY = "/dev/shm"
_NO_WORKERS = "num_workers=0 fetches these rows in this process, with a debugger and the complete traceback"


def explain_worker_error(
    error: Exception, *, pids: Sequence[int], worker: int | None, requested: Sequence[Any]
) -> None:
    """Add one note to an error; type, text and traceback are not changed.

    `requested`: the rows of the missing batch, and of later batches of the same worker.
    """
    if any(note.startswith(NOTE) for note in getattr(error, "__notes__", ())):
        return
    what, why, fix = _cause(_text_of(error))
    known = worker is not None and 0 <= worker < len(pids)
    who = f"loader worker {worker} of {len(pids)} (pid {pids[worker]})" if known and worker is not None else "a worker"
    rows = "; then ".join(_rows_text(rows) for rows in requested[:4] if rows is not None)
    lines = [f"{NOTE}{who} {what}"]
    lines += [f"  {label:<9}{text}" for label, text in (("rows", rows), ("why", why), ("fix", fix)) if text]
    error.add_note("\n".join(lines))


def worker_in_message(error: Exception, pids: Sequence[int], *, waited: int | None) -> int | None:
    """Return the number of the worker whose pid is in the message of an error; `waited` without a pid."""
    lists = re.findall(r"\(pid(?:\(s\))? ([\d, ]+)\)", _text_of(error))
    named = [int(pid) for pids in lists for pid in pids.split(",")]
    if not named:
        return waited
    return next((pids.index(pid) for pid in named if pid in pids), None)


def release_frames(error: Exception) -> None:
    """Clear the frame in which torch raises an error of a worker, to break a reference cycle.

    The frame refers to the error, and the error to the iterator and its workers. Left to garbage collection, the queues
    would be closed first, and workers joined that never receive the end.
    """
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_name == "reraise":
            trace.tb_frame.clear()
        trace = trace.tb_next


def _text_of(error: Exception) -> str:
    """Return the message of an error and of its cause, which names the signal."""
    return f"{error} {error.__cause__ or ''}"


def _cause(text: str) -> tuple[str, str, str]:
    """Return what happened to the worker, the reason and a fix, as texts."""
    by_hand = "DataLoader worker (pid" in text
    if any(part in text for part in ("shared memory", "Bus error", "</torch_")):
        smaller = "fewer num_workers, a smaller prefetch_factor or smaller batches"
        fix = f"a larger {_SHARED_MEMORY} (in a container: docker run --shm-size=8g, or --ipc=host), or {smaller}"
        return "ran out of shared memory", _shared_memory_left(), fix
    if "timed out after" in text:
        fix = f"{_NO_WORKERS}; DataLoader(timeout=...) waits longer"
        return "gave no batch in time", "it hangs: a lock held when it was forked, or a file system or a network", fix
    if by_hand and "signal: Killed" in text:
        why = "SIGKILL, mostly by the system when memory runs out (see dmesg)"
        return "was killed", why, "fewer num_workers or a smaller prefetch_factor"
    if by_hand:
        return "died", "something in the data set's code, or a signal, ended the process", _NO_WORKERS
    return "raised this error", "", _NO_WORKERS


def _shared_memory_left() -> str:
    if not hasattr(os, "statvfs") or not os.path.isdir(_SHARED_MEMORY):
        return "batches go to this process through shared memory, and there was not enough of it"
    room = os.statvfs(_SHARED_MEMORY)
    free, size = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
    return f"batches go to this process through {_SHARED_MEMORY}: {free >> 20:,} MB of {size >> 20:,} MB are free now"


def _rows_text(rows: Any) -> str:
    rows = getattr(rows, "rows", rows)
    if not isinstance(rows, Iterable) or isinstance(rows, str | bytes):
        return str(rows)[:200]
    return listed([str(row)[:40] for row in rows], _MOST_ROWS) or "none"


_END = object()


def warn_of_duplicates(batches: Iterator[Any], *, workers: int, name: str) -> Iterator[Any]:
    """Yield the batches; warn if the first two batches of all workers are the same.

    Each of the two rounds must be equal bit for bit over all workers, and the rounds must differ: data may repeat one
    batch on purpose.
    """
    rounds: list[Any] = []
    for place in range(2 * workers):
        batch = next(batches, _END)
        if batch is _END:
            return
        equal = bool(place % workers) and same_bits(batch, rounds[-1])
        if not place % workers:
            rounds.append(batch)
        yield batch
        if place % workers and not equal:
            break
    else:
        if not same_bits(*rounds):
            warn(
                f"all {workers} workers give the same batches: each reads all of {name}, and every row comes "
                f"{workers} times; in its __iter__: index, total = shard(); "
                "return itertools.islice(rows, index, None, total)",
                stacklevel=2,
            )
    yield from batches


def same_bits(one: Any, other: Any) -> bool:
    """Return whether two nested batches have the same structure and types, and bitwise equal values."""
    pairs = zip_longest(leaves_of(one), leaves_of(other), fillvalue=("nowhere", None))
    return all(at == other_at and _same(leaf, other_leaf) for (at, leaf), (other_at, other_leaf) in pairs)


def _same(one: Any, other: Any) -> bool:
    """Return whether two leaves are equal; False for types that cannot be compared."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        if one.layout is not torch.strided or other.layout is not torch.strided:
            return False
        equal = one.dtype == other.dtype and one.shape == other.shape and one.stride() == other.stride()
        return equal and torch.equal(_bits(one), _bits(other))
    if isinstance(one, np.ndarray | np.generic):
        equal = one.dtype == other.dtype and one.dtype != object and one.shape == other.shape
        return equal and one.tobytes() == other.tobytes()
    return isinstance(one, str | bytes | int | float | None) and repr(one) == repr(other)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
