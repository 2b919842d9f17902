"""One checkpoint written by all processes: each lays its file into one directory, the first sees that all is there.

They meet in the temporary directory of the commit, and nowhere else: no process waits for another in a collective, and
who is slow, dead or refused by its disk is known by what lies there. When the file of process 3 is durable, its report
`rank-3.json` gets its name; where it fails, its marker `rank-3` is renamed to `rank-3.failed-28`, which takes no space
and tells the number of the error. The first process waits for all reports, then writes the list of the pieces.
"""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainwright.checkpointing import tensorfile
from trainwright.checkpointing.checksums import Checksum
from trainwright.checkpointing.files import is_entry, read_file, sync_directory, write_file
from trainwright.checkpointing.pieces import INDEX, Piece, Whole, index_text
from trainwright.core.errors import CheckpointError

PATIENCE = 300.0
"""Seconds without any change in the directory after which a process is taken for gone."""
HURRY = 5.0
"""The same where a run ends in an error."""
_LARGEST_REPORT = 1 << 28
_POLLS = (0.01, 0.2)
"""Seconds between two looks: the first, and the longest."""


def shard_file(rank: int) -> str:
    """The name of the file with the pieces that one process writes."""
    return f"shard-{rank:05d}.safetensors"


class Patience:
    """How long a process waits for others; it is changed by the thread of training while another one waits."""

    def __init__(self) -> None:
        self.seconds = PATIENCE


@dataclass(frozen=True, slots=True, eq=False)
class Meeting:
    """The processes that write one checkpoint, and the name of the directory where they meet."""

    name: str
    rank: int
    size: int
    patience: Patience
    written: dict[str, int] = field(default_factory=dict)
    """Bytes that the other processes have written, by file; known when all is there."""

    @property
    def others(self) -> list[int]:
        """All processes but the first."""
        return list(range(1, self.size))


@dataclass(frozen=True, slots=True, eq=False)
class Joining:
    """What the first process does in the directory after its own files: wait for the others, and list the pieces."""

    meeting: Meeting
    wholes: Mapping[str, Whole]
    """The sharded tensors, with this process's pieces."""
    checksum: Checksum

    def __call__(self, directory: Path) -> dict[str, dict[str, Any]]:
        """Size and checksum of each file that has come to lie there, all durable.

        OSError where a process was refused by its system or gave no sign for too long, CheckpointError for anything
        else: then nothing may be published.
        """
        entries: dict[str, dict[str, Any]] = {}
        wholes = dict(self.wholes)
        for rank, report in self._reports(directory):
            file = shard_file(rank)
            found = os.stat(directory / file).st_size
            if found != report["entry"]["size"]:
                raise OSError(
                    errno.EIO, f"{file} of process {rank} has {found} bytes, {report['entry']['size']} are due"
                )
            entries[file] = report["entry"]
            self.meeting.written[file] = found
            for name, (offsets, sizes) in report["pieces"].items():
                piece = Piece(file, tuple(offsets), tuple(sizes))
                wholes[name] = replace(wholes[name], pieces=(*wholes[name].pieces, piece))
        entries[INDEX] = write_file(directory / INDEX, index_text(wholes), checksum=self.checksum)
        for rank in self.meeting.others:
            for left in (f"rank-{rank}", f"rank-{rank}.json"):
                os.unlink(directory / left)
        return entries

    def _reports(self, directory: Path) -> Iterator[tuple[int, dict[str, Any]]]:
        """The report of each other process as it comes."""
        missing = set(self.meeting.others)

        def look() -> list[int]:
            names = os.listdir(directory)
            _raise_failed(names, directory)
            return [rank for rank in missing if f"rank-{rank}.json" in names]

        while missing:
            for rank in _awaited(look, directory, patience=self.meeting.patience, who=lambda: _named(missing)):
                missing.discard(rank)
                yield rank, _read_report(directory / f"rank-{rank}.json", self.wholes)


