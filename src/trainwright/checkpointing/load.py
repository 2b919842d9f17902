"""Finds and loads a checkpoint: the one that `resume=` means, the newest complete one, or the weights of the best.

A checkpoint counts only where it is complete: every checksum in it is right, and this version can decode all of it.
One that does not count is named in a warning, and the next older one is tried. There is no file that points to the
newest or the best: both follow from the manifests in the directory.
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

from trainwright.checkpointing import tensorfile
from trainwright.checkpointing.coordinator import load_on_all_ranks
from trainwright.checkpointing.files import read_file
from trainwright.checkpointing.format import (
    MANIFEST,
    MODEL,
    is_update_name,
    list_checkpoints,
    load_parts,
    load_tree,
    read_manifest,
)
from trainwright.checkpointing.sharded_files import INDEX
from trainwright.checkpointing.weights import load_into, read_weights
from trainwright.core.checks import local_path
from trainwright.core.device import Home
from trainwright.core.errors import CheckpointError, SettingError, message, warn_user
from trainwright.core.monitor import Mode, rank
from trainwright.core.suggestions import suggests
from trainwright.protocols import Tree

if TYPE_CHECKING:
    from trainwright.distributed.world import World

T = TypeVar("T")
_RETRIES = 100
"""How often a directory is read anew where a run saves and removes checkpoints meanwhile."""


class DamagedError(CheckpointError):
    """A checkpoint of which every byte could be read, and that cannot be loaded: changed, or saved by other code."""

    def __init__(self, text: str, origin: str, *, early: bool = False) -> None:
        super().__init__(text)
        self.origin = origin
        """The path of the checkpoint."""
        self.early = early
        """Whether it was found before any hook of the user ran."""


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A checkpoint of which every byte was read and checked."""

    path: Path
    tree: dict[str, Tree]
    manifest: dict[str, Any]
    passed_over: tuple[Path, ...] = ()
    """Newer ones that cannot be loaded; of several ranks only rank 0 knows them."""


def load_checkpoint(
    resume: str | Path | None,
    directory: str | Path | None,
    *,
    run: str | None = None,
    device: Home | None = None,
    world: World | None = None,
    lazy_shards: bool = False,
    refused: Mapping[Path, str] | None = None,
) -> Loaded | None:
    """Load the checkpoint that `fit(resume=...)` means: "auto" looks in `directory`, a path is one, or a run's.

    None where there is nothing to resume. CheckpointError where a path is missing, or nothing there is complete. One
    that cannot be read is named in a warning and passed over for the next older one, unless it was asked for. Each
    byte is read once.

    State that was on an accelerator is put on `device` where one is given, as `unflatten` does. All ranks of a `world`
    call this alike: rank 0 searches, all read, and they end with the same checkpoint or the same error. With
    `lazy_shards` tensors in pieces stay in their files, for `distributed.resharding.place`. `refused`: checkpoints
    that could be read and not loaded, each with the reason.
    """
    share = (0, 1) if world is None else (world.rank, world.size)

    def read(path: Path, manifest: dict[str, Any] | None = None) -> Loaded:
        if refused and path in refused:
            raise CheckpointError(refused[path])
        manifest = read_manifest(path) if manifest is None else manifest
        tree = load_tree(path, manifest=manifest, device=device, share=share if lazy_shards else None)
        return Loaded(path, tree, manifest)

    def find(read: Callable[[Path, dict[str, Any] | None], Loaded]) -> Loaded | None:
        failed: dict[Path, None] = {}

        def noting(path: Path, manifest: dict[str, Any] | None) -> Loaded:
            try:
                return read(path, manifest)
            except CheckpointError:
                failed[path] = None
                raise

        loaded = _find(resume, directory, run=run, read=noting)
        return None if loaded is None else replace(loaded, passed_over=tuple(failed))

    if world is None or world.size == 1:
        return find(read)
    return load_on_all_ranks(world, lambda on_all: find(lambda path, _: on_all(path)), read)


@suggests
def latest_checkpoint(directory: str | Path, *, run: str | None = None) -> Path | None:
    """Return the newest complete checkpoint of a directory, or None; a newer unreadable one is named in a warning.

    A directory with checkpoints of several runs is a CheckpointError, unless `run` is the id of one of them.
    """
    return _newest(local_path(directory, "latest_checkpoint({})", reads=True), run, read=_checked)[0]


