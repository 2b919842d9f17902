"""Takes the disk away from a training for a while, in each way that a system can refuse, and judges what it does."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import stat
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import children
from .adapters import words_of
from .children import Ended, When
from .judging import Reference, Subject, Table, Verdict, judge, reference_of

BYTES = 70_000
"""How much is written before a disk is full: the first file of a save is cut off inside."""


class Fault:
    """Something that fails from `start` to `stop`; both are called in the training's process."""

    reason = ""
    """What a message must say, as the system puts it."""
    mends = False
    """Whether a library may help itself, so that no save fails; it must say so all the same."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def start(self) -> None:
        """Begin to fail."""

    def stop(self) -> None:
        """Fail no more."""


class Refusing(Fault):
    """Functions of `os` that raise; for libraries that write with them alone."""

    def __init__(self, directory: Path, code: int, names: tuple[str, ...], *, kind: str = "") -> None:
        super().__init__(directory)
        self.reason, self._code, self._kind, self._left = os.strerror(code), code, kind, BYTES
        self._real = {name: getattr(os, name) for name in names}

    def start(self) -> None:
        """Put refusing functions in their places."""
        for name, real in self._real.items():
            setattr(os, name, self._refusing(name, real))

    def stop(self) -> None:
        """Put the real ones back."""
        for name, real in self._real.items():
            setattr(os, name, real)

    def _refusing(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def refusing(*given: Any, **named: Any) -> Any:
            if self._concerns(name, given):
                raise OSError(self._code, os.strerror(self._code))
            return real(*given, **named)

        return refusing

    def _concerns(self, name: str, given: tuple[Any, ...]) -> bool:
        if name == "open":
            return bool(given[1] & os.O_CREAT) and Path(given[0]).is_relative_to(self.directory)
        if name not in ("write", "fsync"):
            return Path(given[0]).is_relative_to(self.directory)
        is_file = stat.S_ISREG(os.fstat(given[0]).st_mode)
        if name == "fsync":
            return is_file == (self._kind == "file")
        self._left -= len(given[1]) if is_file else 0
        return is_file and self._left < 0


class Short(Fault):
    """Files that may not grow beyond a size."""

    reason = os.strerror(errno.EFBIG)

    def start(self) -> None:
        """Limit them."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (BYTES, resource.RLIM_INFINITY))

    def stop(self) -> None:
        """Lift the limit."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


class Away(Fault):
    """A directory that is gone, and comes back: a network drive, a hand that slipped."""

    reason = "vanished"
    mends = True  # by making it anew

    def start(self) -> None:
        """Move it away."""
        self.directory.rename(self.directory.with_name("away"))

    def stop(self) -> None:
        """Move it back."""
        if not self.directory.exists():  # else the library has made it anew, and that is where the run lies now
            self.directory.with_name("away").rename(self.directory)


class Ballast(Fault):
    """A file system that is really full; only where it is a small one (`--tmpfs`)."""

    reason = os.strerror(errno.ENOSPC)

    def start(self) -> None:
        """Fill it."""
        fd = os.open(self.directory.with_name("ballast"), os.O_WRONLY | os.O_CREAT, 0o600)
        for size in (1 << 20, 1 << 12):
            try:
                while True:
                    os.write(fd, bytes(size))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
        os.close(fd)

    def stop(self) -> None:
        """Empty it; a process that is killed late may have done so."""
        self.directory.with_name("ballast").unlink(missing_ok=True)


REFUSING: dict[str, Callable[[Path], Fault]] = {
    "disk full": lambda path: Refusing(path, errno.ENOSPC, ("write",)),
    "quota": lambda path: Refusing(path, errno.EDQUOT, ("write",)),
    "write fails": lambda path: Refusing(path, errno.EIO, ("write",)),
    "fsync of a file fails": lambda path: Refusing(path, errno.EIO, ("fsync",), kind="file"),
    "fsync of a directory fails": lambda path: Refusing(path, errno.EIO, ("fsync",), kind="directory"),
    "rename fails": lambda path: Refusing(path, errno.EIO, ("rename", "replace")),
    "read-only": lambda path: Refusing(path, errno.EROFS, ("mkdir", "open", "rename", "replace", "unlink", "rmdir")),
}
EVERYWHERE: dict[str, Callable[[Path], Fault]] = {"file too large": Short, "directory away": Away}
FULL: dict[str, Callable[[Path], Fault]] = {"full file system": Ballast}


def fault_all(
    subject: Subject, base: Path, *, full: bool, command: str, only: str, note: Callable[[str], None]
) -> Table:
    """Try every fault (those whose name holds `only`); `command` repeats one, where its name is filled in."""
    reference = reference_of(subject, base)
    shutil.rmtree(base / "reference")
    note(f"{subject.name}: from update {_spell(subject)[0]} until {_spell(subject)[1]} saves fail")
    refusing = REFUSING if getattr(subject.adapter, "WRITES_WITH_OS", False) else {}
    table = Table(subject.name)
    for name, make in (FULL if full else {**refusing, **EVERYWHERE}).items():
        for how, trial in (("", _goes_on), (", killed", _killed), (", raise", _raises)):
            if only not in name + how or (trial is _raises and "raise" not in subject.adapter.WORDS):
                continue
            verdict = trial(subject, reference, base, make)
            table.add(verdict, command.format(name=name + how))
            note(f"{name + how}: {verdict.word} {verdict.why}")
            for left in ("run", "away"):
                shutil.rmtree(base / left, ignore_errors=True)
            (base / "ballast").unlink(missing_ok=True)
    children.groups.clear()
    return table


def _spell(subject: Subject) -> tuple[int, int]:
    """Updates from which, and until which, the disk is away: two saves fall between."""
    every = subject.task.every
    return 2 * every + every // 2, 4 * every + every // 2


def _goes_on(subject: Subject, reference: Reference, base: Path, make: Callable[[Path], Fault]) -> Verdict:
    """The training must not care, must say so, and must save again as soon as it can."""
    fault = make(base / "run")
    ran = _run(subject, base, fault)
    last = ran.lines[-1] if ran.lines else None
    if ran.code or last is None:
        return _failed(ran)
    if last.words != reference.ended:
        return Verdict("drift", why="a save that failed has changed the run")
    due = subject.task.updates // subject.task.every * subject.task.every
    if ran.last("saved") < due:
        return Verdict("lost", why=f"the last save was that of update {ran.last('saved')}, {due} was due")
    return _received(ran, fault)


def _killed(subject: Subject, reference: Reference, base: Path, make: Callable[[Path], Fault]) -> Verdict:
    """Killed while the disk is away, it goes on from what was saved before."""
    fault = make(base / "run")
    ran = _run(subject, base, fault, When(0, f"update {_spell(subject)[1] - 1}"))
    if not ran.struck:
        return _failed(ran)
    if isinstance(fault, Away | Ballast):
        fault.stop()
    verdict = judge(reference, _run(subject, base, None), acked=ran.last("saved"), made=ran.last("update"))
    assert verdict is not None
    return verdict


def _raises(subject: Subject, reference: Reference, base: Path, make: Callable[[Path], Fault]) -> Verdict:
    """Asked to, it ends in an error that says why; and goes on when the disk is back."""
    fault = make(base / "run")
    words = words_of(subject.adapter, f"{subject.variant}+raise")
    ran = _run(replace(subject, words=words), base, fault)
    if ran.code == 0 and fault.mends:
        return _received(ran, fault)
    if ran.code == 0:
        return Verdict("silent", why="it did not raise")
    if isinstance(fault, Away | Ballast):
        fault.stop()
    verdict = judge(reference, _run(subject, base, None), acked=ran.last("saved"), made=ran.last("update"))
    assert verdict is not None
    return verdict if verdict.word != "ok" else _received(ran, fault)


def _run(subject: Subject, base: Path, fault: Fault | None, when: When | None = None) -> Ended:
    log = Path(tempfile.gettempdir()) / f"{base.parent.name}.log"  # not on the disk that is away
    log.unlink(missing_ok=True)
    first, last = _spell(subject)

    def at(what: str, update: int) -> None:
        if fault is not None and what == "update" and update in (first, last):
            (fault.start if update == first else fault.stop)()

    try:
        return children.run(subject.script(base / "run", at=at), log, when=when)
    finally:
        log.unlink(missing_ok=True)


def _failed(ran: Ended) -> Verdict:
    lines = [line for line in ran.log.splitlines() if line and not line.startswith(" ")]
    return Verdict("error", why=f"exit code {ran.code}: {lines[-1][:200] if lines else ''}")


def _received(ran: Ended, fault: Fault) -> Verdict:
    missing = [text for text in (fault.reason, str(fault.directory)) if text not in ran.log]
    return Verdict("silent", why=f"it does not say {missing}") if missing else Verdict("ok")
