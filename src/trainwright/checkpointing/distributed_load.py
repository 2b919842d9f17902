"""Finds one checkpoint for all processes: the first looks, every one reads, all end with it or with one error."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.checkpointing import commits
from trainwright.checkpointing.checksums import checksum_of
from trainwright.checkpointing.load import Loaded
from trainwright.checkpointing.rank0 import error_of, here, mark
from trainwright.core.errors import CheckpointError, message

if TYPE_CHECKING:
    from trainwright.distributed.world import World

Read = Callable[[Path], Loaded]
WHOLE, UNSEEN, DEFECT = "whole", "unseen", "defect"


def load_with_all(world: World, find: Callable[[Read], Loaded | None], read: Read) -> Loaded | None:
    """What `find` finds on the first process; `read` reads a path on the process that it is called on.

    One that any process cannot read is damaged for all of them. CheckpointError, on all, also where a process sees
    another directory than the first one does.
    """
    if not world.is_main:
        return _follow(world, read)
    try:
        found = find(lambda path: _read_by_all(world, path, read))
    except _OtherDirectoryError as error:
        shown = mark(CheckpointError(str(error)))
        world.same(("error", "CheckpointError", str(error)))
        raise shown from None
    except BaseException as error:
        world.same(("error", type(error).__name__, str(error)))
        if isinstance(error, Exception):
            mark(error)
        raise
    world.same(("found", found is not None))
    return found


class _OtherDirectoryError(Exception):
    """A process has no such directory: no older checkpoint can help."""


def _read_by_all(world: World, path: Path, read: Read) -> Loaded:
    """Have every process read a checkpoint; CheckpointError where one cannot, of whichever that is."""
    world.same(("read", path.absolute()))
    loaded, error, verdict = _tried(world, path, read)
    verdicts = world.gather(verdict)
    if error is not None:
        raise error
    unseen = [where for state, where, _ in verdicts if state == UNSEEN]
    unseen += [where for state, where, text in verdicts if state == WHOLE and text != verdict[2]]
    if unseen:
        what = f"{path}: {', '.join(unseen)} cannot see it as process 0 does"
        fix = f"lay {path.parent} where each process reads the same"
        raise _OtherDirectoryError(message(what, want="a directory that all processes share", fix=fix))
    for state, where, text in verdicts:
        if state == DEFECT:
            raise CheckpointError(f"{text} (read by {where})")
    assert loaded is not None
    return loaded


def _follow(world: World, read: Read) -> Loaded | None:
    """Read what the first process says, until it has found what is meant."""
    loaded: Loaded | None = None
    while True:
        order: Any = world.same(None)
        if order[0] == "error":
            raise error_of(order[1], order[2])
        if order[0] == "found":
            return loaded if order[1] else None
        loaded = None  # of two that are read one after the other only one is in memory
        loaded, error, verdict = _tried(world, order[1], read)
        world.gather(verdict)
        if error is not None and not isinstance(error, Exception):
            raise error


def _tried(world: World, path: Path, read: Read) -> tuple[Loaded | None, BaseException | None, tuple[str, str, str]]:
    """What this process makes of a checkpoint, and what it says of it to the others."""
    if not os.path.lexists(path):
        return None, CheckpointError(f"checkpoint {path} is gone"), (UNSEEN, here(world), "")
    try:
        loaded = read(path)
    except CheckpointError as error:
        return None, error, (DEFECT, here(world), str(error))
    except BaseException as error:
        return None, error, (DEFECT, here(world), f"{path} could not be read: {type(error).__name__}: {error}")
    return loaded, None, (WHOLE, here(world), _identity(loaded))


def _identity(loaded: Loaded) -> str:
    """What two different checkpoints of one name do not have in common."""
    manifest = loaded.manifest
    text = json.dumps([manifest["run"], manifest["update"], manifest["files"]], sort_keys=True)
    return f"{commits.update_name(manifest['update'])} {checksum_of(text.encode(), 'sha256')}"
