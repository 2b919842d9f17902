"""The files of one checkpoint: their names, the manifest, and the state that they hold.

    update-0000000016/
        model.safetensors    the weights
        state.safetensors    the tensors of all other parts
        state.json           the plain data of all other parts
        shards.json, shard-00000.safetensors, ...    tensors that several ranks hold in pieces, where there are some
        manifest.json        format, run, update, numbers, versions; size and checksum of each file, and its own

The format has a version; a checkpoint of another version is refused by name, and nothing of it is read.
"""

from __future__ import annotations

import json
import os
import platform
import re
import stat
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainwright.checkpointing import tensorfile
from trainwright.checkpointing.files import (
    CHECKSUMS,
    Content,
    check_size,
    checksum_of,
    is_entry,
    open_file,
    read_file,
)
from trainwright.checkpointing.sharded_files import INDEX, read_shards, split_shards
from trainwright.checkpointing.tree import flatten, unflatten
from trainwright.checkpointing.weights import read_weights, weights_contents
from trainwright.core.device import Home
from trainwright.core.errors import CheckpointError
from trainwright.distributed.pieces import LazyTensor, Placeholder
from trainwright.modules.dtensors import is_sharded
from trainwright.protocols import Tree

FORMAT, FORMAT_VERSION = "trainwright-checkpoint", 1
MODEL, STATE, DATA, MANIFEST = "model.safetensors", "state.safetensors", "state.json", "manifest.json"
LARGEST_MANIFEST = 1 << 20
"""Bytes; a larger one is neither written nor read."""
LARGEST_DATA = 1 << 28
"""Bytes of the plain data; more are neither written nor read: to parse them takes twenty times their memory."""
_NAME = re.compile(r"update-(\d{10,})")
_FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
"""Names that files of a checkpoint may have, on any file system."""
_LONGEST_NAME = 1000
"""Characters of the id of a run, or of the name of a number."""
_LARGEST_COUNT = 1 << 62
"""A count of updates, epochs or bytes is below it."""
_FIELDS: dict[str, type] = {"run": str, "update": int, "epoch": int, "metrics": dict, "files": dict}
_OPTIONAL = {"monitor": (str, type(None)), "mode": (str, type(None)), "settings": (str,)}
"""Fields that may be missing; `settings` is a digest of the run's settings."""


# Names


def update_name(update: int) -> str:
    """Return the name of the checkpoint taken after `update` updates; names sort as the numbers do."""
    return f"update-{update:010d}"


def is_update_name(name: str) -> bool:
    """Return whether `update_name` returns such a name."""
    return _NAME.fullmatch(name) is not None


def update_of(name: str) -> int:
    """Return the update in a name that `update_name` returned."""
    found = _NAME.fullmatch(name)
    assert found, name
    return int(found[1])


