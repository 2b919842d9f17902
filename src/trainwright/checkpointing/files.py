"""Writes a file durably; reads a file and checks its size and checksum. Refuses links and pipes.

Checksums are computed while bytes are written or read, in a thread for large files.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from io import FileIO
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any, Literal, Protocol, TypeVar
from warnings import warn

from trainwright.checkpointing import tensorfile
from trainwright.core.errors import CheckpointError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

T = TypeVar("T")
Checksum = Literal["crc32", "sha256"]
"""Kinds of checksums for accidental changes. crc32 is fast and misses one random change in 2**32; sha256 misses none.
Neither protects against intentional changes: the checksum in the manifest can be changed too."""
Content = tensorfile.Contents | bytes
"""The content of one file: tensors, or bytes."""
NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
_BINARY = getattr(os, "O_BINARY", 0)
_READ = os.O_RDONLY | NO_FOLLOW | getattr(os, "O_NONBLOCK", 0) | _BINARY
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_FOLLOW | _BINARY
_CHUNK = 1 << 22
"""Bytes per system call, and per item of the checksum thread: large, so that its wake-ups cost little."""
_BUFFER = 1 << 19
"""Bytes per read for the checksum alone: they stay in the cache of the processor."""


def write_file(path: Path, content: Content, *, checksum: Checksum = "crc32") -> dict[str, Any]:
    """Write and fsync a new file; return its entry for the manifest: size and checksum."""
    fd = os.open(path, _WRITE, 0o600)
    try:
        with _hash(checksum, content_size(content)) as total:
            file = FileWriter(fd, total)
            if isinstance(content, bytes):
                file.write(content)
            else:
                tensorfile.write(file, content.tensors, content.metadata)
            _fsync(fd)
            return {"size": file.size, checksum: total.hexdigest()}
    finally:
        os.close(fd)


def read_file(path: Path, use: Callable[[FileReader], T], *, expected: Mapping[str, Any] | None = None) -> T:
    """Return the result of `use` for an open file. CheckpointError if its checksum differs from `expected`."""
    with open_file(path) as file:
        if expected is None:
            return use(file)
        kind = next(kind for kind in CHECKSUMS if kind in expected)
        with _hash(kind, file.size) as file.checksum:
            try:
                result = use(file)
            except CheckpointError:
                file.verify(kind, expected[kind])  # a wrong checksum explains more than an error in decoding
                raise
            file.verify(kind, expected[kind])
            return result


def read_bytes(path: Path, *, limit: int, expected: Mapping[str, Any] | None = None) -> bytes:
    """Return the bytes of a file. CheckpointError if there are more than `limit`."""

    def use(file: FileReader) -> bytes:
        if file.size > limit:
            raise CheckpointError(f"{path} is damaged: it has {file.size} bytes, and {limit} at most are written")
        data = bytearray(file.size)
        file.readinto(memoryview(data))
        return bytes(data)

    return read_file(path, use, expected=expected)


def replace_file(path: Path, content: Content) -> None:
    """Write a single file completely or not at all. Replaces an existing file; a link is replaced, not followed."""
    temporary = path.with_name(spare_name(".tmp", path.name))
    try:
        write_file(temporary, content)
        os.replace(temporary, path)
        sync_directory(path.parent)
    except OSError as error:
        raise CheckpointError(f"{path} could not be written", have=str(error)) from error
    finally:
        with suppress(OSError):
            os.unlink(temporary)


@contextmanager
def open_file(path: Path) -> Iterator[FileReader]:
    """Open a regular file: no link, pipe or device. Errors of reading inside the context become CheckpointError."""
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise CheckpointError(f"{path} is no regular file (links are not followed)")
        with FileIO(path, opener=_open) as file:
            yield FileReader(file, str(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def is_entry(entry: Any) -> bool:
    """Return whether `entry` has the form that `write_file` returns: a size and one checksum."""
    if type(entry) is not dict or type(entry.get("size")) is not int or entry["size"] < 0:
        return False
    return [type(entry[kind]) for kind in CHECKSUMS if kind in entry] == [str]


def content_size(content: Content) -> int:
    """Return the size of a file's content in bytes, without the header of tensors."""
    if isinstance(content, bytes):
        return len(content)
    return sum(tensor.numel() * tensor.element_size() for tensor in content.tensors.values())


def spare_name(kind: str, name: str) -> str:
    """Return a unique hidden name for a file or directory next to `name`."""
    return f"{kind}-{name}-{os.getpid()}-{secrets.token_hex(4)}"


def sync_directory(path: Path) -> None:
    """Flush the names in a directory to disk, if the system supports that."""
    if os.name == "nt":
        return
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        warn(f"the file system of {path} cannot fsync a directory: a power cut may undo a rename", stacklevel=2)
    finally:
        os.close(fd)


