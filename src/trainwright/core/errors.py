"""Say what was given, what was expected and what to write instead."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from types import FrameType

NOTE = "trainwright: "
"""What a note that is added to an error of others begins with."""
_ESCAPED = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class TrainwrightError(Exception):
    """Any error that this library raises on purpose, beside ``ValueError`` and ``TypeError`` for arguments."""


class SettingError(TrainwrightError, ValueError):
    """A setting, or two settings together, that cannot work; raised before the first update."""


class DataError(TrainwrightError, ValueError):
    """Data that cannot be trained on: empty, used up, or of a form that no step can read."""


class StepError(TrainwrightError, RuntimeError):
    """A step returned something that is no loss, or what it computed no longer holds when its backward runs."""


class NonFiniteError(TrainwrightError, ArithmeticError):
    """A loss or a gradient was not finite; no weight was changed by it."""


class Stopped(SystemExit):
    """A signal has ended the run, after its update and a save; the process exits with 128 and the signal's number."""

    def __init__(self, number: int, name: str) -> None:
        super().__init__(128 + number)
        self.signal = name
        """What the signal is called: "SIGTERM"."""

    def __reduce__(self) -> tuple[type[Stopped], tuple[int, str]]:
        """It may come out of another process."""
        return Stopped, (int(str(self.code)) - 128, self.signal)


class CheckpointError(TrainwrightError, RuntimeError):
    """A checkpoint that is missing, damaged, of another run or of another model."""


class DistributedError(TrainwrightError, RuntimeError):
    """Another process of the run has failed, does not answer or has not come."""


def first_line(error: BaseException, most: int | None = None) -> str:
    """Say an error in a line: its class and the first line of its text, `most` letters of both at most."""
    return f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(": ")[:most]


def listed(names: Sequence[str], most: int = 4) -> str:
    """The first `most` names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(name if name.isprintable() else repr(name) for name in names[:most]) + more


def message(what: str, *, have: str = "", want: str = "", fix: str = "", where: bool = True) -> str:
    """Lay out an error message: what is wrong, then `have`, `want`, `fix` and the user's own line.

    Control characters are escaped: what is shown may come from a file of somebody else, and goes to a terminal.
    """
    lines = [what]
    lines += [f"  {label:<6}{text}" for label, text in (("have", have), ("want", want), ("fix", fix)) if text]
    if where and (line := user_line()):
        lines.append(f"  {'where':<6}{line}")
    return "\n".join(lines).translate(_ESCAPED)


def user_line(frame: FrameType | None = None) -> str:
    """``file:line`` of the innermost frame that is neither ours nor an installed package's, or "".

    Seen from `frame`, which may be another thread's; from the caller where none is given.
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
    """Warn at the user's line that has led here, such as the call of `fit`, however deep the call is nested."""
    frame, depth = sys._getframe(1), 2
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame, depth = frame.f_back, depth + 1
    warnings.warn(text, stacklevel=depth)


def is_ours(name: str) -> bool:
    """Whether a file is one of this package."""
    return os.path.abspath(name).startswith(_PACKAGE)


def is_users(name: str) -> bool:
    """Whether a file is neither ours nor an installed package's."""
    return not is_ours(name) and "site-packages" not in name and not name.startswith("<") and "/lib/python" not in name


def not_built(name: str, instead: str = "") -> SettingError:
    """Refuse a setting whose part is designed but not built yet, by name."""
    return SettingError(message(f"{name} is not built yet", fix=instead or f"leave {name} out"))
