"""Finds and loads what was saved: the newest whole checkpoint, the best one, a tree of state, the weights alone."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from warnings import warn

from torch import Tensor, nn

from trainwright.checkpointing import commits, tensorfile
from trainwright.checkpointing.files import Content, read_file, replace_file
from trainwright.checkpointing.pieces import INDEX, Stored, read_pieces
from trainwright.checkpointing.tree import Elsewhere, flatten, unflatten
from trainwright.checkpointing.weights import load_into, read_weights, weights_contents
from trainwright.core.checks import local_path
from trainwright.core.device import Home
from trainwright.core.errors import CheckpointError, SettingError, message
from trainwright.core.suggestions import suggests
from trainwright.modules.dtensors import is_sharded
from trainwright.protocols import Tree

if TYPE_CHECKING:
    from trainwright.distributed.world import World

T = TypeVar("T")
MODEL, STATE, DATA = "model.safetensors", "state.safetensors", "state.json"
"""The files of a checkpoint: the weights, the tensors of all other parts, and their plain data."""
LARGEST_DATA = 1 << 28
"""Bytes of the plain data; more are neither written nor read: to parse them takes twenty times their memory."""
_LOOKS = 100
"""How often a directory is looked at anew where a run saves and removes while it is read."""


def encode(tree: Mapping[str, Tree]) -> dict[str, Content]:
    """The files of a checkpoint of `{part: state}`; part "model" is a module's state_dict and has its own file.

    A model whose tensors are in files of several processes is named in the others' plain data instead. Nothing is
    written or copied, so this alone is a dry save. CheckpointError names what cannot be stored.
    """
    files: dict[str, Content] = {}
    parts = dict(tree)
    if "model" in tree and not any(isinstance(value, Elsewhere) for value in tree["model"].values()):
        files[MODEL] = weights_contents(parts.pop("model"))
    jsonable, tensors = flatten(parts)
    text = json.dumps(jsonable, allow_nan=False, separators=(",", ":")).encode("ascii")
    if len(text) > LARGEST_DATA:
        largest = max(parts, key=lambda name: len(json.dumps(jsonable[name])))
        what = f"the plain data of a checkpoint would have {len(text)} bytes, most of them in part {largest!r}"
        fix = "store long lists of numbers as tensors or arrays"
        raise CheckpointError(message(what, want=f"{LARGEST_DATA} bytes at most", fix=fix, where=False))
    return files | {STATE: tensorfile.Contents(tensors, {}), DATA: text}


def dry_save(tree: Mapping[str, Tree]) -> None:
    """Raise CheckpointError for a state that cannot be stored, naming what; one that is sharded over processes too."""
    if is_sharded(*(value for value in tree.get("model", {}).values() if isinstance(value, Tensor))):
        from trainwright.distributed.resharding import split

        tree = split(tree, file="").tree
    encode(tree)


def load_tree(
    path: str | Path, *, device: Home | None = None, later: tuple[int, int] | None = None, fill: bool = True
) -> tuple[dict[str, Tree], dict[str, Any]]:
    """`{part: state}` and the manifest of a checkpoint, each byte checked; its tensors are on the CPU.

    State that lay on an accelerator is put on `device` where one is given, as `unflatten` does. CheckpointError names
    file and defect. Tensors that several processes have written are put together; with `later`, a process and their
    number, they are `Stored` ones, and every process checks its share of their files. Without `fill` everything is
    read and decoded, and the tensors have no values: no memory is used for them.
    """
    path = Path(path)
    manifest = commits.read_manifest(path)
    files = manifest["files"]
    for name in (STATE, DATA):
        if name not in files:
            raise CheckpointError(f"{path / commits.MANIFEST} is damaged: it does not list {name}")
    tree: dict[str, Tree] = {}
    if MODEL in files:
        tree["model"] = read_file(path / MODEL, partial(read_weights, fill=fill), expected=files[MODEL])
    return tree | _load_parts(path, files, device=device, later=later, fill=fill), manifest


def readable(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint of which each byte was checked and everything decoded; CheckpointError else."""
    return load_tree(path, fill=False)[1]


