"""What one process of a group does or finds for all of them, so that its result and its error are everybody's."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from trainwright.core.errors import CheckpointError, DataError, SettingError

if TYPE_CHECKING:
    from trainwright.distributed.world import World

T = TypeVar("T")
BEAT = 5.0
"""Seconds after which a first process that is at work tells the others so, and again: no time-out of theirs ends it."""
_KINDS: dict[str, type[Exception]] = {kind.__name__: kind for kind in (CheckpointError, DataError, SettingError)}


def first_of(world: World, do: Callable[[], T]) -> T:
    """What the first process makes of `do`, on every process; what it raises there is raised on all.

    For all processes alike, in the same order. The result must be one that can be pickled. An error that is raised on
    all of them has the attribute `everywhere`; it is a CheckpointError where it was none of the library's own.
    """
    if not world.is_main:
        heard: T = _heard(world)
        return heard
    try:
        with _beating(world):
            result = do()
    except BaseException as error:
        world.same(("error", type(error).__name__, str(error)))
        if isinstance(error, Exception):
            mark(error)
        raise
    world.same(("result", result, ""))
    return result


def mark(error: Exception) -> Exception:
    """The same error, known to have come out of every process."""
    error.everywhere = True  # type: ignore[attr-defined]
    return error


def error_of(kind: str, text: str) -> Exception:
    """An error that another process has told."""
    if kind in _KINDS:
        return mark(_KINDS[kind](text))
    return mark(CheckpointError(f"{kind} on the first process: {text}"))


def here(world: World) -> str:
    """How this process is called in an error: `process 1 on host-b`."""
    return f"process {world.rank} on {socket.gethostname()}"


def _heard(world: World) -> Any:
    """What the first process tells when it is done."""
    said: Any = ("beat",)
    while said[0] == "beat":
        said = world.same(None)
    if said[0] == "error":
        raise error_of(said[1], said[2])
    return said[1]


@contextmanager
def _beating(world: World) -> Iterator[None]:
    """Tell the others now and then that this process is at work; it must ask them nothing meanwhile."""
    done = threading.Event()

    def beat() -> None:
        with suppress(RuntimeError):  # a process that is gone: the next thing that is said to it tells
            while not done.wait(BEAT):
                world.same(("beat",))

    thread = threading.Thread(target=beat, name="trainwright beat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
