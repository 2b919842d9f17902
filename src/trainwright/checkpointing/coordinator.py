"""Checkpoints of several ranks: rank 0 acts for all ranks, all ranks load the same checkpoint, one manager per rank.

The result or the error of rank 0 is broadcast, so that all ranks continue or end together. Collectives carry nothing
else. The files are on a file system that the ranks share.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from trainwright.checkpointing import sharded_files
from trainwright.checkpointing.commit import temporary_name
from trainwright.checkpointing.files import Content, spare_name
from trainwright.checkpointing.format import encode, holds_shards, update_name
from trainwright.checkpointing.manager import CheckpointManager
from trainwright.checkpointing.sharded_files import ShardedSave, shard_file, split_shards
from trainwright.checkpointing.tensorfile import Contents
from trainwright.checkpointing.writer import Writer
from trainwright.core.errors import CheckpointError, DataError, SettingError, message
from trainwright.core.records import Saved
from trainwright.protocols import Tree

if TYPE_CHECKING:
    from trainwright.checkpointing.checkpoint import Checkpoint
    from trainwright.checkpointing.load import Loaded
    from trainwright.distributed.resharding import Split
    from trainwright.distributed.world import World

T = TypeVar("T")
BEAT = 5.0
"""Seconds between heartbeats of rank 0 while it works. They keep the collectives of other ranks from timing out."""
_ERRORS: dict[str, type[Exception]] = {kind.__name__: kind for kind in (CheckpointError, DataError, SettingError)}
_Verdict = Literal["complete", "unseen", "damaged"]


def on_rank_zero(world: World, do: Callable[[], T]) -> T:
    """Call `do` on rank 0; return its result, or raise its error, on every rank.

    A collective. The result must be picklable. On other ranks an error of another package becomes a CheckpointError.
    """
    if not world.is_main:
        result: T = _receive(world)
        return result
    try:
        with _beating(world):
            result = do()
    except BaseException as error:
        world.broadcast(("error", type(error).__name__, str(error)))
        raise
    world.broadcast(("result", result, ""))
    return result


def rank_name(world: World) -> str:
    """Return the name of this rank for errors, such as `rank 1 on host-b`."""
    return f"rank {world.rank} on {socket.gethostname()}"


def _receive(world: World) -> Any:
    """Return the result of rank 0, or raise its error."""
    sent: Any = ("beat",)
    while sent[0] == "beat":
        sent = world.broadcast(None)
    if sent[0] == "error":
        raise _error_of(sent[1], sent[2])
    return sent[1]


def _error_of(kind: str, text: str) -> Exception:
    """Return the error of rank 0, rebuilt from its class name and text."""
    if kind in _ERRORS:
        return _ERRORS[kind](text)
    return CheckpointError(f"{kind} on rank 0: {text}")


@contextmanager
def _beating(world: World) -> Iterator[None]:
    """Send heartbeats from a thread. The caller must not start a collective in this context."""
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
    """Search with `find` on rank 0, read each candidate with `read` on every rank; return the same checkpoint on all.

    A checkpoint that one rank cannot read counts as damaged on all ranks. CheckpointError on all ranks if a rank sees
    another directory than rank 0.
    """
    if not world.is_main:
        return _follow(world, read)
    try:
        loaded = find(lambda path: _read_on_all(world, path, read))
    except _OtherDirectoryError as error:
        raised = CheckpointError(str(error))
        world.broadcast(("error", type(raised).__name__, str(raised)))
        raise raised from None
    except BaseException as error:
        world.broadcast(("error", type(error).__name__, str(error)))
        raise
    world.broadcast(("loaded", loaded is not None))
    return loaded


class _OtherDirectoryError(Exception):
    """A rank does not see the directory: no older checkpoint can help."""


def _read_on_all(world: World, path: Path, read: Callable[[Path], Loaded]) -> Loaded:
    """Read a checkpoint on every rank. CheckpointError if any rank cannot read it."""
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
    """Read each candidate of rank 0 until it has loaded one or given up. For the other ranks."""
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
    """Read a checkpoint on this rank; return (checkpoint or None, error or None, verdict for the other ranks)."""
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
    """Return a text that identifies the content of a checkpoint."""
    manifest = loaded.manifest
    text = json.dumps([manifest["run"], manifest["update"], manifest["files"]], sort_keys=True)
    return f"{update_name(manifest['update'])} {hashlib.sha256(text.encode()).hexdigest()}"


# The manager: rank 0 commits, and all ranks get the same results

_LOOKS_FOR = 5.0
"""Seconds for a directory of rank 0 to appear on the network file system of the other ranks."""


@dataclass(frozen=True, slots=True)
class ManagerStatus:
    """The state of rank 0's manager, for the other ranks."""

    run_id: str
    directory: Path
    complete: Mapping[int, float]
    resumed: Path | None
    failing: str
    is_saving: bool
    saved: tuple[Saved, ...] = ()
    """Checkpoints completed since the last report."""
    error: str = ""
    """The error of the save, to be raised on all ranks."""


