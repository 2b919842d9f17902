"""Checkpoints that all ranks write: each rank writes its pieces of sharded tensors into one file of the directory.

The ranks communicate through files in the temporary directory of the commit, never by a collective: so a slow, dead or
failed rank is visible. When the file of rank 3 is flushed, its report is renamed to `rank-3.json`. If writing fails,
its marker `rank-3` is renamed to `rank-3.failed-28`: the name takes no space and holds the number of the error. Rank 0
waits for all reports, checks that the pieces cover every tensor, and writes the list of pieces.

The list is JSON and the files are safetensors: they contain no code. In its file, a piece has the name of its tensor.
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
"""The file with the list of pieces."""
_VERSION = 1
PATIENCE = 300.0
"""Seconds without a change in the directory until a missing rank counts as dead."""
HURRY = 5.0
"""The same, in a run that ends with an error."""
_LARGEST_TEXT = 1 << 28
"""Maximum bytes read of the list of pieces, and of the report of one rank."""
_LARGEST_FAILURE = 1 << 20
"""Maximum bytes read of a rank's report of a failure."""
_POLLS = (0.01, 0.2)
"""Seconds between two listings of the directory: at first, and at most."""
_FAILED = re.compile(r"rank-(\d+)\.failed-(\d+)")


def shard_file(rank: int) -> str:
    """Return the name of the file with the pieces of one rank."""
    return f"shard-{rank:05d}.safetensors"


def split_shards(tree: Mapping[str, Tree], *, rank: int) -> Split:
    """Return `{part: state}` without its sharded tensors, and the pieces of one rank.

    CheckpointError names a tensor that cannot be saved.
    """
    from trainwright.distributed.resharding import split  # imports torch's DCP: for sharded models alone

    return split(tree, file=shard_file(rank), dtypes=tensorfile.TAGS)


# Reading


class ShardReader:
    """Reads the sharded tensors of one checkpoint. `entries`: size and checksum of each file."""

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
        """Return `name` if it is in the list of pieces; else CheckpointError."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.path / INDEX} is damaged: it does not list {name}")
        return name

    def read(self, file: str, *, fill: bool = True) -> Mapping[str, Tensor]:
        """Return the pieces in one file, each byte checked. CheckpointError if they differ from the list.

        `fill`: False returns tensors without values.
        """
        entry = self._entries[file]
        tensors = read_file(self.path / file, partial(tensorfile.read, fill=fill), expected=entry).tensors
        for name, piece in self._by_file[file]:
            stored, dtype = tensors.get(name), self.tensors[name].dtype
            if stored is None or (stored.dtype, tuple(stored.shape)) != (dtype, piece.sizes):
                raise CheckpointError(f"{self.path / file} is damaged: {name} differs from its entry in {INDEX}")
        return tensors

    def check(self, files: Iterable[str]) -> None:
        """Raise CheckpointError if one of the files is damaged."""
        for file in files:
            self.read(file, fill=False)

    def assemble(self, names: Collection[str]) -> dict[str, Tensor]:
        """Return complete tensors on the CPU. One file at a time is in memory."""
        complete = {name: torch.empty(self.tensors[name].shape, dtype=self.tensors[name].dtype) for name in names}
        for file in self.files:
            wanted = [(name, piece) for name, piece in self._by_file[file] if name in complete]
            tensors = self.read(file) if wanted else {}
            for name, piece in wanted:
                complete[name][piece.box] = tensors[name]
        return complete


def read_shards(path: Path, entries: Mapping[str, Mapping[str, Any]]) -> ShardReader:
    """Return the reader of a checkpoint with sharded tensors. CheckpointError if the list of pieces is damaged."""
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
    """Return the list of pieces as JSON. CheckpointError if the pieces of a tensor do not cover it exactly."""
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
    """The part of one rank in a save by all ranks.

    `temporary`: name of the shared directory. `tensors`: every sharded tensor with the pieces of this rank. The
    training thread may change `patience` while the writer thread waits for other ranks.
    """

    def __init__(
        self, temporary: str, *, rank: int, size: int, tensors: Mapping[str, TensorPieces], checksum: Checksum
    ) -> None:
        self.temporary, self.rank, self.size = temporary, rank, size
        self.patience = PATIENCE
        self.bytes_of_others = 0
        """Bytes written by the other ranks. Set on rank 0 by `gather`."""
        self._tensors = tensors
        self._checksum: Checksum = checksum

    def write_shard(self, files: Mapping[str, Content], *, directory: Path) -> None:
        """Write, flush and report the file of this rank, in the directory made by rank 0. Not for rank 0.

        A failure is reported to rank 0, as far as the system allows.
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
        """Wait for all ranks, and write the list of pieces. Return size and checksum of each flushed file. For rank 0.

        OSError if the system refused a rank's write, or if a rank gave no sign within `patience`. CheckpointError for
        any other failure.
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
        """Yield (rank, report) of each other rank in the order of arrival."""
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
        """Return the first true value of `poll`. TimeoutError after `patience` seconds without a change of files."""
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
    """Return name -> (size, time) of each file. They change while a rank writes."""
    listing = {}
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            with suppress(OSError):
                stat = entry.stat(follow_symlinks=False)
                listing[entry.name] = stat.st_size, stat.st_mtime_ns
    return listing


def _report_failure(shared: Path, rank: int, error: BaseException) -> None:
    """Report a failure: by the name of the marker, and with its text if there is space."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__
    number = 0 if cause is None else cause.errno or 0
    failure = {"where": f"rank {rank} on {socket.gethostname()}", "error": f"{type(error).__name__}: {error}"}
    with suppress(Exception):  # the name of the marker holds the error number in any case
        write_file(shared / f"rank-{rank}.why", json.dumps(failure).encode("ascii"))
    failed = shared / f"rank-{rank}.failed-{number}"
    try:
        os.rename(shared / f"rank-{rank}", failed)
    except OSError:
        with suppress(OSError):
            os.mkdir(failed, 0o700)


def _raise_failure(names: list[str], shared: Path) -> None:
    """Raise the failure of a rank: an OSError if its system refused the write, so that a later save may succeed."""
    for match in filter(None, map(_FAILED.fullmatch, names)):
        failure = {"where": f"rank {match[1]}", "error": ""}
        with suppress(CheckpointError, OSError, ValueError, TypeError):
            failure |= json.loads(read_bytes(shared / f"rank-{match[1]}.why", limit=_LARGEST_FAILURE))
        number = int(match[2])
        if number:
            raise OSError(number, f"{os.strerror(number)} on {failure['where']}: {failure['error']}".removesuffix(": "))
        raise CheckpointError(f"{failure['where']} could not write its part: {failure['error']}".removesuffix(": "))


def _read_report(path: Path, tensors: Mapping[str, TensorPieces]) -> dict[str, Any]:
    """Return the report of one rank. CheckpointError if it has another form."""
    report = json.loads(read_bytes(path, limit=_LARGEST_TEXT))
    if not is_entry(report["entry"]) or not set(report["pieces"]) <= set(tensors):
        raise CheckpointError(f"{path.name} does not fit the state of rank 0: the ranks save different states")
    return dict(report)


def _named(ranks: set[int]) -> str:
    numbers = ", ".join(str(rank) for rank in sorted(ranks)[:8]) + (" ..." if len(ranks) > 8 else "")
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"
