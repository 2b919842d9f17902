"""Forks trainings from one warmed process, follows what they tell, and kills them at a chosen moment."""

from __future__ import annotations

import gc
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

LIMIT = 120.0
"""Seconds after which a training hangs."""


@dataclass(frozen=True)
class When:
    """A moment: `delay` seconds after the training has written a line that begins with `line` ("": after its start)."""

    delay: float
    line: str = ""
    signal: int = signal.SIGKILL
    group: bool = False
    """Whether the whole process group is signalled, loader workers included."""


@dataclass(frozen=True)
class Line:
    """One line that a training has reported, and the seconds since its start when it came."""

    what: str
    update: int
    words: tuple[str, ...]
    seconds: float


@dataclass
class Ended:
    """How a training ended."""

    lines: list[Line]
    code: int
    """The exit code; -n where signal n has killed it."""
    struck: bool
    """Whether the signal was sent before it ended by itself."""
    hung: bool = False
    log: str = field(default="", repr=False)

    def last(self, what: str) -> int:
        """The greatest update that a line of this kind reported; 0 where there is none."""
        return max((line.update for line in self.lines if line.what == what), default=0)

    def first(self, what: str) -> Line | None:
        """The first line of this kind."""
        return next((line for line in self.lines if line.what == what), None)


def prepare() -> None:
    """Make this process one that can be forked: one thread, and nothing for the collector to copy."""
    torch.set_num_threads(1)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"a process with {len(threads)} threads cannot be forked safely"
    gc.collect()
    gc.freeze()


def run(train: Callable[[int], None], log: Path, *, when: When | None = None, limit: float = LIMIT) -> Ended:
    """Fork a process that runs `train(fd)`, where fd takes its lines; signal it at `when`; return how it ended."""
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        _child(train, log, writing)
    os.close(writing)
    with suppress(OSError):  # the child does the same: whoever is first
        os.setpgid(pid, pid)
    try:
        return _Following(pid, reading, when, limit).until_it_ends(log)
    finally:
        os.close(reading)


def end_group(pids: Sequence[int]) -> None:
    """Kill what the trainings have left behind: loader workers notice only after seconds that their parent is gone."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


groups: list[int] = []
"""The process groups of trainings that ended and may have left workers."""


def _child(train: Callable[[int], None], log: Path, fd: int) -> None:
    """Live as a script of its own would: the exit code is the interpreter's."""
    code = 1
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(out, 1)
        os.dup2(out, 2)
        train(fd)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        print(f"SystemExit: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        traceback.print_exc()
        sys.stderr.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # as the interpreter ends
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


class _Following:
    def __init__(self, pid: int, fd: int, when: When | None, limit: float) -> None:
        self.pid, self.fd, self.when = pid, fd, when
        self.begun = time.monotonic()
        self.end = self.begun + limit
        self.at = self.begun + when.delay if when is not None and not when.line else None
        self.lines: list[Line] = []
        self.rest = b""
        self.struck = self.hung = False

    def until_it_ends(self, log: Path) -> Ended:
        process = os.pidfd_open(self.pid)
        os.set_blocking(self.fd, False)
        waiting = select.poll()
        waiting.register(process, select.POLLIN)
        waiting.register(self.fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in waiting.poll(self._wait())}
            if self.fd in ready and not self._read():
                waiting.unregister(self.fd)
            if process in ready:
                break
            self._strike()
        os.close(process)
        _, status = os.waitpid(self.pid, 0)
        self._read()
        groups.append(self.pid)
        text = log.read_text(errors="replace") if log.exists() else ""
        return Ended(self.lines, os.waitstatus_to_exitcode(status), self.struck, self.hung, text)

    def _wait(self) -> float:
        """Milliseconds until something is to be done."""
        until = self.end if self.at is None else min(self.at, self.end)
        return max(0.0, 1000 * (until - time.monotonic()))

    def _strike(self) -> None:
        now = time.monotonic()
        if now >= self.end:
            self.hung = True
            end_group([self.pid])
            self.end = now + 5
        elif self.at is not None and now >= self.at:
            assert self.when is not None
            self.struck, self.at = True, None
            (os.killpg if self.when.group else os.kill)(self.pid, self.when.signal)

    def _read(self) -> bool:
        """Take in what was reported; False at the end of the pipe."""
        while True:
            try:
                data = os.read(self.fd, 1 << 16)
            except BlockingIOError:
                return True
            if not data:
                return False
            *whole, self.rest = (self.rest + data).split(b"\n")
            for text in whole:
                self._take(text.decode())

    def _take(self, text: str) -> None:
        now = time.monotonic()
        what, update, *words = text.split()
        self.lines.append(Line(what, int(update), tuple(words), now - self.begun))
        when = self.when
        if (
            when is not None
            and when.line
            and self.at is None
            and not self.struck
            and f"{text} ".startswith(when.line + " ")
        ):
            self.at = now + when.delay
