"""Checkpoints that all ranks write: each writes the pieces of tensors that it holds into one file of one directory.

The ranks communicate by the temporary directory of the commit alone, never by a collective: the files there show a
slow, dead or failed rank. When the file of rank 3 is flushed, its report is renamed to `rank-3.json`; where writing
fails, its marker `rank-3` is renamed to `rank-3.failed-28`, which takes no space and holds the number of the error.
Rank 0 waits for all reports, checks that the pieces make up every tensor, and writes their list.

The list is JSON, the files are safetensors: nothing in them can run. A piece has the name of its tensor in its file.
"""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from trainwright.checkpointing import tensorfile
from trainwright.checkpointing.files import (
    Checksum,
    Content,
    is_entry,
    read_bytes,
    read_file,
    sync_directory,
    write_file,
)
from trainwright.core.errors import CheckpointError
from trainwright.distributed.pieces import Piece, TensorPieces
from trainwright.protocols import Tree

if TYPE_CHECKING:
    from trainwright.distributed.resharding import Split

T = TypeVar("T")
INDEX = "shards.json"
"""The file of a checkpoint that lists the pieces."""
_VERSION = 1
PATIENCE = 300.0
"""Seconds without any change in the directory after which a rank counts as dead."""
HURRY = 5.0
"""The same where a run ends in an error."""
_LARGEST_TEXT = 1 << 28
"""Bytes of the list of the pieces, and of the report of one rank; more are not read."""
_LARGEST_FAILURE = 1 << 20
"""Bytes of the text in which a rank reports a failure; more are not read."""
_POLLS = (0.01, 0.2)
"""Seconds between two listings of the directory: the first, and the longest."""
_FAILED = re.compile(r"rank-(\d+)\.failed-(\d+)")


def shard_file(rank: int) -> str:
    """Return the name of the file with the pieces that one rank writes."""
    return f"shard-{rank:05d}.safetensors"


def split_shards(tree: Mapping[str, Tree], *, rank: int) -> Split:
    """Return `{part: state}` without its sharded tensors, and a rank's pieces of them.

    CheckpointError names a tensor that cannot be stored.
    """
    from trainwright.distributed.resharding import split  # with torch's DCP, for sharded models alone

    return split(tree, file=shard_file(rank), dtypes=tensorfile.TAGS)


# Reading


