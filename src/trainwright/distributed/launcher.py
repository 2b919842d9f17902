"""`launch(main, processes=2)`: run a function in several processes of this machine, from a script or a notebook."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.process
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

import torch

from trainwright.core.checks import check_number, check_whole
from trainwright.core.errors import DistributedError, SettingError, Stopped, message
from trainwright.core.suggestions import suggests
from trainwright.distributed.launched import UNGUARDED, serve
from trainwright.distributed.launcher_signals import Noted, noting
from trainwright.distributed.launching import choose_start, describe

R = TypeVar("R")

GRACE = 5.0
"""Seconds that the others have to end by themselves when a process has failed."""
GRACE_OF_SIGNAL = 30.0
"""Seconds that all have to save and end after Ctrl-C or another signal; a second Ctrl-C ends them at once."""


@suggests
def launch(main: Callable[..., R], *args: Any, processes: int = 2, timeout: float | None = None) -> R:
    """Run `main(*args)` in several processes of this machine at once; return what it returns in the first of them.

    In each, `Trainer(...)` finds the others as under torchrun. A function that new processes can import runs in new
    ones; any other, as in a notebook, in copies of this one (fork), where nothing stands in the way. One process is
    this process itself. `timeout`: seconds after which all are ended; None: never.

    Raises DistributedError with the traceback of the process that failed, when all others are ended; SettingError for
    what cannot be started, and inside processes that were started together already. Ctrl-C, SIGTERM and SIGUSR1 are
    passed on, and end this process as they end a `fit`, when all others have saved and ended.
    """
    _check(main, processes, timeout)
    if processes == 1:
        return main(*args)
    method, sent = choose_start(main, args)
    run = _Launch(processes, end=None if timeout is None else time.monotonic() + timeout)
    try:
        run.start(method, sent)
        value: R = run.result(timeout)
    finally:
        run.close()
    return value


@dataclass
class _Launch:
    """The processes of one call, from their start to their end."""

    size: int
    end: float | None
    """When all are ended, by the clock of `time.monotonic`."""
    processes: list[Any] = field(default_factory=list)
    pipes: list[Connection] = field(default_factory=list)
    failures: dict[int, tuple[str, str, str]] = field(default_factory=dict)
    """By rank: the kind of its error, what to say of it, the traceback."""
    values: dict[int, bytes] = field(default_factory=dict)
    store: Any = None
    number: int = 0
    """The signal that has ended it."""

    def start(self, method: str, sent: Any) -> None:
        """Start all processes, then the store where they meet: its thread must not be there when they are forked."""
        context: Any = multiprocessing.get_context(method)
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            self.pipes.append(ours)
            inherited = tuple(self.pipes) if method == "fork" else ()
            told = {"sent": sent, "inherited": inherited}
            process = context.Process(target=serve, args=(theirs, rank, self.size), kwargs=told)
            with _deaf_to_interrupts(), _silent_about_threads():
                process.start()
            theirs.close()
            self.processes.append(process)
        dist: Any = torch.distributed
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for pipe in self.pipes:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has ended: its exit code tells why
                pipe.send(self.store.port)

    def result(self, timeout: float | None) -> Any:
        """Wait for all; return the first one's value or raise the error of the one that failed."""
        try:
            self._hear()
        except KeyboardInterrupt:
            self._interrupt()
            raise
        if self.number:
            raise Stopped(self.number, signal.Signals(self.number).name)
        if self.failures:
            raise self._error()
        missing = sorted(set(range(self.size)) - set(self.values))
        if missing:
            raise DistributedError(
                f"launch: {self.size} processes have not ended within {timeout:g} s",
                have=f"still running, and ended now: rank {', '.join(map(str, missing))}",
                fix="launch(..., timeout=...) with more seconds, or None",
            )
        for process in self.processes:
            process.join(GRACE)  # what they do at their end
        return pickle.loads(self.values[0])

    def close(self) -> None:
        """End whatever still runs, and leave nothing behind."""
        for process in self.processes:
            if process.is_alive():
                process.kill()
        for process in self.processes:
            process.join()
            process.close()
        for pipe in self.pipes:
            pipe.close()
        self.store = None

    def _hear(self) -> None:
        """Hear of every process until all have ended, or one has failed and the others had their time."""
        end = self.end
        with noting() as noted:
            while open_ := self._open():
                ready = wait([*open_, noted.come], timeout=None if end is None else max(0.0, end - time.monotonic()))
                if not ready:
                    break
                for pipe in open_.keys() & set(ready):
                    self._take(open_[pipe])
                if noted.come in ready:
                    end = self._pass_on(noted)
                elif self.failures and not noted.number:
                    end = min(time.monotonic() + GRACE, end or float("inf"))
        self.number = noted.number
        for process in self.processes if self.number else ():
            process.join(max(0.0, (end or 0.0) - time.monotonic()))

    def _open(self) -> dict[Any, int]:
        """The pipes of those that have not told yet how they ended."""
        return {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in (self.values | self.failures)}

    def _pass_on(self, noted: Noted) -> float:
        """Pass a signal on, once to each process; returns until when they may save and end."""
        self._send(noted.take())
        return time.monotonic() + GRACE_OF_SIGNAL

    def _take(self, rank: int) -> None:
        try:
            kind, *told = self.pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            self.processes[rank].join()
            self.failures[rank] = _ended(self.processes[rank].exitcode)
            return
        if kind == "value":
            self.values[rank] = told[0]
        else:
            self.failures[rank] = (kind, *told)

    def _interrupt(self) -> None:
        """Pass Ctrl-C on, once to each process, and give them time to save."""
        end = time.monotonic() + GRACE_OF_SIGNAL
        self._send(signal.SIGINT)
        with contextlib.suppress(KeyboardInterrupt):
            for process in self.processes:
                process.join(max(0.0, end - time.monotonic()))

    def _send(self, number: int) -> None:
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, number)

    def _error(self) -> BaseException:
        """The error of the process that failed by itself, before those that only follow from it."""
        order = ("setting", "error", "exit", "named", "follows")
        rank = min(self.failures, key=lambda rank: order.index(self.failures[rank][0]))
        kind, said, trace = self.failures[rank]
        error: Exception
        if kind == "setting":
            error = SettingError(said)
        else:
            error = DistributedError(said if kind == "named" else f"rank {rank} of {self.size} has failed: {said}")
        if trace:
            error.__cause__ = _Remote(trace)
        return error


