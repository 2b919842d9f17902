"""The format of a checkpoint: its files, their names, the manifest, and the encoding of the state.

    update-0000000016/
        model.safetensors    the weights
        state.safetensors    the tensors of all other parts
        state.json           the plain data of all other parts
        shards.json, shard-00000.safetensors, ...    sharded tensors, if there are any
        manifest.json        format, run, update, numbers, versions; size and checksum of each file, and its own

A checkpoint of another version of the format is refused, with both versions named, before its state is read. Version 2
changed the parts `progress`, `schedule` and `totals`; versions 3 and 4 changed the part `data`.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainwright.checkpointing import tensorfile
from trainwright.checkpointing.files import CHECKSUMS, Content, is_entry, open_file, read_bytes, read_file
from trainwright.checkpointing.sharded_files import INDEX, read_shards, split_shards
from trainwright.checkpointing.tree import flatten, loads, plain_data
from trainwright.checkpointing.weights import read_weights, weights_contents
from trainwright.core.checks import FormError, check_form, is_count, is_dict, is_none_or, is_numbers, is_text
from trainwright.core.device import Home
from trainwright.core.errors import CheckpointError
from trainwright.distributed.pieces import LazyTensor, Placeholder
from trainwright.modules.dtensors import is_sharded
from trainwright.protocols import Tree

FORMAT, FORMAT_VERSION = "trainwright-checkpoint", 4
MODEL, STATE_TENSORS, STATE_JSON, MANIFEST = "model.safetensors", "state.safetensors", "state.json", "manifest.json"
LARGEST_MANIFEST = 1 << 20
"""Maximum bytes of a manifest, for writing and reading."""
LARGEST_JSON = 1 << 28
"""Maximum bytes of the plain data, for writing and reading. Parsing takes twenty times their memory."""
_NAME = re.compile(r"update-(\d{10}|[1-9]\d{10,})")
_FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
"""Valid names of files of a checkpoint, on any file system."""
_LONGEST_NAME = 1000
"""Maximum characters of the id of a run, or of the name of a number."""


def _own_version() -> str:
    try:
        return version("trainwright")
    except PackageNotFoundError:
        return "not installed"


_VERSIONS = {"trainwright": _own_version(), "torch": str(torch.__version__), "python": platform.python_version()}
"""The versions of the software that writes a checkpoint, for its manifest."""


# Names


def update_name(update: int) -> str:
    """Return the name of the checkpoint after `update` updates. Names sort like numbers."""
    return f"update-{update:010d}"


def is_update_name(name: str) -> bool:
    """Return whether a name has the form of `update_name`."""
    return _NAME.fullmatch(name) is not None


def update_of(name: str) -> int:
    """Return the update of a name from `update_name`."""
    return int(name.removeprefix("update-"))


def list_checkpoints(directory: Path) -> list[Path]:
    """Return the checkpoints of a directory, by name alone, newest first; none if the directory does not exist."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be listed: {error.strerror}") from error
    return [directory / name for name in sorted(filter(is_update_name, names), key=update_of, reverse=True)]


def check_file_name(name: str, label: str = "a checkpoint") -> str:
    """Return `name` if it is a plain file name. CheckpointError if it could lead out of the directory."""
    if type(name) is not str or name == MANIFEST or not _FILE.fullmatch(name):
        raise CheckpointError(f"{label} names the file {name!r}, which is no plain name")
    return name


# State


def encode(tree: Mapping[str, Tree]) -> dict[str, Content]:
    """Return the files of a checkpoint of `{part: state}`. Nothing is written or copied.

    Part "model", the state_dict of a module, gets a file of its own, unless its tensors are sharded. CheckpointError
    names a value that cannot be saved.
    """
    files, parts = _model_apart(tree)
    jsonable, tensors = flatten(parts)
    return files | {STATE_TENSORS: tensorfile.Contents(tensors, {}), STATE_JSON: _data(jsonable)}


def dry_save(tree: Mapping[str, Tree]) -> None:
    """Raise CheckpointError, with the name of the value, for a state that cannot be saved by one or several ranks."""
    if holds_shards(tree):
        tree = split_shards(tree, rank=0).tree
    _, parts = _model_apart(tree)
    jsonable, _ = plain_data(parts)
    _data(jsonable)


