"""torch's iterator over a loader's workers: they carry their random state home, and what ends them is named."""

from __future__ import annotations

import atexit
import os
import signal
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch

from trainwright.core.errors import DataError
from trainwright.core.torch_private import (
    ExceptionWrapper,
    LoaderWorkers,
    error_if_any_worker_fails,
    forget_workers,
    index_queues,
    is_shut_down,
    is_started,
)
from trainwright.data.dataloader import faults
from trainwright.data.dataloader.worker import SIGNALS, Again, Carrying, Ended, State
from trainwright.data.seeded import mixed
from trainwright.data.stateful import not_there

HANGS_AFTER = 600.0
"""Seconds without a batch from any worker after which a loader without a timeout of its own is taken to hang."""


class Record:
    """What the workers of one pass have told: their random states now, and when the window in hand was begun."""

    def __init__(self, given: int = 0) -> None:
        self.states: dict[int, State] = {}
        """By worker, those states that have moved since it was started."""
        self.seed: int | None = None
        """What the workers were seeded from; None where there are none, or they were started by somebody else."""
        self.given = self.boundary = given
        """Batches of the epoch that were given, and how many of them when the window in hand was begun."""
        self.before: dict[int, State | None] = {}
        """The states at that boundary of those workers whose states have moved since."""

        self.start: dict[int, State] = {}
        """The states that persistent workers had when the pass began."""
        self.kept = False
        """Whether the workers were there before the pass."""
        self.ended: dict[int, State] = {}
        """The states that iterable data sets have left their workers in, where the pass is over for these."""

    def at_boundary(self) -> None:
        """Record that all batches given so far are trained on."""
        self.boundary = self.given
        self.before.clear()

    def note(self, worker: int, moved: State) -> None:
        """Take in what came with a batch."""
        self.before.setdefault(worker, self.states.get(worker))
        self.states[worker] = {**self.states.get(worker, {}), **moved}

    def begins(self, worker: int, state: State) -> None:
        """Take in what a worker begins its next pass with; what it said of its last one is over."""
        self.start[worker] = self.states[worker] = state
        self.ended.pop(worker, None)

    def state_dict(self, number: int) -> dict[str, Any]:
        """Everything, for a loader with this number of workers."""
        kept = ("seed", "given", "boundary", "kept", "states", "before", "start", "ended")
        return {"number": number} | {name: copy(getattr(self, name)) for name in kept}

    def take_over(self, tree: dict[str, Any], *, given: int | None, inside: bool) -> None:
        """Go on with the states of a saved record: after `given` batches of its pass, or at its end or start."""
        states = tree["states"] if given is not None or not inside else tree["start"]
        if given is not None and given != tree["given"]:
            if given != tree["boundary"]:
                raise not_there([tree["given"], tree["boundary"]], given)
            states = {number: state for number, state in {**states, **tree["before"]}.items() if state is not None}
        self.states = dict(states) if inside else {**states, **tree.get("ended", {})}


