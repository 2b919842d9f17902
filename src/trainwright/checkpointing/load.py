"""Finds and loads a checkpoint: that of `resume=`, the newest complete one, or the weights of the best.

A checkpoint is complete if every checksum is right and this version can decode all of it. An incomplete one is named in
a warning, and the next older one is tried. No file points to the newest or the best: both are derived from the
manifests in the directory.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from torch import nn

from trainwright.checkpointing.files import read_file
from trainwright.checkpointing.format import (
    MANIFEST,
    MODEL,
    is_update_name,
    list_checkpoints,
    load_tree,
    read_manifest,
)
from trainwright.checkpointing.sharded_files import INDEX
from trainwright.checkpointing.tensorfile import read_header
from trainwright.checkpointing.weights import PartialWeights, load_into, read_weights
from trainwright.core.checks import local_path
from trainwright.core.device import Home
from trainwright.core.errors import CheckpointError, SettingError, message, warn_user
from trainwright.core.monitor import Mode, sort_key
from trainwright.core.suggestions import suggests
from trainwright.protocols import Tree

if TYPE_CHECKING:
    from trainwright.distributed.world import World

T = TypeVar("T")
_Read = Callable[[Path, dict[str, Any] | None], T]
"""Reads a checkpoint, given its path and its manifest or None. CheckpointError if it is damaged."""
_RETRIES = 100
"""Maximum number of attempts to read a directory while a run saves and removes checkpoints in it."""


class DamagedError(CheckpointError):
    """A checkpoint whose bytes are intact and whose state cannot be loaded: changed, or saved by other code."""

    def __init__(self, text: str, origin: str, *, early: bool = False) -> None:
        super().__init__(text)
        self.origin = origin
        """The path of the checkpoint."""
        self.early = early
        """Whether it was detected before any hook of the user ran."""


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A checkpoint, each byte read and checked."""

    path: Path
    tree: dict[str, Tree]
    manifest: dict[str, Any]
    unreadable: tuple[Path, ...] = ()
    """Newer checkpoints that cannot be loaded. Known to rank 0 alone."""


def load_checkpoint(
    resume: str | Path,
    directory: str | Path | None,
    *,
    run: str | None = None,
    device: Home | None = None,
    world: World | None = None,
    lazy_shards: bool = False,
    refused: Mapping[Path, str] | None = None,
) -> Loaded | None:
    """Return the checkpoint of `fit(resume=...)`; None if there is nothing to resume. Each byte is read once.

    - `resume`: "auto" searches `directory`; a path is that of a checkpoint or of a run's directory.
    - `run`: the id of the run, for a directory with several runs.
    - `device`: state from an accelerator is moved to it, as in `tree.loads`; None leaves all state on the CPU.
    - `world`: a collective of its ranks. Rank 0 searches, all read; all return the same checkpoint or raise the same
      error.
    - `lazy_shards`: sharded tensors stay in their files, for `distributed.resharding.place`.
    - `refused`: checkpoints that were read and could not be loaded, each with the reason. They are skipped.

    An unreadable checkpoint is named in a warning, and the next older one is tried, unless `resume` is its path.
    CheckpointError if a path does not exist, or if no checkpoint there is complete.
    """
    share = (0, 1) if world is None else (world.rank, world.size)

    def read(path: Path, manifest: dict[str, Any] | None = None) -> Loaded:
        if refused and path in refused:
            raise CheckpointError(refused[path])
        manifest = read_manifest(path) if manifest is None else manifest
        tree = load_tree(path, manifest=manifest, device=device, share=share if lazy_shards else None)
        return Loaded(path, tree, manifest)

    def find(read: _Read[Loaded]) -> Loaded | None:
        loaded, defects = _find(resume, directory, run=run, read=read)
        return None if loaded is None else replace(loaded, unreadable=tuple(defects))

    if world is None or world.size == 1:
        return find(read)
    from trainwright.checkpointing.coordinator import load_on_all_ranks  # imports the manager: not for weights alone

    return load_on_all_ranks(world, lambda on_all: find(lambda path, _: on_all(path)), read)


