"""Look after the other processes of a run: who has failed, who does not answer, and where each of them stands."""

from __future__ import annotations

import itertools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from trainwright.core.errors import DistributedError, first_line, user_line
from trainwright.core.torch_private import default_store
from trainwright.distributed.attempts import share_store
from trainwright.distributed.lingering import wait_for
from trainwright.distributed.peer_errors import Cause, call_of, line_of, told

T = TypeVar("T")
Beat = dict[str, Any]
"""What a process says of itself: n, state, rank, host, pid, place, line, call."""

GRACE = 5.0
"""Seconds in which a process may notice by itself that another one has failed, before it is ended."""
PAUSE = 0.5
"""Seconds between two words of a process; more where there are hundreds, since one of them hears all."""

_GROUP_WORDS = ("gloo", "nccl", "connection closed by peer", "connection reset by peer", "timed out waiting")
"""What the errors of a process group say; gloo's are plain RuntimeErrors."""
_LATE = ("timed out", "timeout")
"""What they say where a time-out has passed; else the connections are closed."""


class PeerWatch:
    """The watch of one process over its peers, run after run."""

    def __init__(self, group: Any) -> None:
        self._group, self._runs = group, itertools.count()
        self._run: _Watched | None = None

    @contextmanager
    def during(self, tell: Callable[[], str], timeout: float) -> Iterator[None]:
        """Watch a run; inside a run that is watched already this changes nothing.

        An error that leaves it is told to the others, or comes out as the DistributedError that `blame` makes of it.
        """
        if self._group.size == 1 or self._run is not None:
            yield
            return
        self._run = run = _Watched(self._group, next(self._runs), tell=tell, timeout=timeout)
        run.start()
        try:
            yield
        except Exception as error:
            cause = self.blame(error)
            if cause is not error:
                raise cause from None
            raise
        finally:
            self._run = None
            run.leave()

    def failed(self, error: BaseException) -> None:
        """Tell the others that this process ends in `error`; the first to say so is the one they name."""
        if self._run is not None and not isinstance(error, DistributedError):
            self._run.claim(error)

    def blame(self, error: BaseException) -> BaseException:
        """Return what an error comes from: DistributedError where it only follows from another process's."""
        run = self._run
        if run is None or isinstance(error, DistributedError):
            return error
        if not of_the_group(error):
            run.claim(error)
            return error
        cause = run.find_cause(late=any(word in str(error).lower() for word in _LATE))
        if cause is None or (cause["kind"] == "error" and cause["rank"] == self._group.rank):
            run.claim(error)
            return error
        return DistributedError(told(cause, run.timeout, here=line_of(error)))


def of_the_group(error: BaseException) -> bool:
    """Return whether an error is one of the process group's, or comes from one."""
    dist: Any = torch.distributed
    told: BaseException | None = error
    while told is not None:
        if isinstance(told, dist.DistError):
            return True
        if isinstance(told, RuntimeError) and any(word in str(told).lower() for word in _GROUP_WORDS):
            return True
        told = told.__cause__
    return False


last_words: Callable[[str], None] | None = None
"""Who is told, in place of the process's own stderr, why it is ended; for the launcher that started it."""