def holds_shards(tree: Mapping[str, Tree]) -> bool:
    """Return whether the model of `{part: state}` is sharded over ranks."""
    return is_sharded(*(value for value in tree.get("model", {}).values() if isinstance(value, Tensor)))


def load_tree(
    path: Path,
    *,
    manifest: Mapping[str, Any] | None = None,
    device: Home | None = None,
    share: tuple[int, int] | None = None,
    only: str = "",
    fill: bool = True,
) -> dict[str, Tree]:
    """Return the `{part: state}` of a checkpoint, each byte checked, with tensors on the CPU.

    - `manifest`: the manifest, if it was read before.
    - `device`: state from an accelerator is moved to it, as in `tree.loads`.
    - `share`: (rank, number of ranks). Sharded tensors become `LazyTensor`s, and each rank checks its share of their
      files. Without it they are assembled.
    - `only`: assemble the sharded tensors of this part alone; the others are None.
    - `fill`: False checks and decodes everything, and returns tensors without values, which take no memory.

    CheckpointError names file and defect.
    """
    files = (read_manifest(path) if manifest is None else manifest)["files"]
    if missing := {STATE_TENSORS, STATE_JSON}.difference(files):
        raise CheckpointError(f"{path / MANIFEST} is damaged: it does not list {min(missing)}")
    tree: dict[str, Tree] = {}
    if MODEL in files:
        tree["model"] = read_file(path / MODEL, partial(read_weights, fill=fill), expected=files[MODEL])
    text = read_bytes(path / STATE_JSON, limit=LARGEST_JSON, expected=files[STATE_JSON])
    read = partial(tensorfile.read, fill=fill)
    tensors = read_file(path / STATE_TENSORS, read, expected=files[STATE_TENSORS]).tensors
    find = _finder(path, files, share=share if fill else (0, 1), only=only) if INDEX in files else None
    parts = loads(text, tensors, label=str(path / STATE_JSON), device=device, find=find)
    if type(parts) is not dict:
        raise CheckpointError(f"{path / STATE_JSON} is damaged: it holds no parts")
    return tree | parts


def _model_apart(tree: Mapping[str, Tree]) -> tuple[dict[str, Content], dict[str, Tree]]:
    """Return the file of the model and the other parts; no file for a sharded model."""
    parts = dict(tree)
    if "model" not in tree or any(isinstance(value, Placeholder) for value in tree["model"].values()):
        return {}, parts
    return {MODEL: weights_contents(parts.pop("model"))}, parts


def _data(jsonable: dict[str, Any]) -> bytes:
    """Return the plain data of all parts as JSON. CheckpointError above `LARGEST_JSON` bytes."""
    text = json.dumps(jsonable, allow_nan=False, separators=(",", ":")).encode("ascii")
    if len(text) > LARGEST_JSON:
        raise _too_large(jsonable, len(text))
    return text


def _too_large(jsonable: dict[str, Any], size: int) -> CheckpointError:
    largest = max(jsonable, key=lambda name: len(json.dumps(jsonable[name])))
    what = f"the plain data of a checkpoint would have {size} bytes, most of them in part {largest!r}"
    fix = "store long lists of numbers as tensors or arrays"
    return CheckpointError(what, want=f"{LARGEST_JSON} bytes at most", fix=fix, where=False)


def _finder(
    path: Path, files: Mapping[str, Any], *, share: tuple[int, int] | None, only: str
) -> Callable[[Placeholder], Any]:
    """Return a function that returns the sharded tensor of a placeholder."""
    shards = read_shards(path, files)
    if share is not None:
        rank, size = share
        shards.check(shards.files[rank::size])
        return lambda placeholder: LazyTensor(shards, shards.listed(placeholder.name))
    prefix = f"{only}." if only else ""
    complete = shards.assemble([name for name in shards.tensors if name.startswith(prefix)])
    return lambda placeholder: complete.get(shards.listed(placeholder.name))


# Manifest


