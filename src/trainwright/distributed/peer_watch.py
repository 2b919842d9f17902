"""Watches the other ranks of a run: reports which rank failed or does not answer, and the line that it runs.

Each rank writes heartbeats with the position of its main thread to the store of the group. Rank 0 reads those of all
ranks; the others read that of rank 0. All ranks report the cause that was recorded first. If rank 1 fails:

- By an error: it records the error as the cause, and exits.
- Killed or stopped: the other ranks find it silent after `timeout` seconds, or within about 3 seconds if a call fails
  because its connections are closed. `launch` ends the remaining ranks after FAILURE_GRACE.
- On the other ranks, `cause_of` replaces the error of the next collective by a DistributedError that names rank 1 and
  its line. If a rank is blocked in a call, its guard thread ends the process GUARD_GRACE seconds after the cause is
  known.

Nothing is saved then (`fit/rollback.py::rescue`): the other ranks are elsewhere in the update. `resume="auto"`
continues from the last checkpoint.
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
"""Seconds for a rank to raise an error by itself after another rank has failed; then its process is ended."""
PAUSE = 0.5
"""Seconds between two heartbeats of a rank; more for hundreds of ranks, since rank 0 reads all of them."""

_GROUP_WORDS = ("gloo", "nccl", "connection closed by peer", "connection reset by peer", "timed out waiting")
"""Substrings of the errors of a process group; gloo raises plain RuntimeErrors."""
_LATE = ("timed out", "timeout")
"""Substrings of time-out errors; other errors mean closed connections."""


class PeerWatch:
    """Watches the peers of one rank, in every run of the process."""

    def __init__(self, group: Any) -> None:
        self._group, self._runs = group, itertools.count()
        self._run: _WatchedRun | None = None

    @contextmanager
    def during(self, position: Callable[[], str], timeout: float) -> Iterator[None]:
        """Watch the run inside the block; no-op inside a run that is already watched.

        An exception that leaves the block is reported to the peers, or replaced by the DistributedError of `cause_of`.
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
        """Record `error` as the end of this rank; all ranks report the cause that was recorded first."""
        if self._run is not None and not isinstance(error, DistributedError):
            self._run.record_error(error)

    def cause_of(self, error: BaseException) -> BaseException:
        """Return the cause of an error: a DistributedError if another rank caused it, else the error itself."""
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
    """Return whether an error comes from the process group, directly or as its `__cause__`."""
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
"""Called with the reason when this process is ended, instead of a write to stderr; set by `launch`."""


