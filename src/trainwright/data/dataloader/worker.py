"""What runs inside a loader's worker process: its random state goes home with the batches, and signals wait."""

from __future__ import annotations

import array
import os
import signal
from collections.abc import Callable
from multiprocessing import parent_process
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from trainwright.core.rng import host_random_state, set_random_state
from trainwright.core.torch_private import EndOfIterable, ResumeIteration, replace_worker_messages
from trainwright.data.generators import is_stateful
from trainwright.data.sharding import set_part
from trainwright.distributed.mesh import Shard

SURVIVES = 30.0
"""Seconds that a worker lives on after a first SIGTERM: the main process has 20 to end by itself."""
SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGUSR1", "SIGTERM") if hasattr(signal, name))
"""What a scheduler or a terminal sends to all processes of a run."""

State = dict[str, Any]
"""The random states of a worker that have moved, as plain data: "torch", "python", "numpy", and "dataset"."""


class Carrying:
    """A collate function whose batches bring along what has moved: (batch, (worker, `State`))."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate
        self._sent: State = {}
        self._worker = 0
        self._data: Any = None
        self._ready: State = {}

    def begin(self, worker: int) -> None:
        """Take the state of a worker that is ready for its first batch: it would be made again without being told."""
        info = get_worker_info()
        data = None if info is None else info.dataset
        self._worker, self._data = worker, data if is_stateful(data) else None
        self._sent = self._ready = _packed(host_random_state())

    def begin_again(self) -> tuple[int, State]:
        """The number of this worker and its state; one that was asked for nothing yet is as it was made ready."""
        _take_over(self._ready)  # torch has iterated the data set once before, in vain
        return self.now()

    def __call__(self, rows: Any) -> Any:
        """The batch of these rows, and the states that have moved since the last one."""
        batch = self._collate(rows)
        self._ready = {}
        now = _packed(host_random_state())
        moved = {name: state for name, state in now.items() if self._sent.get(name) != state}
        self._sent = now
        if self._data is not None:
            moved["dataset"] = self._data.state_dict()
        return batch, (self._worker, moved)

    def now(self) -> tuple[int, State]:
        """The number of this worker and its whole state."""
        self._ready = {}
        state = _packed(host_random_state())
        return self._worker, state if self._data is None else {**state, "dataset": self._data.state_dict()}


class Again(ResumeIteration):  # type: ignore[misc]
    """A worker's answer that it begins its next pass, with the state that it begins it with.

    It is made in the worker out of torch's request, before the data set is iterated; an iterable one may have drawn
    after its last batch, for rows that were dropped.
    """

    told: tuple[int, State] | None = None

    def __setstate__(self, kept: dict[str, Any]) -> None:
        self.__dict__.update(kept)
        if self.told is None and _carrying:
            self.__dict__["told"] = _carrying[-1].begin_again()


class Ended(EndOfIterable):  # type: ignore[misc]
    """A worker's word that its pass is over, with the state that it was left in."""

    told: tuple[int, State]

    def __init__(self, worker: int) -> None:
        super().__init__(worker)
        self.__dict__["told"] = _carrying[-1].now()


_carrying: list[Carrying] = []
"""In a worker that reads an iterable data set: what it carries home with."""


class Starting:
    """A `worker_init_fn`: after the user's own a worker takes over its state; signals are left to the main process.

    A first SIGTERM is survived for `SURVIVES` seconds, then an alarm ends the process, as a second SIGTERM does.
    `part` is what `shard` tells there.
    """

    def __init__(
        self, given: Any, states: dict[int, State], carrying: Carrying | None, *, part: Shard | None = None
    ) -> None:
        self._given = given
        self._part = part
        self._states = states
        self._carrying = carrying

    def __call__(self, worker: int) -> None:
        """Make the worker of this number ready."""
        outlive_signals()
        if self._part is not None:
            set_part(self._part)
        if self._given is not None:
            self._given(worker)
        _take_over(self._states.get(worker, {}))
        if self._carrying is not None:
            self._carrying.begin(worker)
            info = get_worker_info()
            if info is not None and isinstance(info.dataset, IterableDataset) and parent_process() is not None:
                _carrying[:] = [self._carrying]
                replace_worker_messages(Again, Ended)


def outlive_signals() -> None:
    """Leave it to the main process when to end: it may still want the batches of the update in hand."""
    for number in SIGNALS:
        signal.signal(number, _survive if number == signal.SIGTERM else signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _survive(number: int, _: Any) -> None:
    signal.signal(number, signal.SIG_DFL)
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, SURVIVES)
    else:
        os.kill(os.getpid(), number)


def _packed(state: dict[str, Any]) -> State:
    """Three random states as plain data and bytes."""
    version, words, cached = state["python"]
    packed = {
        "torch": state["torch"].numpy().tobytes(),
        "python": [version, array.array("I", words).tobytes() if words else b"", cached],
    }
    numpy = state["numpy"]
    if isinstance(numpy, tuple):
        packed["numpy"] = [numpy[0], numpy[1].tobytes(), *(float(numpy[index]) for index in (2, 3, 4))]
    return packed


def _take_over(state: State) -> None:
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