@dataclass(frozen=True, slots=True, eq=False)
class Contribution:
    """What every other process does: write its file into the directory that the first has made, and report it."""

    meeting: Meeting
    root: Path
    contents: tensorfile.Contents
    wholes: Mapping[str, Whole]
    checksum: Checksum

    def __call__(self) -> None:
        """Write, fsync, report. Where that fails, the first process is told as far as the system allows it."""
        directory, rank = self.root / self.meeting.name, self.meeting.rank
        _awaited(
            lambda: os.path.isdir(directory), self.root, patience=self.meeting.patience, who=lambda: "the first process"
        )
        try:
            os.close(os.open(directory / f"rank-{rank}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            entry = write_file(directory / shard_file(rank), self.contents, checksum=self.checksum)
            pieces = {name: (one.offsets, one.sizes) for name, whole in self.wholes.items() for one in whole.pieces}
            self._report(directory, {"entry": entry, "pieces": pieces})
        except BaseException as error:
            _tell_failure(directory, rank, error)
            raise

    def _report(self, directory: Path, report: Mapping[str, Any]) -> None:
        draft = directory / f"rank-{self.meeting.rank}.draft"
        write_file(draft, json.dumps(report).encode("ascii"))
        os.rename(draft, directory / f"rank-{self.meeting.rank}.json")
        sync_directory(directory)


def _awaited(look: Callable[[], Any], directory: Path, *, patience: Patience, who: Callable[[], str]) -> Any:
    """What `look` finds; TimeoutError where the directory stays as it is for longer than the patience lasts."""
    pause, longest = _POLLS
    before, since = _state(directory), time.monotonic()
    while not (found := look()):
        now = _state(directory)
        if now != before:
            before, since = now, time.monotonic()
        elif time.monotonic() - since >= patience.seconds:
            raise TimeoutError(
                errno.ETIMEDOUT, f"nothing was heard of {who()} for {patience.seconds:g} seconds", str(directory)
            )
        time.sleep(pause)
        pause = min(2 * pause, longest)
    return found


def _state(directory: Path) -> dict[str, tuple[int, int]]:
    """What changes as long as anybody is at work there."""
    found = {}
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            with suppress(OSError):
                stat = entry.stat(follow_symlinks=False)
                found[entry.name] = stat.st_size, stat.st_mtime_ns
    return found


def _tell_failure(directory: Path, rank: int, error: BaseException) -> None:
    """Say what failed: in words where there is room for them, by the marker's name in any case."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, OSError):
        seen = seen.__cause__
    number = 0 if seen is None else seen.errno or 0
    said = {"where": f"process {rank} on {socket.gethostname()}", "error": f"{type(error).__name__}: {error}"}
    with suppress(Exception):  # the name of the marker says what must be said
        write_file(directory / f"rank-{rank}.why", json.dumps(said).encode("ascii"))
    failed = directory / f"rank-{rank}.failed-{number}"
    try:
        os.rename(directory / f"rank-{rank}", failed)
    except OSError:
        with suppress(OSError):
            os.mkdir(failed, 0o700)


_FAILED = re.compile(r"rank-(\d+)\.failed-(\d+)")


def _raise_failed(names: list[str], directory: Path) -> None:
    """Raise what any process has met: an OSError where its system refused, so that a later save may go well."""
    for match in filter(None, map(_FAILED.fullmatch, names)):
        said = {"where": f"process {match[1]}", "error": ""}
        with suppress(CheckpointError, OSError, ValueError, TypeError):
            why = directory / f"rank-{match[1]}.why"
            said |= json.loads(read_file(why, lambda file: file.read_all(limit=1 << 20)))
        number = int(match[2])
        if number:
            raise OSError(number, f"{os.strerror(number)}, says {said['where']}: {said['error']}".removesuffix(": "))
        raise CheckpointError(f"{said['where']} could not write its part: {said['error']}".removesuffix(": "))


def _read_report(path: Path, wholes: Mapping[str, Whole]) -> dict[str, Any]:
    """The report of one process; CheckpointError where it is not one."""
    report = json.loads(read_file(path, lambda file: file.read_all(limit=_LARGEST_REPORT)))
    if not is_entry(report["entry"]) or not set(report["pieces"]) <= set(wholes):
        raise CheckpointError(f"{path.name} does not fit what the first process saves: the processes save other states")
    return dict(report)


def _named(ranks: set[int]) -> str:
    shown = ", ".join(str(rank) for rank in sorted(ranks)[:8]) + (" ..." if len(ranks) > 8 else "")
    return f"process {shown}" if len(ranks) == 1 else f"processes {shown}"
