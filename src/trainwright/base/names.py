"""Help with names: did you mean, and refusing methods that nearly match a hook."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from typing import Any, ParamSpec, TypeVar

from trainwright.base.errors import SettingError, message, user_line

P = ParamSpec("P")
R = TypeVar("R")

RESERVED = frozenset({"epoch", "grad_norm", "loss", "lr", "rows", "skipped", "update"})
"""Numbers that the run itself reports; no metric, logged number or named loss may have such a name."""


def check_name(name: str, what: str = "metric") -> None:
    """Refuse a name that the run itself reports under, or that starts with `val_`."""
    if not isinstance(name, str) or not name:
        raise SettingError(message(f"{what} name {name!r}", want="a string that is not empty"))
    if name in RESERVED:
        raise SettingError(
            message(
                f"{what} name {name!r} is reserved",
                want=f"another name than {', '.join(sorted(RESERVED))}",
                fix=f'"my_{name}"',
            )
        )
    if name.startswith("val_"):
        raise SettingError(
            message(
                f"{what} name {name!r} starts with val_, which validation puts there itself",
                fix=f'"{name.removeprefix("val_")}"',
            )
        )


def did_you_mean(name: str, known: Collection[str]) -> str:
    """`` Did you mean 'x'?`` with the nearest known name, or an empty string where none is near."""
    near = nearest(name, known)
    return "" if near is None else f" Did you mean {near!r}?"


def nearest(name: str, known: Collection[str]) -> str | None:
    """The nearest known name, or None where none is near."""
    return next(iter(get_close_matches(name, sorted(known), n=1, cutoff=0.6)), None)


def suggests(function: Callable[P, R]) -> Callable[P, R]:
    """Let a call with an argument that `function` does not take say which one was meant.

    The TypeError of the call itself gains a note; one that is raised inside the function passes untouched.
    """

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is None:  # no frame of the function
                _suggest(error, function, kwargs)
            raise

    return called


def refuse_near_names(
    cls: type, known: Collection[str], *, base: type | None = None, cutoff: float = 0.85, prefix: str = ""
) -> None:
    """Raise TypeError where a method defined in `cls`, or in a mixin beside `base`, nearly has a `known` name.

    So it is for one that `base` takes as an argument of this name, which would hide it. With a `prefix` every method
    that starts with it must be known.
    """
    arguments = set() if base is None else set(inspect.signature(base).parameters)
    inherited = set() if base is None else set(base.__mro__)
    own = [cls] if base is None else [one for one in cls.__mro__ if one not in inherited]
    for name, value in [item for one in own for item in vars(one).items()]:
        if name in known or name.startswith("_") or not callable(value):
            continue
        if base is not None and name in arguments:
            raise TypeError(
                f"{cls.__name__}.{name} is never called: the argument {name}= of {base.__name__} has its name\n"
                f"  want  {base.__name__}(..., {name}=...)\n"
                f"  fix   rename it, and give it as {name}="
            )
        near = get_close_matches(name, sorted(known), n=1, cutoff=cutoff)
        if near or (prefix and name.startswith(prefix)):
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise TypeError(
                f"{cls.__name__}.{name} is not a method that is ever called.{hint}\n"
                f"  want  one of {', '.join(sorted(known))}\n"
                f"  fix   rename it; a helper of your own may start with an underscore"
            )


def _suggest(error: TypeError, function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    parameters = [one for name, one in inspect.signature(function).parameters.items() if name != "self"]
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return
    name = function.__qualname__.removesuffix(".__init__")
    known = {one.name for one in parameters}
    unknown = [f"{name} takes no {wrong!r}.{did_you_mean(wrong, known)}" for wrong in given if wrong not in known]
    by_name = ", ".join(one.name for one in parameters if one.kind is one.KEYWORD_ONLY)
    by_position = ", ".join(one.name for one in parameters if one.kind is not one.KEYWORD_ONLY)
    lines = [f"trainwright: {' '.join(unknown) or f'{name} was called with other arguments than it takes.'}"]
    entries = {"by position": by_position, "by name": by_name, "where": user_line()}
    error.add_note("\n".join([*lines, *(f"  {label:<13}{text}" for label, text in entries.items() if text)]))
