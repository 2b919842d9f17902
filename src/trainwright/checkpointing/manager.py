"""Manages the checkpoints of one run: copies states for the writer, ranks them, and reports what came of each save."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.checkpointing import commit as commits
from trainwright.checkpointing.commit import RunDirectory
from trainwright.checkpointing.files import Checksum, Content
from trainwright.checkpointing.format import (
    encode,
    is_of_run,
    is_update_name,
    load_tree,
    read_manifest,
    update_name,
    update_of,
)
from trainwright.checkpointing.format import list_checkpoints as listed
from trainwright.checkpointing.retention import BestTracker, Retention
from trainwright.checkpointing.tensorfile import Contents
from trainwright.checkpointing.writer import Files, Writer
from trainwright.core.errors import CheckpointError, message, warn_user
from trainwright.core.monitor import rank
from trainwright.core.records import Best, Saved
from trainwright.protocols import Tree

if TYPE_CHECKING:
    from trainwright.checkpointing.checkpoint import Checkpoint
    from trainwright.checkpointing.load import Loaded
    from trainwright.checkpointing.sharded_files import ShardedSave


class CheckpointManager:
    """Saves the checkpoints of one run, tracks which are best, and has those removed that retention does not keep.

    Order of use: `prepare`, `adopt` where a run is resumed, `reserve` once or more, then `judge`, `save` and
    `completed` as often as needed, `release`. All methods are for the training thread. The writer thread is given
    records that nobody changes, and its results are taken over between two saves: so nothing is read while it changes.

    A slot of a user's own subclasses it: every method may be overridden, `save` and `completed` at least.
    """

    def __init__(self, settings: Checkpoint, run_id: str) -> None:
        self.settings = settings
        self.run_id = run_id
        self.directory = Path(settings.directory).expanduser().absolute()
        self.on_result: Callable[[], None] | None = None
        """Called in the writer thread when a save is complete or has failed; set before `prepare` or after."""
        self.blocked = 0.0
        """Seconds that saving has made training wait."""
        self.is_saving = False
        """Whether a save has begun of which no result was taken over."""
        self._tracker = BestTracker(settings)
        self._complete: Mapping[int, float] = {}
        """Complete checkpoints of this run in the directory: update -> rank of the monitored number. Never changed in
        place: a save is given this one, and returns another."""
        self._resumed: Path | None = None
        """The checkpoint that was resumed."""
        self._root = RunDirectory(self.directory, given=str(settings.directory))
        self._writer: Writer[SaveResult] | None = None
        self._last_save = (0, 0.0)
        """Its update, and how long training waited for it."""
        self._saved: list[Saved] = []
        self._failures: list[SaveFailure] = []
        self._warnings: list[str] = []
        self._failed: SaveFailure | None = None
        """The last save, where it failed."""

    def prepare(self, *, resuming: bool) -> None:
        """Make and lock the directory and check that it can be written to, before the first update.

        Raises CheckpointError where another process writes there, or where it holds another run and none is resumed.
        """
        self.release()
        self._root.acquire()
        try:
            if not resuming:
                self._complete = self._survey(None)
        except BaseException:
            self._root.release()
            raise
        self._writer = Writer("trainwright checkpoints", async_save=self.settings.async_save, on_result=self._notify)

    def adopt(self, loaded: Loaded) -> None:
        """Continue the run of the checkpoint that was loaded; its state is loaded by `load_state_dict`.

        Raises CheckpointError where the directory holds another run, or later complete checkpoints of this one, from
        which newer ones could not be distinguished.
        """
        self.run_id = loaded.manifest["run"]
        self._resumed = loaded.path.absolute()
        self._complete = self._survey(loaded)
        later = [update_name(update) for update in self._complete if update > loaded.manifest["update"]]
        if later:
            what = f"{loaded.path.name} cannot be resumed into {self.directory}: the run continued from there"
            fix = f"resume {max(later)}, move the later ones away, or give another directory"
            raise CheckpointError(what, have=", ".join(sorted(later)), fix=fix)

    def reserve(self, tree: Mapping[str, Tree]) -> None:
        """Have memory for a copy of such a state allocated in the background.

        CheckpointError names a value of it that cannot be saved.
        """
        self._reserve(encode(tree))

    def judge(self, metrics: Mapping[str, float], *, epoch: int, update: int) -> bool:
        """Take in the numbers of an update; return whether the monitored one is among the best, and to be saved now.

        NaN never is, nor the worst infinity; a tie is no better. SettingError where there is no such number.
        """
        return self._tracker.judge(metrics, epoch=epoch, update=update)

    def save(
        self,
        tree: Mapping[str, Tree],
        *,
        update: int,
        epoch: int,
        metrics: Mapping[str, float] | None = None,
        settings: str = "",
        alone: bool = False,
    ) -> None:
        """Copy `{part: state}` and have it written; `completed` returns it when it is complete.

        Waits for the save in flight. Then checkpoints that retention does not keep are removed. `metrics` are the
        numbers measured at this very update, `settings` a digest of the run's settings. `alone`: of several ranks only
        this one saves. CheckpointError names a value that cannot be stored.
        """
        self._save(tree, update=update, epoch=epoch, metrics=metrics, settings=settings)

    def completed(self, *, wait: bool = False, alone: bool = False) -> list[Saved]:
        """Return the checkpoints that have become complete since the last call, oldest first.

        With `wait`: after the save in flight, and as the last call, since no further save is due. A save that failed
        is reported here, once: by a warning where the system refused, by CheckpointError with `on_save_error="raise"`,
        for any other failure, and with `wait` where it was the last save. `alone`: without asking other ranks.
        """
        if wait:
            self.wait()
        self._take_results()
        while self._failures:
            self._report(self._failures.pop(0), ends=wait)
        while self._warnings:
            warn_user(self._warnings.pop(0))
        saved, self._saved = self._saved, []
        return saved

    def wait(self) -> None:
        """Wait until no save is in flight."""
        if self._writer is not None:
            with self._blocking():
                self._writer.wait()

    def release(self, *, wait: bool = True) -> None:
        """Wait for the save in flight, and unlock the directory.

        Without `wait`, or where the wait is interrupted, the writer thread unlocks it when it is done.
        """
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close(self._root.release, wait=wait)
            self._take_results(writer)

    @property
    def best(self) -> Best | None:
        """The best of the monitored number so far; its path is None until that checkpoint is complete."""
        if not self._tracker.top:
            return None
        top = self._tracker.top[0]
        return Best(str(self.settings.best), top.value, top.epoch, top.update, self._path_at(top.update))

    @property
    def saved(self) -> list[Path]:
        """The complete checkpoints of this run in the directory, newest first."""
        self._take_results()
        return [self.directory / update_name(update) for update in sorted(self._complete, reverse=True)]

    @property
    def failing(self) -> str:
        """How many saves have failed since the last complete one, why, and what there is; empty where none has."""
        self._take_results()
        return "" if self._failed is None else self._failed.line(before=self._newest)

    @property
    def has_results(self) -> bool:
        """Whether `completed` has anything to return or to report."""
        self._take_results()
        return bool(self._saved or self._failures or self._warnings)

    def state_dict(self) -> dict[str, Any]:
        """Return the best values so far."""
        return self._tracker.state_dict()

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        """Restore the best values so far; those of another number are dropped, with a warning."""
        self._tracker.load_state_dict(tree)

    def _reserve(self, files: Files) -> None:
        if self._writer is not None:
            self._writer.reserve(files)

    def _save(
        self,
        tree: Mapping[str, Tree],
        *,
        update: int,
        epoch: int,
        metrics: Mapping[str, float] | None,
        settings: str,
        shards: Mapping[str, Content] | None = None,
        sharded: ShardedSave | None = None,
    ) -> None:
        """Hand a state to the writer; `shards`: files that this rank adds, `sharded`: how the others add theirs."""
        assert self._writer is not None, "prepare() comes first"
        with self._blocking():
            asked = time.perf_counter()
            files = encode(tree) | dict(shards or {})
            self._writer.wait()
            self._take_results()
            top = [one.update for one in self._tracker.top]
            keep = self.settings.keep
            job = SaveJob(
                self._root,
                manifest={
                    "run": self.run_id,
                    "update": update,
                    "epoch": epoch,
                    "monitor": self.settings.best,
                    "mode": self.settings.mode if self.settings.best else None,
                    "metrics": {name: float(value) for name, value in (metrics or {}).items()},
                    "settings": settings,
                },
                checksum=self.settings.checksum,
                retention=Retention(keep if isinstance(keep, int) else None, self.settings.top, frozenset(top)),
                complete=self._complete,
                is_best=top[:1] == [update],
                began=time.perf_counter(),
                sharded=sharded,
            )
            self._writer.submit(files, job.write)
            self._last_save = update, time.perf_counter() - asked
            self.is_saving = True

    def _take_results(self, writer: Writer[SaveResult] | None = None) -> None:
        """Take over what came of the last save; `completed` reports it."""
        writer = writer or self._writer
        update, blocked = self._last_save
        for outcome in [] if writer is None else writer.outcomes():
            self.is_saving = False
            if outcome.result is None:
                assert outcome.error is not None
                times = 1 if self._failed is None else self._failed.times + 1
                self._failed = SaveFailure(update, outcome.error, times)
                self._failures.append(self._failed)
                continue
            self._failed = None
            self._complete = outcome.result.complete
            self._warnings += outcome.result.warnings
            self._saved.append(replace(outcome.result.saved, blocked=blocked))

    def _report(self, failure: SaveFailure, *, ends: bool) -> None:
        is_last = ends and failure is self._failed
        raises = self.settings.on_save_error == "raise" or not failure.is_of_the_system or is_last
        text = failure.text(self.directory, before=self._newest, ends=ends or raises)
        if raises:
            raise CheckpointError(text) from failure.error
        warn_user(text)

    def _notify(self) -> None:
        if self.on_result is not None:
            self.on_result()

    def _survey(self, loaded: Loaded | None) -> dict[int, float]:
        """Return the complete checkpoints of this run in the directory, each of which is read once.

        CheckpointError where there is one of another run; without `loaded`, one that cannot be read may be of any run.
        The loaded one was read already, and those that it was preferred to cannot be loaded and do not count.
        """
        complete = {}
        for path in listed(self.directory):
            if loaded is not None and path in [one.absolute() for one in loaded.passed_over]:
                continue
            if path == self._resumed and loaded is not None:
                manifest: dict[str, Any] | None = loaded.manifest
            else:
                manifest = self._root.read_manifest(path, self.run_id, tolerant=loaded is not None)
                if manifest is None or not _is_readable(path, manifest):
                    continue
            assert manifest is not None
            complete[manifest["update"]] = rank(manifest["metrics"].get(self.settings.best), self._tracker.mode)
        return complete

    @property
    def _newest(self) -> Path | None:
        """The newest checkpoint that still exists, or the one that was resumed."""
        known = [*self.saved, *([] if self._resumed is None else [self._resumed])]
        return next((path for path in known if is_of_run(path, self.run_id)), None)

    def _path_at(self, update: int) -> Path | None:
        self._take_results()
        name = update_name(update)
        if update in self._complete:
            return self.directory / name
        origin = self.directory if self._resumed is None else self._resumed.parent
        return origin / name if origin != self.directory and (origin / name).is_dir() else None

    @contextmanager
    def _blocking(self) -> Iterator[None]:
        """Count the time as one in which training waits."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.blocked += time.perf_counter() - began


