"""Commits checkpoint directories that are complete or absent, and locks the directory of a run.

The order of writes. A power cut at any point leaves the old checkpoints intact, with or without the new one:

1. All files are written into a hidden temporary directory: readers ignore it.
2. Each file is flushed to disk (fsync) once written, so that the rename cannot overtake its bytes.
3. The manifest is written last, with size and checksum of each file: a directory with a manifest is complete.
4. The temporary directory is flushed: the names of its files are then on disk.
5. It is renamed to its final name. The rename is atomic: a reader sees the complete checkpoint or none.
6. The directory of the run is flushed: the checkpoint now survives a power cut, and is reported.

Then old checkpoints are removed, each in two steps: renamed to a hidden name, then deleted.

A process that locks a directory cleans up after killed writers (`_clean_up`): it renames their complete hidden
directories to the final names, unless a checkpoint has that name, and deletes the others.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from warnings import warn

from trainwright.checkpointing.files import NO_FOLLOW, Checksum, Content, spare_name, sync_directory, write_file
from trainwright.checkpointing.format import (
    MANIFEST,
    check_file_name,
    is_update_name,
    list_checkpoints,
    manifest_text,
    read_manifest,
    update_name,
    verify,
)
from trainwright.core.errors import CheckpointError

if TYPE_CHECKING:
    from trainwright.checkpointing.sharded_files import ShardedSave

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_LEFTOVER = re.compile(r"\.(tmp|old|trash)-(update-\d{10,})-\d+-[0-9a-f]{8}")
_locked: set[int] = set()
"""File descriptors of the locks of this process. A forked child closes them."""


def commit(
    directory: Path,
    files: Mapping[str, Content],
    *,
    manifest: Mapping[str, Any],
    checksum: Checksum = "crc32",
    sharded: ShardedSave | None = None,
) -> Path:
    """Write a checkpoint completely or not at all; return its path. On return it survives a power cut.

    `manifest` has `run`, `update`, `epoch` and `metrics`; files, checksums and versions are added. `sharded`: other
    ranks write files into the temporary directory too. A checkpoint of the same update is replaced. CheckpointError if
    the system refuses; then nothing of the new checkpoint is left.
    """
    target = directory / update_name(manifest["update"])
    hidden = directory / (spare_name(".tmp", target.name) if sharded is None else sharded.temporary)
    try:
        os.mkdir(hidden, 0o700)  # 1. hidden: readers ignore it
        entries: dict[str, Any] = {}
        for name, content in files.items():  # 2. each flushed: a later rename cannot overtake its bytes
            entries[name] = write_file(hidden / check_file_name(name), content, checksum=checksum)
        if sharded is not None:
            entries |= sharded.gather(hidden)
        # 3. The manifest last: a directory with a manifest has all files that it lists.
        write_file(hidden / MANIFEST, manifest_text({**manifest, "files": entries}, checksum))
        sync_directory(hidden)  # 4. now the names of the files are on disk
        _publish(hidden, target)  # 5. and 6.
    except OSError as error:
        what = f"checkpoint {target.name} could not be written to {directory}; those before it are as they were"
        raise CheckpointError(what, have=str(error), where=False) from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
    return target


def remove(path: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that a partly deleted directory never has a checkpoint's name."""
    assert is_update_name(path.name), path
    hidden = _hide(path, ".trash")
    sync_directory(path.parent)
    _delete(hidden)


def temporary_name(update: int, *, pid: int, token: str) -> str:
    """Return the name of a temporary directory shared by ranks. `token`: 8 hexadecimal digits."""
    return f".tmp-{update_name(update)}-{pid}-{token}"


class RunDirectory:
    """The checkpoint directory of one run, locked for this process from `acquire` to `release`.

    The lock is a `flock` on the file `.lock`, which the system releases when the process ends.
    """

    def __init__(self, path: Path, *, given: str) -> None:
        self.path = path
        self._given = given
        """The path as the user wrote it, for messages."""
        self._lock: int | None = None
        """The descriptor of the locked file."""
        self._identity: tuple[int, int] | None = None

    def acquire(self) -> None:
        """Create the directory if missing, check that it is writable, lock it, and clean up after killed writers.

        CheckpointError if another process has locked it.
        """
        make_directory(self.path)
        if fcntl is None:
            warn(f"this system has no flock: two runs that write to {self.path} at once are not noticed", stacklevel=3)
        else:
            self._lock_file()
        self._identity = self._current_identity()

    @property
    def is_lost(self) -> bool:
        """Whether the directory, or the locked file in it, was removed or replaced since `acquire`."""
        return not os.path.isdir(self.path) or self._current_identity() != self._identity

    def reacquire(self, run: str) -> None:
        """Create and lock the directory again. CheckpointError if another run uses it now."""
        self.release()
        self.acquire()
        try:
            for path in list_checkpoints(self.path):
                self.read_manifest(path, run)
        except CheckpointError:
            self.release()
            raise

    def release(self) -> None:
        """Unlock the directory."""
        self._identity = (0, 0)
        locked, self._lock = self._lock, None
        if locked is not None and locked in _locked:  # not in a forked child, which has closed it already
            _locked.discard(locked)
            # `close` does not suffice: a process that was just forked may not have closed its copy yet.
            with suppress(OSError):
                if fcntl is not None:
                    fcntl.flock(locked, fcntl.LOCK_UN)
            os.close(locked)

    def read_manifest(self, path: Path, run: str, *, tolerant: bool = False) -> dict[str, Any] | None:
        """Return the manifest of a checkpoint of this run. CheckpointError if it is of another run.

        An unreadable one may be of another run: CheckpointError, or None if `tolerant`.
        """
        try:
            manifest = read_manifest(path)
        except CheckpointError as error:
            if tolerant:
                return None
            raise self._of_another_run(str(error)) from error
        if manifest["run"] != run:
            raise self._of_another_run(f"{path.name} of run {manifest['run']}; this is run {run}")
        return manifest

    def _lock_file(self) -> None:
        try:
            self._lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | NO_FOLLOW, 0o600)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be locked", have=str(error)) from error
        _locked.add(self._lock)
        try:
            if _flock(self._lock, self.path):
                _clean(self.path)
        except BaseException:
            self.release()
            raise

    def _of_another_run(self, have: str) -> CheckpointError:
        fix = f'fit(..., resume="auto") to continue it, or Checkpoint("{self._given}-2", ...)'
        return CheckpointError(f"{self.path} holds another run", have=have, fix=fix)

    def _current_identity(self) -> tuple[int, int] | None:
        """Return device and inode of the locked file; None on a system without locks."""
        try:
            status = os.stat(self.path / ".lock")
        except OSError:
            return None
        return status.st_dev, status.st_ino


