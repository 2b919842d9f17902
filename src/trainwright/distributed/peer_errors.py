"""What is said of a process that the others wait for in vain: who, where it was, who waits for it, and what to do."""

from __future__ import annotations

import os
from inspect import CO_GENERATOR
from types import FrameType
from typing import Any

from trainwright.core.errors import is_ours, is_users, message

Cause = dict[str, Any]
"""Which process a run ends of: what it has said of itself last, and kind, what, by, waits, gone."""

_LATE = "for long pauses DDP(timeout=...)"
_SAYS = {
    "error": ("rank {rank} has failed: {what}", "its traceback is in its own output"),
    "silent": (
        "rank {rank} does not answer",
        f"find out whether it was killed (no memory?) or stopped, or its machine lost; {_LATE}",
    ),
    "gone": (
        "rank {rank} does not answer, and its connections are closed",
        "find out whether it was killed (no memory?), or its machine lost",
    ),
    "absent": (
        "rank {rank} has not come to this run",
        "call {call} on every process, in the same order, and not under `if trainer.is_main:`",
    ),
    "left": (
        "rank {rank} has left this run, and rank {by} waits for it",
        "every process must do the same calls, and none of them under `if trainer.is_main:`",
    ),
    "behind": (
        "rank {rank} has not come to where rank {by} waits for it",
        f"it is stuck, or the processes do not all call the same: look at the line of each; {_LATE}",
    ),
    "store": ("the process that launched this one does not answer", "look at its output; start the job again"),
}
"""By kind: what is said, and what to do."""


def told(cause: Cause, timeout: float, *, here: str = "") -> str:
    """Return the error's text for a cause; `timeout` is the setting, in seconds, `here` where this process waited."""
    kind, waits = cause["kind"], cause.get("waits", "")
    gone = bool(cause.get("gone"))
    what, fix = _SAYS["gone" if gone and kind == "silent" else kind]
    named = {**cause, "call": waits.partition(" ")[0] or "fit and the like"}
    have = [_who(cause)]
    if waits and kind in ("absent", "left", "behind"):
        have.append(f"rank {cause['by']} waits for it in {waits}")
    elif here:
        have.append(f"this process waited at {here}")
    want = f"a word from every process within {timeout:g} s" if kind in ("silent", "absent", "store") else ""
    if gone and kind in ("silent", "absent"):
        want = "every process to stay until all have done the same calls" if kind == "absent" else ""
    have_lines = "\n        ".join(line for line in have if line)
    return message(what.format(**named), have=have_lines, want=want, fix=fix.format(**named), where=False)


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
            if code.co_filename.endswith("launched.py"):  # what `launch` runs is the user's program
                break
            if code.co_flags & CO_GENERATOR:
                name = ""  # a context of ours, which no user has called by its name
            elif code.co_name != "called":  # which stands around methods: `suggests`
                name = code.co_name
        frame = frame.f_back
    return found


def _who(cause: Cause) -> str:
    """The process that is missed, and where it was."""
    if "host" not in cause:
        return ""
    place, line, call = (cause.get(key, "") for key in ("place", "line", "call"))
    line = "" if call.endswith(f"({line})") else line
    at = ", ".join(text for text in (place, line, f"in {call}" if call else "") if text)
    heard = "last heard of at" if cause["kind"] == "absent" else "at"
    return f"rank {cause['rank']} on {cause['host']}, process {cause['pid']}" + (f", {heard} {at}" if at else "")
