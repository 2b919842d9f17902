"""One save, done away from training: writes a checkpoint, removes what is not to be kept, and says what went wrong."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.checkpointing import commits
from trainwright.checkpointing.checksums import Checksum
from trainwright.checkpointing.files import Content
from trainwright.checkpointing.load import rank
from trainwright.checkpointing.tensorfile import Contents
from trainwright.core.errors import CheckpointError, message
from trainwright.core.records import Saved

if TYPE_CHECKING:
    from trainwright.checkpointing.sharded_save import Joining


class Place:
    """The directory of a run and its lock. Whoever has a `Writing` of it in hand is alone with it."""

    def __init__(self, directory: Path, *, given: str) -> None:
        self.directory = directory
        self._given = given
        """The directory as it was given, for what a message says to write."""
        self._held = ExitStack()
        self._lock: tuple[int, int] | None = None

    def hold(self) -> None:
        """Make the directory where there is none, see that it can be written to, and lock it: CheckpointError."""
        commits.make_root(self.directory)
        self._held.enter_context(commits.lock(self.directory))
        self._lock = self._identity()

    def hold_again(self, run: str) -> bool:
        """Whether the directory, or its lock, is not the one that is held; then it is made and locked anew.

        CheckpointError where another run has taken it meanwhile.
        """
        if os.path.isdir(self.directory) and self._identity() == self._lock:
            return False
        self.let_go()
        self.hold()
        try:
            self.refuse_others(run, damaged=True)
        except CheckpointError:
            self.let_go()
            raise
        return True

    def let_go(self) -> None:
        """Let others write there."""
        self._lock = (0, 0)
        self._held.close()

    def refuse_others(self, run: str, *, damaged: bool) -> None:
        """Raise CheckpointError where there is a checkpoint of another run, or, if `damaged`, of nobody knows which."""
        for path in commits.scan(self.directory):
            try:
                found = commits.read_manifest(path)["run"]
                have = f"{path.name} of run {found}; this is run {run}"
            except CheckpointError as error:
                found, have = None if damaged else run, str(error)
            if found != run:
                what = f"{self.directory} holds another run"
                fix = f'fit(..., resume="auto") to go on with it, or Checkpoint("{self._given}-2", ...)'
                raise CheckpointError(message(what, have=have, fix=fix))

    def _identity(self) -> tuple[int, int] | None:
        """Which file the lock is; None where there is none, as on a system without locks."""
        try:
            found = os.stat(self.directory / ".lock")
        except OSError:
            return None
        return found.st_dev, found.st_ino


@dataclass(frozen=True, slots=True, eq=False)
class Retention:
    """Which checkpoints stay: the last `keep`, the `top` best of those that are whole, and what was `judged` best."""

    keep: int | None
    """None: all of them."""
    top: int
    judged: frozenset[int]

    def victims(self, whole: Mapping[int, float]) -> list[int]:
        """The updates of `whole`, given with the rank of their number, whose checkpoints are not to be kept."""
        last = sorted(whole, reverse=True)[: self.keep]
        ranked = sorted((value, update) for update, value in whole.items() if value < inf)
        best = [update for _, update in ranked[: self.top]]
        return sorted(set(whole) - {*last, *best, *self.judged})


@dataclass(frozen=True, slots=True, eq=False)
class Written:
    """What came of a save that went well."""

    saved: Saved
    whole: Mapping[int, float]
    """The checkpoints that are whole now: update -> rank of the judged number."""
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Writing:
    """One save. Nothing in it changes, and nothing that it is given is changed, while another thread does it."""

    place: Place
    files: Mapping[str, Content]
    manifest: Mapping[str, Any]
    checksum: Checksum
    retention: Retention
    whole: Mapping[int, float]
    """The checkpoints that are whole before it."""
    is_best: bool
    began: float
    """When it began, by `time.perf_counter`."""
    joining: Joining | None = None
    """What other processes add to it."""

    def __call__(self) -> Written:
        """Write the checkpoint durably, then remove what is not to be kept.

        CheckpointError where it could not be written; those before it are then as they were.
        """
        directory, update = self.place.directory, self.manifest["update"]
        whole, warnings = dict(self.whole), []
        if self.place.hold_again(self.manifest["run"]):
            whole = {kept: value for kept, value in whole.items() if _path(directory, kept).is_dir()}
            if len(whole) < len(self.whole) or not whole:
                warnings.append(f"{directory} had vanished, with what was in it; it was made anew")
        name = commits.update_name(update)
        path = commits.commit(
            directory, name, self.files, manifest=self.manifest, checksum=self.checksum, **self._joined
        )
        seconds = time.perf_counter() - self.began
        whole[update] = rank(self.manifest, self.manifest["monitor"], self.manifest["mode"])
        for victim in self.retention.victims(whole):
            del whole[victim]
            warnings += _removed(_path(directory, victim), run=self.manifest["run"])
        saved = Saved(path, update, best=self.is_best, seconds=seconds, size=_size(self.files) + self._size_of_others)
        return Written(saved, whole, tuple(warnings))

    @property
    def _joined(self) -> dict[str, Any]:
        """What a commit is told where other processes take part."""
        joining = self.joining
        return {} if joining is None else {"temporary": joining.meeting.name, "joining": joining}

    @property
    def _size_of_others(self) -> int:
        """Bytes that other processes have written."""
        return 0 if self.joining is None else sum(self.joining.meeting.written.values())


@dataclass(frozen=True, slots=True, eq=False)
class Failure:
    """A save that failed: `text` says what that means."""

    update: int
    error: BaseException
    times: int
    """How many have failed one after the other, this one included."""

    @property
    def is_of_the_system(self) -> bool:
        """Whether the system refused, so that a later save may go well; anything else is a mistake in the program."""
        return _cause(self.error) is not None

    def text(self, directory: Path, *, before: Path | None, ends: bool) -> str:
        """What failed, why, what is lost if the run dies now and when it is tried again.

        `before`: the newest whole checkpoint; `ends`: no further save is due.
        """
        name = commits.update_name(self.update)
        counted = f" (the save number {self.times} that failed in a row)" if self.times > 1 else ""
        what = f"checkpoint {name}{counted} could not be written to {directory}: {self.reason}"
        if before is not None and commits.is_name(before.name) and commits.update_of(before.name) > self.update:
            lost = f"{before.name} is whole meanwhile"
        elif ends:
            lost = "there is no complete checkpoint of this run"
            lost = lost if before is None else f"the newest complete checkpoint is {before}"
        else:
            again = "have nothing to go on from" if before is None else f"go on from {before}"
            lost = f"training goes on, and the next save tries again; a run that dies before would {again}"
        return message(f"{what}; {lost}", have=self._said, fix=self._reason[1], where=False)

    def line(self, *, before: Path | None) -> str:
        """The same in one line, for a run that is over; `before`: the newest whole checkpoint."""
        count = f"{self.times} saves failed, the last for" if self.times > 1 else "the last save failed"
        whole = "nothing is saved" if before is None else f"the newest whole checkpoint is {before.name}"
        return f"{count}: {self.reason}; {whole}"

    @property
    def reason(self) -> str:
        """Why, in a few words."""
        return self._reason[0]

    @property
    def _reason(self) -> tuple[str, str]:
        cause = _cause(self.error)
        if cause is None:
            return f"{type(self.error).__name__}: {str(self.error).partition(chr(10))[0]}", ""
        return _REASONS.get(cause.errno or 0, (cause.strerror or str(cause), ""))

    @property
    def _said(self) -> str:
        cause = _cause(self.error)
        return "" if cause is None else str(cause)


def _cause(error: BaseException) -> OSError | None:
    """What the system said, where it was the system that refused."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, OSError):
        seen = seen.__cause__
    return seen


