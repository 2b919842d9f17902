"""What runs inside a loader's worker process: its random state goes home with the batches, and signals wait."""

from __future__ import annotations

import array
import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from trainwright.data.generators import knows_its_state
from trainwright.runtime.randomness import host_random_state, set_random_state

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

    def begin(self, worker: int) -> None:
        """Take the state of a worker that is ready for its first batch: it would be made again without being told."""
        info = get_worker_info()
        data = None if info is None else info.dataset
        self._worker, self._data = worker, data if knows_its_state(data) else None
        self._sent = _packed(host_random_state())

    def __call__(self, rows: Any) -> Any:
        """The batch of these rows, and the states that have moved since the last one."""
        batch = self._collate(rows)
        now = _packed(host_random_state())
        moved = {name: state for name, state in now.items() if self._sent.get(name) != state}
        self._sent = now
        if self._data is not None:
            moved["dataset"] = self._data.state_dict()
        return batch, (self._worker, moved)


class Starting:
    """A `worker_init_fn`: after the user's own a worker takes over its state; signals are left to the main process.

    A first SIGTERM is survived for `SURVIVES` seconds, then an alarm ends the process, as a second SIGTERM does.
    """

    def __init__(self, given: Any, states: dict[int, State], carrying: Carrying | None) -> None:
        self._given = given
        self._states = states
        self._carrying = carrying

    def __call__(self, worker: int) -> None:
        """Make the worker of this number ready."""
        outlive_signals()
        if self._given is not None:
            self._given(worker)
        _take_over(self._states.get(worker, {}))
        if self._carrying is not None:
            self._carrying.begin(worker)


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