class FileReader:
    """A file that is read in order; computes its checksum on the way, if one is expected."""

    def __init__(self, file: FileIO, label: str) -> None:
        self.label = label
        """The name of the file in an error."""
        self.size = os.fstat(file.fileno()).st_size
        self.checksum: _Hash | None = None
        self._file = file

    def readinto(self, target: memoryview) -> None:
        """Fill `target` with the next bytes. CheckpointError if the file ends first."""
        at = 0
        while at < len(target):
            n = self._file.readinto(target[at : at + _CHUNK])
            if not n:
                raise CheckpointError(f"{self.label} is cut off")
            if self.checksum is not None:
                self.checksum.update(target[at : at + n])
            at += n

    def verify(self, kind: str, expected: str) -> None:
        """Read the rest of the file. CheckpointError if its checksum is not the expected one."""
        assert self.checksum is not None
        self.checksum.hexdigest()  # ends its thread, so that one buffer can be reused
        buffer = memoryview(bytearray(_BUFFER))
        while n := self._file.readinto(buffer):
            self.checksum.update(buffer[:n])
        if (found := self.checksum.hexdigest()) != expected:
            raise CheckpointError(f"{self.label} is damaged: its checksum ({kind}) is {found} and should be {expected}")


class FileWriter:
    """A file for writing; computes its checksum on the way."""

    def __init__(self, fd: int, checksum: _Hash) -> None:
        self.size, self._fd, self._checksum = 0, fd, checksum
        self._flushed = 0

    def write(self, data: bytes | memoryview) -> None:
        """Write all of `data`."""
        view = memoryview(data)
        while view:
            n = os.write(self._fd, view[:_CHUNK])
            self._checksum.update(view[:n])
            self.size += n
            view = view[n:]
            if self.size - self._flushed >= _CHUNK:
                self._begin_flush()

    def _begin_flush(self) -> None:
        """Hint Linux to start writing to the drive, so that the fsync waits less."""
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):
                os.posix_fadvise(self._fd, self._flushed, self.size - self._flushed, os.POSIX_FADV_DONTNEED)
        self._flushed = self.size


def _open(path: str, _: int) -> int:
    """Opener for `FileIO` that neither follows a link nor waits at a pipe."""
    return os.open(path, _READ)


def _fsync(fd: int) -> None:
    if fcntl is not None and hasattr(fcntl, "F_FULLFSYNC"):  # macOS: its fsync stops at the drive's cache
        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
    else:
        os.fsync(fd)


# Checksums


class _Hash(Protocol):
    """An incremental checksum, with the interface of hashlib."""

    def update(self, data: bytes | memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


class _Crc32:
    """`zlib.crc32` with the interface of hashlib."""

    def __init__(self, data: bytes = b"") -> None:
        self._value = zlib.crc32(data)

    def update(self, data: bytes | memoryview, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


CHECKSUMS: dict[str, Callable[..., _Hash]] = {"crc32": _Crc32, "sha256": hashlib.sha256}
"""Kinds of checksums by their names in a manifest. Called with the first bytes, or without."""


def _hash(kind: str, size: int) -> AbstractContextManager[_Hash]:
    """Return a new checksum, computed in a thread for a large file."""
    total = CHECKSUMS[kind]()
    if size >= _CHUNK:
        with suppress(RuntimeError):  # no thread can be started, or the interpreter is ending
            return _ThreadedHash(total)
    return nullcontext(total)


class _ThreadedHash:
    """A checksum computed in a thread while the next bytes are read or written.

    The bytes must not change before `hexdigest`, which ends the thread. Later bytes are added at once. The queue is
    short, since the bytes may be copies.
    """

    def __init__(self, total: _Hash) -> None:
        self._total = total
        self._batch: list[bytes | memoryview] = []
        self._size = 0
        self._batches: Queue[list[bytes | memoryview]] = Queue(maxsize=2)
        self._thread = Thread(target=self._run, name="trainwright checksum", daemon=True)
        self._thread.start()

    def __enter__(self) -> _ThreadedHash:
        return self

    def __exit__(self, *_: object) -> None:
        self.hexdigest()

    def update(self, data: bytes | memoryview, /) -> None:
        if not self._thread.is_alive():
            self._total.update(data)
            return
        self._batch.append(data)
        self._size += len(data)
        if self._size >= _CHUNK:
            self._batches.put(self._batch)
            self._batch, self._size = [], 0

    def hexdigest(self) -> str:
        """Wait for the thread, end it, and return the checksum."""
        if self._thread.is_alive():
            if self._batch:
                self._batches.put(self._batch)
            self._batches.put([])  # the end
            self._thread.join()
        return self._total.hexdigest()

    def _run(self) -> None:
        while batch := self._batches.get():
            for data in batch:
                self._total.update(data)
