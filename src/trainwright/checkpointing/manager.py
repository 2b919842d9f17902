"""Keeps the checkpoints of one run: judges which are best, hands on what is to be saved, and hears what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from warnings import warn

import torch

from trainwright.checkpointing import commits
from trainwright.checkpointing.background import Background
from trainwright.checkpointing.best import Judged
from trainwright.checkpointing.files import Content
from trainwright.checkpointing.load import encode, rank, readable
from trainwright.checkpointing.staging import Arena, needs
from trainwright.checkpointing.writer import Failure, Place, Retention, Writing, Written
from trainwright.core.errors import CheckpointError, message
from trainwright.core.records import Best, Saved
from trainwright.protocols import Tree

if TYPE_CHECKING:
    from trainwright.checkpointing.checkpoint import Checkpoint
    from trainwright.checkpointing.sharded_save import Joining


class Keeper:
    """Saves the checkpoints of one run, judges which are best, and removes those that are not to be kept.

    Order of use: `prepare`, `adopt` where a run is resumed, `expect` once or more, then `judge`, `save` and `written`
    as often as needed, `release`. One thread uses it. The one that it has write checkpoints is given what it needs
    and gives back what has come of it; what a keeper knows (what was judged, what is whole) is changed by the first
    alone, and only between two jobs of the other: so nothing is read while it changes.
    """

    def __init__(self, settings: Checkpoint, run_id: str) -> None:
        self.settings = settings
        self.run_id = run_id
        self.directory = Path(settings.directory).expanduser().absolute()
        self.news: Callable[[], None] | None = None
        """Called by the writing thread when a save is done or has failed."""
        self.blocked = 0.0
        """Seconds that saving has kept the run waiting: all of `save`, and the waiting in `written`."""
        self._judged = Judged(settings)
        self._whole: Mapping[int, float] = {}
        """Whole checkpoints of this run in the directory: update -> rank of the judged number. Never changed in place:
        a job of the thread is given this one, and gives another."""
        self._resumed: Path | None = None
        """The checkpoint that was resumed."""
        self._place = Place(self.directory, given=str(settings.directory))
        self._arena = Arena()
        self._background: Background[Written] | None = None
        self._handed = _Handed(0, 0.0)
        self.is_in_flight = False
        """Whether a save was begun of which nothing has been heard."""
        self._saved: list[Saved] = []
        self._failures: list[Failure] = []
        self._warnings: list[str] = []
        self._failed: Failure | None = None
        """The last save, where it failed."""

    def prepare(self, *, resuming: bool) -> None:
        """Make and lock the directory and see that it can be written to, before the first update.

        Raises CheckpointError where another process writes there, or where it holds another run and none is resumed.
        """
        self.release()
        self._place.hold()
        try:
            if not resuming:
                self._place.refuse_others(self.run_id, damaged=True)
                self._note_whole()
        except BaseException:
            self._place.let_go()
            raise
        self._background = Background("trainwright checkpoints", news=self._tell)

    def adopt(self, path: Path, manifest: Mapping[str, Any], *, passed_over: Collection[Path] = ()) -> None:
        """Go on with the run of the checkpoint that was loaded; its state is loaded by `load_state_dict`.

        Raises CheckpointError where the directory holds another run, or later checkpoints of this one, which newer
        ones could not be told from. `passed_over` are some that cannot be loaded: they do not count.
        """
        self.run_id = manifest["run"]
        self._resumed = path.absolute()
        self._place.refuse_others(self.run_id, damaged=False)
        self._note_whole(loaded=self._resumed, without={one.absolute() for one in passed_over})
        later = [commits.update_name(update) for update in self._whole if update > manifest["update"]]
        if later:
            what = f"{path.name} cannot be resumed into {self.directory}: the run went on from there"
            fix = f"resume {max(later)}, move the later ones away, or give another directory"
            raise CheckpointError(message(what, have=", ".join(sorted(later)), fix=fix))

    def expect(self, tree: Mapping[str, Tree], *, shared: Mapping[str, Content] | None = None) -> None:
        """Have the thread make room for a copy of a state like this one. CheckpointError names what cannot be saved.

        Without it, or where the state has grown since, what is missing is allocated while training waits. `shared`:
        files of a state that several processes hold together.
        """
        files = encode(tree) | dict(shared or {})
        if self.settings.async_save and self._background is not None:
            self._background.prepare(partial(_reserve, self._arena, *needs(files)))

    def judge(self, metrics: Mapping[str, float], *, epoch: int, update: int) -> bool:
        """Whether the monitored number is among the `top` best so far, and is to be saved now; the very best is `best`.

        NaN never is, nor the worst infinity; a tie beats nothing. SettingError where there is no such number.
        """
        return self._judged.judge(metrics, epoch=epoch, update=update)

    def save(
        self,
        tree: Mapping[str, Tree],
        *,
        update: int,
        epoch: int,
        metrics: Mapping[str, float] | None = None,
        settings: str = "",
        shared: Shared | None = None,
    ) -> None:
        """Copy `{part: state}` and have it written durably, then what is not to be kept removed; `written` tells.

        Waits for the save before. `metrics` are the numbers measured at this very update; none where nothing was.
        `settings`: a digest of what the run was set to. CheckpointError where a value cannot be stored. `shared`: what
        this process writes beside it of a state that several processes hold together, and how they meet.
        """
        background = self._background
        assert background is not None, "prepare() comes first"
        with self._blocking():
            asked = time.perf_counter()
            files = encode(tree) | ({} if shared is None else dict(shared.files))
            background.wait()
            self._collect()
            began = time.perf_counter()
            manifest = {
                "run": self.run_id,
                "update": update,
                "epoch": epoch,
                "monitor": self.settings.best,
                "mode": self._judged.mode if self.settings.best else None,
                "metrics": {name: float(value) for name, value in (metrics or {}).items()},
                "settings": settings,
            }
            copied = self._copied(files) if self.settings.async_save else None
            writing = self._writing(files if copied is None else copied, manifest, began=began)
            writing = writing if shared is None else replace(writing, joining=shared.joining)
            if copied is None:
                background.here(writing)
            else:
                background.hand(writing)
                if self._arena.wanted > self._arena.size:  # it has grown: when this one is written, make room
                    background.prepare(partial(_reserve, self._arena, *needs(files)))
            self._handed = _Handed(update, time.perf_counter() - asked)
            self.is_in_flight = True

    def written(self, *, wait: bool = False) -> list[Saved]:
        """The checkpoints that have become whole since this was last asked, oldest first.

        With `wait` after the one in flight, and as the last time: no further save is due. A save that failed is told
        here, once: a warning where the system refused, CheckpointError with `on_save_error="raise"`, for anything
        else, and with `wait` where it was the last one.
        """
        if wait:
            self.wait()
        self._collect()
        while self._failures:
            self._report(self._failures.pop(0), ends=wait)
        while self._warnings:
            warn(self._warnings.pop(0), stacklevel=2)
        saved, self._saved = self._saved, []
        return saved

    def wait(self) -> None:
        """Wait until nothing is in flight."""
        if self._background is not None:
            with self._blocking():
                self._background.wait()

    def release(self, *, wait: bool = True) -> None:
        """Wait for the save in flight and let others write to the directory.

        Without `wait`, or where that is interrupted, the thread lets them when it is done.
        """
        background, self._background = self._background, None
        if background is not None:
            background.close(self._let_go, wait=wait)
            self._collect(background)

    def abandon(self) -> None:
        """Release without waiting: whoever is in a hurry loses what is not whole yet where the process ends too."""
        self.release(wait=False)

    @property
    def best(self) -> Best | None:
        """The best of the monitored number so far; its path is None until that checkpoint is whole."""
        if not self._judged.top:
            return None
        top = self._judged.top[0]
        return Best(str(self.settings.best), top.value, top.epoch, top.update, self._path(top.update))

    @property
    def saved(self) -> list[Path]:
        """The whole checkpoints of this run in the directory, newest first."""
        self._collect()
        return [self.directory / commits.update_name(update) for update in sorted(self._whole, reverse=True)]

    @property
    def failing(self) -> str:
        """How many saves have failed since one went well, why, and what is whole; an empty string where none has."""
        self._collect()
        return "" if self._failed is None else self._failed.line(before=self._newest)

    @property
    def has_news(self) -> bool:
        """Whether `written` has anything to tell."""
        self._collect()
        return bool(self._saved or self._failures or self._warnings)

    @property
    def known(self) -> Known:
        """What it knows of the run and its directory."""
        self._collect()
        return Known(self.run_id, self.directory, self._whole, self._resumed)

    def know(self, known: Known) -> None:
        """Take over what the keeper of the process that writes has told."""
        self.run_id, self.directory = known.run_id, known.directory
        self._whole, self._resumed = known.whole, known.resumed

    def state_dict(self) -> dict[str, Any]:
        """What was judged best so far."""
        return self._judged.state_dict()

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        """Take over what was judged best; a best of another number is forgotten, with a warning."""
        self._judged.load_state_dict(tree)

    @property
    def _newest(self) -> Path | None:
        """The newest checkpoint that is still there, or the one that was resumed."""
        known = [*self.saved, *([] if self._resumed is None else [self._resumed])]
        return next((path for path in known if commits.is_of_run(path, self.run_id)), None)

    def _path(self, update: int) -> Path | None:
        self._collect()
        name = commits.update_name(update)
        if update in self._whole:
            return self.directory / name
        origin = self.directory if self._resumed is None else self._resumed.parent
        return origin / name if origin != self.directory and (origin / name).is_dir() else None

    @contextmanager
    def _blocking(self) -> Iterator[None]:
        """Count the time as one that training waits."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.blocked += time.perf_counter() - began

    def _copied(self, files: Mapping[str, Content]) -> dict[str, Content] | None:
        """The files with copies of their tensors; None, with a warning, where there is no memory for them."""
        try:
            return self._arena.copy(files)
        except OSError as error:
            size = needs(files)[0] / 2**30
            warn(
                f"there is no memory for a copy of the state ({size:.1f} GiB: {error.strerror}): "
                "training waits while it is written; Checkpoint(..., async_save=False) does so always",
                stacklevel=3,
            )
            return None

    def _writing(self, files: Mapping[str, Content], manifest: Mapping[str, Any], *, began: float) -> Writing:
        """The job for the thread: with all that is known now, of which nothing is changed later."""
        judged, keep = [one.update for one in self._judged.top], self.settings.keep
        return Writing(
            self._place,
            files,
            manifest,
            checksum=self.settings.checksum,
            retention=Retention(keep if isinstance(keep, int) else None, self.settings.top, frozenset(judged)),
            whole=self._whole,
            is_best=judged[:1] == [manifest["update"]],
            began=began,
        )

    def _collect(self, background: Background[Written] | None = None) -> None:
        """Take over what has come of the last save; what is to be told of it is kept for `written`."""
        background = background or self._background
        for done in [] if background is None else background.done():
            self.is_in_flight = False
            if done.result is None:
                assert done.error is not None
                times = 1 if self._failed is None else self._failed.times + 1
                self._failed = Failure(self._handed.update, done.error, times)
                self._failures.append(self._failed)
                continue
            self._failed = None
            self._whole = done.result.whole
            self._warnings += done.result.warnings
            self._saved.append(replace(done.result.saved, blocked=self._handed.blocked))

    def _report(self, failure: Failure, *, ends: bool) -> None:
        is_last = ends and failure is self._failed
        raises = self.settings.on_save_error == "raise" or not failure.is_of_the_system or is_last
        text = failure.text(self.directory, before=self._newest, ends=ends or raises)
        if raises:
            raise CheckpointError(text) from failure.error
        warn(text, stacklevel=3)

    def _tell(self) -> None:
        if self.news is not None:
            self.news()

    def _let_go(self) -> None:
        self._arena.free()
        self._place.let_go()

    def _note_whole(self, *, loaded: Path | None = None, without: Collection[Path] = ()) -> None:
        """Find the checkpoints of this run that can be read: `loaded` is one; others do not count and stay."""
        whole = {}
        for path in commits.scan(self.directory):
            if path in without:
                continue
            try:
                manifest = commits.read_manifest(path) if path == loaded else readable(path)
            except CheckpointError:
                continue
            whole[manifest["update"]] = rank(manifest, self.settings.best, self._judged.mode)
        self._whole = whole


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """What one of several processes adds to a checkpoint: its files of pieces, and how it hears of the others'."""

    files: Mapping[str, Content]
    joining: Joining


@dataclass(frozen=True, slots=True)
class Known:
    """What a keeper knows of its run: the id, the directory, what is whole (update -> rank), what was resumed."""

    run_id: str
    directory: Path
    whole: Mapping[int, float]
    resumed: Path | None


@dataclass(frozen=True, slots=True)
class _Handed:
    """The last save that was begun, and how long training waited for it."""

    update: int
    blocked: float


def _reserve(arena: Arena, size: int, device: torch.device | None) -> None:
    """Make room; where the system has none, that is found again, and said, when it is needed."""
    with suppress(OSError):
        arena.reserve(size, device)
