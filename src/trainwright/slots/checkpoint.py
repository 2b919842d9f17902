"""Says where, when and how many checkpoints are kept and which is best; saves, finds and loads them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass
from math import inf
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Protocol
from warnings import warn

from trainwright.base.contracts import Part, Tree
from trainwright.base.errors import CheckpointError, SettingError, message
from trainwright.base.names import did_you_mean
from trainwright.base.records import Best, Saved
from trainwright.base.spans import Epochs, Seconds, Span, Updates
from trainwright.runtime import storage
from trainwright.slots.saved import (
    encode,
    find_checkpoint,
    latest_checkpoint,
    load_tree,
    load_weights,
    rank,
    save_weights,
)

__all__ = [
    "Checkpoint",
    "Keeper",
    "Keeping",
    "Saving",
    "encode",
    "find_checkpoint",
    "latest_checkpoint",
    "load_tree",
    "load_weights",
    "save_weights",
]


class Keeping(Part, Protocol):
    """What the Trainer asks of one run's checkpoints: `prepare`, perhaps `adopt`, `judge` and `save`, `release`."""

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

    def save(self, tree: Mapping[str, Tree], *, update: int, epoch: int, metrics: Mapping[str, float]) -> Saved:
        """Write `{part: state}`."""
        ...

    def release(self) -> None:
        """Called once, when the run ends in whatever way."""


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
        """The keeper of one run's checkpoints."""
        ...


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Where, when and how many checkpoints of a run are kept.

    The last `keep` are kept and, with `best="val_accuracy"`, the `top` best besides. `every` is a span, or "auto": each
    validation, or each epoch without one. `mode` may be left out for names that end in "loss", of which less is better.
    """

    directory: str | Path
    _: KW_ONLY
    best: str | None = None
    mode: Literal["min", "max"] | None = None
    top: int = 1
    keep: int = 3
    every: Span | Literal["auto"] = "auto"
    restore_best: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.directory, str | PathLike) or not str(self.directory):
            raise SettingError(
                message(f"Checkpoint({self.directory!r})", want="a directory", fix='Checkpoint("runs/1")')
            )
        for name in ("top", "keep"):
            n = getattr(self, name)
            if type(n) is not int or n < 1:
                raise SettingError(message(f"Checkpoint({name}={n!r})", want="a whole number, at least 1"))
        if self.every != "auto" and not isinstance(self.every, Updates | Epochs | Seconds):
            want = 'Updates(n), Epochs(n), Seconds(n) or "auto"'
            n = self.every if type(self.every) is int and self.every > 0 else 500
            raise SettingError(message(f"Checkpoint(every={self.every!r})", want=want, fix=f"every=Updates({n})"))
        if not isinstance(self.restore_best, bool):
            raise SettingError(message(f"Checkpoint(restore_best={self.restore_best!r})", want="True or False"))
        self._check_best()

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

    def bind(self, run_id: str) -> Keeper:
        """The keeper of one run's checkpoints; nothing is touched before its `prepare`."""
        return Keeper(self, run_id)


