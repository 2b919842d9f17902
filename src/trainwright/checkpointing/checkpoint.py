"""Says where, when and how many checkpoints are kept and which is best; who fills the slot, and who keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args, overload

from trainwright.checkpointing.checksums import Checksum
from trainwright.core.checks import check_flag, check_number, check_whole, local_path
from trainwright.core.durations import Epochs, Seconds, Span, Updates
from trainwright.core.errors import SettingError, message
from trainwright.core.records import Best, Saved
from trainwright.core.suggestions import suggests
from trainwright.protocols import Stateful, Tree

if TYPE_CHECKING:
    from trainwright.checkpointing.distributed_manager import GroupKeeper
    from trainwright.checkpointing.manager import Keeper
    from trainwright.distributed.world import World


class Keeping(Stateful, Protocol):
    """What the Trainer asks of one run's checkpoints: `prepare`, perhaps `adopt`, `judge` and `save`, `release`.

    A keeper that writes in the background has more, and is asked for it where it is there:
    `news`: set to a function by the run; to be called, in whatever thread, when a save is done or has failed;
    `written(*, wait=False) -> list[Saved]`: what has become whole since it was last asked, oldest first; with `wait`
    after all that is in flight, as the last time: CheckpointError where the last save has failed, which `fit` raises at
    its end. What went wrong is raised here, in the thread of training. `save` then returns None,
    and takes `settings=`, a digest of what the run is set to, for the manifest;
    `expect(tree)`: a state like this one will be saved: time to have room for a copy of it;
    `blocked`: seconds that saving has kept the run waiting so far;
    `failing`: a line for `Result.notes` where the last save failed, an empty string where it did not;
    `adopt(path, manifest, passed_over=paths)`: where newer checkpoints than the loaded one cannot be loaded, these;
    `abandon()`: called in the place of `release` after a second Ctrl-C; to return at once.

    In a group every process has one, made by `bind(run_id, world=world)`, and calls the same of it in the same order.
    There `save` and `written` take `alone=True`, for a process that ends in an error which the others do not share,
    and nothing may be asked of them; `news` is not called, and `has_news` may be looked at when all meet.
    """

    run_id: str

    @property
    def settings(self) -> Saving:
        """What was set."""
        ...

    @property
    def best(self) -> Best | None:
        """The best of the number that is judged, so far."""

    @property
    def saved(self) -> list[Path]:
        """The checkpoints that are kept, newest first, by names that say their update."""
        ...

    def prepare(self, *, resuming: bool) -> None:
        """Refuse what cannot be written to, before the first update."""

    def adopt(self, path: Path, manifest: Mapping[str, Any]) -> None:
        """Go on with the run of the checkpoint that was loaded."""

    def judge(self, metrics: Mapping[str, float], *, epoch: int, update: int) -> bool:
        """Whether these numbers are among the best, and to be saved now; asked only where `settings.best` is set."""
        ...

    def save(self, tree: Mapping[str, Tree], *, update: int, epoch: int, metrics: Mapping[str, float]) -> Saved | None:
        """Write `{part: state}`, of which nothing may be used after this returns: its tensors are trained on.

        Returns what is whole now; None where `written` tells it.
        """
        ...

    def release(self) -> None:
        """Called once, when the run ends in whatever way; to return when nothing is in flight."""


class Saving(Protocol):
    """What fills the slot `checkpoint`: settings only; `bind` makes the thing with state, anew for each `fit`."""

    @property
    def directory(self) -> str | Path:
        """Where checkpoints lie."""
        ...

    @property
    def best(self) -> str | None:
        """The number that is judged."""

    @property
    def mode(self) -> Literal["min", "max"] | None:
        """Whether less or more of it is better."""

    @property
    def every(self) -> Span | Literal["auto"]:
        """When to save: a span, or at each validation."""
        ...

    @property
    def restore_best(self) -> bool:
        """Whether the model holds the best weights when `fit` ends."""
        ...

    def bind(self, run_id: str) -> Keeping:
        """The keeper of one run's checkpoints; on several processes it is also given `world=`."""
        ...