class _Remote(Exception):
    """The traceback of another process, to be shown as the cause of an error here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _check(main: Any, processes: Any, timeout: Any) -> None:
    if getattr(multiprocessing.process.current_process(), "_inheriting", False):
        os._exit(UNGUARDED)  # a process that `launch` starts runs the script that called it: say so once, not n times
    if not callable(main):
        raise SettingError(
            f"launch({main!r}): that is no function",
            want="the function itself, and its arguments after it",
            fix="launch(main, processes=2), not launch(main(), ...)",
        )
    check_whole(processes, f"launch(processes={processes!r})")
    if timeout is not None:
        check_number(timeout, f"launch(timeout={timeout!r})", above=0, what="seconds, a number")
    if processes > 1:
        _check_alone()


def _check_alone() -> None:
    """Refuse to start processes in one of several that were started together, or where torch cannot."""
    have = describe()
    if have:
        raise SettingError(
            "launch: this is one of several processes already", have=have, fix="call main() directly here"
        )
    if not torch.distributed.is_available():
        raise SettingError("launch: this torch is built without torch.distributed", fix="processes=1")
    if multiprocessing.current_process().daemon:
        raise SettingError(
            "launch: called in a worker process, which may start none", fix="call it in the main process"
        )


def _ended(code: int | None) -> tuple[str, str, str]:
    """What to say of a process that has ended without a word."""
    if code == UNGUARDED:
        fix = 'if __name__ == "__main__":\n            launch(main, processes=2)'
        what = "launch: the script starts its processes again in each of them, since it calls `launch` when imported"
        return "setting", message(what, want="the call behind a guard, at the end of the script", fix=fix), ""
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        why = " (no memory?)" if name == "SIGKILL" else ""
        return "exit", f"it was ended by {name}{why}", ""
    return "exit", f"it ended with exit code {code}", ""


@contextlib.contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Keep Ctrl-C from a process that is only just coming up; it hears of it from here."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _silent_about_threads() -> Iterator[None]:
    """Python warns of a fork beside threads; which may be there was looked at."""
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
        yield
