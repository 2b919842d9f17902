"""Notes a signal that would end the launcher, for a loop that waits for pipes: it ends only when its processes have."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from trainwright.core.signals import ENDING


class Noted:
    """The first signal that has come; `come` is ready to be read then."""

    def __init__(self) -> None:
        self.number = 0
        """The signal; 0 while none has come."""
        self.come: Any
        self.come, self._told = multiprocessing.Pipe(duplex=False)

    def take(self) -> int:
        """Return the signal, and be ready for no other."""
        self.come.recv_bytes()
        return self.number

    def note(self, number: int, _: FrameType | None) -> None:
        """Be the handler of a signal: the first one counts, as in a `fit`."""
        if not self.number:
            self.number = number
            self._told.send_bytes(b"")

    def close(self) -> None:
        """Give the pipe up."""
        self.come.close()
        self._told.close()


@contextmanager
def noting() -> Iterator[Noted]:
    """Note SIGTERM and SIGUSR1 inside, in the main thread, where nobody else handles or ignores them."""
    noted, ours = Noted(), list[int]()
    try:
        if threading.current_thread() is threading.main_thread():
            for number in ENDING:
                if signal.getsignal(number) is signal.SIG_DFL:  # of Ctrl-C that is Python's own, which raises
                    signal.signal(number, noted.note)
                    ours.append(number)
        yield noted
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
        noted.close()