@suggests
def latest_checkpoint(directory: str | Path, *, run: str | None = None) -> Path | None:
    """Return the newest complete checkpoint of a directory, or None. Warns of newer unreadable ones.

    Args:
        directory: The directory of a run.
        run: The id of a run, for a directory with several runs.

    Raises:
        CheckpointError: If the directory holds several runs and `run` is not given.
    """
    path = local_path(directory, "latest_checkpoint({})", reads=True)
    found, _ = _retried(path, lambda listing: _newest(path, run, read=_checked, listing=listing))
    return found


@suggests
def load_weights(
    path: str | Path, model: nn.Module | None = None, which: Literal["best", "last"] = "best"
) -> OrderedDict[str, Any]:
    """Return the weights of a safetensors file, of a checkpoint, or of the best or last checkpoint of a directory.

    Args:
        path: The file, the checkpoint or the directory.
        model: A model to load the weights into.
        which: "best" or "last" checkpoint of a directory.

    Returns:
        The state dict, on the CPU.

    Raises:
        CheckpointError: If the file is damaged, or if names or shapes differ from those of `model`.

    A checkpoint of `trainable_only=True` holds no frozen weights. `model` keeps its own, with a warning if they differ
    from those of the run.
    """
    if which not in ("best", "last"):
        raise SettingError(f"load_weights(which={which!r})", want='"best" or "last"')
    if model is not None and not isinstance(model, nn.Module):
        given = repr(model) if isinstance(model, str) else f"a {type(model).__name__}"
        fix = f"load_weights(path, which={model!r})" if given in ("'best'", "'last'") else "load_weights(path, model)"
        what = f"load_weights(path, model): the model is {given}"
        raise TypeError(message(what, want="a torch.nn.Module, or none", fix=fix))
    found, weights = find_weights(path, model, which)
    if model is not None:
        load_into(model, weights, source=str(found))
    elif isinstance(weights, PartialWeights):
        held, missing = len(weights), len(weights.frozen)
        fix = "load_weights(path, model) keeps those of the model"
        warn_user(f"{found} holds the trainable weights alone, {held} tensors, and not {missing} frozen ones: {fix}")
    return weights


def find_weights(
    path: str | Path, model: nn.Module | None = None, which: str = "best"
) -> tuple[Path, OrderedDict[str, Any]]:
    """Return the path and the content of the weights of `load_weights`. `model`: its shapes are compared."""
    found = _existing(local_path(path, "load_weights({}, ...)", reads=True))
    if not found.is_dir():
        return found, read_file(found, partial(read_weights, model=model))
    if _is_checkpoint(found):
        return _weights_of(found, model)
    choose = _best if which == "best" else _last
    return _retried(found, lambda listing: _weights_of(choose(found, listing), model))


def without_slot(resume: str | Path) -> Exception:
    """Return the error for a resume by a Trainer without a checkpoint slot, with the slot to add.

    CheckpointError if `resume` is not the path of a checkpoint: the first mistake to correct.
    """
    directory, instead = "runs/1", ""
    if resume != "auto":
        found, _ = _find_at(_given_directory(resume), run=None, read=lambda path, _: path)
        assert found is not None
        directory = str(found.parent)
        instead = f"; or, for its weights alone, load_weights({str(found)!r}, model) before fit, without resume"
    written = '"auto"' if resume == "auto" else repr(str(resume))
    what = f"resume={written} without a checkpoint slot"
    want = "a slot, which holds the best of the run and writes its next checkpoints"
    return SettingError(what, want=want, fix=f"Trainer(..., checkpoint=Checkpoint({directory!r})){instead}")


# The search


def _find(
    resume: str | Path, directory: str | Path | None, *, run: str | None, read: _Read[T]
) -> tuple[T | None, dict[Path, str]]:
    """Return the result of `read` for the checkpoint of `resume`, and the defects of newer unreadable ones."""
    if resume != "auto":
        return _find_at(_given_directory(resume), run=run, read=read)
    if directory is None:
        raise without_slot(resume)
    path = Path(directory).expanduser()  # locked by this run: no checkpoint is removed meanwhile
    found, defects = _newest(path, run, read=read)
    if found is None and defects:
        other = f'move the damaged ones away, or Checkpoint("{directory}-2", ...), to begin anew'
        raise _none_complete(path, defects, fix=other)
    return found, defects


