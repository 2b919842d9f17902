"""What a process of `launch` does: take its place among the others, run the function, say how it went."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from trainwright.core.errors import DistributedError, first_line, message
from trainwright.distributed.peer_watch import of_the_group

Answer = tuple[str, bytes] | tuple[str, str, str]
"""("value", the pickled value), or the kind of an error, what to say of it, and its traceback.

"setting": the call of `launch` is wrong. "error": this process's own. "named": it says which other process has failed.
"follows": it comes from another process's, and does not say whose.
"""

UNGUARDED = 86
"""The exit code of a process that comes to `launch` while it imports the script that called it."""
LAST_SAVE = 30.0
"""Seconds that a process has to save and end when the one that launched it is gone."""


def serve(pipe: Connection, rank: int, size: int, *, sent: Any, inherited: Sequence[Connection]) -> None:
    """Run what was sent as process `rank` of `size`; `inherited` are ends of pipes that are not this one's."""
    from trainwright.distributed import peer_watch, start

    for other in inherited:
        other.close()
    _settle(forked=not isinstance(sent, bytes))
    try:
        _take_place(pipe.recv(), rank, size)
    except EOFError:  # the launcher is gone
        return
    threading.Thread(target=_end_with_launcher, args=(pipe,), daemon=True).start()
    peer_watch.last_words = lambda text: pipe.send(("named", text, ""))
    answer = _answer(sent, rank)
    with contextlib.suppress(BrokenPipeError):
        pipe.send(answer)
    start.leave()


def _settle(*, forked: bool) -> None:
    """Leave the launcher's terminal: Ctrl-C comes from the launcher, once, and not from both."""
    if hasattr(os, "setsid"):
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # what came on the way here is dropped
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if forked or "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # as torchrun does; and OpenMP in a copy waits for threads that the copy lacks


def _take_place(port: int, rank: int, size: int) -> None:
    """Say who this is, as torchrun does; the store where all meet is the launcher's."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    if os.path.isdir("/sys/class/net/lo"):  # where the name of this machine leads does not matter then
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _end_with_launcher(pipe: Connection) -> None:
    """Save and end where the process that launched this one is gone: it says nothing else through the pipe."""
    wait([pipe])
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(LAST_SAVE)
    os._exit(1)


def _answer(sent: Any, rank: int) -> Answer:
    """Run the function; return what it gives, or of what kind its error is, its first line and the traceback."""
    try:
        main, args = pickle.loads(sent) if isinstance(sent, bytes) else sent
    except Exception as error:  # whatever an import of the user's raises
        fix = "put it into a file that can be imported, and not under `if __name__ == ...`"
        what = message(
            "launch: the new processes cannot import the function", have=first_line(error), fix=fix, where=False
        )
        return "setting", what, traceback.format_exc()
    try:
        value = main(*args)
    except SystemExit as error:
        return ("error", first_line(error), traceback.format_exc()) if error.code else _packed(None)
    except DistributedError as error:
        return "named", str(error), traceback.format_exc()
    except BaseException as error:
        return "follows" if of_the_group(error) else "error", first_line(error), traceback.format_exc()
    return _packed(value if rank == 0 else None)


def _packed(value: Any) -> Answer:
    try:
        return "value", pickle.dumps(value)
    except Exception as error:  # whatever a user's own __reduce__ raises
        want = "what can be pickled: numbers, text, tensors, None, lists and dicts of these"
        what = f"launch: the value of the first process cannot be sent back, a {type(value).__name__}"
        fix = "return result.history, trainer.model.state_dict(), or a dict of plain numbers"
        return "setting", message(what, have=first_line(error), want=want, fix=fix, where=False), ""
