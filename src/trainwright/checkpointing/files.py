"""Writes one file durably, and reads one with checks: size and checksum, no links, no pipes.

Checksums are computed on the way to or from the file; those of large files by a thread beside it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
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
"""Both detect accidents: crc32 is cheap and misses one random change in 2**32, sha256 misses none. Neither proves
anything about intent: who can change a file can change its checksum in the manifest too."""
Content = tensorfile.Contents | bytes
"""What one file holds: tensors, or bytes."""
NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
_READ = os.O_RDONLY | NO_FOLLOW | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_FOLLOW | getattr(os, "O_BINARY", 0)
_CHUNK = 1 << 22
"""Bytes per call of the system, and per item for the checksum thread: large enough for its wake-ups not to count."""
_BUFFER = 1 << 19
"""Bytes that are read for the checksum alone at a time: as many as stay in the processor's cache."""


def write_file(path: Path, content: Content, *, checksum: Checksum = "crc32") -> dict[str, Any]:
    """Write and fsync a new file; return its size and checksum."""
    fd = os.open(path, _WRITE, 0o600)
    try:
        # Memory that exists anyway may wait for its checksum; of copies made on the way only two may.
        limit = None if isinstance(content, bytes) or tensorfile.is_ready(content) else 2
        with closing(_FileWriter(fd, Checksummer(checksum, limit=limit))) as file:
            if isinstance(content, bytes):
                file.write(content)
            else:
                tensorfile.write(file, content.tensors, content.metadata)
            _fsync(fd)
            return {"size": file.size, checksum: file.checksum.finish()}
    finally:
        os.close(fd)


def read_file(path: Path, use: Callable[[FileReader], T], *, expected: Mapping[str, Any] | None = None) -> T:
    """Return what `use` makes of a file, whose size and checksum must be the `expected` ones."""
    kind = None if expected is None else next(kind for kind in CHECKSUMS if kind in expected)
    with open_file(path, checksum=kind) as file:
        if expected is not None:
            check_size(file, expected)
        try:
            result = use(file)
        except CheckpointError:
            _verify(file, kind, expected)  # a wrong checksum says more than what its bytes were mistaken for
            raise
        _verify(file, kind, expected)
        return result


def replace_file(path: Path, content: Content) -> None:
    """Write a single file completely or not at all, in place of an existing one (a link is replaced, not followed)."""
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
def open_file(path: Path, *, checksum: str | None = None) -> Iterator[FileReader]:
    """Open a regular file, never a link, a pipe or a device; with `checksum` the bytes that are read are summed."""
    try:
        if not NO_FOLLOW and path.is_symlink():
            raise OSError(errno.ELOOP, "it is a symbolic link")
        fd = os.open(path, _READ)
    except OSError as error:
        reason = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise CheckpointError(f"{path} cannot be read: {reason}") from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise CheckpointError(f"{path} is no regular file")
        with closing(FileReader(fd, str(path), Checksummer(checksum) if checksum else None)) as file:
            yield file
    finally:
        os.close(fd)


def check_size(file: FileReader, expected: Mapping[str, Any]) -> None:
    """Raise CheckpointError where a file is longer or shorter than it was written."""
    if file.size != expected["size"]:
        raise CheckpointError(f"{file.label} is damaged: it has {file.size} bytes and should have {expected['size']}")


def is_entry(entry: Any) -> bool:
    """Return whether `entry` is a size and one checksum, as `write_file` returns them."""
    if type(entry) is not dict or type(entry.get("size")) is not int or entry["size"] < 0:
        return False
    return [type(entry[kind]) for kind in CHECKSUMS if kind in entry] == [str]


def spare_name(kind: str, name: str) -> str:
    """Return a name for something beside `name` that no other writer uses."""
    return f"{kind}-{name}-{os.getpid()}-{secrets.token_hex(4)}"


