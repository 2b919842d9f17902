"""Keeps the checkpoints of a run on several processes: the first one writes, all of them know the same."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainwright.checkpointing import commits
from trainwright.checkpointing.files import spare_name
from trainwright.checkpointing.manager import Keeper, Known
from trainwright.checkpointing.rank0 import first_of, here, mark
from trainwright.checkpointing.sharing import Sharing, new_token
from trainwright.core.errors import CheckpointError, message
from trainwright.core.records import Best, Saved
from trainwright.modules.dtensors import is_sharded
from trainwright.protocols import Tree

if TYPE_CHECKING:
    from trainwright.checkpointing.checkpoint import Checkpoint
    from trainwright.distributed.resharding import Split
    from trainwright.distributed.world import World

_LOOKS_FOR = 5.0
"""Seconds within which a network file system must show one process what another has made."""


class GroupKeeper:
    """Saves the checkpoints of one run of several processes: the first one's state, or one that all hold together.

    A model whose tensors are sharded (torch's DTensors) is written by all processes, each its own part; its state is
    then to be given on every process. Of any other only what the first process gives is written.

    Every process calls the same in the same order, and gets the same: results, errors, what is best, what is whole.
    `release`, `abandon`, `best`, `saved`, `failing`, `has_news` and whatever is asked `alone` may be used by one of
    them without the others; the first then knows the newest, the others what all knew last. Nothing is said between
    the processes but in `prepare`, `adopt`, `expect`, `save`, and in `written` while a save has not been told.
    """

    def __init__(self, settings: Checkpoint, run_id: str, *, world: World) -> None:
        self.settings = settings
        self.world = world
        self._keeper = Keeper(settings, run_id)
        """It writes on the first process; on the others it judges, and holds what the first has told."""
        self._untold = False
        """Whether there may be a save that not all have heard of; the same on every process."""
        self._failing = ""
        self._sharing = Sharing(world, checksum=settings.checksum)

    @property
    def run_id(self) -> str:
        """The id of the run: the first process's, from `prepare` on."""
        return self._keeper.run_id

    @property
    def directory(self) -> Path:
        """Where the checkpoints lie."""
        return self._keeper.directory

    @property
    def blocked(self) -> float:
        """Seconds that saving has kept this process waiting."""
        return self._keeper.blocked

    def prepare(self, *, resuming: bool) -> None:
        """Make and lock the directory, and see that every process sees it.

        Raises CheckpointError on all processes where another run writes there, where it holds another run and none is
        resumed, or where a process has another directory of that name, as on a drive of its own.
        """
        known, probe, token = first_of(self.world, lambda: self._prepare_first(resuming=resuming))
        self._take(known)
        self._sharing.begin(token)
        unseen = [where for where in self.world.gather("" if _appears(probe) else here(self.world)) if where]
        if self.world.is_main:
            with suppress(OSError):
                probe.rmdir()
        if unseen:
            self.release()
            what = f"checkpoints in {self.directory}: {', '.join(unseen)} cannot see what process 0 has made there"
            want = "a directory that all processes share"
            fix = f'Checkpoint("/a/shared/drive/{self.directory.name}", ...)'
            raise mark(CheckpointError(message(what, want=want, fix=fix)))

    def adopt(self, path: Path, manifest: Mapping[str, Any], *, passed_over: Collection[Path] = ()) -> None:
        """Go on with the run of the checkpoint that was loaded. Raises as `Keeper.adopt`, on all processes."""

        def adopt() -> Known:
            self._keeper.adopt(path, manifest, passed_over=passed_over)
            return self._keeper.known

        self._take(first_of(self.world, adopt))

    def expect(self, tree: Mapping[str, Tree]) -> None:
        """Have room made for a copy of a state like this one; CheckpointError names what cannot be saved."""
        if not _is_sharded(tree):
            first_of(self.world, lambda: self._keeper.expect(tree))
            return
        parts = self._sharing.split(tree)
        first_of(self.world, lambda: self._keeper.expect(parts.tree, shared=self._sharing.files(parts)))
        if self.settings.async_save and not self.world.is_main:
            self._sharing.expect(parts)

    def judge(self, metrics: Mapping[str, float], *, epoch: int, update: int) -> bool:
        """Whether the monitored number is among the best; every process judges the same numbers alike."""
        return self._keeper.judge(metrics, epoch=epoch, update=update)

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
        """Have the first process copy its `{part: state}` and write it; of a sharded state every process its part.

        They wait for the copies, and for the save before. `alone`: the first one saves without the others, which have
        failed or will not come here; on another process nothing happens then. CheckpointError for a sharded state.
        """
        save = partial(self._keeper.save, update=update, epoch=epoch, metrics=metrics, settings=settings)
        if _is_sharded(tree):
            if alone:
                what = "a model that is sharded cannot be saved by one process without the others"
                raise CheckpointError(message(what, fix='fit(..., resume="auto") goes on from its last checkpoint'))
            self._save_parts(self._sharing.split(tree), save, update=update)
        elif not alone:
            first_of(self.world, lambda: save(tree))
        elif self.world.is_main:
            save(tree)
        self._untold = True

    def written(self, *, wait: bool = False, alone: bool = False) -> list[Saved]:
        """The checkpoints that have become whole since all were last told, oldest first, on every process.

        A save that failed is told here, once: a warning of the first process where the system refused, else, or with
        `on_save_error="raise"`, CheckpointError on all. `alone`: what this process knows, without asking the others.
        """
        if alone:
            self._sharing.hurry()
            if wait:
                self._sharing.wait()
            return self._keeper.written(wait=wait)
        if not self._untold:
            return []
        told = first_of(self.world, lambda: self._tell(wait=wait))
        self._take(told.known)
        self._untold, self._failing = told.more, told.failing
        if not told.more:
            self._sharing.settle()
        if told.error:
            raise mark(CheckpointError(told.error))
        return told.saved

    def release(self, *, wait: bool = True) -> None:
        """Wait for the save in flight and let others write to the directory; asks no other process."""
        self._sharing.hurry() if wait else self._sharing.settle()
        self._sharing.close(wait=wait)
        self._keeper.release(wait=wait)

    def abandon(self) -> None:
        """Release without waiting."""
        self.release(wait=False)

    @property
    def best(self) -> Best | None:
        """The best of the monitored number so far; its path is None until all know that it is whole."""
        return self._keeper.best

    @property
    def saved(self) -> list[Path]:
        """The whole checkpoints of this run, newest first."""
        return self._keeper.saved

    @property
    def failing(self) -> str:
        """How many saves have failed since one went well, and why; an empty string where none has."""
        return self._keeper.failing if self.world.is_main else self._failing

    @property
    def has_news(self) -> bool:
        """Whether this process knows of a save that `written` would tell: a reason for all to meet and ask."""
        return self._keeper.has_news

    def state_dict(self) -> dict[str, Any]:
        """What was judged best so far."""
        return self._keeper.state_dict()

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        """Take over what was judged best."""
        self._keeper.load_state_dict(tree)

    def _save_parts(self, parts: Split, save: Callable[..., None], *, update: int) -> None:
        """Have each process copy and write its part; what the first one cannot encode is an error of all."""
        if self._untold:  # all are done with the last before any begins: no memory of a copy is used twice
            first_of(self.world, self._keeper.wait)
            self._sharing.wait()
        if self.world.is_main:
            shared = self._sharing.lead(parts, update)
            first_of(self.world, lambda: save(parts.tree, shared=shared))
            return
        self._sharing.contribute(parts, update, directory=self.directory, copies=self.settings.async_save)
        try:
            first_of(self.world, lambda: None)
        except Exception:
            self._sharing.settle()
            raise
        if not self.settings.async_save:
            self._sharing.wait()

    def _prepare_first(self, *, resuming: bool) -> tuple[Known, Path, tuple[int, str]]:
        self._keeper.prepare(resuming=resuming)
        probe = self.directory / spare_name(".tmp", commits.update_name(0))
        try:
            probe.mkdir(mode=0o700)
        except OSError as error:
            self._keeper.release()
            raise CheckpointError(message(f"{self.directory} cannot be written to", have=str(error))) from error
        return self._keeper.known, probe, new_token(os.getpid())

    def _tell(self, *, wait: bool) -> _Told:
        """What the first process has to tell; an error is told too, after which all know the same."""
        saved, error = [], ""
        try:
            saved = self._keeper.written(wait=wait)
        except CheckpointError as failed:
            error = str(failed)
        return _Told(saved, error, self._keeper.known, self._keeper.failing, self._keeper.is_in_flight)

    def _take(self, known: Known) -> None:
        if not self.world.is_main:
            self._keeper.know(known)


@dataclass(frozen=True, slots=True)
class _Told:
    """What came of the saves, as the first process tells it."""

    saved: list[Saved]
    error: str
    known: Known
    failing: str
    more: bool
    """Whether one is in flight still."""


def _is_sharded(tree: Mapping[str, Tree]) -> bool:
    """Whether the processes hold the model together, each a part of it."""
    return is_sharded(*(value for value in tree.get("model", {}).values() if isinstance(value, Tensor)))


def _appears(path: Path) -> bool:
    """Whether this process sees a path, at once or when its file system asks the server anew."""
    end = time.monotonic() + _LOOKS_FOR
    while not os.path.lexists(path):
        if time.monotonic() > end:
            return False
        with suppress(OSError):
            os.listdir(path.parent)
        time.sleep(0.05)
    return True
