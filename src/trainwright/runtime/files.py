"""Writes single files durably and reads them with care: summed on the way, links and pipes refused."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar
from warnings import warn

from trainwright.base.errors import CheckpointError, message
from trainwright.runtime import tensorfile

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

T = TypeVar("T")
Content = tensorfile.Contents | bytes
"""What one file holds."""
Checksum = Literal["crc32", "sha256"]
"""crc32 notices what breaks by itself, and is cheap; sha256 also what somebody means to pass off as it was."""

CHUNK = 1 << 20
"""Bytes that are summed and written, or read and summed, while they are in the cache."""
NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
_READ = os.O_RDONLY | NO_FOLLOW | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_FOLLOW | getattr(os, "O_BINARY", 0)


def write_file(path: Path, content: Content, *, checksum: Checksum = "crc32") -> dict[str, Any]:
    """Write and fsync a new file; its size and checksum."""
    fd = os.open(path, _WRITE, 0o600)
    try:
        file = _Writing(fd, new_sum(checksum))
        if isinstance(content, bytes):
            file.write(content)
        else:
            tensorfile.write(file, content.tensors, content.metadata)
        if fcntl is not None and hasattr(fcntl, "F_FULLFSYNC"):  # macOS: its fsync stops at the drive's cache
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
        else:
            os.fsync(fd)
    finally:
        os.close(fd)
    return {"size": file.size, checksum: file.sum.hexdigest()}


def read_file(path: Path, use: Callable[[Reading], T], *, expected: Mapping[str, Any] | None = None) -> T:
    """What `use` makes of the bytes of a file, whose size and checksum must be those `expected`."""
    with open_file(path) as file:
        if expected is not None:
            check_size(file, expected)
            file.sum = new_sum(_kind_of(expected))
        try:
            result = use(file)
        except CheckpointError:
            # A wrong checksum says more than what its bytes were mistaken for.
            _check_sum(file, expected)
            raise
        _check_sum(file, expected)
        return result


def replace_file(path: Path, content: Content) -> None:
    """Write a single file whole or not at all, in place of one that is there (a link is replaced, not followed)."""
    temporary = path.with_name(spare_name(".tmp", path.name))
    try:
        write_file(temporary, content)
        os.replace(temporary, path)
        sync_directory(path.parent)
    except OSError as error:
        raise CheckpointError(message(f"{path} could not be written", have=str(error))) from error
    finally:
        with suppress(OSError):
            os.unlink(temporary)


@contextmanager
def open_file(path: Path) -> Iterator[Reading]:
    """Open a plain file, never a link, a pipe or a device."""
    try:
        if not NO_FOLLOW and path.is_symlink():
            raise OSError(errno.ELOOP, "it is a symbolic link")
        fd = os.open(path, _READ)
    except OSError as error:
        reason = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise CheckpointError(f"{path} cannot be read: {reason}") from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise CheckpointError(f"{path} is no plain file")
        yield Reading(fd, str(path))
    finally:
        os.close(fd)


def check_size(file: Reading, expected: Mapping[str, Any]) -> None:
    """Raise CheckpointError where a file is longer or shorter than it was written."""
    if file.size != expected["size"]:
        raise CheckpointError(f"{file.label} is damaged: it has {file.size} bytes and should have {expected['size']}")


def is_entry(entry: Any) -> bool:
    """Whether it is a size and one checksum, as `write_file` gives them."""
    if type(entry) is not dict or type(entry.get("size")) is not int:
        return False
    return [type(entry[kind]) for kind in SUMS if kind in entry] == [str]


def spare_name(kind: str, name: str) -> str:
    """A name beside `name` that no other writer has."""
    return f"{kind}-{name}-{os.getpid()}-{secrets.token_hex(4)}"


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable, where the system can."""
    if os.name == "nt":
        return
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        warn(f"the file system of {path} cannot fsync a directory: a power cut may undo a rename", stacklevel=2)
    finally:
        os.close(fd)


class Sum(Protocol):
    """A checksum that grows, as those of hashlib do."""

    def update(self, data: bytes | memoryview, /) -> None:
        """Take in the next bytes."""

    def hexdigest(self) -> str:
        """What it is of all bytes so far."""
        ...


class _Crc32:
    """`zlib.crc32` as an object."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: bytes | memoryview, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


SUMS: dict[str, Callable[[], Sum]] = {"crc32": _Crc32, "sha256": hashlib.sha256}
"""The kinds of checksums by their names in a manifest."""


def new_sum(kind: str) -> Sum:
    """A checksum of no bytes yet."""
    return SUMS[kind]()


class Reading:
    """A file that is summed while it is read, in order."""

    def __init__(self, fd: int, label: str) -> None:
        self.label = label
        self.size = os.fstat(fd).st_size
        self.sum = new_sum("crc32")
        self._file = FileIO(fd, closefd=False)

    def readinto(self, target: memoryview) -> None:
        """Fill `target` with the next bytes; CheckpointError where the file ends before."""
        at = 0
        while at < len(target):
            try:
                n = self._file.readinto(target[at : at + CHUNK])
            except OSError as error:
                raise CheckpointError(f"{self.label} cannot be read: {error.strerror}") from error
            if not n:
                raise CheckpointError(f"{self.label} is cut off")
            self.sum.update(target[at : at + n])
            at += n

    def read_all(self, *, limit: int | None = None) -> bytes:
        """The whole file; CheckpointError where it has more bytes than `limit`, or than there is memory."""
        if limit is not None and self.size > limit:
            raise CheckpointError(f"{self.label} is damaged: it has {self.size} bytes, and {limit} at most are written")
        try:
            data = bytearray(self.size)
        except MemoryError as error:
            raise CheckpointError(f"{self.label} has {self.size} bytes, and there is no memory for them") from error
        self.readinto(memoryview(data))
        return bytes(data)

    def finish(self) -> None:
        """Read what is left, for the sum alone."""
        buffer = memoryview(bytearray(CHUNK))
        while left := self.size - self._file.tell():
            self.readinto(buffer[: min(left, CHUNK)])


class _Writing:
    """A file that is summed while it is written."""

    def __init__(self, fd: int, total: Sum) -> None:
        self.size, self.sum, self._fd = 0, total, fd

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            n = os.write(self._fd, view[:CHUNK])
            self.sum.update(view[:n])
            self.size += n
            view = view[n:]


def _check_sum(file: Reading, expected: Mapping[str, Any] | None) -> None:
    if expected is None:
        return
    file.finish()
    kind = _kind_of(expected)
    if (found := file.sum.hexdigest()) != expected[kind]:
        raise CheckpointError(
            f"{file.label} is damaged: its checksum ({kind}) is {found} and should be {expected[kind]}"
        )


def _kind_of(entry: Mapping[str, Any]) -> str:
    return next(kind for kind in SUMS if kind in entry)