class DistributedCheckpointManager(CheckpointManager):
    """The manager for several ranks: rank 0 writes a replicated state, all ranks write a sharded state.

    All ranks pass their state to `save`. For a sharded model (torch's DTensor) each rank writes its shards; of a
    replicated state that of rank 0 is written.

    Every rank makes the same calls in the same order, and gets the same results, errors, best and complete checkpoints.
    Collectives run in `prepare`, `adopt`, `reserve`, `save`, and in `completed` while a save is unreported. One rank
    alone may call `release`, `best`, `saved`, `failing`, and `completed(alone=True)`: on rank 0 they return the current
    state, on other ranks the state of the last report.
    """

    def __init__(self, settings: Checkpoint, run_id: str, *, world: World) -> None:
        super().__init__(settings, run_id)
        self.world = world
        self._is_unreported = False
        """Whether the result of a save is not broadcast yet. Equal on every rank."""
        self._reported_failing = ""
        self._shard_writer: Writer[None] | None = None
        """Writes the shards of this rank; None on rank 0, where the checkpoint writer writes them."""
        self._sharded_save: ShardedSave | None = None
        """The last sharded save."""
        self._token = (0, "")
        """Process id and random token of rank 0, from which all ranks derive the same temporary names."""
        self._sharded_saves = 0

    def prepare(self, *, resuming: bool) -> None:
        """Create and lock the directory, and check that every rank sees it.

        CheckpointError on all ranks if another process has locked it, if a new run finds another run there, or if a
        rank has another directory of that name, as on a local drive.
        """
        prepare = super().prepare

        def first() -> tuple[ManagerStatus, Path, tuple[int, str]]:
            prepare(resuming=resuming)
            probe = self.directory / spare_name(".tmp", update_name(0))
            try:
                probe.mkdir(mode=0o700)
            except OSError as error:
                self.release()
                raise CheckpointError(f"{self.directory} cannot be written to", have=str(error)) from error
            return self._status(), probe, (os.getpid(), secrets.token_hex(4))

        status, probe, self._token = on_rank_zero(self.world, first)
        self._take(status)
        self._sharded_saves = 0
        if not self.world.is_main:
            self._shard_writer = Writer("trainwright shards", async_save=self.settings.async_save)
        unseen = [where for where in self.world.all_gather("" if _appears(probe) else rank_name(self.world)) if where]
        if self.world.is_main:
            with suppress(OSError):
                probe.rmdir()
        if unseen:
            self.release()
            what = f"checkpoints in {self.directory}: {', '.join(unseen)} cannot see what rank 0 has made there"
            want = "a directory that all ranks share"
            fix = f'Checkpoint("/a/shared/drive/{self.directory.name}", ...)'
            raise CheckpointError(what, want=want, fix=fix)

    def adopt(self, loaded: Loaded) -> None:
        """Continue the run of a loaded checkpoint. Raises the errors of `CheckpointManager.adopt` on all ranks."""
        adopt = super().adopt

        def first() -> ManagerStatus:
            adopt(loaded)
            return self._status()

        self._take(on_rank_zero(self.world, first))

    def reserve(self, tree: Mapping[str, Tree]) -> None:
        """Allocate memory for copies in the background. CheckpointError names a value that cannot be saved."""
        if not holds_shards(tree):
            reserve = super().reserve
            on_rank_zero(self.world, lambda: reserve(tree))
            return
        parts = split_shards(tree, rank=self.world.rank)
        on_rank_zero(self.world, lambda: self._reserve(encode(parts.tree) | self._own_files(parts)))
        if self._shard_writer is not None:
            self._shard_writer.reserve(self._own_files(parts))

    def _save(self, tree: Mapping[str, Tree], manifest: dict[str, Any]) -> None:
        """Copy and submit the `{part: state}` of rank 0, and the shards of every rank.

        All ranks wait for the save in flight, and for the copies.
        """
        if holds_shards(tree):
            self._save_shards(split_shards(tree, rank=self.world.rank), manifest)
        else:
            on_rank_zero(self.world, lambda: self._submit(encode(tree), manifest))
        self._is_unreported = True

    def completed(self, *, wait: bool = False, alone: bool = False) -> list[Saved]:
        """Return the checkpoints completed since the last report, oldest first, on every rank.

        A failed save is reported once: as a warning on rank 0, or as a CheckpointError on all ranks, by the rules of
        `CheckpointManager.completed`. `alone`: the checkpoints known to this rank, without a collective.
        """
        completed = super().completed
        if alone:
            self._limit_patience(sharded_files.HURRY)
            if wait and self._shard_writer is not None:
                self._shard_writer.wait()
            return completed(wait=wait)
        if not self._is_unreported:
            return []

        def first() -> ManagerStatus:
            saved, error = [], ""
            try:
                saved = completed(wait=wait)
            except CheckpointError as failed:  # broadcast: all ranks raise it
                error = str(failed)
            return replace(self._status(), saved=tuple(saved), error=error)

        status = on_rank_zero(self.world, first)
        self._take(status)
        self._is_unreported, self._reported_failing = status.is_saving, status.failing
        if not status.is_saving:
            self._limit_patience(0.0)
        if status.error:
            raise CheckpointError(status.error)
        return list(status.saved)

    def release(self, *, wait: bool = True) -> None:
        """Wait for the save in flight and unlock the directory, without a collective."""
        self._limit_patience(sharded_files.HURRY if wait else 0.0)
        shard_writer, self._shard_writer = self._shard_writer, None
        if shard_writer is not None:
            shard_writer.close(lambda: None, wait=wait)
        super().release(wait=wait)

    @property
    def failing(self) -> str:
        """One line on the saves that failed since the last complete one; empty if none did."""
        return super().failing if self.world.is_main else self._reported_failing

    def _own_files(self, parts: Split) -> dict[str, Content]:
        """Return the file with the shards of this rank, without a copy."""
        return {shard_file(self.world.rank): Contents(parts.tensors, {})}

    def _save_shards(self, parts: Split, manifest: dict[str, Any]) -> None:
        """Copy and submit the shards on every rank. An error of rank 0 is raised on all ranks."""
        if self._is_unreported:  # no rank may overwrite its copies before all have written the last save
            on_rank_zero(self.world, self.wait)
            if self._shard_writer is not None:
                self._shard_writer.wait()
        self._sharded_save = self._next_sharded_save(parts, manifest["update"])
        files = self._own_files(parts)
        if self.world.is_main:
            sharded = self._sharded_save
            on_rank_zero(self.world, lambda: self._submit(encode(parts.tree) | files, manifest, sharded))
            return
        writer = self._shard_writer
        assert writer is not None, "prepare() comes first"
        writer.wait()
        writer.outcomes()  # rank 0 reports them
        copies = writer.copy(files)
        # In the thread also without copies: the training thread must be free to receive an error of rank 0.
        writer.start(partial(self._sharded_save.write_shard, copies or files, directory=self.directory))
        try:
            on_rank_zero(self.world, lambda: None)
        except Exception:
            self._limit_patience(0.0)
            raise
        if copies is None:
            writer.wait()
        elif writer.memory.used > writer.memory.size:
            writer.reserve(files)

    def _next_sharded_save(self, parts: Split, update: int) -> ShardedSave:
        """Return the sharded save of an update. All ranks derive the same unique temporary name."""
        self._sharded_saves += 1
        pid, secret = self._token
        token = f"{(int(secret, 16) + self._sharded_saves) % (1 << 32):08x}"
        return ShardedSave(
            temporary_name(update, pid=pid, token=token),
            rank=self.world.rank,
            size=self.world.size,
            tensors=parts.pieces,
            checksum=self.settings.checksum,
        )

    def _limit_patience(self, seconds: float) -> None:
        """Limit the wait for other ranks, after an error of the run or when the result is known."""
        if self._sharded_save is not None:
            self._sharded_save.patience = min(self._sharded_save.patience, seconds)

    def _status(self) -> ManagerStatus:
        return ManagerStatus(
            self.run_id, self.directory, self._complete, self._resumed, super().failing, self.is_saving
        )

    def _take(self, status: ManagerStatus) -> None:
        """Copy the state of rank 0's manager."""
        if not self.world.is_main:
            self.run_id, self.directory = status.run_id, status.directory
            self._complete, self._resumed = status.complete, status.resumed


def _appears(path: Path) -> bool:
    """Return whether this rank sees a path within `_LOOKS_FOR` seconds: a network file system refreshes late."""
    end = time.monotonic() + _LOOKS_FOR
    while not os.path.lexists(path):
        if time.monotonic() > end:
            return False
        with suppress(OSError):
            os.listdir(path.parent)
        time.sleep(0.05)
    return True