def _find_at(path: Path, *, run: str | None, read: _Read[T]) -> tuple[T | None, dict[Path, str]]:
    """Search like `_find`, at the path of a checkpoint or of a directory with checkpoints."""
    if _is_checkpoint(path):
        return read(path, None), {}
    found, defects = _retried(path, lambda listing: _newest(path, run, read=read, listing=listing))
    if found is None:
        raise _none_complete(path, defects, fix="give another path")
    return found, defects


def _newest(
    directory: Path, run: str | None, *, read: _Read[T], listing: _Listing | None = None
) -> tuple[T | None, dict[Path, str]]:
    """Return the result of `read` for the newest readable checkpoint, and the defects of newer ones."""
    defects: dict[Path, str] = {}
    for path, manifest in _of_one_run(directory, run):
        try:
            return read(path, manifest), defects
        except CheckpointError as error:
            if listing is not None and listing.has_changed:
                raise
            defects[path] = str(error).partition("\n")[0]
            warn_user(f"{error}; it is passed over for an older checkpoint")
    return None, defects


def _of_one_run(directory: Path, run: str | None) -> list[tuple[Path, dict[str, Any] | None]]:
    """Return (path, manifest) of the checkpoints of one run, newest first; None for a damaged manifest."""
    found: list[tuple[Path, dict[str, Any] | None]] = []
    for path in list_checkpoints(directory):
        try:
            found.append((path, read_manifest(path)))
        except CheckpointError:
            found.append((path, None))
    runs = sorted({manifest["run"] for _, manifest in found if manifest is not None})
    if run not in runs:
        if len(runs) > 1:
            fix = "give the path of one checkpoint, or keep each run in a directory of its own"
            raise CheckpointError(f"{directory} holds several runs", have=", ".join(runs), fix=fix)
        run = runs[0] if runs else None
    return [(path, manifest) for path, manifest in found if manifest is None or manifest["run"] == run]


def _none_complete(path: Path, defects: Mapping[Path, str], *, fix: str) -> CheckpointError:
    have = "\n        ".join(defects.values()) or "no checkpoint at all"
    return CheckpointError(f"{path} holds no complete checkpoint", have=have, fix=fix)


def _retried(directory: Path, look: Callable[[_Listing], T]) -> T:
    """Return the result of `look`; call it again if a run has removed or replaced a checkpoint meanwhile."""
    for _ in range(_RETRIES):
        listing = _Listing(directory)
        try:
            return look(listing)
        except CheckpointError:
            if not listing.has_changed:
                raise
    return look(_Listing(directory))


class _Listing:
    """The checkpoints of a directory at one moment. A run may remove or replace them later."""

    def __init__(self, directory: Path) -> None:
        self._inodes = {path: _inode(path) for path in list_checkpoints(directory)}

    @property
    def has_changed(self) -> bool:
        """Whether a checkpoint was removed or replaced since."""
        return any(inode is None or _inode(path) != inode for path, inode in self._inodes.items())


def _inode(path: Path) -> int | None:
    """Return the inode number of a path; None if it does not exist."""
    try:
        return os.lstat(path).st_ino
    except OSError:
        return None


def _last(directory: Path, listing: _Listing) -> Path:
    found, _ = _newest(directory, None, read=_checked, listing=listing)
    if found is None:
        raise CheckpointError(f"{directory} holds no complete checkpoint")
    return found