class _WatchedRun:
    """One watched run: an exchange thread for heartbeats, and a guard thread that can end the process.

    Both use a separate connection to the store. If the process that hosts the store is stopped, a call of the store may
    never return: only the exchange thread and threads with a time limit call it.
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
        """`_over` is set when this rank leaves the run; `_knows` when its main thread is about to raise an error."""
        self._rounds, self._has_recorded = 0, False
        self._last: dict[int, Heartbeat] = {}
        """The last heartbeat, by rank."""
        self._silent: dict[int, float] = {}
        """Seconds since the last heartbeat, by rank."""
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
            time.sleep(2 * self._pause)  # the store may end with this process: other ranks must read the cause first
        self._over.set()
        wait_for(self._exchanger, 4 * self._pause)
        wait_for(self._guard, 4 * self._pause)

    def record_error(self, error: BaseException) -> None:
        """Record this rank's error as the cause, unless a cause is already recorded."""
        self._knows.set()
        cause = Cause("error", self.rank, self.rank, self._heartbeat(), first_line(error))
        _within(GUARD_GRACE, lambda: self._record(cause))
        self._has_recorded = True

    def find_cause(self, *, late: bool) -> Cause | None:
        """Return the cause of an error of the group; None if no other rank is at fault.

        `late`: whether the error is a time-out, not a closed connection.
        """
        self._knows.set()
        if self._cause is not None:
            return self._cause
        found = _within(6 * self._pause + GUARD_GRACE, lambda: self._search(closed=not late))
        return found[0] if found else (self._cause or self._cause_without_store())

    # The exchange thread.

    def _exchange(self) -> None:
        dist: Any = torch.distributed
        last = time.monotonic()
        try:
            self._send(self._all_runs)
            while not self._over.is_set():
                self._send(self._store)
                now = time.monotonic()
                # Limited: if this process was stopped itself, the gap is no silence of the other ranks.
                self._receive(min(now - last, 2 * self._pause))
                last = now
                self._rounds += 1
                self._over.wait(self._pause)
            self._send(self._store, has_left=True)
            self._send(self._all_runs, has_left=True)
        except (dist.DistError, RuntimeError):
            return  # the store is gone: the guard sees that the rounds have ended

    def _send(self, store: Any, *, has_left: bool = False) -> None:
        """Write a heartbeat to the store of this run, or to that of all runs, for ranks that wait in another run."""
        store.set(f"beat/{self.rank}", json.dumps(self._heartbeat(has_left=has_left)))

    def _heartbeat(self, *, has_left: bool = False) -> Heartbeat:
        frame = frame_of(self._thread)
        try:
            progress = self._progress()
        except Exception as error:  # a missing position must not stop the heartbeats
            progress = f"({type(error).__name__} when asked for its position)"
        line = user_line(frame) if frame is not None else ""
        here = (self.rank, socket.gethostname(), os.getpid())
        return Heartbeat(next(self._counter), has_left, *here, progress, line, call_of(frame))

    def _receive(self, elapsed: float) -> None:
        """Read heartbeats: rank 0 those of all ranks, others that of rank 0, so that a round has n reads, not n * n."""
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
        """Return the newest heartbeats of ranks that have one: reading a missing key would block."""
        if not self._store.check([f"beat/{rank}" for rank in ranks]):
            ranks = [rank for rank in ranks if self._store.check([f"beat/{rank}"])]
        beats = self._store.multi_get([f"beat/{rank}" for rank in ranks]) if ranks else []
        return {rank: Heartbeat.read(beat) for rank, beat in zip(ranks, beats, strict=True)}

    def _recorded(self) -> Cause | None:
        return Cause.read(self._store.get("failure")) if self._store.check(["failure"]) else None

    def _record(self, cause: Cause) -> Cause:
        """Record a cause unless there is one; return the recorded one."""
        return Cause.read(self._store.compare_set("failure", "", json.dumps(cause)))

    def _missed(self, kind: str, rank: int, *, is_closed: bool = False) -> Cause:
        """Return a cause of a rank that does not answer, with its last heartbeat in this run, else in another run."""
        last = self._last.get(rank)
        if kind == "absent" and self._all_runs.check([f"beat/{rank}"]):
            last = Heartbeat.read(self._all_runs.get(f"beat/{rank}"))
        waits = call_of(frame_of(self._thread))
        return Cause(kind, rank, self.rank, last, waits=waits, is_closed=is_closed)

    # After an error of the group, in a thread with a time limit.

    def _search(self, *, closed: bool) -> Cause | None:
        """Wait a short time for a recorded cause; else record a rank that is silent, absent, gone or behind."""
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
        """Return the cause if the store does not answer: the process that hosts it."""
        if share_store():
            return Cause("store", -1, self.rank)
        return None if self.rank == 0 else self._missed("silent", 0)

    # The guard thread.

    def _wait_for_cause(self) -> None:
        """End the process when a cause is known or the exchange thread is blocked in the store."""
        rounds, stuck, last = 0, 0.0, time.monotonic()
        while not self._over.wait(self._pause):
            now = time.monotonic()
            stuck = 0.0 if self._rounds != rounds else stuck + min(now - last, 2 * self._pause)
            rounds, last = self._rounds, now
            if (of_store := self._last.get(0)) is not None and of_store.has_left:
                stuck = 0.0  # rank 0, which hosted the store, has left the run normally
            cause = self._cause or (self._cause_without_store() if stuck > self.timeout else None)
            if cause is not None:
                self._end_process(cause)
                return

    def _end_process(self, cause: Cause) -> None:
        """End this process after GUARD_GRACE, unless its main thread raises an error before or is itself the cause."""
        if cause.kind == "error" and cause.rank == self.rank:
            return
        end = time.monotonic() + GUARD_GRACE
        while time.monotonic() < end:
            if self._knows.wait(self._pause / 10) or self._over.is_set():
                return
        text = f"rank {self.rank} ends: {error_text(cause, self.timeout)}"
        if report_exit is not None:
            report_exit(text)
        elif self.rank == (1 if cause.rank == 0 else 0):  # one rank prints the message
            os.write(2, f"{text}\n".encode())
        _within(1.0, _flush)
        os._exit(1)  # the main thread may be in a blocking call that cannot be interrupted