def list_checkpoints(directory: Path) -> list[Path]:
    """Return the checkpoints of a directory by name alone, newest first; none where there is no such directory."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be listed: {error.strerror}") from error
    found = {int(match[1]): name for name in names if (match := _NAME.fullmatch(name))}
    return [directory / name for update, name in sorted(found.items(), reverse=True) if name == update_name(update)]


def check_file_name(name: str, label: str = "a checkpoint") -> str:
    """Return `name` where it can only be a file of the directory in which it is looked for; CheckpointError else."""
    if type(name) is not str or name == MANIFEST or not _FILE.fullmatch(name):
        raise CheckpointError(f"{label} names the file {name!r}, which is no plain name")
    return name


# State


def encode(tree: Mapping[str, Tree]) -> dict[str, Content]:
    """Return the files of a checkpoint of `{part: state}`; part "model" is a module's state_dict with its own file.

    A model whose tensors are in files of several ranks is named in the plain data instead. Nothing is written or
    copied, so this alone is a dry save. CheckpointError names what cannot be stored.
    """
    files: dict[str, Content] = {}
    parts = dict(tree)
    if "model" in tree and not any(isinstance(value, Placeholder) for value in tree["model"].values()):
        files[MODEL] = weights_contents(parts.pop("model"))
    jsonable, tensors = flatten(parts)
    text = json.dumps(jsonable, allow_nan=False, separators=(",", ":")).encode("ascii")
    if len(text) > LARGEST_DATA:
        largest = max(parts, key=lambda name: len(json.dumps(jsonable[name])))
        what = f"the plain data of a checkpoint would have {len(text)} bytes, most of them in part {largest!r}"
        fix = "store long lists of numbers as tensors or arrays"
        raise CheckpointError(what, want=f"{LARGEST_DATA} bytes at most", fix=fix, where=False)
    return files | {STATE: tensorfile.Contents(tensors, {}), DATA: text}


def holds_shards(tree: Mapping[str, Tree]) -> bool:
    """Return whether the ranks hold the model of `{part: state}` together, each a part of it."""
    return is_sharded(*(value for value in tree.get("model", {}).values() if isinstance(value, Tensor)))


def dry_save(tree: Mapping[str, Tree]) -> None:
    """Raise CheckpointError for a state that cannot be stored, naming what; for one that ranks share too."""
    if holds_shards(tree):
        tree = split_shards(tree, rank=0).tree
    encode(tree)


def load_tree(
    path: str | Path,
    *,
    manifest: Mapping[str, Any] | None = None,
    device: Home | None = None,
    share: tuple[int, int] | None = None,
    fill: bool = True,
) -> dict[str, Tree]:
    """Return the `{part: state}` of a checkpoint, each byte checked; its tensors are on the CPU.

    `manifest`: the checkpoint's, where it was read before. State that was on an accelerator is put on `device` where
    one is given, as `unflatten` does. CheckpointError names file and defect. Tensors in pieces are put together; with
    `share`, a rank and the number of ranks, they become `LazyTensor`s, and every rank checks its share of their
    files. Without `fill` everything is read and decoded, and the tensors have no values and take no memory.
    """
    path = Path(path)
    files = (read_manifest(path) if manifest is None else manifest)["files"]
    for name in (STATE, DATA):
        if name not in files:
            raise CheckpointError(f"{path / MANIFEST} is damaged: it does not list {name}")
    tree: dict[str, Tree] = {}
    if MODEL in files:
        tree["model"] = read_file(path / MODEL, partial(read_weights, fill=fill), expected=files[MODEL])
    return tree | load_parts(path, files, device=device, share=share, fill=fill)


def load_parts(
    path: Path,
    files: Mapping[str, Any],
    *,
    device: Home | None = None,
    share: tuple[int, int] | None = None,
    only: str = "",
    fill: bool = True,
) -> dict[str, Tree]:
    """Return the parts of a checkpoint that have no file of their own; or one `only`."""
    text = read_file(path / DATA, lambda file: file.read_all(limit=LARGEST_DATA), expected=files[DATA])
    use = tensorfile.read if fill else tensorfile.outline
    tensors = read_file(path / STATE, use, expected=files[STATE]).tensors
    try:
        jsonable = json.loads(text)
        jsonable = {only: jsonable[only]} if only else jsonable
        find = _finder(path, files, share=share if fill else (0, 1), prefix=f"{only}." if only else "")
        parts = unflatten(jsonable, tensors, device=device, find=find)
    except (LookupError, TypeError, ValueError, ArithmeticError, MemoryError, RecursionError) as error:
        raise CheckpointError(f"{path / DATA} is damaged: it is not JSON ({error})") from error
    except CheckpointError as error:
        where = "" if str(path) in str(error) else f"{path / DATA} is damaged: "
        raise CheckpointError(f"{where}{error}") from error
    if type(parts) is not dict:
        raise CheckpointError(f"{path / DATA} is damaged: it holds no parts")
    return parts


def _finder(
    path: Path, files: Mapping[str, Any], *, share: tuple[int, int] | None, prefix: str
) -> Callable[[Placeholder], Any] | None:
    """Return what finds the tensors in pieces; None where there are none."""
    if INDEX not in files:
        return None
    shards = read_shards(path, files)
    if share is not None:
        rank, size = share
        shards.check(shards.files[rank::size])
        return lambda one: LazyTensor(shards, shards.listed(one.name))
    complete = shards.assemble([name for name in shards.tensors if name.startswith(prefix)])
    return lambda one: complete[shards.listed(one.name)]


# Manifest


def manifest_text(fields: Mapping[str, Any], checksum: str) -> bytes:
    """Return the manifest as JSON, whose last entry is the checksum of all that stands before it.

    `fields` has `run`, `update`, `epoch`, `metrics` and `files`; format and versions are added.
    """
    versions = {"trainwright": _own_version(), "torch": torch.__version__, "python": platform.python_version()}
    head = {"format": FORMAT, "version": FORMAT_VERSION, **fields}
    jsonable, tensors = flatten(head | {"versions": {name: str(text) for name, text in versions.items()}})
    assert not tensors
    body = json.dumps(jsonable, indent=1, allow_nan=False).removesuffix("\n}").encode("ascii")
    text = body + seal(body, checksum)
    if len(text) > LARGEST_MANIFEST:
        what = f"the manifest of checkpoint {update_name(fields['update'])} has {len(text)} bytes"
        fix = "give fewer metrics, or shorter names"
        raise CheckpointError(what, want=f"{LARGEST_MANIFEST} bytes at most", fix=fix, where=False)
    return text


def seal(body: bytes, checksum: str) -> bytes:
    """Return the last entry of a manifest: the checksum of its body."""
    return f',\n "{checksum}": "{checksum_of(body, checksum)}"\n}}\n'.encode("ascii")


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest, itself checked, of a checkpoint whose files exist in their sizes; no other byte is read."""
    try:
        is_directory = stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {error.strerror}") from error
    if not is_directory:
        raise CheckpointError(f"checkpoint {path} is no directory (links are not followed)")
    label = str(path / MANIFEST)
    text = read_file(path / MANIFEST, lambda file: file.read_all(limit=LARGEST_MANIFEST))
    manifest = _parsed(text, label)
    if _NAME.fullmatch(path.name) and path.name != update_name(manifest["update"]):
        raise CheckpointError(f"{label} is damaged: it is that of {update_name(manifest['update'])}")
    for name, entry in manifest["files"].items():
        with open_file(path / check_file_name(name, label)) as file:
            check_size(file, entry)
    return manifest