def _path(directory: Path, update: int) -> Path:
    return directory / commits.update_name(update)


def _removed(path: Path, *, run: str) -> list[str]:
    """Remove a checkpoint, if it is readable and bears the run's id; what to warn of."""
    try:
        if commits.read_manifest(path)["run"] == run:
            commits.remove(path)
    except (CheckpointError, OSError) as error:
        return [f"{path} is no longer needed and could not be removed: {error}"]
    return []


def _size(files: Mapping[str, Content]) -> int:
    """Bytes of texts and tensors."""
    texts = sum(len(content) for content in files.values() if isinstance(content, bytes))
    tensors = [
        tensor for content in files.values() if isinstance(content, Contents) for tensor in content.tensors.values()
    ]
    return texts + sum(tensor.numel() * tensor.element_size() for tensor in tensors)


_REASONS = {
    errno.ENOSPC: ("the disk is full", "free space there"),
    errno.EFBIG: ("a file of this size is not allowed there", "a directory on another file system, or a higher limit"),
    errno.EROFS: ("the file system is read-only", "have it mounted for writing again; see what the system logged"),
    errno.EACCES: ("writing there is not allowed", "allow it: the owner and mode of the directory"),
    errno.EPERM: ("writing there is not allowed", "allow it: the owner and mode of the directory"),
    errno.EIO: ("the drive reports an input/output error", "see what the system logged; move the run elsewhere"),
    errno.ENOENT: ("the directory has vanished", "find out what removes it"),
    errno.ETIMEDOUT: ("a process has not written its part", "see what it does, and whether its disk is slow"),
    errno.ENOMEM: ("the system has no memory left", "free memory, or Checkpoint(..., async_save=False)"),
}
"""What an error number means here, and what to do about it."""
for _name, _what in {
    "EDQUOT": ("the quota is used up", "free space of this user there, or ask for more"),
    "ESTALE": ("the network file system has lost the directory", "see whether the file server is there"),
}.items():
    if hasattr(errno, _name):  # Windows has them under other names
        _REASONS[getattr(errno, _name)] = _what
