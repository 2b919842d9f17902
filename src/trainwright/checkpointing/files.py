"""Writes single files durably and reads them with care: summed on the way, links and pipes refused."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar
from warnings import warn

from trainwright.checkpointing import tensorfile
from trainwright.checkpointing.checksums import PIECE, SUMS, Checksum, Checksummer
from trainwright.core.errors import CheckpointError, message

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

T = TypeVar("T")
Content = tensorfile.Contents | bytes
"""What one file holds."""
_BUFFER = 1 << 19
"""Bytes that are read only to be summed, while they are in the cache."""
NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
_READ = os.O_RDONLY | NO_FOLLOW | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_FOLLOW | getattr(os, "O_BINARY", 0)


def write_file(path: Path, content: Content, *, checksum: Checksum = "crc32") -> dict[str, Any]:
    """Write and fsync a new file; its size and checksum."""
    fd = os.open(path, _WRITE, 0o600)
    try:
        ahead = None if isinstance(content, bytes) or tensorfile.lies_ready(content) else 2
        with closing(_Writing(fd, Checksummer(checksum, ahead=ahead))) as file:
            if isinstance(content, bytes):
                file.write(content)
            else:
                tensorfile.write(file, content.tensors, content.metadata)
            _sync(fd)
            return {"size": file.size, checksum: file.sum.stop()}
    finally:
        os.close(fd)


def read_file(path: Path, use: Callable[[Reading], T], *, expected: Mapping[str, Any] | None = None) -> T:
    """What `use` makes of the bytes of a file, whose size and checksum must be those `expected`."""
    with open_file(path, checksum=_kind_of(expected)) as file:
        if expected is not None:
            check_size(file, expected)
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
def open_file(path: Path, *, checksum: str | None = None) -> Iterator[Reading]:
    """Open a plain file, never a link, a pipe or a device; with a `checksum` what is read is summed."""
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
        with closing(Reading(fd, str(path), Checksummer(checksum) if checksum else None)) as file:
            yield file
    finally:
        os.close(fd)


def check_size(file: Reading, expected: Mapping[str, Any]) -> None:
    """Raise CheckpointError where a file is longer or shorter than it was written."""
    if file.size != expected["size"]:
        raise CheckpointError(f"{file.label} is damaged: it has {file.size} bytes and should have {expected['size']}")


def is_entry(entry: Any) -> bool:
    """Whether it is a size and one checksum, as `write_file` gives them."""
    if type(entry) is not dict or type(entry.get("size")) is not int or entry["size"] < 0:
        return False
    return [type(entry[kind]) for kind in SUMS if kind in entry] == [str]


def spare_name(kind: str, name: str) -> str:
    """A name beside `name` that no other writer has."""
    return f"{kind}-{name}-{os.getpid()}-{secrets.token_hex(4)}"


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable, where the system can."""
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


class Reading:
    """A file that is read in order, and summed on the way where a sum is given."""

    def __init__(self, fd: int, label: str, total: Checksummer | None) -> None:
        self.label = label
        self.size = os.fstat(fd).st_size
        self._sum = total
        self._file = FileIO(fd, closefd=False)

    def readinto(self, target: memoryview) -> None:
        """Fill `target` with the next bytes; CheckpointError where the file ends before."""
        at = 0
        while at < len(target):
            try:
                n = self._file.readinto(target[at : at + PIECE])
            except OSError as error:
                raise CheckpointError(f"{self.label} cannot be read: {error.strerror}") from error
            if not n:
                raise CheckpointError(f"{self.label} is cut off")
            if self._sum is not None:
                self._sum.update(target[at : at + n])
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

    def finish(self) -> str:
        """Read what is left, for the sum alone, and give the sum."""
        assert self._sum is not None
        left = self.size - self._file.tell()
        buffer = memoryview(bytearray(min(left, _BUFFER)))
        while left:
            self.readinto(buffer[: min(left, _BUFFER)])
            self._sum.stop()  # before the buffer is used again
            left = self.size - self._file.tell()
        return self._sum.stop()

    def close(self) -> None:
        """Let the sum end."""
        if self._sum is not None:
            self._sum.stop()


class _Writing:
    """A file that is summed while it is written."""

    def __init__(self, fd: int, total: Checksummer) -> None:
        self.size, self.sum, self._fd = 0, total, fd
        self._sent = 0

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            n = os.write(self._fd, view[:PIECE])
            self.sum.update(view[:n])
            self.size += n
            view = view[n:]
            if self.size - self._sent >= PIECE:
                self._send()

    def close(self) -> None:
        self.sum.stop()

    def _send(self) -> None:
        """Have the system begin to write to the drive, which leaves the fsync less to wait for; a hint, on Linux."""
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):
                os.posix_fadvise(self._fd, self._sent, self.size - self._sent, os.POSIX_FADV_DONTNEED)
        self._sent = self.size


def _sync(fd: int) -> None:
    if fcntl is not None and hasattr(fcntl, "F_FULLFSYNC"):  # macOS: its fsync stops at the drive's cache
        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
    else:
        os.fsync(fd)


def _check_sum(file: Reading, expected: Mapping[str, Any] | None) -> None:
    if expected is None:
        return
    kind = str(_kind_of(expected))
    if (found := file.finish()) != expected[kind]:
        raise CheckpointError(
            f"{file.label} is damaged: its checksum ({kind}) is {found} and should be {expected[kind]}"
        )


def _kind_of(entry: Mapping[str, Any] | None) -> str | None:
    return None if entry is None else next(kind for kind in SUMS if kind in entry)
