"""Threads that may be left behind in a call that does not return, and are waited for before the program ends."""

from __future__ import annotations

import atexit
import threading

LAST = 10.0
"""Seconds that the program's end waits for such threads."""

_behind: list[threading.Thread] = []


def wait_for(thread: threading.Thread, seconds: float) -> None:
    """Wait for a daemon thread that calls torch; one that does not end in time is waited for again at the very end.

    A thread that comes back from C++ when the interpreter is gone already would abort the process (`terminate called
    without an active exception`).
    """
    thread.join(seconds)
    if not thread.is_alive():
        return
    if not _behind:
        atexit.register(_wait_once_more)
    _behind.append(thread)


def _wait_once_more() -> None:
    for thread in _behind:
        thread.join(LAST / len(_behind))
