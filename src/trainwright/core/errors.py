"""The errors of this library: what is wrong, what was given, what was expected, and what to write instead."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from types import FrameType

NOTE = "trainwright: "
"""The start of a note that is added to an error of the user's or torch's."""
_ESCAPED = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class TrainwrightError(Exception):
    """Any error that this library raises on purpose, in addition to `ValueError` and `TypeError` for arguments.

    `raise SettingError("clip=-1", want="a number above 0", fix="clip=1.0")` refuses a setting. A text alone stays as it
    is, as pickle and errors from other processes need.

    Args:
        what: What is wrong, as it was given.
        have: A line with what was found.
        want: A line with what is expected.
        fix: A line of code to write instead.
        where: Whether to add the user's line that led here. None: where one of the other lines is given.
    """

    def __init__(
        self,
        what: str = "",
        *,
        have: str | None = None,
        want: str | None = None,
        fix: str | None = None,
        where: bool | None = None,
    ) -> None:
        is_plain = have is None and want is None and fix is None and where is None
        laid_out = what if is_plain else message(what, have=have, want=want, fix=fix, where=where is not False)
        super().__init__(laid_out)


class SettingError(TrainwrightError, ValueError):
    """A setting, or two settings together, that cannot work.

    Raised when it is given or before the first update; during training only where user code causes it there, as by a
    value of a parameter group that is set by hand under a schedule, or by a name that is logged twice.
    """


class DataError(TrainwrightError, ValueError):
    """Data that cannot be trained on: empty, exhausted, or of a form that no step can read."""


class StepError(TrainwrightError, RuntimeError):
    """A step returned something that is no loss, or its graph is no longer valid when backward runs."""


class NonFiniteError(TrainwrightError, ArithmeticError):
    """A loss or a gradient was not finite; no weight was changed by it."""


class CheckpointError(TrainwrightError, RuntimeError):
    """A checkpoint that is missing, damaged, of another run or of another model."""


class DistributedError(TrainwrightError, RuntimeError):
    """Another process of the run has failed, does not answer or has not started."""


class Stopped(SystemExit):
    """A signal has ended the run, after its update and a save; the exit status is 128 plus the signal's number.

    Args:
        number: The number of the signal.
        name: Its name, such as "SIGTERM".
    """

    def __init__(self, number: int, name: str) -> None:
        super().__init__(128 + number)
        self.signal = name
        """The name of the signal: "SIGTERM"."""

    def __reduce__(self) -> tuple[type[Stopped], tuple[int, str]]:
        """It may be raised in another process and pickled."""
        return Stopped, (int(str(self.code)) - 128, self.signal)


def message(
    what: str, *, have: str | None = None, want: str | None = None, fix: str | None = None, where: bool = True
) -> str:
    """Return a message in lines: what is wrong, then `have`, `want`, `fix` and the line of user code.

    For warnings and built-in errors; errors of this library lay out their own. Control characters are escaped: a text
    may come from a file of an unknown author, and goes to a terminal.
    """
    lines = [what]
    lines += [f"  {label:<6}{text}" for label, text in (("have", have), ("want", want), ("fix", fix)) if text]
    if where and (line := user_line()):
        lines.append(f"  {'where':<6}{line}")
    return "\n".join(lines).translate(_ESCAPED)


def first_line(error: BaseException, most: int | None = None) -> str:
    """Return the class of an error and the first line of its text, cut after `most` characters."""
    return f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(": ")[:most]


def listed(names: Sequence[str], most: int = 4) -> str:
    """Return the first `most` names, and the number of the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(name if name.isprintable() else repr(name) for name in names[:most]) + more


def notes_of(error: BaseException) -> list[str]:
    """Return the notes that were added to an error."""
    notes: list[str] = getattr(error, "__notes__", [])
    return notes


def user_line(frame: FrameType | None = None) -> str:
    """Return ``file:line`` of the innermost frame of user code, or "".

    `frame`: where to begin, by default at the caller; it may be of another thread.
    """
    frame = sys._getframe(1) if frame is None else frame
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return ""


def warn_user(text: str) -> None:
    """Warn at the innermost line of user code, such as the call of `fit`."""
    frame, depth = sys._getframe(1), 2
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame, depth = frame.f_back, depth + 1
    warnings.warn(text, stacklevel=depth)


def is_ours(name: str) -> bool:
    """Return whether a file is one of this package."""
    return os.path.abspath(name).startswith(_PACKAGE)


def is_users(name: str) -> bool:
    """Return whether a file is neither of this package nor of an installed one."""
    return not is_ours(name) and "site-packages" not in name and not name.startswith("<") and "/lib/python" not in name


def not_built(name: str, instead: str = "") -> SettingError:
    """Return the error that refuses a setting that is not implemented yet."""
    return SettingError(f"{name} is not built yet", fix=instead or f"leave {name} out")