def _is_readable(path: Path, manifest: Mapping[str, Any]) -> bool:
    try:
        load_tree(path, manifest=manifest, fill=False)
    except CheckpointError:
        return False
    return True


# One save, in the writer thread


@dataclass(frozen=True, slots=True, eq=False)
class SaveJob:
    """One save as the writer thread sees it: nothing in it, or given to it, changes meanwhile."""

    root: RunDirectory
    manifest: Mapping[str, Any]
    checksum: Checksum
    retention: Retention
    complete: Mapping[int, float]
    """The complete checkpoints before it."""
    is_best: bool
    began: float
    """When it began, by `time.perf_counter`."""
    sharded: ShardedSave | None
    """How other ranks add their files."""

    def write(self, files: Files) -> SaveResult:
        """Commit the checkpoint, then remove what retention does not keep.

        CheckpointError where it could not be written; those before it are as they were then.
        """
        directory, run, update = self.root.path, self.manifest["run"], self.manifest["update"]
        complete, warnings = dict(self.complete), []
        if self.root.reacquire_if_lost(run):
            complete = {old: key for old, key in complete.items() if (directory / update_name(old)).is_dir()}
            if len(complete) < len(self.complete) or not complete:
                warnings.append(f"{directory} had vanished, with what was in it; it was made anew")
        others: dict[str, Any] = {}
        if self.sharded is not None:
            others = {"temporary": self.sharded.temporary, "gather": self.sharded.gather}
        path = commits.commit(directory, files, manifest=self.manifest, checksum=self.checksum, **others)
        seconds = time.perf_counter() - self.began
        monitor, mode = self.manifest["monitor"], self.manifest["mode"]
        complete[update] = inf if monitor is None else rank(self.manifest["metrics"].get(monitor), mode)
        for old in self.retention.removable(complete):
            del complete[old]
            warnings += _remove(directory / update_name(old), run=run)
        size = _size(files) + (0 if self.sharded is None else self.sharded.bytes_of_others)
        return SaveResult(Saved(path, update, best=self.is_best, seconds=seconds, size=size), complete, tuple(warnings))


