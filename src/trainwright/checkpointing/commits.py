"""Makes directories that exist whole or not at all, checks every byte that is read of them, and locks their root.

A commit: the files go into a temporary directory of the same root, each fsynced, the manifest last; fsync of that
directory; rename; fsync of the root. Whoever holds the lock of a root cleans up what dead writers have left there.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import socket
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from warnings import warn

import torch

from trainwright.checkpointing.checksums import SUMS, Checksum, checksum_of
from trainwright.checkpointing.files import (
    NO_FOLLOW,
    Content,
    check_size,
    is_entry,
    open_file,
    read_file,
    spare_name,
    sync_directory,
    write_file,
)
from trainwright.checkpointing.tree import flatten, unflatten
from trainwright.core.errors import CheckpointError, message

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

FORMAT, FORMAT_VERSION, MANIFEST = "trainwright-checkpoint", 1, "manifest.json"
_NAME = re.compile(r"update-(\d{10,})")
_LEFTOVER = re.compile(r"\.(tmp|old|trash)-(update-\d{10,})-\d+-[0-9a-f]{8}")
_FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
"""Names that files of a checkpoint may have, on any file system."""
_LONGEST_NAME = 1000
"""Letters of the id of a run, or of the name of a number."""
_FIELDS: dict[str, type] = {"run": str, "update": int, "epoch": int, "metrics": dict, "files": dict}
_OPTIONAL = {"monitor": (str, type(None)), "mode": (str, type(None)), "settings": (str,)}
"""Fields that may be missing; `settings` is a digest of what the run was set to."""
LARGEST_MANIFEST = 1 << 20
"""Bytes; a larger one is neither written nor read."""
_LARGEST = 1 << 62
"""A count of updates, epochs or bytes is below it."""
_locked: set[int] = set()
"""Descriptors of the locks that this process holds; a forked child must not keep them alive."""


def update_name(update: int) -> str:
    """The name of the checkpoint taken after `update` updates; names sort as the numbers do."""
    return f"update-{update:010d}"


def commit(
    root: Path,
    name: str,
    files: Mapping[str, Content],
    *,
    manifest: Mapping[str, Any],
    checksum: Checksum = "crc32",
    temporary: str = "",
    joining: Callable[[Path], Mapping[str, dict[str, Any]]] | None = None,
) -> Path:
    """Write a checkpoint whole or not at all; when this returns, a power cut cannot take it away.

    `manifest` has `run`, `update`, `epoch` and `metrics`; sizes, checksums and versions are added. Nothing is left of a
    save that fails. A checkpoint of that name is replaced. CheckpointError where the system refuses.

    `joining` is called in the `temporary` directory, whose name others know, and gives size and checksum of what they
    have laid there, all of it durable.
    """
    temporary_path = root / (temporary or spare_name(".tmp", _plain(name)))
    try:
        os.mkdir(temporary_path, 0o700)
        entries = {
            _plain(file): write_file(temporary_path / file, content, checksum=checksum)
            for file, content in files.items()
        }
        if joining is not None:
            entries |= {_plain(file): entry for file, entry in joining(temporary_path).items()}
        text = _manifest_text({**manifest, "files": entries}, checksum)
        if len(text) > LARGEST_MANIFEST:
            what = f"the manifest of checkpoint {name} has {len(text)} bytes"
            fix = "give fewer metrics, or shorter names"
            raise CheckpointError(message(what, want=f"{LARGEST_MANIFEST} bytes at most", fix=fix, where=False))
        write_file(temporary_path / MANIFEST, text)
        sync_directory(temporary_path)
        _publish(temporary_path, root / name)
    except OSError as error:
        what = f"checkpoint {name} could not be written to {root}; those before it are as they were"
        raise CheckpointError(message(what, have=str(error), where=False)) from error
    finally:
        shutil.rmtree(temporary_path, ignore_errors=True)
    return root / name


def verify(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint of which every byte has been checked; CheckpointError names file and defect."""
    manifest = read_manifest(path)
    for name in manifest["files"]:
        read_file(path / name, lambda _: None, expected=manifest["files"][name])
    return manifest


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest, itself checked, of a checkpoint whose files are there in their sizes; no other byte is read."""
    try:
        is_directory = stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {error.strerror}") from error
    if not is_directory:
        raise CheckpointError(f"checkpoint {path} is no directory (links are not followed)")
    label = str(path / MANIFEST)
    text = read_file(path / MANIFEST, lambda file: file.read_all(limit=LARGEST_MANIFEST))
    manifest = _parsed_manifest(text, label)
    if _NAME.fullmatch(path.name) and path.name != update_name(manifest["update"]):
        raise CheckpointError(f"{label} is damaged: it is that of {update_name(manifest['update'])}")
    for name, entry in manifest["files"].items():
        with open_file(path / _plain(name, label)) as file:
            check_size(file, entry)
    return manifest


def is_of_run(path: Path, run: str) -> bool:
    """Return whether a checkpoint of a run lies there now: somebody may have removed or replaced it."""
    try:
        return bool(read_manifest(path)["run"] == run)
    except CheckpointError:
        return False


def scan(root: Path) -> list[Path]:
    """The checkpoints of a root by name alone, newest first; none where there is no such directory."""
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{root} cannot be listed: {error.strerror}") from error
    found = {int(match[1]): name for name in names if (match := _NAME.fullmatch(name))}
    return [root / name for update, name in sorted(found.items(), reverse=True) if name == update_name(update)]


def temporary_name(update: int, *, pid: int, token: str) -> str:
    """A name as a commit gives itself, for one that several processes are to know; `token`: 8 hexadecimal digits."""
    return f".tmp-{update_name(update)}-{pid}-{token}"


def is_name(name: str) -> bool:
    """Whether `name` is one that `update_name` gives."""
    return _NAME.fullmatch(name) is not None


def update_of(name: str) -> int:
    """The update in a name that `update_name` gave."""
    found = _NAME.fullmatch(name)
    assert found, name
    return int(found[1])


def remove(path: Path) -> None:
    """Remove a checkpoint: renamed first, so that no half of it ever bears its name."""
    assert _NAME.fullmatch(path.name), path
    trash = _put_aside(path, ".trash")
    sync_directory(path.parent)
    _delete(trash)


def make_root(root: Path) -> None:
    """Make the directory of a run where there is none, durably, and see that it can be written to."""
    try:
        missing = [path for path in (root, *root.parents) if not path.exists()]
        for path in reversed(missing):
            path.mkdir(mode=0o700 if path == root else 0o777, exist_ok=True)
            sync_directory(path.parent)
        probe = root / spare_name(".tmp", update_name(0))
        probe.mkdir(mode=0o700)
        probe.rmdir()
    except OSError as error:
        fix = 'free space, allow writing there, or Checkpoint("another/directory")'
        raise CheckpointError(message(f"checkpoints cannot be written to {root}", have=str(error), fix=fix)) from error


@contextmanager
def lock(root: Path) -> Iterator[None]:
    """Hold a root for this process alone (CheckpointError where another holds it), cleaned of leftovers."""
    if fcntl is None:
        warn(f"this system has no flock: two runs that write to {root} at once are not noticed", stacklevel=3)
        yield
        return
    try:
        fd = os.open(root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | NO_FOLLOW, 0o600)
    except OSError as error:
        raise CheckpointError(message(f"{root} cannot be locked", have=str(error))) from error
    _locked.add(fd)
    try:
        if _flock(fd, root):
            try:
                _clean(root)
            except OSError as error:
                what = f"{root} could not be cleaned of what a dead run has left"
                raise CheckpointError(message(what, have=str(error))) from error
        yield
    finally:
        if fd in _locked:
            _locked.discard(fd)
            os.close(fd)


def _publish(temporary: Path, target: Path) -> None:
    """Give a directory its name, in place of one that bears it; where that fails, the names are as they were."""
    old: Path | None = None
    with ExitStack() as undo:
        if os.path.lexists(target):
            old = _put_aside(target, ".old")
            undo.callback(_rename_back, old, target)
        os.rename(temporary, target)
        undo.callback(_rename_back, target, temporary)
        sync_directory(target.parent)
        undo.pop_all()
    if old:
        _delete(old)


def _rename_back(now: Path, before: Path) -> None:
    with suppress(OSError):  # what stays under a hidden name is seen to by the next run
        os.rename(now, before)


def _put_aside(path: Path, kind: str) -> Path:
    aside = path.with_name(spare_name(kind, path.name))
    os.rename(path, aside)
    return aside


def _delete(path: Path) -> None:
    """Remove what bears a hidden name; what cannot be removed stays for the next run to try."""
    if path.is_symlink():
        with suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _clean(root: Path) -> None:
    """Finish, put back or remove what a dead writer has left; only under the lock, where no other can be alive."""
    leftovers = [match for entry in os.listdir(root) if (match := _LEFTOVER.fullmatch(entry))]
    for match in sorted(leftovers, key=lambda match: ("tmp", "old", "trash").index(match[1])):
        left, named = root / match[0], root / match[2]
        if match[1] == "trash" or os.path.lexists(named) or not _is_whole(left, match[2]):
            _delete(left)
            continue
        # Its writer was killed right before a rename: the new one's, or that which puts back what it was to replace.
        try:
            os.rename(left, named)
        except OSError as error:
            warn(f"{left} is a whole checkpoint that could not be given its name: {error}", stacklevel=5)
    if leftovers:
        sync_directory(root)


def _is_whole(path: Path, name: str) -> bool:
    try:
        return update_name(verify(path)["update"]) == name
    except CheckpointError:
        return False


def _manifest_text(fields: dict[str, Any], checksum: str) -> bytes:
    """JSON whose last entry is the checksum of all that stands before it."""
    versions = {"trainwright": _own_version(), "torch": torch.__version__, "python": platform.python_version()}
    head = {"format": FORMAT, "version": FORMAT_VERSION}
    jsonable, tensors = flatten(head | fields | {"versions": {name: str(text) for name, text in versions.items()}})
    assert not tensors
    body = json.dumps(jsonable, indent=1, allow_nan=False).removesuffix("\n}").encode("ascii")
    return body + _seal(body, checksum)


def _seal(body: bytes, checksum: str) -> bytes:
    return f',\n "{checksum}": "{checksum_of(body, checksum)}"\n}}\n'.encode("ascii")


def _parsed_manifest(text: bytes, label: str) -> dict[str, Any]:
    body, _, last = text.rpartition(b",\n ")
    if not any(last.startswith(f'"{kind}": '.encode()) and text == body + _seal(body, kind) for kind in SUMS):
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
        raise CheckpointError(message(what, have=wrote, fix="pip install --upgrade trainwright", where=False))
    if wrong := _wrong_fields(manifest):
        raise CheckpointError(f"{label} is damaged: {', '.join(wrong)} is missing or of another type")
    return manifest


def _wrong_fields(manifest: dict[str, Any]) -> list[str]:
    wrong = [name for name, kind in _FIELDS.items() if type(manifest.get(name)) is not kind]
    wrong += [name for name, kinds in _OPTIONAL.items() if name in manifest and type(manifest[name]) not in kinds]
    if not wrong:
        wrong += [name for name in ("update", "epoch") if not 0 <= manifest[name] < _LARGEST]
        wrong += [name for name in ("run", "monitor") if not _is_shown(manifest.get(name) or "-")]
        wrong += [
            f"metrics[{name!r}]"
            for name, value in manifest["metrics"].items()
            if type(name) is not str
            or type(value) not in (int, float)
            or (type(value) is int and abs(value) >= _LARGEST)
        ]
        wrong += [repr(name) for name, entry in manifest["files"].items() if not is_entry(entry)]
    return wrong


def _is_shown(text: str) -> bool:
    """Whether a text can be printed as it is, in one line."""
    return text.isprintable() and len(text) <= _LONGEST_NAME


def _own_version() -> str:
    try:
        return version("trainwright")
    except PackageNotFoundError:
        return "not installed"


def _plain(name: str, label: str = "") -> str:
    """`name`, if it can only be a file of the directory that it is looked for in."""
    if type(name) is not str or name == MANIFEST or not _FILE.fullmatch(name):
        raise CheckpointError(f"{label or 'a checkpoint'} names the file {name!r}, which is no plain name")
    return name


def _flock(fd: int, root: Path) -> bool:
    """Whether the lock is held; False, with a warning, where the file system has no locks."""
    _close_in_children()
    assert fcntl is not None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 200, 0).decode("ascii", "replace") or "another process"
        fix = "wait for it, end it, or give this run another directory"
        raise CheckpointError(message(f"{root} is being written to by another run", have=holder, fix=fix)) from None
    except OSError as error:
        warn(f"{root} cannot be locked ({error.strerror}): two runs that write to it are not noticed", stacklevel=4)
        return False
    with suppress(OSError):  # a full disk: the name of the holder is only for the other's message
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}".encode("ascii", "replace"), 0)
    return True


@cache
def _close_in_children() -> None:
    """A forked loader worker that outlives its killed parent must not hold the lock on."""
    os.register_at_fork(after_in_child=_close_inherited)


def _close_inherited() -> None:
    while _locked:
        os.close(_locked.pop())