@suggests
def load_weights(
    path: str | Path, model: nn.Module | None = None, which: Literal["best", "last"] = "best"
) -> OrderedDict[str, Any]:
    """Return the weights of a safetensors file, of a checkpoint, or of the best or last checkpoint of a directory.

    They are on the CPU, and loaded into `model` where one is given: CheckpointError where names or shapes differ.
    """
    if which not in ("best", "last"):
        raise SettingError(f"load_weights(which={which!r})", want='"best" or "last"')
    if model is not None and not isinstance(model, nn.Module):
        given = repr(model) if isinstance(model, str) else f"a {type(model).__name__}"
        fix = f"load_weights(path, which={model!r})" if given in ("'best'", "'last'") else "load_weights(path, model)"
        what = f"load_weights(path, model): the model is {given}"
        raise TypeError(message(what, want="a torch.nn.Module, or none", fix=fix))
    found = _existing(local_path(path, "load_weights({}, ...)", reads=True))
    if not found.is_dir():
        weights = read_file(found, partial(read_weights, model=model))
    elif _is_checkpoint(found):
        found, weights = _weights_of(found, model)
    else:
        choose = _best if which == "best" else _last
        found, weights = _retried(found, lambda: _weights_of(choose(found), model))
    if model is not None:
        load_into(model, weights, source=str(found))
    return weights


def without_slot(resume: str | Path) -> Exception:
    """Build the error for a resume by a Trainer without a checkpoint slot, with the slot to write.

    CheckpointError where `resume` is the path of no checkpoint: that is the mistake to correct first.
    """
    directory, instead = "runs/1", ""
    if resume != "auto":
        found = _find(resume, None, run=None, read=lambda path, _: path)
        assert found is not None
        directory = str(found.parent)
        instead = f"; or, for its weights alone, load_weights({str(found)!r}, model) before fit, without resume"
    written = '"auto"' if resume == "auto" else repr(str(resume))
    what = f"resume={written} without a checkpoint slot"
    want = "a slot, which holds the best of the run and writes its next checkpoints"
    return SettingError(what, want=want, fix=f"Trainer(..., checkpoint=Checkpoint({directory!r})){instead}")


# Which checkpoint is meant


def _find(
    resume: str | Path | None,
    directory: str | Path | None,
    *,
    run: str | None,
    read: Callable[[Path, dict[str, Any] | None], T],
) -> T | None:
    """Return what `read` makes of the checkpoint that `resume` means."""
    if resume is None:
        return None
    if not isinstance(resume, str | Path):
        raise SettingError(f"resume={resume!r}", want='"auto", a path or None', fix='resume="auto"')
    if resume == "auto":
        if directory is None:
            raise without_slot(resume)
        path = Path(directory).expanduser()
    else:
        path = _existing(resume, written="resume={!r}")
        if not path.is_dir():
            raise _is_file(path, resume)
        if _is_checkpoint(path):
            return read(path, None)
    found, defects = _newest(path, run, read=read)
    if found is None and (resume != "auto" or defects):
        have = "\n        ".join(defects) or "no checkpoint at all"
        anew = f'move the damaged ones away, or Checkpoint("{directory}-2", ...), to begin anew'
        fix = anew if resume == "auto" else "give another path"
        raise CheckpointError(f"{path} holds no complete checkpoint", have=have, fix=fix)
    return found


def _newest(
    directory: Path, run: str | None, *, read: Callable[[Path, dict[str, Any] | None], T]
) -> tuple[T | None, list[str]]:
    """Return what `read` makes of the newest checkpoint that it can read, and the defects of those that it cannot."""

    def look() -> tuple[T | None, list[str]]:
        defects: list[str] = []
        for one in _of_one_run(directory, run):
            try:
                return read(one.path, one.manifest), defects
            except CheckpointError as error:
                if one.has_changed:
                    raise  # it was removed or replaced meanwhile, so that there are others now
                defects.append(str(error).partition("\n")[0])
                warn_user(f"{error}; it is passed over for an older checkpoint")
        return None, defects

    return _retried(directory, look)


def _retried(directory: Path, look: Callable[[], T]) -> T:
    """Return what `look` finds in a directory; it looks again where a run has removed meanwhile what it read."""
    for _ in range(_RETRIES):
        before = {path: _inode(path) for path in list_checkpoints(directory)}
        try:
            return look()
        except CheckpointError:
            if all(inode is not None and _inode(path) == inode for path, inode in before.items()):
                raise
    return look()


