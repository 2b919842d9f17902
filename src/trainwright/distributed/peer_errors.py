"""Messages about a rank at fault: which one, its last position, the call of another rank that waits for it."""

from __future__ import annotations

import json
import os
from inspect import CO_GENERATOR
from types import FrameType
from typing import NamedTuple

from trainwright.core.errors import is_ours, is_users, message


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


_LATE = "for long pauses DDP(timeout=...)"
_MESSAGES = {
    "error": ("rank {rank} has failed: {error}", "its traceback is in its own output"),
    "silent": (
        "rank {rank} does not answer",
        f"find out whether it was killed (no memory?) or stopped, or its machine lost; {_LATE}",
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
        f"it is stuck, or the processes do not all call the same: look at the line of each; {_LATE}",
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