def make_directory(path: Path) -> None:
    """Create the directory of a run durably if missing, and check that it is writable."""
    try:
        if not path.is_dir():
            _make_durably(path)
        probe = path / spare_name(".tmp", update_name(0))
        probe.mkdir(mode=0o700)
        probe.rmdir()
    except OSError as error:
        fix = 'free space, allow writing there, or Checkpoint("another/directory")'
        raise CheckpointError(f"checkpoints cannot be written to {path}", have=str(error), fix=fix) from error


def _make_durably(path: Path) -> None:
    missing = [directory for directory in (path, *path.parents) if not directory.exists()]
    for directory in reversed(missing):
        directory.mkdir(mode=0o700 if directory == path else 0o777, exist_ok=True)
        sync_directory(directory.parent)


def _publish(hidden: Path, target: Path) -> None:
    """Rename a complete directory to its final name, replacing an older one. On failure all names are as before."""
    if os.path.lexists(target):
        _replace(target, hidden)
        return
    os.rename(hidden, target)  # 5. atomic: a reader sees the complete checkpoint or none
    try:
        sync_directory(target.parent)  # 6. from here on it survives a power cut
    except BaseException:
        _rename_back(target, hidden)
        raise


def _replace(target: Path, hidden: Path) -> None:
    """Rename a complete directory to the name of an older one. On failure all names are as before."""
    old = _hide(target, ".old")
    try:
        _publish(hidden, target)
    except BaseException:
        _rename_back(old, target)
        raise
    _delete(old)


def _rename_back(now: Path, before: Path) -> None:
    with suppress(OSError):  # the next run cleans up hidden names
        os.rename(now, before)


def _hide(path: Path, kind: str) -> Path:
    hidden = path.with_name(spare_name(kind, path.name))
    os.rename(path, hidden)
    return hidden


def _delete(path: Path) -> None:
    """Delete a hidden directory. On failure the next run tries again."""
    if path.is_symlink():
        with suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _clean(directory: Path) -> None:
    """Clean up the hidden directories of killed writers. Called under the lock: no writer is alive."""
    try:
        leftovers = [match for entry in os.listdir(directory) if (match := _LEFTOVER.fullmatch(entry))]
        if leftovers:
            _clean_up(directory, leftovers)
    except OSError as error:
        what = f"{directory} could not be cleaned of the leftovers of a killed run"
        raise CheckpointError(what, have=str(error)) from error


def _clean_up(directory: Path, leftovers: list[re.Match[str]]) -> None:
    """Rename complete directories to their final names, new before old, unless taken; delete all others."""
    for match in sorted(leftovers, key=lambda match: ("tmp", "old", "trash").index(match[1])):
        left, target = directory / match[0], directory / match[2]
        if match[1] == "trash" or os.path.lexists(target) or not _is_complete(left, match[2]):
            _delete(left)
            continue
        # Its writer was killed before a rename: of the new checkpoint, or of the old one back to its name.
        try:
            os.rename(left, target)
        except OSError as error:
            warn(f"{left} is a complete checkpoint that could not be given its name: {error}", stacklevel=7)
    sync_directory(directory)


def _is_complete(path: Path, name: str) -> bool:
    try:
        return update_name(verify(path)["update"]) == name
    except CheckpointError:
        return False


def _flock(fd: int, directory: Path) -> bool:
    """Lock the file; return whether it is locked. False, with a warning, on a file system without locks."""
    assert fcntl is not None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        _check_unlocked(fd, directory, error)
        return False
    with suppress(OSError):  # a full disk: the name of the holder only serves the error of another process
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}".encode("ascii", "replace"), 0)
    return True


def _check_unlocked(fd: int, directory: Path, error: OSError) -> None:
    """Raise CheckpointError if another process holds the lock; else warn that the file system has no locks."""
    if isinstance(error, BlockingIOError):
        holder = os.pread(fd, 200, 0).decode("ascii", "replace") or "another process"
        fix = "wait for it, end it, or give this run another directory"
        raise CheckpointError(f"{directory} is being written to by another run", have=holder, fix=fix) from None
    what = f"{directory} cannot be locked ({error.strerror})"
    warn(f"{what}: two runs that write to it are not noticed", stacklevel=5)


def _close_inherited() -> None:
    while _locked:
        os.close(_locked.pop())


if fcntl is not None:
    # A forked child closes the locks: a dataloader worker may outlive its killed parent.
    os.register_at_fork(after_in_child=_close_inherited)