class Workers(LoaderWorkers):  # type: ignore[misc]
    """torch's iterator over the worker processes of a loader, started from a given seed and with a given worker.

    `first` is the worker that is asked first in the next pass; after that pass they take turns from number 0 again.
    `rank` is the process's.
    """

    _failed: tuple[int, int] | None = None
    """The batch that an error came in the place of, and the worker that sent it."""

    _broken = False
    """Whether a worker has died or hangs, so that nobody waits for them at the end."""

    def __init__(self, loader: Any, record: Record, *, seed: int | None = None, first: int = 0, rank: int = 0) -> None:
        self.record, self.first, self._of_rank = record, first, rank
        self._carries = isinstance(loader.collate_fn, Carrying)
        self._given_seed = seed
        self._own_state: dict[int, Any] = {}
        self._idle = 0.0
        self._process = os.getpid()
        try:
            with _signals_wait(loader.multiprocessing_context):
                super().__init__(loader)
        except BaseException:
            self._broken = True
            if is_started(self):
                self._shutdown_workers()  # the error holds this object, and nobody waits for a collection
            raise
        record.seed = self._base_seed
        _ALIVE.add(self)

    def __next__(self) -> Any:
        try:
            error_if_any_worker_fails()  # one that died while nobody listened
            given = super().__next__()
        except StopIteration:
            raise
        except Exception as error:
            self.explain(error)
            raise
        self.record.given += 1
        if not self._carries:
            return given
        batch, (worker, moved) = given
        if moved:
            self.record.note(worker, moved)
        return batch

    def go_on(self, record: Record, order: Any, *, first: int) -> None:
        """Have the next pass made in this order and told to `record`, which takes over what was told so far."""
        record.states, record.seed, record.kept = self.record.states, self.record.seed, True
        record.start = dict(record.states)
        self.record, self._index_sampler, self.first = record, order, first

    def explain(self, error: Exception) -> None:
        """Add a note to an error: which worker it was, which rows it was asked for, and what to do."""
        pids = [process.pid or 0 for process in self._workers]
        if self._failed is not None:
            task, worker = self._failed
            faults.unravel(error)
            faults.explain(error, pids=pids, worker=worker, asked=[self._own_state.get(task)])
            return
        self._broken = True
        waited = self._task_info.get(self._rcvd_idx, (None,))
        named = faults.named_in(error, pids, waited=waited[0])
        tasks = sorted(task for task, info in self._task_info.items() if info[0] == named and len(info) == 1)
        faults.explain(error, pids=pids, worker=named, asked=[self._own_state.get(task) for task in tasks])

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self._own_state.clear()
        self._failed, self._idle = None, 0.0
        super()._reset(loader, first_iter)
        if self.first:  # else workers would go on with the work of others, and nobody would see it
            raise DataError(f"torch {torch.__version__} lets nobody choose which worker of a loader is asked first")

    def _next_index(self) -> Any:
        rows = super()._next_index()
        if len(self._own_state) > 4 * (len(self._task_info) + 1):
            self._own_state = {task: self._own_state[task] for task in self._task_info}
        self._own_state[self._send_idx] = rows
        return rows

    def _process_data(self, data: Any, *worker: int) -> Any:
        if isinstance(data, ExceptionWrapper):
            self._failed = (self._rcvd_idx - 1, worker[0] if worker else -1)
        return super()._process_data(data, *worker)

    def _try_get_data(self, timeout: float = 5.0) -> tuple[bool, Any]:
        found: tuple[bool, Any] = super()._try_get_data(timeout)
        self._idle = 0.0 if found[0] else self._idle + timeout
        if found[0] and isinstance(found[1][0], Again) and found[1][0].told is not None:
            self.record.begins(*found[1][0].told)
        elif found[0] and isinstance(found[1][1], Ended):
            worker, state = found[1][1].told
            self.record.ended[worker] = state
        if not self._timeout and self._idle >= HANGS_AFTER:
            raise RuntimeError(f"DataLoader timed out after {HANGS_AFTER:g} seconds")
        return found

    def _shutdown_workers(self) -> None:
        if self._broken or any(_is_closed(queue) for queue in index_queues(self)):
            self.kill()
        super()._shutdown_workers()
        if is_shut_down(self, default=False):
            self.kill()  # what hangs has survived the SIGTERM that it was sent

    def kill(self) -> None:
        """End the workers that are still there."""
        if os.getpid() != self._process:
            return
        forget_workers(self)
        for process in self._workers:
            if process.is_alive():
                process.kill()

    # torch draws the seed in any case; workers that go on with the work of others have that of the others.
    @property
    def _base_seed(self) -> int:
        return self._seed

    @_base_seed.setter
    def _base_seed(self, drawn: int) -> None:
        # All processes draw alike; the workers of each draw for rows of their own.
        own = mixed(drawn, self._of_rank) >> 2 if self._of_rank else drawn
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
    """Whether a collection has ended a queue before its iterator: workers will not hear that this is the end."""
    finalizer = getattr(queue, "_close", None)
    return finalizer is not None and not finalizer.still_active()


@contextmanager
def _signals_wait(context: Any) -> Iterator[None]:
    """Hold signals to the whole process group back until new workers are ready for them.

    Where they are forked: what another start method starts for good would hold them back for ever.
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


_ALIVE: weakref.WeakSet[Workers] = weakref.WeakSet()


def _end_all() -> None:
    """End what is left when the process ends: multiprocessing would send SIGTERM once, and wait."""
    for pool in list(_ALIVE):
        if not is_shut_down(pool, default=True):
            pool.kill()


atexit.register(_end_all)
