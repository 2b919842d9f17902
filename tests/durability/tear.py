"""Damages every file of the newest checkpoint in every way that a disk can, and judges how the run goes on."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from . import children
from .children import Ended, When
from .judging import Reference, Subject, Table, Verdict, judge, reference_of

TO_THE_END = 8
"""One in this many goes on to its end; the others only until they have shown where they go on."""


def tear_all(subject: Subject, base: Path, *, seed: int, command: str, only: str, note: Callable[[str], None]) -> Table:
    """Try every damage (those whose name holds `only`); `command` repeats one, where its name is filled in."""
    reference = reference_of(subject, base)
    master, older = _master(subject, base)
    newest = subject.adapter.checkpoints(master)[0]
    note(f"{subject.name}: seed {seed}; damages {newest.name}, falls back on update {older}")
    table = Table(subject.name)
    for nth, (name, file, damage) in enumerate(_all_damages(newest, random.Random(seed))):
        if only not in name or (file == newest and "is gone" in name):
            continue
        copy = base / "copy"
        shutil.copytree(master, copy, symlinks=True)
        damage(copy / file.relative_to(master))
        ran = _resume(subject, copy, to_the_end=nth % TO_THE_END == 0)
        verdict = _judged(reference, ran, older=older, newest=newest.name)
        table.add(verdict, command.format(name=name))
        if verdict.word != "ok":
            note(f"{name}: {verdict.word}: {verdict.why}")
        shutil.rmtree(copy)
    if only in "every checkpoint":
        table.add(_all_gone(subject, master, base / "copy"), command.format(name="every checkpoint"))
    children.groups.clear()
    return table


def _master(subject: Subject, base: Path) -> tuple[Path, int]:
    """A directory with several checkpoints of an unfinished run, and the update of the last but one."""
    saves = [update for update in range(subject.task.every, subject.task.updates, subject.task.every)]
    master = base / "master"
    subject.run(master, when=When(0, f"saved {saves[len(saves) * 2 // 3]}"))
    _resume(subject, master)  # what the kill has left half done is cleaned up
    without = base / "without"
    shutil.copytree(master, without, symlinks=True)
    newest = subject.adapter.checkpoints(without)[0]
    shutil.rmtree(newest) if newest.is_dir() else newest.unlink()
    first = _resume(subject, without).first("resumed")
    assert first is not None, "a run without its newest checkpoint cannot go on"
    return master, first.update


def _resume(subject: Subject, directory: Path, *, to_the_end: bool = False) -> Ended:
    return subject.run(directory, when=None if to_the_end else When(0, "resumed"))


def _judged(reference: Reference, ran: Ended, *, older: int, newest: str) -> Verdict:
    verdict = judge(reference, ran, acked=older)
    assert verdict is not None
    first = ran.first("resumed")
    if verdict.word == "ok" and first is not None and first.update == older and newest not in ran.log:
        return Verdict("silent", why=f"it goes on from update {older} and does not say why")
    return verdict


def _all_gone(subject: Subject, master: Path, copy: Path) -> Verdict:
    """Where no checkpoint is whole, an error is right, and to start again without a word is wrong."""
    shutil.copytree(master, copy, symlinks=True)
    for checkpoint in subject.adapter.checkpoints(copy):
        for file in _files(checkpoint):
            _cut(0)(file)
    ran = _resume(subject, copy)
    shutil.rmtree(copy)
    first = ran.first("resumed")
    if first is None:
        return Verdict("ok")
    return Verdict("scratch" if not first.update else "mixed", why="no checkpoint was whole")


def _files(checkpoint: Path) -> list[Path]:
    return [path for path in sorted(checkpoint.rglob("*")) if path.is_file()] if checkpoint.is_dir() else [checkpoint]


def _all_damages(checkpoint: Path, rng: random.Random) -> Iterator[tuple[str, Path, Callable[[Path], None]]]:
    for file in _files(checkpoint):
        for name, damage in _damages(file.read_bytes(), rng):
            yield f"{file.name} {name}", file, damage


def _damages(data: bytes, rng: random.Random) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """Each way to damage a file of this content: cut, flipped, zeroed, longer, replaced, gone."""
    size, header = len(data), _header(data)
    yield "is gone", Path.unlink
    marks = {0, 1, 7, 8, 9, header - 1, header, header + 1, 4096, size // 2, (size + header) // 2, size - 1}
    for at in sorted(at for at in marks if 0 <= at < size):
        yield f"is cut at {at} of {size}", _cut(at)
    regions = {"length": (0, 8), "header": (8, header), "data": (header, size), "end": (size - 8, size)}
    for region, (first, last) in regions.items():
        for _ in range(2):
            at, bit = rng.randrange(max(first, 0), max(last, first + 1)), rng.randrange(8)
            if at < size:
                yield f"has bit {bit} of byte {at} ({region}) flipped", _flip(at, bit)
    yield "has nothing but zeros", _zero(0)
    yield "ends in a page of zeros", _zero(max(0, size - 4096))
    yield "is longer by a byte", lambda path: _write(path, data + b"\0")
    yield "is a directory", lambda path: (path.unlink(), path.mkdir())[1]
    yield "is a link to itself", lambda path: (path.unlink(), path.symlink_to(path))[1]


def _header(data: bytes) -> int:
    """Where the header of a safetensors file ends; a third of any other file."""
    length = int.from_bytes(data[:8], "little")
    return 8 + length if length < len(data) else len(data) // 3


def _cut(at: int) -> Callable[[Path], None]:
    return lambda path: _write(path, path.read_bytes()[:at])


def _flip(at: int, bit: int) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[at] ^= 1 << bit
        _write(path, bytes(data))

    return flip


def _zero(first: int) -> Callable[[Path], None]:
    def zero(path: Path) -> None:
        data = path.read_bytes()
        _write(path, data[:first] + bytes(len(data) - first))

    return zero


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
