"""Watch the other ranks of a run: which one has failed or does not answer, and on which line it is.

Each rank writes a heartbeat to the store of the group, with the position of its main thread; rank 0 reads those of all,
the others read rank 0's. The first cause that is recorded is the one that all ranks report. When rank 1 fails:

- by an error: it records the error as the cause, and ends;
- killed or stopped: the others find it silent after `timeout` seconds, or within about 3 seconds where a call fails
  because its connections are closed. `launch` ends the rest after its own FAILURE_GRACE;
- on the others, `cause_of` replaces the error of the next collective by a DistributedError that names rank 1 and its
  line. If a rank is blocked in a call, its guard thread ends the process GUARD_GRACE seconds after the cause is known.

Nothing is saved then (`fit/rollback.py::rescue`): the others are elsewhere in the update. `resume="auto"` restarts.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import CO_GENERATOR
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import torch

from trainwright.core.errors import DistributedError, first_line, is_ours, is_users, message, user_line
from trainwright.core.torch_private import default_store
from trainwright.distributed.environment import share_store, wait_for

T = TypeVar("T")

GUARD_GRACE = 5.0
"""Seconds in which a rank may raise an error by itself after another one has failed, before its process is ended."""
PAUSE = 0.5
"""Seconds between two heartbeats of a rank; more with hundreds of ranks, since rank 0 reads all."""

_GROUP_WORDS = ("gloo", "nccl", "connection closed by peer", "connection reset by peer", "timed out waiting")
"""Parts of the errors of a process group; gloo's are plain RuntimeErrors."""
_LATE = ("timed out", "timeout")
"""Parts of those where a time-out has passed; in others the connections are closed."""


class PeerWatch:
    """The watch of one rank over its peers, run after run."""

    def __init__(self, group: Any) -> None:
        self._group, self._runs = group, itertools.count()
        self._run: _WatchedRun | None = None

    @contextmanager
    def during(self, position: Callable[[], str], timeout: float) -> Iterator[None]:
        """Watch a run inside; no-op inside a run that is watched already.

        An error that leaves it is reported to the peers, or becomes the DistributedError that `cause_of` returns.
        """
        if self._group.size == 1 or self._run is not None:
            yield
            return
        self._run = run = _WatchedRun(self._group, next(self._runs), position=position, timeout=timeout)
        run.start()
        try:
            yield
        except Exception as error:
            cause = self.cause_of(error)
            if cause is not error:
                raise cause from None
            raise
        finally:
            self._run = None
            run.leave()

    def report_error(self, error: BaseException) -> None:
        """Record that this rank ends in `error`; all report the cause that is recorded first."""
        if self._run is not None and not isinstance(error, DistributedError):
            self._run.record_error(error)

    def cause_of(self, error: BaseException) -> BaseException:
        """Return the cause of an error: DistributedError where it follows from another rank's, else itself."""
        run = self._run
        if run is None or isinstance(error, DistributedError):
            return error
        cause = None
        if of_the_group(error):
            cause = run.find_cause(late=any(word in str(error).lower() for word in _LATE))
        if cause is None or (cause.kind == "error" and cause.rank == self._group.rank):
            run.record_error(error)
            return error
        return DistributedError(error_text(cause, run.timeout, here=line_of(error)))


def of_the_group(error: BaseException) -> bool:
    """Return whether an error is one of the process group, or was raised from one."""
    dist: Any = torch.distributed
    one: BaseException | None = error
    while one is not None:
        if isinstance(one, dist.DistError):
            return True
        if isinstance(one, RuntimeError) and any(word in str(one).lower() for word in _GROUP_WORDS):
            return True
        one = one.__cause__
    return False


report_exit: Callable[[str], None] | None = None
"""Receives the reason why this process is ended, in place of its stderr; set by `launch`."""