def sync_directory(path: Path) -> None:
    """Flush the names in a directory to the disk, where the system can."""
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
    """A file that is read in order, its checksum computed on the way where one is asked for."""

    def __init__(self, fd: int, label: str, checksum: Checksummer | None) -> None:
        self.label = label
        """The name of the file in an error."""
        self.size = os.fstat(fd).st_size
        self._checksum = checksum
        self._file = FileIO(fd, closefd=False)

    def readinto(self, target: memoryview) -> None:
        """Fill `target` with the next bytes; CheckpointError where the file ends before."""
        at = 0
        while at < len(target):
            try:
                n = self._file.readinto(target[at : at + _CHUNK])
            except OSError as error:
                raise CheckpointError(f"{self.label} cannot be read: {error.strerror}") from error
            if not n:
                raise CheckpointError(f"{self.label} is cut off")
            if self._checksum is not None:
                self._checksum.update(target[at : at + n])
            at += n

    def read_all(self, *, limit: int | None = None) -> bytes:
        """Return all bytes; CheckpointError where there are more than `limit`, or than there is memory for."""
        if limit is not None and self.size > limit:
            raise CheckpointError(f"{self.label} is damaged: it has {self.size} bytes, and {limit} at most are written")
        try:
            data = bytearray(self.size)
        except MemoryError as error:
            raise CheckpointError(f"{self.label} has {self.size} bytes, and there is no memory for them") from error
        self.readinto(memoryview(data))
        return bytes(data)

    def finish(self) -> str:
        """Read the rest for the checksum alone; return the checksum."""
        assert self._checksum is not None
        left = self.size - self._file.tell()
        buffer = memoryview(bytearray(min(left, _BUFFER)))
        while left:
            self.readinto(buffer[: min(left, _BUFFER)])
            self._checksum.finish()  # before the buffer is used again
            left = self.size - self._file.tell()
        return self._checksum.finish()

    def close(self) -> None:
        """End the checksum thread."""
        if self._checksum is not None:
            self._checksum.finish()


class _FileWriter:
    """A file whose checksum is computed while it is written."""

    def __init__(self, fd: int, checksum: Checksummer) -> None:
        self.size, self.checksum, self._fd = 0, checksum, fd
        self._flushed = 0

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            n = os.write(self._fd, view[:_CHUNK])
            self.checksum.update(view[:n])
            self.size += n
            view = view[n:]
            if self.size - self._flushed >= _CHUNK:
                self._begin_flush()

    def close(self) -> None:
        self.checksum.finish()

    def _begin_flush(self) -> None:
        """Hint to Linux to begin with writing to the drive, which leaves less to wait for in the fsync."""
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):
                os.posix_fadvise(self._fd, self._flushed, self.size - self._flushed, os.POSIX_FADV_DONTNEED)
        self._flushed = self.size


def _fsync(fd: int) -> None:
    if fcntl is not None and hasattr(fcntl, "F_FULLFSYNC"):  # macOS: its fsync stops at the drive's cache
        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
    else:
        os.fsync(fd)


def _verify(file: FileReader, kind: str | None, expected: Mapping[str, Any] | None) -> None:
    if kind is None or expected is None:
        return
    if (found := file.finish()) != expected[kind]:
        raise CheckpointError(
            f"{file.label} is damaged: its checksum ({kind}) is {found} and should be {expected[kind]}"
        )


class _Hash(Protocol):
    """A checksum that grows, as those of hashlib do."""

    def update(self, data: bytes | memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


class _Crc32:
    """`zlib.crc32` as an object."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: bytes | memoryview, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


CHECKSUMS: dict[str, Callable[[], _Hash]] = {"crc32": _Crc32, "sha256": hashlib.sha256}
"""The kinds of checksums by their names in a manifest."""


def checksum_of(data: bytes, kind: str) -> str:
    """Return the checksum of bytes in memory."""
    total = CHECKSUMS[kind]()
    total.update(data)
    return total.hexdigest()


class Checksummer:
    """The checksum of bytes that are given in order, computed by a thread of its own where they are many.

    The bytes must not change before `finish`, which must be called in any case. At most `limit` batches may wait for
    the thread; None: any number, right for memory that exists anyway.
    """

    def __init__(self, kind: str, *, limit: int | None = None) -> None:
        self._hash = CHECKSUMS[kind]()
        self._batch: list[bytes | memoryview] = []
        self._size = 0
        self._queue: Queue[list[bytes | memoryview]] = Queue(maxsize=limit or 0)
        self._thread: Thread | None = None

    def update(self, data: bytes | memoryview) -> None:
        """Add the next bytes, now or later."""
        self._batch.append(data)
        self._size += len(data)
        if self._size >= _CHUNK:
            self._enqueue()

    def finish(self) -> str:
        """Wait until all bytes are added; return the checksum so far."""
        if self._thread is not None:
            if self._batch:
                self._queue.put(self._batch)
            self._queue.put([])  # the end
            self._thread.join()
            self._thread = None
        else:
            self._add(self._batch)
        self._batch, self._size = [], 0
        return self._hash.hexdigest()

    def _enqueue(self) -> None:
        batch, self._batch, self._size = self._batch, [], 0
        if self._thread is None:
            thread = Thread(target=self._run, name="trainwright checksum", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads, or the interpreter is about to end
                return self._add(batch)
            self._thread = thread
        self._queue.put(batch)

    def _run(self) -> None:
        while batch := self._queue.get():
            self._add(batch)

    def _add(self, batch: list[bytes | memoryview]) -> None:
        for data in batch:
            self._hash.update(data)