def _load_parts(
    path: Path,
    files: Mapping[str, Any],
    *,
    device: Home | None,
    later: tuple[int, int] | None = None,
    only: str = "",
    fill: bool = True,
) -> dict[str, Tree]:
    """The parts of a checkpoint that have no file of their own; or one `only`."""
    text = read_file(path / DATA, lambda file: file.read_all(limit=LARGEST_DATA), expected=files[DATA])
    use = tensorfile.read if fill else tensorfile.outline
    tensors = read_file(path / STATE, use, expected=files[STATE]).tensors
    try:
        jsonable = json.loads(text)
        jsonable = {only: jsonable[only]} if only else jsonable
        stored = _stored(path, files, later=later if fill else (0, 1), prefix=f"{only}." if only else "")
        parts = unflatten(jsonable, tensors, device=device, elsewhere=stored)
    except (LookupError, TypeError, ValueError, ArithmeticError, MemoryError, RecursionError) as error:
        raise CheckpointError(f"{path / DATA} is damaged: it is not JSON ({error})") from error
    except CheckpointError as error:
        where = "" if str(path) in str(error) else f"{path / DATA} is damaged: "
        raise CheckpointError(f"{where}{error}") from error
    if type(parts) is not dict:
        raise CheckpointError(f"{path / DATA} is damaged: it holds no parts")
    return parts


def _stored(
    path: Path, files: Mapping[str, Any], *, later: tuple[int, int] | None, prefix: str
) -> Callable[[Elsewhere], Any] | None:
    """What gives the tensors that lie in files of several processes; None where there are no such files."""
    if INDEX not in files:
        return None
    pieces = read_pieces(path, files)
    if later is not None:
        pieces.check(pieces.shard_files[later[0] :: later[1]])
        return lambda one: Stored(pieces, pieces.named(one.name))
    whole = pieces.whole([name for name in pieces.wholes if name.startswith(prefix)])
    return lambda one: whole[pieces.named(one.name)]


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A checkpoint of which every byte has been read and checked."""

    path: Path
    tree: dict[str, Tree]
    manifest: dict[str, Any]
    passed_over: tuple[Path, ...] = ()
    """Newer ones that cannot be loaded; of several processes the first knows them."""


def load_checkpoint(
    resume: str | Path | None,
    directory: str | Path | None,
    *,
    run: str | None = None,
    device: Home | None = None,
    world: World | None = None,
    later: bool = False,
    refused: Mapping[Path, str] | None = None,
) -> Loaded | None:
    """The checkpoint that `find_checkpoint` finds, found by reading it: each byte of it is read once.

    One that cannot be read is named in a warning and passed over for the next older one, unless it was asked for.
    State that lay on an accelerator is put on `device` where one is given, as `unflatten` does. The processes of a
    `world` call it alike: the first one looks, all of them read, and they end with the same one or the same error.
    `later`: tensors that several processes have written are left in their files, for `parallel.sharded.place`.
    `refused`: checkpoints that could be read and not loaded, each with the reason.
    """
    share = (0, 1) if world is None else (world.rank, world.size)

    def read(path: Path) -> Loaded:
        if refused and path in refused:
            raise CheckpointError(refused[path])
        return Loaded(path, *load_tree(path, device=device, later=share if later else None))

    if world is None or world.size == 1:
        return _passing_over(resume, directory, run=run, read=read)
    from trainwright.checkpointing.distributed_load import load_with_all

    return load_with_all(world, lambda reads: _passing_over(resume, directory, run=run, read=reads), read)


@suggests
def latest_checkpoint(directory: str | Path, *, run: str | None = None) -> Path | None:
    """The newest complete checkpoint of a directory, or None; a newer one that cannot be read is named in a warning.

    A directory with checkpoints of several runs is a CheckpointError, unless `run` is the id of one of them.
    """
    return _newest(local_path(directory, "latest_checkpoint({})", reads=True), run, read=_readable)[0]


def find_checkpoint(resume: str | Path | None, directory: str | Path | None, *, run: str | None = None) -> Path | None:
    """The whole checkpoint that `fit(resume=...)` means: "auto" looks in `directory`, a path is one, or a run's.

    None where there is nothing to resume. CheckpointError where a path is missing, or where nothing there is whole.
    """
    return _meant(resume, directory, run=run, read=_readable)


@suggests
def load_weights(
    path: str | Path, model: nn.Module | None = None, which: Literal["best", "last"] = "best"
) -> OrderedDict[str, Any]:
    """The weights of a safetensors file, of a checkpoint, or of the best or last checkpoint of a run's directory.

    They are on the CPU, and loaded into `model` where one is given: CheckpointError where names or shapes differ.
    """
    if which not in ("best", "last"):
        raise SettingError(message(f"load_weights(which={which!r})", want='"best" or "last"'))
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
        found, weights = _steadily(found, lambda: _weights_of(choose(found), model))
    if model is not None:
        load_into(model, weights, source=str(found))
    return weights


def save_weights(path: str | Path, state_dict: Mapping[str, Any]) -> None:
    """Write a `state_dict` to one safetensors file that exists whole or not at all; tied tensors are stored once.

    The file is readable by its owner alone. Directories on the way are made.
    """
    if not isinstance(state_dict, Mapping):
        what = f"save_weights({type(path).__name__}, {type(state_dict).__name__})"
        fix = 'save_weights("model.safetensors", model.state_dict())'
        raise TypeError(message(what, want="a path and a state_dict", fix=fix))
    path = local_path(path, "save_weights({}, ...)", file=True)
    contents = weights_contents(state_dict)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(message(f"{path} could not be written", have=str(error))) from error
    replace_file(path, contents)


def rank(manifest: Mapping[str, Any], monitor: str | None, mode: str | None) -> float:
    """What a checkpoint's number is sorted by, less being better; NaN where it has none."""
    value = float(manifest["metrics"].get(monitor, "nan"))
    return -value if mode == "max" else value