def manifest_text(fields: Mapping[str, Any], checksum: str) -> bytes:
    """Return the manifest as JSON. Its last entry is the checksum of all bytes before it.

    `fields` has `run`, `update`, `epoch`, `metrics` and `files`; format and versions are added.
    """
    jsonable, tensors = plain_data({"format": FORMAT, "version": FORMAT_VERSION, **fields, "versions": _VERSIONS})
    assert not tensors
    body = json.dumps(jsonable, indent=1, allow_nan=False).removesuffix("\n}").encode("ascii")
    text = body + seal(body, checksum)
    if len(text) > LARGEST_MANIFEST:
        what = f"the manifest of checkpoint {update_name(fields['update'])} has {len(text)} bytes"
        fix = "give fewer metrics, or shorter names"
        raise CheckpointError(what, want=f"{LARGEST_MANIFEST} bytes at most", fix=fix, where=False)
    return text


def seal(body: bytes, checksum: str) -> bytes:
    """Return the last entry of a manifest: the checksum of `body`."""
    return f',\n "{checksum}": "{CHECKSUMS[checksum](body).hexdigest()}"\n}}\n'.encode("ascii")


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint. Checks its checksum, and that all files exist with their sizes."""
    if os.path.islink(path):
        raise CheckpointError(f"checkpoint {path} is a link (links are not followed)")
    label = str(path / MANIFEST)
    manifest = _parsed(read_bytes(path / MANIFEST, limit=LARGEST_MANIFEST), label)
    if is_update_name(path.name) and path.name != update_name(manifest["update"]):
        raise CheckpointError(f"{label} is damaged: it is that of {update_name(manifest['update'])}")
    for name, entry in manifest["files"].items():
        if not is_entry(entry):
            raise CheckpointError(f"{label} is damaged: it has no size and checksum of {name!r}")
        with open_file(path / check_file_name(name, label)) as file:
            if file.size != entry["size"]:
                found = f"it has {file.size} bytes and should have {entry['size']}"
                raise CheckpointError(f"{file.label} is damaged: {found}")
    return manifest


def verify(path: Path) -> dict[str, Any]:
    """Check every byte of a checkpoint without decoding it; return its manifest."""
    manifest = read_manifest(path)
    for name, entry in manifest["files"].items():
        read_file(path / name, lambda _: None, expected=entry)
    return manifest


def is_of_run(path: Path, run: str) -> bool:
    """Return whether a path holds a checkpoint of a run now. It may have been removed or replaced."""
    try:
        return bool(read_manifest(path)["run"] == run)
    except CheckpointError:
        return False


def _parsed(text: bytes, label: str) -> dict[str, Any]:
    body, _, last = text.rpartition(b",\n ")
    if not any(last.startswith(f'"{kind}": '.encode()) and text == body + seal(body, kind) for kind in CHECKSUMS):
        raise CheckpointError(f"{label} is damaged: it does not end in its own checksum")
    manifest = loads(text, {}, label=label)
    if type(manifest) is not dict or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{label} is not the manifest of a {FORMAT}")
    if manifest.get("version") != FORMAT_VERSION:
        raise _other_version(manifest, label)
    try:
        check_form(manifest, run=_is_line, update=is_count, epoch=is_count, metrics=is_numbers, files=is_dict)
        optional = {"monitor": None, "mode": None}
        check_form(optional | manifest, monitor=is_none_or(_is_line), mode=is_none_or(is_text))
    except FormError as error:
        raise CheckpointError(f"{label} is damaged: {error}") from error
    return manifest


def _other_version(manifest: Mapping[str, Any], label: str) -> CheckpointError:
    """Return the error for a checkpoint of a later or earlier version of the format."""
    found = manifest.get("version")
    what = f"{label} has format version {found!r}, and this trainwright reads {FORMAT_VERSION}"
    fix = "a later trainwright: git pull, and pip install . in the clone"
    if type(found) is int and found < FORMAT_VERSION:
        weights = str(Path(label).with_name(MODEL))
        fix = f"resume with the release that wrote it; or begin a new run with load_weights({weights!r}, model)"
    return CheckpointError(what, have=f"written by {manifest.get('versions')}", fix=fix, where=False)


def _is_line(value: object) -> bool:
    """Return whether a value is a string that prints as one line."""
    return type(value) is str and value.isprintable() and len(value) <= _LONGEST_NAME