def _best(directory: Path, listing: _Listing) -> Path:
    """Return the best complete checkpoint of a run, by the monitored number of its newest checkpoint."""
    last = _last(directory, listing)
    newest = read_manifest(last)
    monitor = newest.get("monitor")
    mode: Mode = "max" if newest.get("mode") == "max" else "min"
    ranked = []
    for path, listed in _of_one_run(directory, newest["run"]):
        try:
            manifest = listed or read_manifest(path)
        except CheckpointError as error:
            if listing.has_changed:
                raise
            warn_user(f"{error}; if it was the best, another one is taken")
            continue
        key = sort_key(manifest["metrics"].get(monitor), mode)
        if key < inf:
            ranked.append((key, manifest["update"], path, manifest))
    for *_, path, manifest in sorted(ranked, key=lambda item: item[:2]):
        try:
            return _checked(path, manifest)
        except CheckpointError as error:
            if listing.has_changed:
                raise
            warn_user(f"{error}; the next best is taken")
    warn_user(f"no checkpoint in {directory} was judged: the last one, {last.name}, is taken for the best")
    return last


def _checked(path: Path, manifest: dict[str, Any] | None = None) -> Path:
    """Read and decode all of a checkpoint; return its path. CheckpointError if it is damaged."""
    load_tree(path, manifest=manifest, fill=False)
    return path


def _weights_of(path: Path, model: nn.Module | None) -> tuple[Path, OrderedDict[str, Any]]:
    """Return the weights of a checkpoint with their path: a file, or the directory for weights in several files."""
    manifest = read_manifest(path)
    files = manifest["files"]
    if MODEL not in files and INDEX in files:
        return path, load_tree(path, manifest=manifest, only="model")["model"]
    if MODEL not in files:
        raise CheckpointError(f"{path} holds no {MODEL}")
    return path / MODEL, read_file(path / MODEL, partial(read_weights, model=model), expected=files[MODEL])


def _is_checkpoint(path: Path) -> bool:
    """Return whether a path is a single checkpoint, complete or damaged, and not a directory of checkpoints."""
    return is_update_name(path.name) or os.path.lexists(path / MANIFEST)


def _given_directory(resume: str | Path) -> Path:
    """Return the directory of `resume`: that of a checkpoint or of a run."""
    if not isinstance(resume, str | Path):
        raise SettingError(f"resume={resume!r}", want='"auto", a path or None', fix='resume="auto"')
    path = _existing(resume, written="resume={!r}")
    if not path.is_dir():
        raise _is_file(path, resume)
    return path


def _existing(path: str | Path, *, written: str = "{}") -> Path:
    """Return a path with links resolved. CheckpointError, with the paths next to it, if it does not exist.

    `written`: the format of the path in the error, such as an argument.
    """
    given = Path(path).expanduser()
    try:
        os.stat(given)
        return given.resolve()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        pass
    except OSError as error:
        raise CheckpointError(f"{written.format(str(given))} cannot be read: {error.strerror}") from error
    near = next(parent for parent in (given.parent, *given.parents) if parent.is_dir())
    saved = list_checkpoints(near)
    names = [found.name for found in saved] or sorted(entry.name for entry in near.iterdir())
    have = f"{near} has {', '.join(names[:10]) or 'nothing in it'}{' ...' if len(names) > 10 else ''}"
    fix = written.format(str(saved[0])) if saved else ""
    fix = " or ".join(filter(None, (fix, 'resume="auto"' if written != "{}" else "")))
    raise CheckpointError(f"{written.format(str(given))} does not exist", have=have, fix=fix)


def _is_file(path: Path, resume: str | Path) -> CheckpointError:
    """Return the error for a resume from a file: its kind, and the line that loads its weights."""
    fix = f"load_weights({str(path)!r}, model) before fit, without resume"
    try:
        read_file(path, read_header)
        have = "a safetensors file: the weights of a model, without the rest of a run"
    except CheckpointError as error:
        have = str(error)
        fix = "model.load_state_dict(...) of the weights in it before fit, without resume"
    if os.path.lexists(path.parent / MANIFEST):
        have, fix = f"a file of the checkpoint {path.parent}", f"resume={str(path.parent)!r}"
    what = f"resume={str(resume)!r} is a file, and a checkpoint is a directory"
    want = '"auto", or the directory of a checkpoint or of a run'
    return CheckpointError(what, have=have, want=want, fix=fix)