class _Watched:
    """One run under watch: a thread that speaks and hears, and one that acts where the first one cannot.

    The store of the group is used through a connection of its own. Where the process that keeps the store is stopped,
    a call to it may never return, so that no thread but the first one's, which can be left behind, ever makes one.
    """

    def __init__(self, group: Any, run: int, *, tell: Callable[[], str], timeout: float) -> None:
        dist: Any = torch.distributed
        self.rank, self.size, self.timeout = group.rank, group.size, timeout
        name = getattr(group.group or dist.group.WORLD, "group_name", "")
        store = default_store(dist).clone()
        self._store_of_all: Any = dist.PrefixStore(f"trainwright/watch/{name}", store)
        self._store: Any = dist.PrefixStore(str(run), self._store_of_all)
        self._tell, self._thread = tell, threading.get_ident()
        self._pause = min(max(PAUSE, self.size / 500), timeout / 10)
        self._beats = itertools.count()
        self._over, self._known = threading.Event(), threading.Event()
        self._rounds, self._claimed = 0, False
        self._heard: dict[int, Beat] = {}
        self._silent: dict[int, float] = {}
        self._cause: Cause | None = None
        self._speaker = threading.Thread(target=self._speak, name="trainwright-watch", daemon=True)
        self._guard = threading.Thread(target=self._act, name="trainwright-guard", daemon=True)

    def start(self) -> None:
        """Begin to speak and to hear."""
        self._speaker.start()
        self._guard.start()

    def leave(self) -> None:
        """Say that this process has left the run, and stop watching."""
        if self._claimed and self.rank == 0 and not share_store():
            time.sleep(2 * self._pause)  # the store may end with this process: let the others read why
        self._over.set()
        wait_for(self._speaker, 4 * self._pause)
        wait_for(self._guard, 4 * self._pause)

    def claim(self, error: BaseException) -> None:
        """Be the process that the run ends of, unless another one was before."""
        self._known.set()
        what = first_line(error)
        _within(GRACE, lambda: self._first({**self._beat("here"), "kind": "error", "what": what, "by": self.rank}))
        self._claimed = True

    def find_cause(self, *, late: bool) -> Cause | None:
        """Return which process an error of the group comes from, None where it is no other one's doing.

        `late`: whether the error is a time-out, and not a connection that is closed.
        """
        self._known.set()
        if self._cause is not None:
            return self._cause
        found = _within(6 * self._pause + GRACE, lambda: self._search(gone=not late))
        return found[0] if found else (self._cause or self._without_store())

    # What the first thread does.

    def _speak(self) -> None:
        dist: Any = torch.distributed
        last = time.monotonic()
        try:
            self._note("here")
            while not self._over.is_set():
                self._say("here")
                now = time.monotonic()
                # A process that was stopped itself, with all the others maybe, must not hold the gap against them.
                self._listen(min(now - last, 2 * self._pause))
                last = now
                self._rounds += 1
                self._over.wait(self._pause)
            self._say("left")
            self._note("left")
        except (dist.DistError, RuntimeError):
            return  # the store is gone: the guard counts the rounds that do not come any more

    def _say(self, state: str) -> None:
        self._store.set(f"beat/{self.rank}", json.dumps(self._beat(state)))

    def _note(self, state: str) -> None:
        """Say it for those, too, who wait for this process in another run."""
        self._store_of_all.set(f"last/{self.rank}", json.dumps(self._beat(state)))

    def _beat(self, state: str) -> Beat:
        frame = sys._current_frames().get(self._thread)
        return {
            "n": next(self._beats),
            "state": state,
            "rank": self.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "place": self._told(),
            "line": user_line(frame) if frame is not None else "",
            "call": call_of(frame),
        }

    def _told(self) -> str:
        try:
            return self._tell()
        except Exception as error:  # the run moves on beside this thread, and its word is worth no failure
            return f"({type(error).__name__} when asked where it stands)"

    def _listen(self, elapsed: float) -> None:
        """Hear of the others, the first process of all of them, the rest of it alone: n words a round, not n * n."""
        self._cause = self._failure()
        for rank in range(1, self.size) if self.rank == 0 else (0,):
            self._silent[rank] = self._silent.get(rank, 0.0) + elapsed
        for rank, beat in self._beats_of([r for r in self._silent if r != self.rank]).items():
            if beat["state"] == "left" or beat["n"] != self._heard.get(rank, {}).get("n"):
                self._silent[rank] = 0.0
            self._heard[rank] = beat
        overdue = [rank for rank, seconds in self._silent.items() if seconds > self.timeout]
        if overdue and self._cause is None:
            self._cause = self._first(self._accused("silent" if overdue[0] in self._heard else "absent", overdue[0]))

    def _beats_of(self, ranks: list[int]) -> dict[int, Beat]:
        keys = [f"beat/{rank}" for rank in ranks]
        if not self._store.check(keys):  # someone has not come yet: to ask for it would be to wait
            ranks = [rank for rank, key in zip(ranks, keys, strict=True) if self._store.check([key])]
            keys = [f"beat/{rank}" for rank in ranks]
        if not keys:
            return {}
        return {rank: json.loads(beat) for rank, beat in zip(ranks, self._store.multi_get(keys), strict=True)}

    def _failure(self) -> Cause | None:
        return json.loads(self._store.get("failure")) if self._store.check(["failure"]) else None

    def _first(self, cause: Cause) -> Cause:
        """Put down a cause unless there is one; return the one that stands."""
        stands: Cause = json.loads(self._store.compare_set("failure", "", json.dumps(cause)))
        return stands

    def _accused(self, kind: str, rank: int) -> Cause:
        """What is said of a process that is missed; of one that never came here what it said in another run."""
        known = self._heard.get(rank, {})
        if kind == "absent" and self._store_of_all.check([f"last/{rank}"]):
            known = json.loads(self._store_of_all.get(f"last/{rank}"))
        waits = call_of(sys._current_frames().get(self._thread))
        return {"rank": rank, **known, "kind": kind, "what": "", "by": self.rank, "waits": waits}

    # Where the group has given an error.

    def _search(self, *, gone: bool) -> Cause | None:
        """Wait until the process that failed has said so; else find out who is silent, gone or stuck elsewhere."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        before = self._beats_of(others)
        self._store.set(f"waits/{self.rank}", "1")
        end = time.monotonic() + 5 * self._pause
        while time.monotonic() < end:
            if (stands := self._failure()) is not None:
                return stands
            time.sleep(self._pause / 10)
        after = self._beats_of(others)
        self._heard.update(after)
        kinds = {rank: self._kind(before.get(rank), after.get(rank), rank) for rank in others}
        for kind in ("silent", "absent", "left", "behind"):
            for rank in others:
                if kinds[rank] == kind:
                    return self._first({**self._accused(kind, rank), "gone": gone})
        return None

    def _kind(self, before: Beat | None, after: Beat | None, rank: int) -> str:
        if after is None:
            return "absent"
        if after["state"] == "left":
            return "left"
        if before is not None and before["n"] == after["n"]:
            return "silent"
        return "" if self._store.check([f"waits/{rank}"]) else "behind"

    def _without_store(self) -> Cause | None:
        """The store does not answer: who keeps it is who is missed."""
        if share_store():
            return {"rank": -1, "kind": "store", "what": "", "by": self.rank}
        return None if self.rank == 0 else self._accused("silent", 0)

    # What the second thread does.

    def _act(self) -> None:
        rounds, stuck, last = 0, 0.0, time.monotonic()
        while not self._over.wait(self._pause):
            now = time.monotonic()
            stuck = 0.0 if self._rounds != rounds else stuck + min(now - last, 2 * self._pause)
            rounds, last = self._rounds, now
            if self._heard.get(0, {}).get("state") == "left":
                stuck = 0.0  # it has kept the store, and was free to go
            cause = self._cause or (self._without_store() if stuck > self.timeout else None)
            if cause is not None:
                self._end_of(cause)
                return

    def _end_of(self, cause: Cause) -> None:
        """End this process, unless it knows by itself or it is the one that has failed."""
        if cause["kind"] == "error" and cause["rank"] == self.rank:
            return
        end = time.monotonic() + GRACE
        while time.monotonic() < end:
            if self._known.wait(self._pause / 10) or self._over.is_set():
                return
        spokesman = 1 if cause["rank"] == 0 else 0  # one is enough to read
        text = f"rank {self.rank} ends: {told(cause, self.timeout)}"
        if last_words is not None:
            last_words(text)
        elif self.rank == spokesman:
            os.write(2, f"{text}\n".encode())
        _within(1.0, _flush)
        os._exit(1)  # the thread of the run may be in a wait that nothing can interrupt


def _within(seconds: float, ask: Callable[[], T]) -> list[T]:
    """Return the answer to a question, [] where there is none in this time: the store may never answer."""
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