def verify(path: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint of which every byte was checked, and nothing decoded."""
    manifest = read_manifest(path)
    for name, entry in manifest["files"].items():
        read_file(path / name, lambda _: None, expected=entry)
    return manifest


def is_of_run(path: Path, run: str) -> bool:
    """Return whether a checkpoint of a run exists there now: someone may have removed or replaced it."""
    try:
        return bool(read_manifest(path)["run"] == run)
    except CheckpointError:
        return False


def _parsed(text: bytes, label: str) -> dict[str, Any]:
    body, _, last = text.rpartition(b",\n ")
    if not any(last.startswith(f'"{kind}": '.encode()) and text == body + seal(body, kind) for kind in CHECKSUMS):
        raise CheckpointError(f"{label} is damaged: it does not end in its own checksum")
    try:
        manifest = unflatten(json.loads(text), {})
    except (ValueError, RecursionError, MemoryError) as error:
        raise CheckpointError(f"{label} is damaged: it is not JSON ({error})") from error
    except CheckpointError as error:
        raise CheckpointError(f"{label} is damaged: {error}") from error
    if type(manifest) is not dict or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{label} is not the manifest of a {FORMAT}")
    if manifest.get("version") != FORMAT_VERSION:
        what = f"{label} has format version {manifest.get('version')!r}, and this trainwright reads {FORMAT_VERSION}"
        wrote = f"written by {manifest.get('versions')}"
        raise CheckpointError(what, have=wrote, fix="pip install --upgrade trainwright", where=False)
    if wrong := _wrong_fields(manifest):
        raise CheckpointError(f"{label} is damaged: {', '.join(wrong)} is missing or of another type")
    return manifest


def _wrong_fields(manifest: dict[str, Any]) -> list[str]:
    wrong = [name for name, kind in _FIELDS.items() if type(manifest.get(name)) is not kind]
    wrong += [name for name, kinds in _OPTIONAL.items() if name in manifest and type(manifest[name]) not in kinds]
    if wrong:
        return wrong
    wrong += [name for name in ("update", "epoch") if not 0 <= manifest[name] < _LARGEST_COUNT]
    wrong += [name for name in ("run", "monitor") if not _is_printable(manifest.get(name) or "-")]
    wrong += [f"metrics[{name!r}]" for name, value in manifest["metrics"].items() if not _is_metric(name, value)]
    wrong += [repr(name) for name, entry in manifest["files"].items() if not is_entry(entry)]
    return wrong


def _is_metric(name: Any, value: Any) -> bool:
    if type(name) is not str or type(value) not in (int, float):
        return False
    return type(value) is float or abs(value) < _LARGEST_COUNT


def _is_printable(text: str) -> bool:
    """Return whether a text can be printed as it is, in one line."""
    return text.isprintable() and len(text) <= _LONGEST_NAME


def _own_version() -> str:
    try:
        return version("trainwright")
    except PackageNotFoundError:
        return "not installed"
