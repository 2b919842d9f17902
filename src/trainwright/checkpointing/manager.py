"""Manages the checkpoints of one run: submits saves to the writer, reports them, ranks and removes checkpoints."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from warnings import warn

from trainwright.checkpointing import commit as commits
from trainwright.checkpointing.commit import RunDirectory
from trainwright.checkpointing.files import content_size
from trainwright.checkpointing.format import (
    encode,
    is_of_run,
    is_update_name,
    list_checkpoints,
    load_tree,
    read_manifest,
    update_name,
    update_of,
)
from trainwright.checkpointing.writer import Files, Writer
from trainwright.core.checks import check_form, is_count, is_none_or, is_number, is_text
from trainwright.core.errors import CheckpointError, message, warn_user
from trainwright.core.monitor import Mode, require_monitor, sort_key
from trainwright.core.records import Best, Saved
from trainwright.protocols import Tree

if TYPE_CHECKING:
    from trainwright.checkpointing.checkpoint import Checkpoint
    from trainwright.checkpointing.load import Loaded
    from trainwright.checkpointing.sharded_files import ShardedSave


class CheckpointManager:
    """Saves the checkpoints of one run, tracks the best, and removes those beyond retention.

    Order of calls: `prepare`; `adopt` to resume a run; `reserve` once or more; `judge`, `save` and `completed` as often
    as needed; `release`.

    The training thread calls all methods. The writer thread reads immutable records only, and the training thread
    collects its results between two saves: no thread reads state that another one changes.

    To customize: subclass it, and override `save` and `completed` at least.
    """

    def __init__(self, settings: Checkpoint, run_id: str) -> None:
        self.settings = settings
        self.run_id = run_id
        self.directory = Path(settings.directory).expanduser().absolute()
        self.on_result: Callable[[], None] | None = None
        """Called in the writer thread when a save is complete or has failed."""
        self.blocked = 0.0
        """Seconds of training blocked by saves."""
        self.is_saving = False
        """Whether the result of a submitted save is not collected yet."""
        self._tracker = BestTracker(settings)
        self._complete: Mapping[int, float] = {}
        """Complete checkpoints of this run in the directory: update -> sort key of the monitored number. Immutable:
        each save reads one mapping and returns a new one."""
        self._resumed: Path | None = None
        """The resumed checkpoint; None for a new run."""
        self._root = RunDirectory(self.directory, given=str(settings.directory))
        self._writer: Writer[SaveResult] | None = None
        self._last_save = (0, 0.0)
        """Update and blocked seconds of the last save."""
        self._saved: list[Saved] = []
        self._failures: list[SaveFailure] = []
        self._warnings: list[str] = []
        self._failed: SaveFailure | None = None
        """The last save if it failed; else None."""

    def prepare(self, *, resuming: bool) -> None:
        """Create and lock the directory, and check that it is writable. Called before the first update.

        CheckpointError if another process has locked it, or if a new run finds checkpoints of another run there.
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
        """Continue the run of a loaded checkpoint. `load_state_dict` restores the best values.

        CheckpointError if the directory holds another run, or later checkpoints of this run: new checkpoints would get
        the same names.
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
        """Allocate memory for copies of a state of this size, in the background.

        CheckpointError names a value that cannot be saved.
        """
        self._reserve(encode(tree))

    def judge(self, metrics: Mapping[str, float], *, epoch: int, update: int) -> bool:
        """Rank the monitored number of an update; return whether it is among the `top` best so far.

        False for NaN, for the worst infinity, and for a tie. SettingError if `metrics` lacks the number.
        """
        return self._tracker.judge(metrics, epoch=epoch, update=update)

    def save(
        self,
        tree: Mapping[str, Tree],
        *,
        update: int,
        epoch: int,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Copy `{part: state}` and submit it to the writer; `completed` returns the checkpoint later.

        Waits for the save in flight. After the save, checkpoints beyond retention are removed. `metrics`: the numbers
        measured at this update. CheckpointError names a value that cannot be saved.
        """
        manifest = {
            "run": self.run_id,
            "update": update,
            "epoch": epoch,
            "monitor": self.settings.best,
            "mode": self.settings.mode if self.settings.best else None,
            "metrics": {name: float(value) for name, value in (metrics or {}).items()},
        }
        began = time.perf_counter()
        self._save(tree, manifest)
        blocked = time.perf_counter() - began
        self.blocked += blocked
        self._last_save = update, blocked

    def completed(self, *, wait: bool = False, alone: bool = False) -> list[Saved]:
        """Return the checkpoints completed since the last call, oldest first.

        `wait`: wait for the save in flight; no further save follows. `alone`: without a collective.

        Reports each failed save once. A save refused by the system is a warning. It is a CheckpointError with
        `on_save_error="raise"`, and for the last save with `wait`. Any other failure is a CheckpointError.
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
            began = time.perf_counter()
            self._writer.wait()
            self.blocked += time.perf_counter() - began

    def release(self, *, wait: bool = True) -> None:
        """Wait for the save in flight, then unlock the directory.

        Without `wait`, or if the wait is interrupted, the writer thread unlocks it after the save.
        """
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close(self._root.release, wait=wait)
            self._take_results(writer)

    @property
    def best(self) -> Best | None:
        """The best value of the monitored number so far. Its path is None until that checkpoint is complete."""
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
        """One line on the saves that failed since the last complete one; empty if none did."""
        self._take_results()
        return "" if self._failed is None else self._failed.line(before=self._newest)

    def state_dict(self) -> dict[str, Any]:
        """Return the best values so far."""
        return self._tracker.state_dict()

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        """Restore the best values so far; drop those of another number, with a warning."""
        self._tracker.load_state_dict(tree)

    def _reserve(self, files: Files) -> None:
        if self._writer is not None:
            self._writer.reserve(files)

    def _save(self, tree: Mapping[str, Tree], manifest: dict[str, Any]) -> None:
        """Submit a state with the fields of its manifest."""
        self._submit(encode(tree), manifest)

    def _submit(self, files: Files, manifest: dict[str, Any], sharded: ShardedSave | None = None) -> None:
        """Submit files to the writer, after the save in flight. `sharded`: the part of the other ranks in this save."""
        assert self._writer is not None, "prepare() comes first"
        self._writer.wait()
        self._take_results()
        best = tuple(measured.update for measured in self._tracker.top)
        job = SaveJob(self._root, self.settings, manifest, complete=self._complete, best_updates=best, sharded=sharded)
        self._writer.submit(files, job.write)
        self.is_saving = True

    def _take_results(self, writer: Writer[SaveResult] | None = None) -> None:
        """Collect the result of the last save, for `completed`."""
        writer = writer or self._writer
        update, blocked = self._last_save
        for outcome in [] if writer is None else writer.outcomes():
            self.is_saving = False
            if outcome.result is None:
                self._take_failure(update, outcome.error)
                continue
            self._failed = None
            self._complete = outcome.result.complete
            self._warnings += outcome.result.warnings
            self._saved.append(replace(outcome.result.saved, blocked=blocked))

    def _take_failure(self, update: int, error: BaseException | None) -> None:
        assert error is not None
        times = 1 if self._failed is None else self._failed.times + 1
        self._failed = SaveFailure(update, error, times)
        self._failures.append(self._failed)

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
        """Return the complete checkpoints of this run in the directory. Reads each once, except the loaded one.

        CheckpointError if one is of another run, or, without `loaded`, unreadable: it may be of another run. Newer
        checkpoints that `loaded` skipped as unreadable do not count.
        """
        known: dict[Path, dict[str, Any] | None] = {}
        if loaded is not None:
            known = {path.absolute(): None for path in loaded.unreadable}
            known[loaded.path.absolute()] = loaded.manifest
        complete = {}
        for path in list_checkpoints(self.directory):
            manifest = known[path] if path in known else self._readable(path, tolerant=loaded is not None)
            if manifest is not None:
                complete[manifest["update"]] = sort_key(manifest["metrics"].get(self.settings.best), self._tracker.mode)
        return complete

    def _readable(self, path: Path, *, tolerant: bool) -> dict[str, Any] | None:
        """Return the manifest of a checkpoint; None if the checkpoint cannot be decoded completely."""
        manifest = self._root.read_manifest(path, self.run_id, tolerant=tolerant)
        try:
            if manifest is not None:
                load_tree(path, manifest=manifest, fill=False)
        except CheckpointError:
            return None
        return manifest

    @property
    def _newest(self) -> Path | None:
        """The newest checkpoint that still exists, or the resumed one."""
        known = [*self.saved, *([] if self._resumed is None else [self._resumed])]
        return next((path for path in known if is_of_run(path, self.run_id)), None)

    def _path_at(self, update: int) -> Path | None:
        self._take_results()
        name = update_name(update)
        if update in self._complete:
            return self.directory / name
        origin = self.directory if self._resumed is None else self._resumed.parent
        return origin / name if origin != self.directory and (origin / name).is_dir() else None


# One save, in the writer thread


@dataclass(frozen=True, slots=True, eq=False)
class SaveJob:
    """One save, run by the writer thread. The job and its arguments are immutable."""

    root: RunDirectory
    settings: Checkpoint
    manifest: Mapping[str, Any]
    _: KW_ONLY
    complete: Mapping[int, float]
    """The complete checkpoints before this save."""
    best_updates: tuple[int, ...]
    """Updates with the best values so far. Their checkpoints may not be complete yet."""
    sharded: ShardedSave | None
    """The part of the other ranks in this save, for a sharded state."""
    began: float = field(default_factory=time.perf_counter)

    def write(self, files: Files) -> SaveResult:
        """Commit the checkpoint, then remove checkpoints beyond retention.

        CheckpointError if it cannot be written; older checkpoints are then unchanged.
        """
        directory, settings, update = self.root.path, self.settings, self.manifest["update"]
        complete, warnings = dict(self.complete), []
        if self.root.is_lost:
            warnings += self._reacquire(complete)
        path = commits.commit(
            directory, files, manifest=self.manifest, checksum=settings.checksum, sharded=self.sharded
        )
        seconds = time.perf_counter() - self.began
        metrics = self.manifest["metrics"]
        complete[update] = inf if settings.best is None else sort_key(metrics.get(settings.best), self.manifest["mode"])
        for old in removable(complete, keep=settings.keep, top=settings.top, best_updates=self.best_updates):
            del complete[old]
            warnings += _remove(directory / update_name(old), run=self.manifest["run"])
        size = sum(map(content_size, files.values())) + (0 if self.sharded is None else self.sharded.bytes_of_others)
        saved = Saved(path, update, best=self.best_updates[:1] == (update,), seconds=seconds, size=size)
        return SaveResult(saved, complete, warnings)

    def _reacquire(self, complete: dict[int, float]) -> list[str]:
        """Create and lock a lost directory again; drop lost checkpoints from `complete`; return warnings."""
        directory = self.root.path
        self.root.reacquire(self.manifest["run"])
        gone = [update for update in complete if not (directory / update_name(update)).is_dir()]
        for update in gone:
            del complete[update]
        if gone or not complete:
            return [f"{directory} had vanished, with what was in it; it was made anew"]
        return []


@dataclass(frozen=True, slots=True, eq=False)
class SaveResult:
    """The result of a complete save."""

    saved: Saved
    complete: Mapping[int, float]
    """The complete checkpoints after the save: update -> sort key of the monitored number."""
    warnings: list[str]


def _remove(path: Path, *, run: str) -> list[str]:
    """Remove a checkpoint if its manifest is readable and of this run; return warnings."""
    try:
        if read_manifest(path)["run"] == run:
            commits.remove(path)
    except (CheckpointError, OSError) as error:
        return [f"{path} is no longer needed and could not be removed: {error}"]
    return []


# Saves that fail


@dataclass(frozen=True, slots=True, eq=False)
class SaveFailure:
    """A failed save, and its report."""

    update: int
    error: BaseException
    times: int
    """The number of failures in a row, this one included."""

    @property
    def is_of_the_system(self) -> bool:
        """Whether the system refused the save, so that a later one may succeed. Else the failure is a bug."""
        return self._cause is not None

    def text(self, directory: Path, *, before: Path | None, ends: bool) -> str:
        """Return the report: the save, the reason of its failure, and the checkpoint for a resume now.

        `before`: the newest complete checkpoint. `ends`: no further save follows.
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
        """Return the report in one line, for a run that has ended. `before`: the newest complete checkpoint."""
        count = f"{self.times} saves failed, the last for" if self.times > 1 else "the last save failed"
        newest = "nothing is saved" if before is None else f"the newest complete checkpoint is {before.name}"
        return f"{count}: {self._reason[0]}; {newest}"

    @property
    def _cause(self) -> OSError | None:
        """The OSError that refused the save; None for other failures."""
        seen: BaseException | None = self.error
        while seen is not None and not isinstance(seen, OSError):
            seen = seen.__cause__
        return seen

    @property
    def _reason(self) -> tuple[str, str]:
        """The reason of the failure and the fix, each in a few words."""
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
"""Error number -> (meaning, fix)."""
for _name, _what in {
    "EDQUOT": ("the quota is used up", "free space of this user there, or ask for more"),
    "ESTALE": ("the network file system has lost the directory", "see whether the file server is there"),
}.items():
    if hasattr(errno, _name):  # Windows has them under other names
        _REASONS[getattr(errno, _name)] = _what