def _passing_over(
    resume: str | Path | None, directory: str | Path | None, *, run: str | None, read: Callable[[Path], Loaded]
) -> Loaded | None:
    """What `_meant` loads, with the newer checkpoints that cannot be loaded."""
    failed: dict[Path, None] = {}

    def noting(path: Path) -> Loaded:
        try:
            return read(path)
        except CheckpointError:
            failed[path] = None
            raise

    loaded = _meant(resume, directory, run=run, read=noting)
    return None if loaded is None else replace(loaded, passed_over=tuple(failed))


def _meant(
    resume: str | Path | None, directory: str | Path | None, *, run: str | None, read: Callable[[Path], T]
) -> T | None:
    """What `read` makes of the checkpoint that `resume` means."""
    if resume is None:
        return None
    if not isinstance(resume, str | Path):
        raise SettingError(message(f"resume={resume!r}", want='"auto", a path or None', fix='resume="auto"'))
    if resume == "auto":
        if directory is None:
            raise without_slot(resume)
        path = Path(directory).expanduser()
    else:
        path = _existing(resume, written="resume={!r}")
        if not path.is_dir():
            raise _is_file(path, resume)
        if _is_checkpoint(path):
            return read(path)
    found, defects = _newest(path, run, read=read)
    if found is None and (resume != "auto" or defects):
        have = "\n        ".join(defects) or "no checkpoint at all"
        anew = f'move the damaged ones away, or Checkpoint("{directory}-2", ...), to begin anew'
        fix = anew if resume == "auto" else "give another path"
        raise CheckpointError(message(f"{path} holds no whole checkpoint", have=have, fix=fix))
    return found


def without_slot(resume: str | Path) -> Exception:
    """Build the error for a resume by a Trainer without a checkpoint slot, with the slot to write.

    CheckpointError where `resume` is the path of no checkpoint: that is the mistake to mend first.
    """
    directory, instead = "runs/1", ""
    if resume != "auto":
        found = _meant(resume, None, run=None, read=lambda path: path)
        assert found is not None
        directory = str(found.parent)
        instead = f"; or, for its weights alone, load_weights({str(found)!r}, model) before fit, without resume"
    written = '"auto"' if resume == "auto" else repr(str(resume))
    what = f"resume={written} without a checkpoint slot"
    want = "a slot, which holds the best of the run and writes its next checkpoints"
    return SettingError(message(what, want=want, fix=f"Trainer(..., checkpoint=Checkpoint({directory!r})){instead}"))


def _is_file(path: Path, resume: str | Path) -> CheckpointError:
    """Build the error for a resume from a file: what it is, and how to begin with the weights that it may hold."""
    fix = f"load_weights({str(path)!r}, model) before fit, without resume"
    try:
        read_file(path, tensorfile.check_header)
        have = "a safetensors file: the weights of a model, without the rest of a run"
    except CheckpointError as error:
        have = str(error)
        fix = "model.load_state_dict(...) of the weights in it before fit, without resume"
    if os.path.lexists(path.parent / commits.MANIFEST):
        have, fix = f"a file of the checkpoint {path.parent}", f"resume={str(path.parent)!r}"
    what = f"resume={str(resume)!r} is a file, and a checkpoint is a directory"
    want = '"auto", or the directory of a checkpoint or of a run'
    return CheckpointError(message(what, have=have, want=want, fix=fix))


def _newest(directory: Path, run: str | None, *, read: Callable[[Path], T]) -> tuple[T | None, list[str]]:
    """What `read` makes of the newest checkpoint that it can read, and what is wrong with those that it cannot."""

    def look() -> tuple[T | None, list[str]]:
        defects: list[str] = []
        for path in _of_one_run(directory, run):
            before = _identity(path)
            try:
                return read(path), defects
            except CheckpointError as error:
                if before is None or _identity(path) != before:
                    raise  # it was removed or replaced meanwhile, so that there are others now
                defects.append(str(error).partition("\n")[0])
                warn(f"{error}; it is passed over for an older checkpoint", stacklevel=6)
        return None, defects

    return _steadily(directory, look)