class _WatchedRun:
    """One run under watch: a thread that exchanges heartbeats, and one that ends the process.

    The store is used through a connection of its own. Where the process that has the store is stopped, a call of it may
    never return: only the first thread, and threads with a limit, call it.
    """

    def __init__(self, group: Any, run: int, *, position: Callable[[], str], timeout: float) -> None:
        dist: Any = torch.distributed
        self.rank, self.size, self.timeout = group.rank, group.size, timeout
        name = (group.group or dist.group.WORLD).group_name
        self._all_runs: Any = dist.PrefixStore(f"trainwright/watch/{name}", default_store(dist).clone())
        self._store: Any = dist.PrefixStore(str(run), self._all_runs)
        self._progress, self._thread = position, threading.get_ident()
        self._pause = min(max(PAUSE, self.size / 500), timeout / 10)
        self._counter = itertools.count()
        self._over, self._knows = threading.Event(), threading.Event()
        """Set when this rank leaves the run; when its main thread has an error of its own to raise."""
        self._rounds, self._has_recorded = 0, False
        self._last: dict[int, Heartbeat] = {}
        """By rank: its last heartbeat."""
        self._silent: dict[int, float] = {}
        """By rank: the seconds since then."""
        self._cause: Cause | None = None
        self._exchanger = threading.Thread(target=self._exchange, name="trainwright-watch", daemon=True)
        self._guard = threading.Thread(target=self._wait_for_cause, name="trainwright-guard", daemon=True)

    def start(self) -> None:
        """Begin to exchange heartbeats."""
        self._exchanger.start()
        self._guard.start()

    def leave(self) -> None:
        """Announce that this rank has left the run, and stop watching."""
        if self._has_recorded and self.rank == 0 and not share_store():
            time.sleep(2 * self._pause)  # the store may end with this process: the others read the cause before
        self._over.set()
        wait_for(self._exchanger, 4 * self._pause)
        wait_for(self._guard, 4 * self._pause)

    def record_error(self, error: BaseException) -> None:
        """Record this rank's error as the cause of the end, unless there is one already."""
        self._knows.set()
        cause = Cause("error", self.rank, self.rank, self._heartbeat(), first_line(error))
        _within(GUARD_GRACE, lambda: self._record(cause))
        self._has_recorded = True

    def find_cause(self, *, late: bool) -> Cause | None:
        """Return the cause of an error of the group, None where no other rank is at fault.

        `late`: whether the error is a time-out, and not a closed connection.
        """
        self._knows.set()
        if self._cause is not None:
            return self._cause
        found = _within(6 * self._pause + GUARD_GRACE, lambda: self._search(closed=not late))
        return found[0] if found else (self._cause or self._cause_without_store())

    # The first thread.

    def _exchange(self) -> None:
        dist: Any = torch.distributed
        last = time.monotonic()
        try:
            self._send(self._all_runs)
            while not self._over.is_set():
                self._send(self._store)
                now = time.monotonic()
                # Where this process was stopped itself, the gap is not the silence of the others.
                self._receive(min(now - last, 2 * self._pause))
                last = now
                self._rounds += 1
                self._over.wait(self._pause)
            self._send(self._store, has_left=True)
            self._send(self._all_runs, has_left=True)
        except (dist.DistError, RuntimeError):
            return  # the store is gone: the guard sees that the rounds have ended

    def _send(self, store: Any, *, has_left: bool = False) -> None:
        """Write a heartbeat for this run; or for all runs, read by ranks that wait for this one in another run."""
        store.set(f"beat/{self.rank}", json.dumps(self._heartbeat(has_left=has_left)))

    def _heartbeat(self, *, has_left: bool = False) -> Heartbeat:
        frame = frame_of(self._thread)
        try:
            progress = self._progress()
        except Exception as error:  # the run continues beside this thread, and a position is worth no failure
            progress = f"({type(error).__name__} when asked for its position)"
        line = user_line(frame) if frame is not None else ""
        here = (self.rank, socket.gethostname(), os.getpid())
        return Heartbeat(next(self._counter), has_left, *here, progress, line, call_of(frame))

    def _receive(self, elapsed: float) -> None:
        """Read heartbeats: rank 0 those of all, the others rank 0's, so that a round has n reads and not n * n."""
        self._cause = self._recorded()
        for rank in range(1, self.size) if self.rank == 0 else (0,):
            self._silent[rank] = self._silent.get(rank, 0.0) + elapsed
        for rank, beat in self._heartbeats([r for r in self._silent if r != self.rank]).items():
            last = self._last.get(rank)
            if beat.has_left or last is None or beat.number != last.number:
                self._silent[rank] = 0.0
            self._last[rank] = beat
        overdue = [rank for rank, seconds in self._silent.items() if seconds > self.timeout]
        if overdue and self._cause is None:
            self._cause = self._record(self._missed("silent" if overdue[0] in self._last else "absent", overdue[0]))

    def _heartbeats(self, ranks: list[int]) -> dict[int, Heartbeat]:
        """Return the newest heartbeats; the store waits for a key that it does not have, so these are left out."""
        if not self._store.check([f"beat/{rank}" for rank in ranks]):
            ranks = [rank for rank in ranks if self._store.check([f"beat/{rank}"])]
        beats = self._store.multi_get([f"beat/{rank}" for rank in ranks]) if ranks else []
        return {rank: Heartbeat.read(beat) for rank, beat in zip(ranks, beats, strict=True)}

    def _recorded(self) -> Cause | None:
        return Cause.read(self._store.get("failure")) if self._store.check(["failure"]) else None

    def _record(self, cause: Cause) -> Cause:
        """Record a cause unless there is one; return the one that is recorded."""
        return Cause.read(self._store.compare_set("failure", "", json.dumps(cause)))

    def _missed(self, kind: str, rank: int, *, is_closed: bool = False) -> Cause:
        """Return the cause "a rank is missed", with its last heartbeat in this run, else in another one."""
        last = self._last.get(rank)
        if kind == "absent" and self._all_runs.check([f"beat/{rank}"]):
            last = Heartbeat.read(self._all_runs.get(f"beat/{rank}"))
        waits = call_of(frame_of(self._thread))
        return Cause(kind, rank, self.rank, last, waits=waits, is_closed=is_closed)

    # After an error of the group, in a thread with a limit.

    def _search(self, *, closed: bool) -> Cause | None:
        """Wait until a cause is recorded; else find the rank that is silent, gone or somewhere else."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        before = self._heartbeats(others)
        self._store.set(f"waits/{self.rank}", "1")
        end = time.monotonic() + 5 * self._pause
        while time.monotonic() < end:
            if (recorded := self._recorded()) is not None:
                return recorded
            time.sleep(self._pause / 10)
        after = self._heartbeats(others)
        self._last.update(after)
        kinds = {rank: self._kind(before.get(rank), after.get(rank), rank) for rank in others}
        for kind in ("silent", "absent", "left", "behind"):
            for rank in others:
                if kinds[rank] == kind:
                    return self._record(self._missed(kind, rank, is_closed=closed))
        return None

    def _kind(self, before: Heartbeat | None, after: Heartbeat | None, rank: int) -> str:
        if after is None:
            return "absent"
        if after.has_left:
            return "left"
        if before is not None and before.number == after.number:
            return "silent"
        return "" if self._store.check([f"waits/{rank}"]) else "behind"

    def _cause_without_store(self) -> Cause | None:
        """Return the cause where the store does not answer: the process that has it."""
        if share_store():
            return Cause("store", -1, self.rank)
        return None if self.rank == 0 else self._missed("silent", 0)

    # The second thread.

    def _wait_for_cause(self) -> None:
        """End the process when a cause is known, or the first thread is stuck in the store."""
        rounds, stuck, last = 0, 0.0, time.monotonic()
        while not self._over.wait(self._pause):
            now = time.monotonic()
            stuck = 0.0 if self._rounds != rounds else stuck + min(now - last, 2 * self._pause)
            rounds, last = self._rounds, now
            if (of_store := self._last.get(0)) is not None and of_store.has_left:
                stuck = 0.0  # rank 0 had the store, and was free to leave
            cause = self._cause or (self._cause_without_store() if stuck > self.timeout else None)
            if cause is not None:
                self._end_process(cause)
                return

    def _end_process(self, cause: Cause) -> None:
        """End this process after GUARD_GRACE, unless its main thread raises an error by then or is the cause itself."""
        if cause.kind == "error" and cause.rank == self.rank:
            return
        end = time.monotonic() + GUARD_GRACE
        while time.monotonic() < end:
            if self._knows.wait(self._pause / 10) or self._over.is_set():
                return
        text = f"rank {self.rank} ends: {error_text(cause, self.timeout)}"
        if report_exit is not None:
            report_exit(text)
        elif self.rank == (1 if cause.rank == 0 else 0):  # one is enough to read
            os.write(2, f"{text}\n".encode())
        _within(1.0, _flush)
        os._exit(1)  # the main thread may be in a wait that nothing interrupts


def frame_of(thread: int) -> FrameType | None:
    """Return the frame that a thread runs, without a garbage collection meanwhile.

    Before Python 3.11.9, `sys._current_frames` allocates while it holds the lock of the list of threads. A finalizer
    that a collection runs there may release the GIL; a thread that then starts another one waits for the lock with the
    GIL, and neither continues (python/cpython#106883).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames().get(thread)
    finally:
        if collects:
            gc.enable()


def _within(seconds: float, ask: Callable[[], T]) -> list[T]:
    """Return [answer], or [] where there is none in this time: the store may never answer."""
    dist: Any = torch.distributed
    answer: list[T] = []

    def asking() -> None:
        try:
            answer.append(ask())
        except (dist.DistError, RuntimeError):
            return  # the store is gone

    thread = threading.Thread(target=asking, daemon=True)
    thread.start()
    wait_for(thread, seconds)
    return list(answer)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


# Messages about a rank at fault: which one, its last position, the call of another rank that waits for it.


class Heartbeat(NamedTuple):
    """A rank and its position, as it writes them to the store again and again."""

    number: int
    """The count of its heartbeats: the same number twice is a rank that is silent."""
    has_left: bool
    """Whether it has left the run."""
    rank: int
    host: str
    pid: int
    progress: str
    """Its progress in the run, such as "epoch 1, after update 3"."""
    line: str
    """The line of the user's code that its main thread runs, such as "train.py:12"."""
    call: str
    """The call of ours in which that is, with the line of the call; "" outside of one."""

    @classmethod
    def read(cls, sent: bytes) -> Heartbeat:
        """Return a heartbeat that was sent as JSON."""
        return cls(*json.loads(sent))


class Cause(NamedTuple):
    """The cause of the end of a run: the first that a rank records is the one that all report."""

    kind: str
    """One of `_MESSAGES`."""
    rank: int
    """The rank at fault; -1: the launcher."""
    by: int
    """The rank that has recorded it."""
    last: Heartbeat | None = None
    """The last heartbeat of the rank at fault."""
    error: str = ""
    """The first line of its error."""
    waits: str = ""
    """The call in which `by` waits for it."""
    is_closed: bool = False
    """Whether its connections are closed."""

    @classmethod
    def read(cls, sent: bytes) -> Cause:
        """Return a cause that was recorded as JSON."""
        kind, rank, by, last, *rest = json.loads(sent)
        return cls(kind, rank, by, None if last is None else Heartbeat(*last), *rest)


_FOR_PAUSES = "for long pauses DDP(timeout=...)"
_MESSAGES = {
    "error": ("rank {rank} has failed: {error}", "its traceback is in its own output"),
    "silent": (
        "rank {rank} does not answer",
        f"find out whether it was killed (no memory?) or stopped, or its machine lost; {_FOR_PAUSES}",
    ),
    "gone": (
        "rank {rank} does not answer, and its connections are closed",
        "find out whether it was killed (no memory?), or its machine lost",
    ),
    "absent": (
        "rank {rank} has not entered this run",
        "call {call} on every process, in the same order, and not under `if trainer.is_main:`",
    ),
    "left": (
        "rank {rank} has left this run, and rank {by} waits for it",
        "every process must do the same calls, and none of them under `if trainer.is_main:`",
    ),
    "behind": (
        "rank {rank} has not reached the call in which rank {by} waits",
        f"it is stuck, or the processes do not all call the same: look at the line of each; {_FOR_PAUSES}",
    ),
    "store": ("the process that launched this one does not answer", "look at its output; start the job again"),
}
"""By kind of cause: the first line of the message, and its `fix`."""


def error_text(cause: Cause, timeout: float, *, here: str = "") -> str:
    """Return the message for a cause; `timeout`: the setting, in seconds; `here`: the line where this rank waited."""
    kind = cause.kind
    what, fix = _MESSAGES["gone" if cause.is_closed and kind == "silent" else kind]
    named = {"rank": cause.rank, "by": cause.by, "error": cause.error}
    have = [_position(cause)]
    if cause.waits and kind in ("absent", "left", "behind"):
        have.append(f"rank {cause.by} waits for it in {cause.waits}")
    elif here:
        have.append(f"this process waited at {here}")
    want = f"a heartbeat of every process within {timeout:g} s" if kind in ("silent", "absent", "store") else ""
    if cause.is_closed and kind in ("silent", "absent"):
        want = "every process to stay until all have done the same calls" if kind == "absent" else ""
    call = cause.waits.partition(" ")[0] or "fit and the like"
    have_lines = "\n        ".join(line for line in have if line)
    return message(what.format(**named), have=have_lines, want=want, fix=fix.format(call=call, **named), where=False)


def line_of(error: BaseException) -> str:
    """Return "train.py:12": the innermost line of the user's code that an error has passed, or ""."""
    found, step = "", error.__traceback__
    while step is not None:
        name = step.tb_frame.f_code.co_filename
        if is_users(name):
            found = f"{os.path.basename(name)}:{step.tb_lineno}"
        step = step.tb_next
    return found


def call_of(frame: FrameType | None) -> str:
    """Return "evaluate (train.py:12)": the outermost call of ours that the user's code is in, or ""."""
    found, name = "", ""
    while frame is not None:
        code = frame.f_code
        if is_users(code.co_filename):
            found = f"{name} ({os.path.basename(code.co_filename)}:{frame.f_lineno})" if name else found
            name = ""
        elif is_ours(code.co_filename):
            if code.co_filename.endswith("launch.py"):  # the function that `launch` runs is the program
                break
            if code.co_flags & CO_GENERATOR:
                name = ""  # a context of ours, which the user has not called by its name
            elif code.co_name != "called":  # the wrapper of methods by `suggests`
                name = code.co_name
        frame = frame.f_back
    return found


def _position(cause: Cause) -> str:
    """Return the rank at fault, its process, and its last position."""
    last = cause.last
    if last is None:
        return ""
    line = "" if last.call.endswith(f"({last.line})") else last.line
    at = ", ".join(text for text in (last.progress, line, f"in {last.call}" if last.call else "") if text)
    seen = "last seen at" if cause.kind == "absent" else "at"
    return f"rank {cause.rank} on {last.host}, process {last.pid}" + (f", {seen} {at}" if at else "")