# Retention: the last `keep` checkpoints, and the `top` best by the monitored number

if TYPE_CHECKING:
    from trainwright.checkpointing.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class Measured:
    """A value of the monitored number, with epoch and update."""

    value: float
    epoch: int
    update: int


class BestTracker:
    """The `top` best values so far of the number of `Checkpoint(best=...)`, best first."""

    def __init__(self, settings: Checkpoint) -> None:
        self.monitor = settings.best
        self.mode: Mode = settings.mode or "min"
        self.top: list[Measured] = []
        self._size = settings.top

    def judge(self, metrics: Mapping[str, float], *, epoch: int, update: int) -> bool:
        """Rank the monitored number of an update; return whether it is among the `top` best so far.

        False for NaN, for the worst infinity, and for a tie. SettingError if `metrics` lacks the number.
        """
        if self.monitor is None:
            return False
        require_monitor(self.monitor, metrics, f"Checkpoint(best={self.monitor!r})")
        measured = Measured(float(metrics[self.monitor]), epoch, update)
        others = [earlier for earlier in self.top if earlier.update != update]
        ranked = sorted([*others, measured], key=self._sort_key)  # stable: of equal values the earlier one is first
        self.top = [candidate for candidate in ranked if self._sort_key(candidate) < inf][: self._size]
        return measured in self.top

    def _sort_key(self, measured: Measured) -> float:
        return sort_key(measured.value, self.mode)

    def state_dict(self) -> dict[str, Any]:
        """Return the best values so far."""
        return {"best": self.monitor, "mode": self.mode, "top": [asdict(measured) for measured in self.top]}

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        """Restore the best values so far; drop those of another number, with a warning."""
        check_form(tree, best=is_none_or(is_text), mode=is_text, top=lambda top: type(top) is list)
        for fields in tree["top"]:
            check_form(fields, value=is_number, epoch=is_count, update=is_count)
        top = [Measured(**fields) for fields in tree["top"]]
        is_same = (tree["best"], tree["mode"]) == (self.monitor, self.mode)
        self.top = top[: self._size] if is_same else []
        if not is_same and tree["best"] is not None and self.monitor is not None:
            saved, now = f"{tree['best']} ({tree['mode']})", f"{self.monitor} ({self.mode})"
            warn(f"the best so far was judged on {saved}; on {now} it starts anew", stacklevel=3)


def removable(
    complete: Mapping[int, float], *, keep: int | Literal["all"], top: int, best_updates: Collection[int]
) -> list[int]:
    """Return the updates of checkpoints to remove: all except the last `keep`, the `top` best, and `best_updates`.

    `complete`: update -> sort key of the monitored number. `best_updates`: updates with the best values so far,
    whose checkpoints may not be complete yet.
    """
    last = sorted(complete, reverse=True)[: None if keep == "all" else keep]
    ranked = sorted((key, update) for update, key in complete.items() if key < inf)
    return sorted(set(complete) - {*last, *(update for _, update in ranked[:top]), *best_updates})