@dataclass(frozen=True, slots=True, eq=False)
class SaveResult:
    """The result of a save that is complete."""

    saved: Saved
    complete: Mapping[int, float]
    """The complete checkpoints now: update -> rank of the monitored number."""
    warnings: tuple[str, ...]


def _remove(path: Path, *, run: str) -> list[str]:
    """Remove a checkpoint that is readable and of this run; return what to warn of."""
    try:
        if read_manifest(path)["run"] == run:
            commits.remove(path)
    except (CheckpointError, OSError) as error:
        return [f"{path} is no longer needed and could not be removed: {error}"]
    return []


def _size(files: Files) -> int:
    """Return the bytes of texts and tensors."""
    contents = [content for content in files.values() if isinstance(content, Contents)]
    texts = sum(len(content) for content in files.values() if isinstance(content, bytes))
    return texts + sum(tensor.nbytes for content in contents for tensor in content.tensors.values())


# Saves that fail


@dataclass(frozen=True, slots=True, eq=False)
class SaveFailure:
    """A save that failed, and how to report it."""

    update: int
    error: BaseException
    times: int
    """How many have failed in a row, this one included."""

    @property
    def is_of_the_system(self) -> bool:
        """Whether the system refused, so that a later save may succeed; any other failure is a mistake in a program."""
        return self._cause is not None

    def text(self, directory: Path, *, before: Path | None, ends: bool) -> str:
        """Return what failed, why, what is lost if the run dies now and when the next save is tried.

        `before`: the newest complete checkpoint; `ends`: no further save is due.
        """
        name = update_name(self.update)
        counted = f" (the save number {self.times} that failed in a row)" if self.times > 1 else ""
        what = f"checkpoint {name}{counted} could not be written to {directory}: {self._reason[0]}"
        if before is not None and is_update_name(before.name) and update_of(before.name) > self.update:
            lost = f"{before.name} is complete meanwhile"
        elif ends:
            lost = "there is no complete checkpoint of this run"
            lost = lost if before is None else f"the newest complete checkpoint is {before}"
        else:
            again = "have nothing to resume from" if before is None else f"resume from {before}"
            lost = f"training continues, and the next save tries again; a run that dies before would {again}"
        have = "" if self._cause is None else str(self._cause)
        return message(f"{what}; {lost}", have=have, fix=self._reason[1], where=False)

    def line(self, *, before: Path | None) -> str:
        """Return the same in one line, for a run that is over; `before`: the newest complete checkpoint."""
        count = f"{self.times} saves failed, the last for" if self.times > 1 else "the last save failed"
        newest = "nothing is saved" if before is None else f"the newest complete checkpoint is {before.name}"
        return f"{count}: {self._reason[0]}; {newest}"

    @property
    def _cause(self) -> OSError | None:
        """The error of the system, where it refused."""
        seen: BaseException | None = self.error
        while seen is not None and not isinstance(seen, OSError):
            seen = seen.__cause__
        return seen

    @property
    def _reason(self) -> tuple[str, str]:
        """Why it failed in a few words, and what to do about it."""
        cause = self._cause
        if cause is None:
            return f"{type(self.error).__name__}: {str(self.error).partition(chr(10))[0]}", ""
        return _REASONS.get(cause.errno or 0, (cause.strerror or str(cause), ""))


_REASONS = {
    errno.ENOSPC: ("the disk is full", "free space there"),
    errno.EFBIG: ("a file of this size is not allowed there", "a directory on another file system, or a higher limit"),
    errno.EROFS: ("the file system is read-only", "have it mounted for writing again; see what the system logged"),
    errno.EACCES: ("writing there is not allowed", "allow it: the owner and mode of the directory"),
    errno.EPERM: ("writing there is not allowed", "allow it: the owner and mode of the directory"),
    errno.EIO: ("the drive reports an input/output error", "see what the system logged; move the run elsewhere"),
    errno.ENOENT: ("the directory has vanished", "find out what removes it"),
    errno.ETIMEDOUT: ("a rank has not written its part", "see what it does, and whether its disk is slow"),
    errno.ENOMEM: ("the system has no memory left", "free memory, or Checkpoint(..., async_save=False)"),
}
"""The meaning of an error number here, and what to do about it."""
for _name, _what in {
    "EDQUOT": ("the quota is used up", "free space of this user there, or ask for more"),
    "ESTALE": ("the network file system has lost the directory", "see whether the file server is there"),
}.items():
    if hasattr(errno, _name):  # Windows has them under other names
        _REASONS[getattr(errno, _name)] = _what