class ShardReader:
    """Reads the tensors of one checkpoint that are stored in pieces; `entries`: size and checksum of its files."""

    def __init__(
        self, path: Path, entries: Mapping[str, Mapping[str, Any]], tensors: Mapping[str, TensorPieces]
    ) -> None:
        self.path, self.tensors = path, tensors
        self._entries = entries
        self._by_file: dict[str, list[tuple[str, Piece]]] = {}
        for name, tensor in tensors.items():
            for piece in tensor.pieces:
                self._by_file.setdefault(piece.file, []).append((name, piece))

    @property
    def files(self) -> list[str]:
        """The files that hold pieces."""
        return sorted(self._by_file)

    def listed(self, name: str) -> str:
        """Return a name that the list has; CheckpointError for one that only a tree has."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.path / INDEX} is damaged: it does not list {name}")
        return name

    def read(self, file: str, *, fill: bool = True) -> Mapping[str, Tensor]:
        """Return the pieces in one file, each byte checked; CheckpointError also where they are not those listed.

        Without `fill` the tensors have no values.
        """
        entry = self._entries[file]
        tensors = read_file(self.path / file, partial(tensorfile.read, fill=fill), expected=entry).tensors
        for name, piece in self._by_file[file]:
            stored, dtype = tensors.get(name), self.tensors[name].dtype
            if stored is None or (stored.dtype, tuple(stored.shape)) != (dtype, piece.sizes):
                raise CheckpointError(f"{self.path / file} is damaged: {name} differs from its entry in {INDEX}")
        return tensors

    def check(self, files: Iterable[str]) -> None:
        """Raise CheckpointError where one of the files is damaged."""
        for file in files:
            self.read(file, fill=False)

    def assemble(self, names: Collection[str]) -> dict[str, Tensor]:
        """Return complete tensors on the CPU, put together from their files, of which one at a time is in memory."""
        complete = {name: torch.empty(self.tensors[name].shape, dtype=self.tensors[name].dtype) for name in names}
        for file in self.files:
            wanted = [(name, piece) for name, piece in self._by_file[file] if name in complete]
            tensors = self.read(file) if wanted else {}
            for name, piece in wanted:
                complete[name][piece.box] = tensors[name]
        return complete


def read_shards(path: Path, entries: Mapping[str, Mapping[str, Any]]) -> ShardReader:
    """Return the reader of a checkpoint that has pieces; CheckpointError where their list is damaged."""
    text = read_bytes(path / INDEX, limit=_LARGEST_TEXT, expected=entries[INDEX])
    try:
        listed = json.loads(text)
        if listed["version"] != _VERSION:
            raise CheckpointError(f"{path / INDEX} has version {listed['version']!r}, and {_VERSION} is read here")
        tensors = {name: _parsed(fields) for name, fields in listed["tensors"].items()}
    except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError, MemoryError, RecursionError) as error:
        raise CheckpointError(f"{path / INDEX} is damaged: it cannot be read ({error!r})") from error
    for name, tensor in tensors.items():
        if not tensor.is_complete or any(piece.file not in entries for piece in tensor.pieces):
            raise CheckpointError(f"{path / INDEX} is damaged: its pieces of {name} do not make it up")
    return ShardReader(path, entries, tensors)


def index_text(tensors: Mapping[str, TensorPieces]) -> bytes:
    """Return the list of the pieces as it is written. CheckpointError where some do not make up their tensor."""
    for name, tensor in tensors.items():
        if not tensor.is_complete:
            raise CheckpointError(f"the ranks hold pieces of {name} that do not make it up")
    listed = {
        name: {
            "dtype": tensorfile.TAGS[tensor.dtype],
            "shape": tensor.shape,
            "pieces": [{"file": piece.file, "offsets": piece.offsets, "sizes": piece.sizes} for piece in tensor.pieces],
        }
        for name, tensor in tensors.items()
    }
    return json.dumps({"version": _VERSION, "tensors": listed}, separators=(",", ":")).encode("ascii")


def _parsed(fields: Any) -> TensorPieces:
    pieces = []
    for piece in fields["pieces"]:
        if type(piece["file"]) is not str:
            raise ValueError(f"{piece['file']!r} is no name")
        pieces.append(Piece(piece["file"], _sizes(piece["offsets"]), _sizes(piece["sizes"])))
    return TensorPieces(tensorfile.DTYPES[fields["dtype"]], _sizes(fields["shape"]), tuple(pieces))


def _sizes(value: Any) -> tuple[int, ...]:
    if type(value) is not list or not all(type(n) is int and 0 <= n < 1 << 62 for n in value):
        raise ValueError(f"{value!r} are no sizes")
    return tuple(value)


# Writing


class ShardedSave:
    """One save in which all ranks take part, as one rank sees it.

    `temporary` is the name of the directory that they share, `tensors` lists every sharded tensor with the pieces that
    this rank writes. `patience` may be changed by the training thread while the writing thread waits for other ranks.
    """

    def __init__(
        self, temporary: str, *, rank: int, size: int, tensors: Mapping[str, TensorPieces], checksum: Checksum
    ) -> None:
        self.temporary, self.rank, self.size = temporary, rank, size
        self.patience = PATIENCE
        self.bytes_of_others = 0
        """Bytes that the other ranks have written; known to rank 0 once all have."""
        self._tensors = tensors
        self._checksum: Checksum = checksum

    def write_shard(self, files: Mapping[str, Content], *, directory: Path) -> None:
        """Write, flush and report this rank's file, in the directory that rank 0 makes; for every other rank.

        Where that fails, rank 0 learns of it as far as the system allows.
        """
        shared, rank = directory / self.temporary, self.rank
        self._wait_until(lambda: os.path.isdir(shared), directory, who=lambda: "rank 0")
        try:
            os.close(os.open(shared / f"rank-{rank}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            (name,) = files
            entry = write_file(shared / name, files[name], checksum=self._checksum)
            tensors = self._tensors.items()
            pieces = {name: (piece.offsets, piece.sizes) for name, tensor in tensors for piece in tensor.pieces}
            self._report(shared, {"entry": entry, "pieces": pieces})
        except BaseException as error:
            _report_failure(shared, rank, error)
            raise

    def gather(self, shared: Path) -> dict[str, dict[str, Any]]:
        """Wait for all ranks and list the pieces; for rank 0. Return size and checksum of each file, all flushed.

        OSError where a rank was refused by its system or gave no sign for too long, CheckpointError for any other
        failure: then nothing may be published.
        """
        entries: dict[str, dict[str, Any]] = {}
        tensors = dict(self._tensors)
        for rank, report in self._reports(shared):
            file, expected = shard_file(rank), report["entry"]["size"]
            size = os.stat(shared / file).st_size
            if size != expected:
                raise OSError(errno.EIO, f"{file} of rank {rank} has {size} bytes and should have {expected}")
            entries[file] = report["entry"]
            self.bytes_of_others += size
            for name, (offsets, sizes) in report["pieces"].items():
                piece = Piece(file, tuple(offsets), tuple(sizes))
                tensors[name] = replace(tensors[name], pieces=(*tensors[name].pieces, piece))
        entries[INDEX] = write_file(shared / INDEX, index_text(tensors), checksum=self._checksum)
        for rank in range(1, self.size):
            for name in (f"rank-{rank}", f"rank-{rank}.json"):
                os.unlink(shared / name)
        return entries

    def _report(self, shared: Path, report: Mapping[str, Any]) -> None:
        draft = shared / f"rank-{self.rank}.draft"
        write_file(draft, json.dumps(report).encode("ascii"))
        os.rename(draft, shared / f"rank-{self.rank}.json")
        sync_directory(shared)

    def _reports(self, shared: Path) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the report of each other rank as it comes."""
        missing = set(range(1, self.size))

        def reported() -> list[int]:
            names = os.listdir(shared)
            _raise_failure(names, shared)
            return [rank for rank in missing if f"rank-{rank}.json" in names]

        while missing:
            for rank in self._wait_until(reported, shared, who=lambda: _named(missing)):
                missing.discard(rank)
                yield rank, _read_report(shared / f"rank-{rank}.json", self._tensors)

    def _wait_until(self, poll: Callable[[], T], directory: Path, *, who: Callable[[], str]) -> T:
        """Return the first true value of `poll`; TimeoutError after `patience` seconds without a change there."""
        pause, longest = _POLLS
        before, since = _listing(directory), time.monotonic()
        while not (result := poll()):
            now = _listing(directory)
            if now != before:
                before, since = now, time.monotonic()
            elif time.monotonic() - since >= self.patience:
                what = f"no sign of {who()} for {self.patience:g} seconds"
                raise TimeoutError(errno.ETIMEDOUT, what, str(directory))
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return result