@suggests
@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Where, when and how many checkpoints of a run are kept.

    The last `keep` are kept ("all": each of them) and, with `best="val_accuracy"`, the `top` best besides. `every` is a
    span, or "auto": each validation, or each epoch without one. `mode` may be left out for names that end in "loss", of
    which less is better.

    With `async_save` the state is copied and written by a thread while training goes on; else training waits. Where
    the system refuses (a full disk, a quota, an input/output error) training goes on with a warning and the next save
    tries again, or with `on_save_error="raise"` it ends; the save at the end must succeed, else `fit` raises.
    `checksum="sha256"` costs more than crc32 and misses no accident; neither proves anything about intent, since the
    sums lie beside the files. `grace`: seconds that a signal waits for the update in hand.
    """

    directory: str | Path
    _: KW_ONLY
    best: str | None = None
    mode: Literal["min", "max"] | None = None
    top: int = 1
    keep: int | Literal["all"] = 3
    every: Span | Literal["auto"] = "auto"
    restore_best: bool = False
    async_save: bool = True
    on_save_error: Literal["warn", "raise"] = "warn"
    checksum: Checksum = "crc32"
    grace: float = 20.0

    def __post_init__(self) -> None:
        if not isinstance(self.directory, str | PathLike) or not str(self.directory):
            raise SettingError(
                message(f"Checkpoint({self.directory!r})", want="a directory", fix='Checkpoint("runs/1")')
            )
        local_path(self.directory, "Checkpoint({})")
        check_whole(self.top, f"Checkpoint(top={self.top!r})")
        if self.keep != "all":
            fix = 'keep="all"' if self.keep is None or self.keep in (0, -1) else ""
            check_whole(self.keep, f"Checkpoint(keep={self.keep!r})", what='"all", or a whole number', fix=fix)
        if self.every != "auto" and not isinstance(self.every, Updates | Epochs | Seconds):
            want = 'Updates(n), Epochs(n), Seconds(n) or "auto"'
            n = self.every if type(self.every) is int and self.every > 0 else 500
            raise SettingError(message(f"Checkpoint(every={self.every!r})", want=want, fix=f"every=Updates({n})"))
        self._check_best()
        self._check_saving()

    def _check_saving(self) -> None:
        for name in ("restore_best", "async_save"):
            check_flag(getattr(self, name), f"Checkpoint({name}={getattr(self, name)!r})")
        for name, known in (("on_save_error", ("warn", "raise")), ("checksum", get_args(Checksum))):
            if getattr(self, name) not in known:
                have, want = f"Checkpoint({name}={getattr(self, name)!r})", " or ".join(f'"{one}"' for one in known)
                raise SettingError(message(have, want=want, fix=f'{name}="{known[0]}"'))
        what = "seconds that a signal waits for the end of the update in hand, a number"
        check_number(self.grace, f"Checkpoint(grace={self.grace!r})", least=0, what=what, fix="grace=20")

    def _check_best(self) -> None:
        if self.mode not in (None, "min", "max"):
            raise SettingError(message(f"Checkpoint(mode={self.mode!r})", want='mode="min" or mode="max"'))
        if self.best is None:
            needs_best = {"mode": self.mode is not None, "top": self.top > 1, "restore_best": self.restore_best}
            for name in (name for name, is_set in needs_best.items() if is_set):
                have = f"Checkpoint({name}={getattr(self, name)!r}) without best"
                raise SettingError(message(have, want="the number that is judged", fix='best="val_loss"'))
        elif not isinstance(self.best, str) or not self.best:
            raise SettingError(message(f"Checkpoint(best={self.best!r})", want="a name", fix='best="val_loss"'))
        elif self.mode is None and not self.best.endswith("loss"):
            what = f"Checkpoint(best={self.best!r}) does not say whether more or less is better"
            raise SettingError(message(what, fix='mode="max" if more is better, as for an accuracy; else mode="min"'))

    @overload
    def bind(self, run_id: str) -> Keeper: ...
    @overload
    def bind(self, run_id: str, *, world: World) -> Keeper | GroupKeeper: ...
    def bind(self, run_id: str, *, world: World | None = None) -> Keeper | GroupKeeper:
        """The keeper of one run's checkpoints; nothing is touched before its `prepare`.

        `world`: the processes of the run. Every process of a group binds and calls alike; see `GroupKeeper`.
        """
        from trainwright.checkpointing.manager import Keeper

        if world is None or (world.size == 1 and not hasattr(world, "group")):
            return Keeper(self, run_id)
        from trainwright.checkpointing.distributed_manager import GroupKeeper

        return GroupKeeper(self, run_id, world=world)