class Keeper:
    """Saves the checkpoints of one run, judges which are best, and removes those that are not to be kept.

    Order of use: `prepare`, `adopt` where a run is resumed, then `judge` and `save` as often as needed, `release`.
    """

    def __init__(self, settings: Checkpoint, run_id: str) -> None:
        self.settings = settings
        self.run_id = run_id
        self.directory = Path(settings.directory).expanduser().absolute()
        self._top: list[_Judged] = []
        self._saved: dict[int, float] = {}
        """Whole checkpoints of this run in the directory: update -> rank of the judged number."""
        self._origin = self.directory
        """Where the checkpoint that was resumed lies."""
        self._held = ExitStack()
        self._is_prepared = False

    def prepare(self, *, resuming: bool) -> None:
        """Make and lock the directory and see that it can be written to, before the first update.

        Raises CheckpointError where another process writes there, or where it holds another run and none is resumed.
        """
        self.release()
        storage.make_root(self.directory)
        with ExitStack() as held:
            held.enter_context(storage.lock(self.directory))
            if not resuming:
                self._refuse_others(damaged=True)
                self._note_saved()
            self._held = held.pop_all()
        self._is_prepared = True

    def adopt(self, path: Path, manifest: Mapping[str, Any]) -> None:
        """Go on with the run of the checkpoint that was loaded; its state is loaded by `load_state_dict`.

        Raises CheckpointError where the directory holds another run, or later checkpoints of this one, which newer
        ones could not be told from.
        """
        self.run_id = manifest["run"]
        self._origin = path.absolute().parent
        self._refuse_others(damaged=False)
        self._note_saved()
        later = [storage.update_name(update) for update in self._saved if update > manifest["update"]]
        if later:
            what = f"{path.name} cannot be resumed into {self.directory}: the run went on from there"
            fix = f"resume {max(later)}, move the later ones away, or give another directory"
            raise CheckpointError(message(what, have=", ".join(sorted(later)), fix=fix))

    def judge(self, metrics: Mapping[str, float], *, epoch: int, update: int) -> bool:
        """Whether the monitored number is among the `top` best so far, and is to be saved now; the very best is `best`.

        NaN never is, nor the worst infinity; a tie beats nothing. SettingError where there is no such number.
        """
        name = self.settings.best
        if name is None:
            return False
        if name not in metrics:
            what = f"Checkpoint(best={name!r}): there is no number of that name.{did_you_mean(name, metrics)}"
            raise SettingError(message(what, want=f"one of {', '.join(sorted(metrics))}"))
        found = _Judged(float(metrics[name]), epoch, update)
        self._top = [judged for judged in self._top if judged.update != update]
        place = bisect_right([self._rank(judged.value) for judged in self._top], self._rank(found.value))
        if place >= self.settings.top or not self._rank(found.value) < inf:
            return False
        self._top.insert(place, found)
        del self._top[self.settings.top :]
        return True

    def save(
        self, tree: Mapping[str, Tree], *, update: int, epoch: int, metrics: Mapping[str, float] | None = None
    ) -> Saved:
        """Write `{part: state}` durably, then remove what is not to be kept.

        `metrics` are the numbers measured at this very update; none where nothing was. CheckpointError where it could
        not be written; the checkpoints before it are then as they were.
        """
        manifest = {
            "run": self.run_id,
            "update": update,
            "epoch": epoch,
            "monitor": self.settings.best,
            "mode": self._mode if self.settings.best else None,
            "metrics": {name: float(value) for name, value in (metrics or {}).items()},
        }
        assert self._is_prepared, "prepare() comes first"
        path = storage.commit(self.directory, storage.update_name(update), encode(tree), manifest=manifest)
        self._saved[update] = rank(manifest, self.settings.best, self._mode)
        self._retain()
        return Saved(path, update, best=bool(self._top) and self._top[0].update == update)

    def release(self) -> None:
        """Let others write to the directory."""
        self._is_prepared = False
        self._held.close()

    @property
    def best(self) -> Best | None:
        """The best of the monitored number so far; its path is None until it is saved."""
        if not self._top:
            return None
        top = self._top[0]
        return Best(str(self.settings.best), top.value, top.epoch, top.update, self._path(top.update))

    @property
    def saved(self) -> list[Path]:
        """The whole checkpoints of this run in the directory, newest first."""
        return [self.directory / storage.update_name(update) for update in sorted(self._saved, reverse=True)]

    def state_dict(self) -> dict[str, Any]:
        """What was judged best so far."""
        top = [{"value": judged.value, "epoch": judged.epoch, "update": judged.update} for judged in self._top]
        return {"best": self.settings.best, "mode": self._mode, "top": top}

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        """Take over what was judged best; a best of another number is forgotten, with a warning."""
        if (tree["best"], tree["mode"]) == (self.settings.best, self._mode):
            self._top = [_Judged(**judged) for judged in tree["top"]][: self.settings.top]
            return
        self._top = []
        if tree["best"] is not None and self.settings.best is not None:
            now = f"{self.settings.best} ({self._mode})"
            warn(
                f"the best so far was judged on {tree['best']} ({tree['mode']}); on {now} it starts anew", stacklevel=2
            )

    @property
    def _mode(self) -> str:
        return self.settings.mode or "min"

    def _rank(self, value: float) -> float:
        return -value if self._mode == "max" else value

    def _path(self, update: int) -> Path | None:
        name = storage.update_name(update)
        if update in self._saved:
            return self.directory / name
        return self._origin / name if self._origin != self.directory and (self._origin / name).is_dir() else None

    def _note_saved(self) -> None:
        """Read which checkpoints of this run are there whole; damaged ones are left alone."""
        self._saved = {}
        for path in storage.scan(self.directory):
            try:
                manifest = storage.verify(path)
            except CheckpointError:
                continue
            self._saved[manifest["update"]] = rank(manifest, self.settings.best, self._mode)

    def _refuse_others(self, *, damaged: bool) -> None:
        """Raise CheckpointError where there is a checkpoint of another run, or, if `damaged`, of nobody knows which."""
        for path in storage.scan(self.directory):
            try:
                run = storage.read_manifest(path)["run"]
                have = f"{path.name} of run {run}; this is run {self.run_id}"
            except CheckpointError as error:
                run, have = None if damaged else self.run_id, str(error)
            if run != self.run_id:
                what = f"{self.directory} holds another run"
                fix = f'fit(..., resume="auto") to go on with it, or Checkpoint("{self.settings.directory}-2", ...)'
                raise CheckpointError(message(what, have=have, fix=fix))

    def _retain(self) -> None:
        """Remove all but the last `keep` and the best `top`; only what bears this run's id and is readable."""
        last = sorted(self._saved, reverse=True)[: self.settings.keep]
        judged = sorted((value, update) for update, value in self._saved.items() if value < inf)
        best = [update for _, update in judged[: self.settings.top]] + [kept.update for kept in self._top]
        for update in sorted(set(self._saved) - {*last, *best}):
            path = self.directory / storage.update_name(update)
            del self._saved[update]
            try:
                if storage.read_manifest(path)["run"] == self.run_id:
                    storage.remove(path)
            except (CheckpointError, OSError) as error:
                warn(f"{path} is no longer needed and could not be removed: {error}", stacklevel=3)


@dataclass(frozen=True, slots=True)
class _Judged:
    value: float
    epoch: int
    update: int
