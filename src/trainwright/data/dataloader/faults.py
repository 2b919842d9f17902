"""Says of an error out of a loader's workers which worker it was, what it was asked for, and what to do."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

from trainwright.core.errors import NOTE, listed

_MOST_ROWS = 16
_SHARED_MEMORY = "/dev/shm"
_ASIDE = "num_workers=0 fetches these rows in this process, where a debugger and the whole traceback are at hand"


def explain(error: Exception, *, pids: Sequence[int], worker: int | None, asked: Sequence[Any]) -> None:
    """Add one note to an error; its type, text and traceback stay.

    `asked` are the rows of the batch that was waited for, and of those that the same worker was asked for after it.
    """
    if any(note.startswith(NOTE) for note in getattr(error, "__notes__", ())):
        return
    what, why, fix = _cause(_told(error))
    known = worker is not None and 0 <= worker < len(pids)
    who = f"loader worker {worker} of {len(pids)} (pid {pids[worker]})" if known and worker is not None else "a worker"
    rows = "; then ".join(_shown(rows) for rows in asked[:4] if rows is not None)
    lines = [f"{NOTE}{who} {what}"]
    lines += [f"  {label:<9}{text}" for label, text in (("rows", rows), ("why", why), ("fix", fix)) if text]
    error.add_note("\n".join(lines))


def named_in(error: Exception, pids: Sequence[int], *, waited: int | None) -> int | None:
    """The number of the worker that an error speaks of by its pid; `waited` where it speaks of none."""
    named = [int(pid) for pids in re.findall(r"\(pid(?:\(s\))? ([\d, ]+)\)", _told(error)) for pid in pids.split(",")]
    if not named:
        return waited
    return next((pids.index(pid) for pid in named if pid in pids), None)


def unravel(error: Exception) -> None:
    """Let an error that was sent by a worker go as soon as nobody holds it.

    torch raises it in a frame that holds it, and so the iterator with its workers: it would stay until a collection,
    which takes the queues first, and then waits for workers that hear nothing any more.
    """
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_name == "reraise":
            trace.tb_frame.clear()
        trace = trace.tb_next


def _told(error: Exception) -> str:
    """What torch says: the signal that it has heard of stands in the cause."""
    return f"{error} {error.__cause__ or ''}"


def _cause(text: str) -> tuple[str, str, str]:
    """What happened to the worker, why, and what to do."""
    by_hand = "DataLoader worker (pid" in text
    if any(part in text for part in ("shared memory", "Bus error", "</torch_")):
        smaller = "fewer num_workers, a smaller prefetch_factor or smaller batches"
        fix = f"a larger {_SHARED_MEMORY} (in a container: docker run --shm-size=8g, or --ipc=host), or {smaller}"
        return "ran out of shared memory", _room(), fix
    if "timed out after" in text:
        fix = f"{_ASIDE}; DataLoader(timeout=...) waits longer"
        return "gave no batch in time", "it hangs: a lock held when it was forked, or a file system or a network", fix
    if by_hand and "signal: Killed" in text:
        why = "SIGKILL, which mostly is the system's when memory runs out (dmesg tells)"
        return "was killed", why, "fewer num_workers or a smaller prefetch_factor"
    if by_hand:
        return "died", "something in the data set's code, or a signal, ended the process", _ASIDE
    return "raised this error", "", _ASIDE


def _room() -> str:
    if not hasattr(os, "statvfs") or not os.path.isdir(_SHARED_MEMORY):
        return "batches go to this process through shared memory, and there was not enough of it"
    room = os.statvfs(_SHARED_MEMORY)
    free, whole = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
    return f"batches go to this process through {_SHARED_MEMORY}: {free >> 20:,} MB of {whole >> 20:,} MB are free now"


def _shown(rows: Any) -> str:
    rows = getattr(rows, "rows", rows)
    if not isinstance(rows, Iterable) or isinstance(rows, str | bytes):
        return str(rows)[:200]
    return listed([str(row)[:40] for row in rows], _MOST_ROWS) or "none"
