"""Coordinates the ranks for checkpoints: rank 0 acts for all, or all ranks read the same checkpoint.

The result or the error of rank 0 is broadcast: all ranks continue, or end, together. Collectives carry only that; the
files are on a file system that the ranks share.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from trainwright.checkpointing.format import update_name
from trainwright.core.errors import CheckpointError, DataError, SettingError, message

if TYPE_CHECKING:
    from trainwright.checkpointing.load import Loaded
    from trainwright.distributed.world import World

T = TypeVar("T")
BEAT = 5.0
"""Seconds between two heartbeats of rank 0 while it works; they keep the collectives of other ranks from timing out."""
_ERRORS: dict[str, type[Exception]] = {kind.__name__: kind for kind in (CheckpointError, DataError, SettingError)}
_Verdict = Literal["complete", "unseen", "damaged"]


def on_rank_zero(world: World, do: Callable[[], T]) -> T:
    """Call `do` on rank 0; return its result, or raise its error, on every rank.

    A collective; the result must be picklable. An error that all ranks raise has the attribute `everywhere`; it is a
    CheckpointError if it is no error of this package.
    """
    if not world.is_main:
        result: T = _receive(world)
        return result
    try:
        with _beating(world):
            result = do()
    except BaseException as error:
        _send_error(world, error)
        raise
    world.broadcast(("result", result, ""))
    return result


def raised_everywhere(error: Exception) -> Exception:
    """Mark an error that every rank raises; return it."""
    error.everywhere = True  # type: ignore[attr-defined]
    return error


def rank_name(world: World) -> str:
    """Return the name of this rank in an error: `rank 1 on host-b`."""
    return f"rank {world.rank} on {socket.gethostname()}"


def _receive(world: World) -> Any:
    """Return the result of rank 0, or raise its error."""
    sent: Any = ("beat",)
    while sent[0] == "beat":
        sent = world.broadcast(None)
    if sent[0] == "error":
        raise _error_of(sent[1], sent[2])
    return sent[1]


def _send_error(world: World, error: BaseException) -> None:
    world.broadcast(("error", type(error).__name__, str(error)))
    if isinstance(error, Exception):
        raised_everywhere(error)


def _error_of(kind: str, text: str) -> Exception:
    """Return the error that rank 0 has raised."""
    if kind in _ERRORS:
        return raised_everywhere(_ERRORS[kind](text))
    return raised_everywhere(CheckpointError(f"{kind} on rank 0: {text}"))


@contextmanager
def _beating(world: World) -> Iterator[None]:
    """Send heartbeats from a thread; the caller must start no collective in this context."""
    done = threading.Event()

    def beat() -> None:
        with suppress(RuntimeError):  # a dead rank: the next collective raises
            while not done.wait(BEAT):
                world.broadcast(("beat",))

    thread = threading.Thread(target=beat, name="trainwright beat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


# One checkpoint, read by all ranks


def load_on_all_ranks(
    world: World, find: Callable[[Callable[[Path], Loaded]], Loaded | None], read: Callable[[Path], Loaded]
) -> Loaded | None:
    """Search with `find` on rank 0, and read each candidate with `read` on every rank; return the same one on all.

    A checkpoint that any rank cannot read is damaged for all. CheckpointError, on all ranks, also if a rank sees
    another directory than rank 0.
    """
    if not world.is_main:
        return _follow(world, read)
    try:
        loaded = find(lambda path: _read_on_all(world, path, read))
    except _OtherDirectoryError as error:
        raised = CheckpointError(str(error))
        _send_error(world, raised)
        raise raised from None
    except BaseException as error:
        _send_error(world, error)
        raise
    world.broadcast(("loaded", loaded is not None))
    return loaded


class _OtherDirectoryError(Exception):
    """A rank has no such directory: no older checkpoint can help."""


def _read_on_all(world: World, path: Path, read: Callable[[Path], Loaded]) -> Loaded:
    """Read a checkpoint on every rank; CheckpointError if any of them cannot."""
    world.broadcast(("read", path.absolute()))
    loaded, error, verdict = _try(world, path, read)
    verdicts = world.all_gather(verdict)
    if error is not None:
        raise error
    unseen = [where for state, where, _ in verdicts if state == "unseen"]
    unseen += [where for state, where, text in verdicts if state == "complete" and text != verdict[2]]
    if unseen:
        what = f"{path}: {', '.join(unseen)} cannot see it as rank 0 does"
        fix = f"put {path.parent} where each rank reads the same"
        raise _OtherDirectoryError(message(what, want="a directory that all ranks share", fix=fix))
    for state, where, text in verdicts:
        if state == "damaged":
            raise CheckpointError(f"{text} (read by {where})")
    assert loaded is not None
    return loaded


def _follow(world: World, read: Callable[[Path], Loaded]) -> Loaded | None:
    """Read each candidate of rank 0, until it has loaded one or given up."""
    loaded: Loaded | None = None
    while True:
        order: Any = world.broadcast(None)
        if order[0] == "error":
            raise _error_of(order[1], order[2])
        if order[0] == "loaded":
            return loaded if order[1] else None
        loaded = None  # at most one checkpoint is in memory
        loaded, error, verdict = _try(world, order[1], read)
        world.all_gather(verdict)
        if error is not None and not isinstance(error, Exception):
            raise error


def _try(
    world: World, path: Path, read: Callable[[Path], Loaded]
) -> tuple[Loaded | None, BaseException | None, tuple[_Verdict, str, str]]:
    """Read a checkpoint on this rank; return it, or the error, and the verdict for the other ranks."""
    where = rank_name(world)
    if not os.path.lexists(path):
        return None, CheckpointError(f"checkpoint {path} is gone"), ("unseen", where, "")
    try:
        loaded = read(path)
    except CheckpointError as error:
        return None, error, ("damaged", where, str(error))
    except BaseException as error:
        return None, error, ("damaged", where, f"{path} could not be read: {type(error).__name__}: {error}")
    return loaded, None, ("complete", where, _identity(loaded))


def _identity(loaded: Loaded) -> str:
    """Return a text that differs between two checkpoints of the same name."""
    manifest = loaded.manifest
    text = json.dumps([manifest["run"], manifest["update"], manifest["files"]], sort_keys=True)
    return f"{update_name(manifest['update'])} {hashlib.sha256(text.encode()).hexdigest()}"