def _inode(path: Path) -> int | None:
    """Return which directory has a name; None where there is none."""
    try:
        return os.lstat(path).st_ino
    except OSError:
        return None


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A checkpoint of a directory as it was when its manifest was read."""

    path: Path
    inode: int | None
    manifest: dict[str, Any] | None
    """None where it cannot be read."""

    @property
    def has_changed(self) -> bool:
        """Whether it was removed or replaced since."""
        return self.inode is None or _inode(self.path) != self.inode


def _of_one_run(directory: Path, run: str | None) -> list[_Candidate]:
    """Return the checkpoints of one run, newest first; a damaged one may be any run's."""
    found: list[_Candidate] = []
    for path in list_checkpoints(directory):
        inode = _inode(path)
        try:
            found.append(_Candidate(path, inode, read_manifest(path)))
        except CheckpointError:
            found.append(_Candidate(path, inode, None))
    runs = sorted({one.manifest["run"] for one in found if one.manifest is not None})
    if run not in runs:
        if len(runs) > 1:
            fix = "give the path of one checkpoint, or keep each run in a directory of its own"
            raise CheckpointError(f"{directory} holds several runs", have=", ".join(runs), fix=fix)
        run = runs[0] if runs else None
    return [one for one in found if one.manifest is None or one.manifest["run"] == run]


def _last(directory: Path) -> Path:
    found = latest_checkpoint(directory)
    if found is None:
        raise CheckpointError(f"{directory} holds no complete checkpoint")
    return found


def _best(directory: Path) -> Path:
    """Return the best complete checkpoint of a run, by the number that its newest one names."""
    last = _last(directory)
    newest = read_manifest(last)
    monitor = newest.get("monitor")
    mode: Mode = "max" if newest.get("mode") == "max" else "min"
    ranked: list[tuple[float, int, _Candidate]] = []
    for one in _of_one_run(directory, newest["run"]):
        try:
            manifest = one.manifest or read_manifest(one.path)
        except CheckpointError as error:
            if one.has_changed:
                raise
            warn_user(f"{error}; if it was the best, another one is taken")
            continue
        key = rank(manifest["metrics"].get(monitor), mode)
        if key < inf:
            ranked.append((key, manifest["update"], one))
    for _, _, one in sorted(ranked, key=lambda item: item[:2]):
        try:
            return _checked(one.path, one.manifest)
        except CheckpointError as error:
            if one.has_changed:
                raise
            warn_user(f"{error}; the next best is taken")
    warn_user(f"no checkpoint in {directory} was judged: the last one, {last.name}, is taken for the best")
    return last


def _checked(path: Path, manifest: dict[str, Any] | None = None) -> Path:
    """Return the path of a checkpoint after reading and decoding all of it; CheckpointError where it is damaged."""
    load_tree(path, manifest=manifest, fill=False)
    return path


def _weights_of(path: Path, model: nn.Module | None) -> tuple[Path, OrderedDict[str, Any]]:
    """Return the weights of a checkpoint, and the file that they are in; its directory where they are in several."""
    files = read_manifest(path)["files"]
    if MODEL not in files and INDEX in files:
        return path, load_parts(path, files, only="model")["model"]
    if MODEL not in files:
        raise CheckpointError(f"{path} holds no {MODEL}")
    return path / MODEL, read_file(path / MODEL, partial(read_weights, model=model), expected=files[MODEL])


def _is_checkpoint(path: Path) -> bool:
    """Return whether a path is that of one checkpoint, damaged ones included, and not of a directory of some."""
    return is_update_name(path.name) or os.path.lexists(path / MANIFEST)


def _existing(path: str | Path, *, written: str = "{}") -> Path:
    """Return a path of the user's, links resolved; CheckpointError lists the paths beside it.

    `written`: the argument in which the user wrote it.
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
    """Build the error for a resume from a file: what it is, and how to begin with the weights that it may hold."""
    fix = f"load_weights({str(path)!r}, model) before fit, without resume"
    try:
        read_file(path, tensorfile.check_header)
        have = "a safetensors file: the weights of a model, without the rest of a run"
    except CheckpointError as error:
        have = str(error)
        fix = "model.load_state_dict(...) of the weights in it before fit, without resume"
    if os.path.lexists(path.parent / MANIFEST):
        have, fix = f"a file of the checkpoint {path.parent}", f"resume={str(path.parent)!r}"
    what = f"resume={str(resume)!r} is a file, and a checkpoint is a directory"
    want = '"auto", or the directory of a checkpoint or of a run'
    return CheckpointError(what, have=have, want=want, fix=fix)
