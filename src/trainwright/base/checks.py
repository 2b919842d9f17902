"""Checks of single settings: whole numbers, numbers between bounds, flags, choices.

`written` is the setting as the user wrote it, `fix` what to write instead; all raise SettingError.
"""

from __future__ import annotations

import math
import operator

from trainwright.base.errors import SettingError, message

_HOLDS = {"at least": operator.ge, "above": operator.gt, "at most": operator.le, "below": operator.lt}


def check_whole(
    value: object, written: str, *, least: int | None = 1, what: str = "a whole number", fix: str = ""
) -> None:
    """Refuse what is no whole number, or below `least`; True and False are none."""
    if not isinstance(value, int) or isinstance(value, bool) or (least is not None and value < least):
        raise SettingError(message(written, want=what if least is None else f"{what}, at least {least}", fix=fix))


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
    """Refuse what is no finite number between the bounds; True and False are none."""
    bounds = {"at least": least, "above": above, "at most": most, "below": below}
    given = {word: bound for word, bound in bounds.items() if bound is not None}
    wanted = [f"{word} {bound:g}" for word, bound in given.items()]
    if isinstance(value, int | float) and not isinstance(value, bool):
        if math.isfinite(value) and all(_HOLDS[word](value, bound) for word, bound in given.items()):
            return
        wanted += [] if math.isfinite(value) else ["finite"]
    raise SettingError(message(written, want=f"{what} {' and '.join(wanted)}".rstrip(), fix=fix))


def check_flag(value: object, written: str, *, fix: str = "") -> None:
    """Refuse what is neither True nor False."""
    if not isinstance(value, bool):
        raise SettingError(message(written, want="True or False", fix=fix))


def check_choice(value: object, owner: str, name: str, *, choices: tuple[object, ...], fix: str = "") -> None:
    """Refuse what is none of the choices; 1 is not True, nor 0 False."""
    if not any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
        *others, last = [f'"{choice}"' if isinstance(choice, str) else repr(choice) for choice in choices]
        want = f"{', '.join(others)} or {last}"
        raise SettingError(message(f"{owner}({name}={value!r})", want=want, fix=fix))
