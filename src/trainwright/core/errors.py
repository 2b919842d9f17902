"""The errors of this library. A message states the problem, the value found, the value expected and a fix."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from types import FrameType

NOTE = "trainwright: "
"""The start of a note that is added to an error of user code or of torch."""
_ESCAPED = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class TrainwrightError(Exception):
    """Base class of the errors of this library, which otherwise raises `ValueError` and `TypeError` for arguments.

    Example: `raise SettingError("clip=-1", want="a number above 0", fix="clip=1.0")`. With `what` alone the text is not
    changed, as pickle and errors of other processes require.

    Args:
        what: The first line: the problem, such as the setting as it was written.
        have: A line with the value that was found.
        want: A line with the value that is expected.
        fix: A line with the code to write instead.
        where: Whether to add the current line of user code. None: if another line is given.
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
    """An invalid setting, or settings that contradict each other.

    Raised when the setting is given, or before the first update. During training it is raised only for user code there:
    a value that is set in a parameter group under a schedule, or a name that is logged twice.
    """


class DataError(TrainwrightError, ValueError):
    """Data that cannot be used: empty, exhausted, or of an unsupported form."""


class StepError(TrainwrightError, RuntimeError):
    """A step has returned no valid loss, or the graph of its loss is invalid when backward runs."""


class NonFiniteError(TrainwrightError, ArithmeticError):
    """A loss or a gradient is NaN or infinite. The update was not applied."""


class CheckpointError(TrainwrightError, RuntimeError):
    """A checkpoint that is missing or damaged, or belongs to another run or another model."""


class DistributedError(TrainwrightError, RuntimeError):
    """Another process of the run has failed, does not answer or has not started."""


class Stopped(SystemExit):
    """A signal has ended the run, after the current update and a save. The exit status is 128 + the signal's number.

    Args:
        number: The number of the signal.
        name: Its name, such as "SIGTERM".
    """

    def __init__(self, number: int, name: str) -> None:
        super().__init__(128 + number)
        self.signal = name
        """The name of the signal, such as "SIGTERM"."""

    def __reduce__(self) -> tuple[type[Stopped], tuple[int, str]]:
        """Support pickling, for errors of other processes."""
        return Stopped, (int(str(self.code)) - 128, self.signal)


def message(
    what: str, *, have: str | None = None, want: str | None = None, fix: str | None = None, where: bool = True
) -> str:
    """Return a message of several lines: the problem, then `have`, `want`, `fix` and the line of user code.

    For warnings and built-in errors; the errors of this library call it themselves. Control characters are escaped,
    since texts may come from untrusted files and are written to a terminal.
    """
    lines = [what]
    lines += [f"  {label:<6}{text}" for label, text in (("have", have), ("want", want), ("fix", fix)) if text]
    if where and (line := user_line()):
        lines.append(f"  {'where':<6}{line}")
    return "\n".join(lines).translate(_ESCAPED)


def first_line(error: BaseException, most: int | None = None) -> str:
    """Return the class of an error and the first line of its message, at most `most` characters."""
    return f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(": ")[:most]


def listed(names: Sequence[str], most: int = 4) -> str:
    """Return the first `most` names and the number of remaining ones, as text."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(name if name.isprintable() else repr(name) for name in names[:most]) + more


def notes_of(error: BaseException) -> list[str]:
    """Return the notes of an error (`add_note`)."""
    notes: list[str] = getattr(error, "__notes__", [])
    return notes


def user_line(frame: FrameType | None = None) -> str:
    """Return ``file:line`` of the innermost frame of user code; "" if there is none.

    `frame`: the frame to start from, also of another thread; by default the caller.
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
    """Issue a warning at the innermost line of user code, such as the call of `fit`."""
    frame, depth = sys._getframe(1), 2
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame, depth = frame.f_back, depth + 1
    warnings.warn(text, stacklevel=depth)


def is_ours(name: str) -> bool:
    """Return whether a file belongs to this package."""
    return os.path.abspath(name).startswith(_PACKAGE)


def is_users(name: str) -> bool:
    """Return whether a file is user code: neither of this package nor of an installed one."""
    return not is_ours(name) and "site-packages" not in name and not name.startswith("<") and "/lib/python" not in name


def not_built(name: str, instead: str = "") -> SettingError:
    """Return the error for a setting that is not implemented yet."""
    return SettingError(f"{name} is not built yet", fix=instead or f"leave {name} out")