def frame_of(thread: int) -> FrameType | None:
    """Return the current frame of a thread, with garbage collection disabled meanwhile.

    Before Python 3.11.9, `sys._current_frames` allocates while it holds the lock of the thread list. A finalizer run by
    a collection at this point may release the GIL. A thread that then starts another thread holds the GIL and waits for
    the lock: a deadlock (python/cpython#106883).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames().get(thread)
    finally:
        if collects:
            gc.enable()


def _within(seconds: float, ask: Callable[[], T]) -> list[T]:
    """Return [result of `ask`], or [] if it does not return within `seconds`: the store may never answer."""
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


# Messages about the rank at fault: its last position, and the call in which another rank waits for it.


class Heartbeat(NamedTuple):
    """Identity and position of a rank, which it writes to the store periodically."""

    number: int
    """The number of its heartbeats so far. A rank whose number does not change is silent."""
    has_left: bool
    """Whether it has left the run."""
    rank: int
    host: str
    pid: int
    progress: str
    """Its progress in the run, such as "epoch 1, after update 3"."""
    line: str
    """The current line of user code in its main thread, such as "train.py:12"."""
    call: str
    """The outermost active call of this library and the line of that call, as `call_of` returns it."""

    @classmethod
    def read(cls, sent: bytes) -> Heartbeat:
        """Return a heartbeat from JSON."""
        return cls(*json.loads(sent))


class Cause(NamedTuple):
    """The cause of a failed run. All ranks report the first one that is recorded."""

    kind: str
    """A key of `_MESSAGES`."""
    rank: int
    """The rank at fault; -1 for the launcher."""
    by: int
    """The rank that recorded the cause."""
    last: Heartbeat | None = None
    """The last heartbeat of the rank at fault."""
    error: str = ""
    """The first line of its error."""
    waits: str = ""
    """The call in which rank `by` waits for it."""
    is_closed: bool = False
    """Whether its connections are closed."""

    @classmethod
    def read(cls, sent: bytes) -> Cause:
        """Return a cause from JSON."""
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
"""The first line of the message and its `fix`, by kind of cause."""


def error_text(cause: Cause, timeout: float, *, here: str = "") -> str:
    """Return the message for a cause. `timeout`: the setting, in seconds. `here`: the line where this rank waited."""
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
    """Return the innermost line of user code in the traceback of an error, as "train.py:12"; "" if there is none."""
    found, step = "", error.__traceback__
    while step is not None:
        name = step.tb_frame.f_code.co_filename
        if is_users(name):
            found = f"{os.path.basename(name)}:{step.tb_lineno}"
        step = step.tb_next
    return found


def call_of(frame: FrameType | None) -> str:
    """Return the outermost active call of this library, as "evaluate (train.py:12)"; "" if there is none."""
    found, name = "", ""
    while frame is not None:
        code = frame.f_code
        if is_users(code.co_filename):
            found = f"{name} ({os.path.basename(code.co_filename)}:{frame.f_lineno})" if name else found
            name = ""
        elif is_ours(code.co_filename):
            if code.co_filename.endswith("launch.py"):  # the function given to `launch` is the program: stop there
                break
            if code.co_flags & CO_GENERATOR:
                name = ""  # an internal context manager, not a method that the user called
            elif code.co_name != "called":  # "called" is the wrapper that `suggests` puts around methods
                name = code.co_name
        frame = frame.f_back
    return found


def _position(cause: Cause) -> str:
    """Return the rank at fault, its process and its last position, as text."""
    last = cause.last
    if last is None:
        return ""
    line = "" if last.call.endswith(f"({last.line})") else last.line
    at = ", ".join(text for text in (last.progress, line, f"in {last.call}" if last.call else "") if text)
    seen = "last seen at" if cause.kind == "absent" else "at"
    return f"rank {cause.rank} on {last.host}, process {last.pid}" + (f", {seen} {at}" if at else "")
