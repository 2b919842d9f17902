"""Writes down what a process does to a disk, and says what a power cut may leave of it.

What POSIX promises, and no more: the data of a file is safe once the file has been fsynced, a name once its directory
has been fsynced. Of anything else each piece may be there or not, whatever was done first; only the changes of one name
keep their order, and a rename is there wholly or not at all.
"""

from __future__ import annotations

import os
import random
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

ROOT = 0
"""The number of the directory that all the others lie in."""
DIRECTORY = object()


@dataclass(frozen=True)
class Op:
    """One thing that was done: to the names of directory `node`, or to the data of file `node`."""

    what: Literal["make", "rename", "remove", "write", "resize", "sync", "reported"]
    node: int = ROOT
    name: str = ""
    """The name that is made, renamed or removed."""
    made: int = 0
    """The node that is made or renamed."""
    to: tuple[int, str] = (ROOT, "")
    """Directory and new name of a rename."""
    at: int = 0
    """Where data was written; the size, the number of the update that was reported."""
    data: bytes = b""
    is_directory: bool = False


class Recorder:
    """Stands before the functions of `os` in this process and writes down what they do below one directory."""

    def __init__(self, base: Path) -> None:
        self.ops: list[Op] = []
        self._base = str(base)
        self._lock = threading.RLock()
        self._names: dict[int, dict[str, int]] = {ROOT: {}}
        self._fds: dict[int, list[int]] = {}
        self._count = 0
        self._real: dict[str, Any] = {}

    def start(self) -> None:
        """Write down from now on."""
        for name in ("open", "close", "write", "pwrite", "ftruncate", "mkdir"):
            self._stand_before(name, getattr(self, f"_{name}"))
        for names, method in (
            (("fsync", "fdatasync"), self._sync),
            (("rename", "replace"), self._rename),
            (("unlink", "remove", "rmdir"), self._remove),
            (("writev", "pwritev", "link", "symlink", "truncate", "sendfile", "copy_file_range"), self._unknown),
        ):
            for name in names:
                self._stand_before(name, method)

    def reported(self, what: str, update: int) -> None:
        """Write down that a save was acknowledged."""
        if what == "saved":
            with self._lock:
                self.ops.append(Op("reported", at=update))

    def _stand_before(self, name: str, note: Callable[..., None]) -> None:
        real = self._real[name] = getattr(os, name)

        def called(*given: Any, **named: Any) -> Any:
            with self._lock:
                found = self._before(name, given, named)
                result = real(*given, **named)
                note(found, result, *given, **named)
                return result

        setattr(os, name, called)

    def _before(self, name: str, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """What must be looked up while it is as it was: where the first path lies, whether it is there."""
        if isinstance(given[0], int):
            return None
        return self._find(given[0], named.get("dir_fd", named.get("src_dir_fd")))

    def _find(self, path: Any, dir_fd: int | None = None) -> tuple[int, str] | None:
        """The directory and name of a path; None outside."""
        text = os.fspath(path)
        if dir_fd is not None:
            node = self._fds[dir_fd][0] if dir_fd in self._fds else None
            return None if node is None else (node, text)
        text = os.path.abspath(text)
        if not text.startswith(self._base + "/"):
            return None
        *parents, name = text[len(self._base) + 1 :].split("/")
        node = ROOT
        for parent in parents:
            node = self._names[node][parent]
        return node, name

    def _new(self, where: tuple[int, str], *, is_directory: bool) -> int:
        self._count += 1
        self._names[where[0]][where[1]] = self._count
        if is_directory:
            self._names[self._count] = {}
        self.ops.append(Op("make", where[0], where[1], self._count, is_directory=is_directory))
        return self._count

    def _open(self, where: Any, fd: int, path: Any, flags: int, mode: int = 0o777, *, dir_fd: Any = None) -> None:
        if where is None:
            if str(path) == self._base:
                self._fds[fd] = [ROOT, 0]
            return
        node = self._names[where[0]].get(where[1])
        if node is None:
            node = self._new(where, is_directory=False)
        elif flags & os.O_TRUNC:
            self.ops.append(Op("resize", node, at=0))
        assert not flags & os.O_APPEND, "files that are appended to are not followed"
        self._fds[fd] = [node, 0]

    def _close(self, _: Any, result: None, fd: int) -> None:
        self._fds.pop(fd, None)

    def _write(self, _: Any, written: int, fd: int, data: Any) -> None:
        if fd in self._fds:
            node, at = self._fds[fd]
            self.ops.append(Op("write", node, at=at, data=bytes(memoryview(data).cast("B")[:written])))
            self._fds[fd][1] += written

    def _pwrite(self, _: Any, written: int, fd: int, data: Any, offset: int) -> None:
        if fd in self._fds:
            self.ops.append(Op("write", self._fds[fd][0], at=offset, data=bytes(data[:written])))

    def _ftruncate(self, _: Any, result: None, fd: int, length: int) -> None:
        if fd in self._fds:
            self.ops.append(Op("resize", self._fds[fd][0], at=length))

    def _mkdir(self, where: Any, result: None, path: Any, mode: int = 0o777, *, dir_fd: Any = None) -> None:
        if where is not None:
            self._new(where, is_directory=True)

    def _sync(self, _: Any, result: None, fd: int) -> None:
        if fd in self._fds:
            self.ops.append(Op("sync", self._fds[fd][0], is_directory=stat.S_ISDIR(os.fstat(fd).st_mode)))

    def _rename(self, where: Any, result: None, source: Any, target: Any, *, src_dir_fd=None, dst_dir_fd=None) -> None:  # type: ignore[no-untyped-def]
        to = self._find(target, dst_dir_fd)
        assert (where is None) == (to is None), "a rename over the edge of what is followed"
        if where is not None and to is not None:
            node = self._names[where[0]].pop(where[1])
            self._names[to[0]][to[1]] = node
            self.ops.append(Op("rename", where[0], where[1], node, to))

    def _remove(self, where: Any, result: None, path: Any, *, dir_fd: Any = None) -> None:
        if where is not None:
            del self._names[where[0]][where[1]]
            self.ops.append(Op("remove", where[0], where[1]))

    def _unknown(self, where: Any, result: Any, *given: Any, **named: Any) -> None:
        inside = where is not None or any(fd in self._fds for fd in given if isinstance(fd, int))
        assert not inside, f"a call that is not followed: {given}"


def without(ops: Sequence[Op], missing: Literal["file", "directory"]) -> list[Op]:
    """The log of a library that leaves out its fsyncs of files, or of directories."""
    return [op for op in ops if op.what != "sync" or op.is_directory != (missing == "directory")]


Tree = dict[str, bytes | None]
"""Paths and contents; None is a directory."""
CUTS = ("least", "names", "zeros", "data", "all")
"""What a power cut leaves of what was not synced: nothing; all names without data; all names, with zeros for data; all
data without names; everything. And, by chance, any piece of it."""


def after_cut(ops: Sequence[Op], end: int, leaves: str) -> Tree:
    """What is on the disk where the power goes after the first `end` operations; `leaves` is one of CUTS or a seed."""
    synced = _synced(ops, end)
    choose = _chooser(leaves)
    names: dict[int, dict[str, int]] = {ROOT: {}}
    files: dict[int, bytearray] = {}
    lost: set[tuple[int, str]] = set()
    for n, op in enumerate(ops[:end]):
        if op.what in ("make", "rename", "remove"):
            keys = {(op.node, op.name), *([op.to] if op.what == "rename" else [])}
            if synced[n] or (not keys & lost and choose("name") == "keep"):
                _rename_in(names, files, op)
            else:
                lost |= keys
                if op.what == "make":  # it has no name, and may be given one by a rename that does reach the disk
                    _hold(names, files, op)
        elif op.what in ("write", "resize"):
            _change(files, op, "keep" if synced[n] else choose("data"))
    return dict(_paths(names, files, ROOT, ""))


def _synced(ops: Sequence[Op], end: int) -> list[bool]:
    """Whether each operation is safe: its file, or its directories, fsynced after it."""
    last: dict[int, int] = {}
    found = [False] * end
    for n in range(end - 1, -1, -1):
        op = ops[n]
        if op.what == "sync":
            last.setdefault(op.node, n)
        nodes = {op.node, op.to[0]} if op.what == "rename" else {op.node}
        found[n] = all(node in last for node in nodes)
    return found


def _chooser(leaves: str) -> Callable[[str], str]:
    """What becomes of one piece that was not synced: keep, drop, zero, tear."""
    if leaves in CUTS:
        fixed = {"least": "drop drop", "names": "keep drop", "zeros": "keep zero", "data": "drop keep"}
        name, data = fixed.get(leaves, "keep keep").split()
        return lambda kind: name if kind == "name" else data
    rng = random.Random(leaves)
    likely = rng.random()
    return lambda kind: (
        "keep" if rng.random() < likely else "drop" if kind == "name" else rng.choice(("drop", "zero", "tear"))
    )


def _hold(names: dict[int, dict[str, int]], files: dict[int, bytearray], op: Op) -> None:
    if op.is_directory:
        names[op.made] = {}
    else:
        files[op.made] = bytearray()


def _rename_in(names: dict[int, dict[str, int]], files: dict[int, bytearray], op: Op) -> None:
    if op.what == "make":
        _hold(names, files, op)
        names[op.node][op.name] = op.made
    else:
        names[op.node].pop(op.name, None)
        if op.what == "rename":
            names[op.to[0]][op.to[1]] = op.made


def _change(files: dict[int, bytearray], op: Op, fate: str) -> None:
    if fate == "drop":
        return
    file = files[op.node]
    if op.what == "resize":
        del file[op.at :]
        file.extend(bytes(op.at - len(file)))
        return
    data = {"keep": op.data, "zero": bytes(len(op.data)), "tear": op.data[: len(op.data) // 2]}[fate]
    file.extend(bytes(max(0, op.at - len(file))))
    file[op.at : op.at + len(data)] = data


def _paths(
    names: dict[int, dict[str, int]], files: dict[int, bytearray], node: int, prefix: str
) -> Iterator[tuple[str, bytes | None]]:
    for name, found in names[node].items():
        if found in names:
            yield prefix + name, None
            yield from _paths(names, files, found, f"{prefix}{name}/")
        else:
            yield prefix + name, bytes(files[found])


def tree_of(base: Path) -> Tree:
    """What lies in a real directory."""
    found = sorted(base.rglob("*"))
    return {path.relative_to(base).as_posix(): None if path.is_dir() else path.read_bytes() for path in found}


def write_tree(base: Path, tree: Tree) -> None:
    """Write it into an empty directory."""
    for name, data in tree.items():
        if data is None:
            (base / name).mkdir()
        else:
            (base / name).write_bytes(data)