def _listing(directory: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of each file: they change as long as any rank writes there."""
    listing = {}
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            with suppress(OSError):
                stat = entry.stat(follow_symlinks=False)
                listing[entry.name] = stat.st_size, stat.st_mtime_ns
    return listing


def _report_failure(shared: Path, rank: int, error: BaseException) -> None:
    """Report a failure: with its text where there is room for one, by the marker's name in any case."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__
    number = 0 if cause is None else cause.errno or 0
    failure = {"where": f"rank {rank} on {socket.gethostname()}", "error": f"{type(error).__name__}: {error}"}
    with suppress(Exception):  # the name of the marker has the number in any case
        write_file(shared / f"rank-{rank}.why", json.dumps(failure).encode("ascii"))
    failed = shared / f"rank-{rank}.failed-{number}"
    try:
        os.rename(shared / f"rank-{rank}", failed)
    except OSError:
        with suppress(OSError):
            os.mkdir(failed, 0o700)


def _raise_failure(names: list[str], shared: Path) -> None:
    """Raise the failure of any rank: an OSError where its system refused, so that a later save may succeed."""
    for match in filter(None, map(_FAILED.fullmatch, names)):
        failure = {"where": f"rank {match[1]}", "error": ""}
        with suppress(CheckpointError, OSError, ValueError, TypeError):
            failure |= json.loads(read_bytes(shared / f"rank-{match[1]}.why", limit=_LARGEST_FAILURE))
        number = int(match[2])
        if number:
            raise OSError(number, f"{os.strerror(number)} on {failure['where']}: {failure['error']}".removesuffix(": "))
        raise CheckpointError(f"{failure['where']} could not write its part: {failure['error']}".removesuffix(": "))


def _read_report(path: Path, tensors: Mapping[str, TensorPieces]) -> dict[str, Any]:
    """Return the report of one rank; CheckpointError where it does not fit."""
    report = json.loads(read_bytes(path, limit=_LARGEST_TEXT))
    if not is_entry(report["entry"]) or not set(report["pieces"]) <= set(tensors):
        raise CheckpointError(f"{path.name} does not fit the state of rank 0: the ranks save different states")
    return dict(report)


def _named(ranks: set[int]) -> str:
    numbers = ", ".join(str(rank) for rank in sorted(ranks)[:8]) + (" ..." if len(ranks) > 8 else "")
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"
