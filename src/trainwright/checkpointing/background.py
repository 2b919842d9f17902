"""One thread that does one job at a time, and keeps what comes of it until it is asked."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
_POLL = 0.5
"""Seconds: on Windows a wait without a limit does not hear Ctrl-C."""


@dataclass(frozen=True, slots=True)
class Done(Generic[T]):
    """What came of a job: its result, or what it raised."""

    result: T | None
    error: BaseException | None = None


class Background(Generic[T]):
    """A daemon thread that begins with its first job and ends with `close`; all methods are for one other thread.

    One job is in flight at most: the next one waits until the last is done. Forked children must not use it; they
    have no such thread. Every wait ends at once with a KeyboardInterrupt, and the job goes on nevertheless.
    """

    def __init__(self, name: str, *, news: Callable[[], None] | None = None) -> None:
        self._name = name
        self._news = news
        """Called by the thread when a job has ended, whatever came of it."""
        self._changed = threading.Condition()
        self._job: Callable[[], T] | None = None
        self._chore: Callable[[], object] | None = None
        self._last: Callable[[], object] | None = None
        self._is_busy = self._has_begun = self._has_ended = False
        self._done: list[Done[T]] = []
        self._process = os.getpid()

    def hand(self, job: Callable[[], T]) -> None:
        """Have a job done; waits for the last one. Its result or its error is given by `done`.

        Nothing of it is held afterwards, unless it is a closure that raises: the error refers to what it closes over.
        """
        with self._changed:
            self.wait()
            self._begin()
            self._job = job
            self._changed.notify_all()

    def prepare(self, chore: Callable[[], object]) -> None:
        """Have something done when no job is; takes the place of a chore that has not begun. Only errors are kept."""
        with self._changed:
            self._begin()
            self._chore = chore
            self._changed.notify_all()

    def here(self, job: Callable[[], T]) -> None:
        """Do a job in the calling thread; what comes of it is kept like that of any other."""
        self.wait()
        self._done.append(_outcome(job, Exception))

    def wait(self) -> None:
        """Wait until nothing is left to do."""
        if not self._is_here:
            return
        with self._changed:
            while self._is_busy or self._job is not None or self._chore is not None:
                self._changed.wait(_POLL)

    def done(self) -> list[Done[T]]:
        """What came of the jobs that have ended since this was last asked, oldest first."""
        with self._changed:
            done, self._done = self._done, []
        return done

    def close(self, last: Callable[[], object], *, wait: bool = True) -> None:
        """Wait for the job in flight, then have `last` called and the thread end; without `wait`, where there is none.

        `last` is called by the thread, so that it comes after the job even where nobody waits for it.
        """
        if not self._is_here:
            return
        with self._changed:
            if not self._has_begun:
                last()
                return
            self._last = last
            self._changed.notify_all()
            waits = wait or not (self._is_busy or self._job is not None)
            while waits and not self._has_ended:
                self._changed.wait(_POLL)

    @property
    def _is_here(self) -> bool:
        """Whether this is the process of the thread; a forked child has none, and must not wait for it."""
        return os.getpid() == self._process

    def _begin(self) -> None:
        if not self._is_here:
            raise RuntimeError("checkpoints are written by the process that called fit, not by one forked off in it")
        if not self._has_begun:
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
            self._has_begun = True

    def _work(self) -> None:
        while self._work_once():
            pass
        assert self._last is not None
        try:
            self._last()
        finally:
            with self._changed:
                self._has_ended = True
                self._changed.notify_all()

    def _work_once(self) -> bool:
        """Do one thing, of which nothing is referred to afterwards; False when all is done and the end is asked for."""
        with self._changed:
            while self._job is None and self._chore is None:
                if self._last is not None:
                    return False
                self._changed.wait()
            job, chore, self._is_busy = self._job, self._chore, True
            if job is not None:
                self._job = None
            else:
                self._chore = None
        outcome: Done[T] | None = None
        if job is not None:
            outcome = _outcome(job, BaseException)
        elif chore is not None:
            said = _outcome(chore, BaseException)
            outcome = None if said.error is None else Done(None, said.error)
        del job, chore
        with self._changed:
            self._done += [] if outcome is None else [outcome]
            self._is_busy = False
            self._changed.notify_all()
        if outcome is not None and self._news is not None:
            self._news()
        return True


def _outcome(job: Callable[[], T], kept: type[BaseException]) -> Done[T]:
    try:
        return Done(job())
    except kept as error:
        del job  # the frames of a traceback refer to the ones that have called them, this one too
        _forget(error)
        return Done(None, error)


def _forget(error: BaseException) -> None:
    """Have an error that is kept say where it came from, and hold on to nothing of what was there."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__
