"""Checks of single settings (numbers, flags, choices) and of the form of saved state; settings as text.

Checks of settings raise SettingError. `written`: the setting as the user wrote it. `fix`: the code to write instead.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

from trainwright.core.errors import SettingError

_HOLDS = {"at least": operator.ge, "above": operator.gt, "at most": operator.le, "below": operator.lt}

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")
"""The start of a URL such as "s3://bucket/run", also in the form "s3:/bucket/run" that `Path` makes of it.

At least two letters: one letter is a Windows drive.
"""
_COPY = {
    "s3": ("aws s3 sync {0} {1}", "aws s3 cp {0} {1}"),
    "gs": ("gcloud storage rsync --recursive {0} {1}", "gcloud storage cp {0} {1}"),
}
"""By URL scheme: the commands that copy a directory, and a file, from {0} to {1}."""
_DOWNLOADS = ("http", "https")
_FILES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".tar")
"""Suffixes of weight files. Any other address is taken for a directory."""


def local_path(given: str | os.PathLike[str], written: str, *, reads: bool = False, file: bool = False) -> Path:
    """Return a path of this machine's file system; SettingError for a URL such as "s3://bucket/run".

    `written`: the call with {} in place of the path. `reads`: whether the path is read, not written. `file`: whether it
    is a file, not a directory. The error states the command that copies between a local path and the URL.
    """
    path = os.fspath(given)
    address = _ADDRESS.match(path)
    if address is not None:
        raise _not_local(address, written, reads=reads, file=file)
    return Path(path).expanduser()


def _not_local(address: re.Match[str], written: str, *, reads: bool, file: bool) -> SettingError:
    scheme, rest = address[1], address.string[address.end() :].rstrip("/")
    url, local = f"{scheme}://{rest}", f"runs/{rest.rpartition('/')[2] or 'run'}"
    if scheme == "file":
        fix = written.format(f'"/{rest}"')
    else:
        ends = (url, local) if reads else (local, url)
        tools = _COPY.get(scheme.lower(), ("copy {0} to {1}",) * 2)
        if reads and scheme.lower() in _DOWNLOADS:
            tools = ("curl --location --output {1} {0}",) * 2
        command = tools[file or (reads and rest.endswith(_FILES))].format(*ends)
        here = written.format(f'"{local}"')
        fix = f"{command}, then {here}" if reads else f"{here}, and every few minutes beside it: {command}"
    what = f"{written.format(repr(url))}: an address, not a path of this machine's file system"
    return SettingError(what, want=f"a local {'file' if file else 'directory'}", fix=fix)


def check_whole(
    value: object, written: str, *, least: int | None = 1, what: str = "a whole number", fix: str = ""
) -> None:
    """Raise SettingError unless a value is an integer of at least `least`; bools are no integers here."""
    if not isinstance(value, int) or isinstance(value, bool) or (least is not None and value < least):
        raise SettingError(written, want=what if least is None else f"{what}, at least {least}", fix=fix)


def check_number(
    value: object,
    written: str,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    what: str = "a number",
    fix: str = "",
) -> None:
    """Raise SettingError unless a value is a finite number within the bounds; bools are no numbers here."""
    bounds = {"at least": least, "above": above, "at most": most, "below": below}
    given = {word: bound for word, bound in bounds.items() if bound is not None}
    wanted = [f"{word} {bound:g}" for word, bound in given.items()]
    if isinstance(value, int | float) and not isinstance(value, bool):
        if math.isfinite(value) and all(_HOLDS[word](value, bound) for word, bound in given.items()):
            return
        wanted += [] if math.isfinite(value) else ["finite"]
    raise SettingError(written, want=f"{what} {' and '.join(wanted)}".rstrip(), fix=fix)


def check_flag(value: object, written: str, *, fix: str = "") -> None:
    """Raise SettingError unless a value is True or False."""
    if not isinstance(value, bool):
        raise SettingError(written, want="True or False", fix=fix)


def check_choice(value: object, owner: str, name: str, *, choices: tuple[object, ...], fix: str = "") -> None:
    """Raise SettingError unless a value is one of the choices; 1 does not count as True, nor 0 as False."""
    if not any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
        *others, last = [f'"{choice}"' if isinstance(choice, str) else repr(choice) for choice in choices]
        want = f"{', '.join(others)} or {last}"
        raise SettingError(f"{owner}({name}={value!r})", want=want, fix=fix)


class FormError(ValueError):
    """Saved state of a wrong form. The message describes the fault, without the path of the file."""


def check_form(tree: object, /, **forms: Callable[[object], bool]) -> None:
    """Raise FormError unless saved state is a dict with these keys, and each value passes the check of its key."""
    if not isinstance(tree, Mapping):
        raise FormError(f"it is a {type(tree).__name__} and no dict")
    for key, fits in forms.items():
        if key not in tree:
            raise FormError(f"{key!r} is missing")
        if not fits(tree[key]):
            raise _wrong_value(key, tree[key])


def _wrong_value(key: str, value: object) -> FormError:
    is_plain = value is None or isinstance(value, float | bool) or (isinstance(value, int) and is_number(value))
    return FormError(f"{key!r} is {value!r}" if is_plain else f"{key!r} is a {type(value).__name__}")


def is_count(value: object) -> bool:
    """Return whether a value is a count: an int from 0 to below 2**62."""
    return type(value) is int and 0 <= value < 1 << 62


def is_number(value: object) -> bool:
    """Return whether a value is a float, including NaN and infinities, or an int within +-2**62."""
    return type(value) is float or (type(value) is int and -(1 << 62) < value < 1 << 62)


def is_amount(value: object) -> bool:
    """Return whether a value is a finite number of at least 0."""
    return isinstance(value, int | float) and is_number(value) and 0 <= value < math.inf


def is_text(value: object) -> bool:
    """Return whether a value is a string that can be encoded: it has no surrogates."""
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)


def is_flag(value: object) -> bool:
    """Return whether a value is True or False."""
    return type(value) is bool


def is_numbers(value: object) -> bool:
    """Return whether a value is a dict of numbers by name."""
    return isinstance(value, Mapping) and all(is_text(name) and is_number(number) for name, number in value.items())


def is_none_or(fits: Callable[[object], bool]) -> Callable[[object], bool]:
    """Return a check that also accepts None."""
    return lambda value: value is None or fits(value)


def is_dict(value: object) -> bool:
    """Return whether a value is a dict."""
    return isinstance(value, Mapping)


def name_of(value: object) -> str:
    """Return the name of a function, a class or the function of a partial; for other objects, that of their class."""
    value = value.func if isinstance(value, functools.partial) else value
    return str(getattr(value, "__name__", type(value).__name__))


def settings_text(value: Any) -> str:
    """Return a setting as code. Functions, and objects whose repr has an address, are given by name."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {settings_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(settings_text, value))}]"
    if isinstance(value, functools.partial):
        named = [f"{name}={settings_text(item)}" for name, item in value.keywords.items()]
        return f"partial({', '.join([settings_text(value.func), *map(settings_text, value.args), *named])})"
    if is_dataclass(value) and not isinstance(value, type):
        return _dataclass_text(value)
    if inspect.isroutine(value) or isinstance(value, type):
        return value.__name__
    text = repr(value)
    return type(value).__name__ if " at 0x" in text else text


def _dataclass_text(setting: Any) -> str:
    """Return a dataclass as code, with its first field and all non-default ones: `StepLR(Epochs(30), gamma=0.5)`."""
    shown = [field for field in fields(setting) if field.repr]
    first = next(iter(shown), None)
    given = []
    for field in shown:
        value, by_place = getattr(setting, field.name), field is first and not field.kw_only
        if by_place or field.default is MISSING or not _is_default(value, field.default):
            # The first field is written without its name if it has a default or is the only one.
            bare = by_place and (field.default is not MISSING or len(shown) == 1)
            given.append(settings_text(value) if bare else f"{field.name}={settings_text(value)}")
    return f"{type(setting).__name__}({', '.join(given)})" if given else type(setting).__name__


def _is_default(value: Any, default: Any) -> bool:
    """Return whether a value is the default. Only plain values and dataclasses are compared: `==` may be overridden."""
    return value is default or ((isinstance(value, str | int | float) or is_dataclass(value)) and value == default)