def _steadily(directory: Path, look: Callable[[], T]) -> T:
    """What `look` finds in a directory; it looks again where a run has removed meanwhile what it was to read."""
    for _ in range(_LOOKS):
        there = {path: _identity(path) for path in commits.scan(directory)}
        try:
            return look()
        except CheckpointError:
            if all(before is not None and _identity(path) == before for path, before in there.items()):
                raise
    return look()


def _identity(path: Path) -> int | None:
    """Which directory it is that bears a name; None where there is none."""
    try:
        return os.lstat(path).st_ino
    except OSError:
        return None


def _weights_of(path: Path, model: nn.Module | None) -> tuple[Path, OrderedDict[str, Any]]:
    """The file of the weights of a checkpoint, or where it has several all of it, and what it holds."""
    files = commits.read_manifest(path)["files"]
    if MODEL not in files and INDEX in files:
        return path, _load_parts(path, files, device=None, only="model")["model"]
    if MODEL not in files:
        raise CheckpointError(f"{path} holds no {MODEL}")
    return path / MODEL, read_file(path / MODEL, partial(read_weights, model=model), expected=files[MODEL])


def _readable(path: Path) -> Path:
    readable(path)
    return path


def _is_checkpoint(path: Path) -> bool:
    """Whether a path is that of one checkpoint, damaged ones included, and not of a directory that holds some."""
    return commits.is_name(path.name) or os.path.lexists(path / commits.MANIFEST)


def _existing(path: str | Path, *, written: str = "{}") -> Path:
    """A path that a user gave, links followed; CheckpointError lists what is there instead. `written`: how it reads."""
    given = Path(path).expanduser()
    try:
        os.stat(given)
        return given.resolve()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        pass
    except OSError as error:
        raise CheckpointError(f"{written.format(str(given))} cannot be read: {error.strerror}") from error
    near = next(parent for parent in (given.parent, *given.parents) if parent.is_dir())
    saved = commits.scan(near)
    names = [found.name for found in saved] or sorted(entry.name for entry in near.iterdir())
    have = f"{near} has {', '.join(names[:10]) or 'nothing in it'}{' ...' if len(names) > 10 else ''}"
    fix = written.format(str(saved[0])) if saved else ""
    fix = " or ".join(filter(None, (fix, 'resume="auto"' if written != "{}" else "")))
    raise CheckpointError(message(f"{written.format(str(given))} does not exist", have=have, fix=fix))


def _of_one_run(directory: Path, run: str | None) -> Iterator[Path]:
    """The checkpoints of a directory, newest first, without those of other runs; damaged ones may be anybody's."""
    runs: dict[Path, str | None] = {}
    for path in commits.scan(directory):
        try:
            runs[path] = commits.read_manifest(path)["run"]
        except CheckpointError:
            runs[path] = None
    ids = sorted({found for found in runs.values() if found is not None})
    if run not in ids:
        if len(ids) > 1:
            fix = "give the path of one checkpoint, or keep each run in a directory of its own"
            raise CheckpointError(message(f"{directory} holds several runs", have=", ".join(ids), fix=fix))
        run = ids[0] if ids else None
    yield from (path for path, found in runs.items() if found in (run, None))


def _last(directory: Path) -> Path:
    found = latest_checkpoint(directory)
    if found is None:
        raise CheckpointError(f"{directory} holds no whole checkpoint")
    return found


def _best(directory: Path) -> Path:
    """The best whole checkpoint of a run, by the number that its newest one was judged on."""
    last = _last(directory)
    newest = commits.read_manifest(last)
    monitor, mode = newest.get("monitor"), newest.get("mode")
    manifests = {}
    for path in _of_one_run(directory, newest["run"]):
        before = _identity(path)
        try:
            manifests[path] = commits.read_manifest(path)
        except CheckpointError as error:
            if before is None or _identity(path) != before:
                raise
            warn(f"{error}; if it was the best, another one is taken", stacklevel=3)
    judged = {path: rank(manifest, monitor, mode) for path, manifest in manifests.items()}
    ranked = sorted((value, manifests[path]["update"], path) for path, value in judged.items() if value < inf)
    for _, _, path in ranked:
        before = _identity(path)
        try:
            readable(path)
        except CheckpointError as error:
            if before is None or _identity(path) != before:
                raise
            warn(f"{error}; the next best is taken", stacklevel=3)
            continue
        return path
    warn(f"no checkpoint in {directory} was judged: the last one, {last.name}, is taken for the best", stacklevel=3)
    return last
