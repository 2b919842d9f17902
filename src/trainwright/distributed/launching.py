"""How `launch` brings a function into other processes: pickled into new ones, or forked, and what stands in the way."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from trainwright.core.errors import SettingError
from trainwright.distributed.environment import is_shell_of_slurm, read_environment


def choose_start(main: Callable[..., Any], args: tuple[Any, ...]) -> tuple[str, Any]:
    """Return "spawn" and the pickled function where new processes can import it, else "fork" and the function.

    Raises SettingError where neither can work.
    """
    sent, why_not = _pickled(main, args)
    if sent is not None:
        return "spawn", sent
    in_the_way = _against_fork()
    if in_the_way:
        raise SettingError(
            "launch: this function can be brought into no other process",
            have=f"new ones cannot import it: {why_not}\n        and this one cannot be copied: {in_the_way}",
            fix="put the function and what it uses into a file of its own, import it from there, give it what it "
            "needs as arguments; or call launch before anything touches the GPU",
        )
    return "fork", (main, args)


def describe() -> str:
    """Say by what this process is one of several already, "" where it is alone."""
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        return f"a process group of {torch.distributed.get_world_size()} processes"
    try:
        place = read_environment()
    except SettingError:
        if not is_shell_of_slurm():
            raise
        return ""  # a good place for `launch`
    return f"rank {place.rank} of {place.size}, by {place.launcher}" if place is not None else ""


def _pickled(main: Callable[..., Any], args: tuple[Any, ...]) -> tuple[bytes | None, str]:
    """Return a function and its arguments as bytes that a new process can read, or None and why there are none."""
    try:
        sent = pickle.dumps((main, args))
    except Exception as error:  # whatever a user's own __reduce__ raises
        return None, f"{type(error).__name__}: {error}"
    if b"__main__" in sent and not _main_can_be_imported():
        name = getattr(main, "__qualname__", repr(main))
        return None, f"{name} or what it is given was written in a notebook or at a prompt, not in a file"
    return sent, ""


def _main_can_be_imported() -> bool:
    """Whether a new process can run the file or module that is `__main__` here."""
    module = sys.modules["__main__"]
    if getattr(module, "__spec__", None) is not None:
        return True
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and os.path.isfile(file) and not hasattr(sys, "ps1")


def _against_fork() -> str:
    """Say why this process cannot be copied, "" where it can."""
    if "fork" not in multiprocessing.get_all_start_methods():
        return f"{sys.platform} has no fork"
    for kind in ("cuda", "xpu"):
        if getattr(torch, kind).is_initialized():
            return f"{kind.upper()} is in use here already, and a copy could not use it"
    if threading.current_thread() is not threading.main_thread():
        return f"launch was called in the thread {threading.current_thread().name!r}, not in the main one"
    others = [thread.name for thread in threading.enumerate() if _stands_in_the_way(thread)]
    return f"threads run that it would lack: {', '.join(others)}" if others else ""


def _stands_in_the_way(thread: threading.Thread) -> bool:
    """Whether a copy may miss a thread: a daemon is made to be lost, and a pool's waits for work."""
    if thread is threading.main_thread() or thread.daemon:
        return False
    pools = sys.modules.get("concurrent.futures.thread")
    return pools is None or thread not in pools._threads_queues
