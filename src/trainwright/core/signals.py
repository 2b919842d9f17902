"""Signals that end a run: recorded on arrival, raised when the state of the run is consistent.

SIGTERM, SIGUSR1 and the first Ctrl-C wait for the end of the current update, for at most `grace` seconds. While the
loop waits for data the state is consistent, and they end the run at once. A second Ctrl-C ends the run anywhere.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))
"""The signals that end a run."""
ONE_CTRL_C = 0.1
"""Seconds within which two SIGINTs count as one Ctrl-C: a terminal and a launcher may both send it."""
_SIGCHLD = getattr(signal, "SIGCHLD", None)
Handler = Callable[[int, FrameType | None], Any]


class Interrupted(BaseException):
    """Raised inside a run to end it for a signal; `fit` converts it to KeyboardInterrupt or Stopped."""

    def __init__(self, number: int, *, late: bool = False) -> None:
        self.number = number
        self.late = late
        """Whether it has interrupted an update that did not end within the grace period."""
        self.name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        super().__init__(self.name)


class Signals:
    """The signal handlers of one run, and the received signal.

    Only the main thread can install handlers; in other threads no signal is received. Handlers set by the user, and
    ignored signals, are not changed.
    """

    received = 0
    """The number of the received signal; 0 for none."""
    data_failed = False
    """Whether a fetch of a batch has raised an error."""
    _waiting = False
    """Whether the loop waits for data, so that a signal ends the run at once."""
    _held = 0
    _overdue = _ended = _child_died = False
    _came = 0.0
    _timer: threading.Timer | None = None
    _on_child: Handler | None = None

    def __init__(self, *, grace: float, alone: bool = True) -> None:
        self.grace = grace
        """Seconds that a signal waits for the end of the current update."""
        self.wake: Callable[[], None] | None = None
        """Called when a signal is received; set by a run."""
        self._alone = alone
        """Whether this is the only rank. Several ranks agree on the end first, and end together."""
        self._process = os.getpid()
        self._before: dict[int, Any] = {}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Install the handlers inside the block; restore the earlier ones at its end.

        Raises Interrupted at the end for a received signal that was not raised inside, on this rank only.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        theirs = {number: signal.getsignal(number) for number in ENDING}
        try:
            for number, handler in theirs.items():
                if handler in (signal.SIG_DFL, signal.default_int_handler):
                    self._before[number] = signal.signal(number, self._receive)
            yield
        finally:
            self._restore()
        if self.received:
            raise Interrupted(self.received)

    def fetch(self, read: Callable[..., Any], *arguments: Any) -> Any:
        """Return `read(*arguments)`, a read of data; a signal before or during it ends the run at once."""
        self._waiting = self._alone
        try:
            if self.received or self._child_died:
                self._before_waiting()
            return read(*arguments)
        except Exception:
            self.data_failed = True
            raise
        finally:
            self._waiting = False

    def batches(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Yield the items of `iterator`, each fetched as `fetch` does."""
        end = object()
        while (item := self.fetch(next, iterator, end)) is not end:
            yield item

    def check(self) -> None:
        """Raise Interrupted if a signal was received. Called when the state of the run is consistent."""
        if self.received and self._alone:
            self._ended = True
            self._stop_timer()
            raise Interrupted(self.received)

    def obey(self, number: int) -> None:
        """Make `check` raise for a signal of any rank, after all ranks have agreed to end."""
        self.received, self._alone = number, True

    @contextmanager
    def held(self) -> Iterator[None]:
        """Protect the block from all interruptions but a second Ctrl-C.

        The grace period of a signal that is received inside starts at the end of the block.
        """
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
            if self._timer is not None and not self._held and not self._ended:
                self._start_timer()

    def watch_children(self) -> None:
        """Make the death of a dataloader worker raise only while data are fetched.

        Called after the start of workers, when torch has installed its SIGCHLD handler, which may raise inside an
        update.
        """
        if _SIGCHLD is None or not self._before:
            return
        theirs = signal.getsignal(_SIGCHLD)
        if getattr(theirs, "__module__", "").startswith("torch.utils.data") and callable(theirs):
            self._on_child = theirs
            self._before[_SIGCHLD] = theirs
            signal.signal(_SIGCHLD, self._receive_child)

    def _receive(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if os.getpid() != self._process:  # a forked process behaves as without this handler
            signal.signal(number, self._before.get(number, signal.SIG_DFL))
            signal.raise_signal(number)
            return
        if self._overdue:
            self._overdue = False
            if not self._held and not self._ended:
                self._ended = True
                raise Interrupted(self.received, late=True)
            return
        if self.received:
            if number == signal.SIGINT and now - self._came > ONE_CTRL_C:
                self._restore()
                raise KeyboardInterrupt
            return
        self.received, self._came = number, now
        if self.wake is not None:
            self.wake()
        if self._waiting:
            self._waiting, self._ended = False, True
            raise Interrupted(number)
        self._start_timer()

    def _receive_child(self, number: int, frame: FrameType | None) -> None:
        assert self._on_child is not None
        if self._waiting or os.getpid() != self._process:
            self._on_child(number, frame)
        else:
            self._child_died = True

    def _before_waiting(self) -> None:
        self.check()
        self._child_died = False
        assert _SIGCHLD is not None
        # Send SIGCHLD again while the loader waits, so that the loader raises the error.
        again = threading.Timer(0.01, signal.pthread_kill, (threading.main_thread().ident, _SIGCHLD))
        again.daemon = True
        again.start()

    def _start_timer(self) -> None:
        self._stop_timer()
        self._timer = threading.Timer(self.grace, self._insist)
        self._timer.daemon = True
        self._timer.start()

    def _insist(self) -> None:
        """Send the signal to the main thread again, to interrupt the update. Runs in the timer's thread."""
        main = threading.main_thread().ident
        if self._before and not self._ended and not self._held and main is not None:
            self._overdue = True
            signal.pthread_kill(main, self.received)

    def _restore(self) -> None:
        self._ended = True
        self._stop_timer()
        while self._before:
            number, handler = self._before.popitem()
            if signal.getsignal(number) in (self._receive, self._receive_child):  # not replaced meanwhile
                signal.signal(number, handler)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
