"""Help with names: did you mean, and refusing methods that nearly match a hook."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches


def did_you_mean(name: str, known: Collection[str]) -> str:
    """`` Did you mean 'x'?`` with the nearest known name, or an empty string where none is near."""
    near = get_close_matches(name, sorted(known), n=1, cutoff=0.6)
    return f" Did you mean {near[0]!r}?" if near else ""


def refuse_near_names(cls: type, known: Collection[str], *, cutoff: float = 0.85, prefix: str = "") -> None:
    """Raise TypeError where a method defined in `cls` is almost, but not quite, one of the `known` names.

    With a `prefix` every method that starts with it must be known.
    """
    for name, value in vars(cls).items():
        if name in known or name.startswith("_") or not callable(value):
            continue
        near = get_close_matches(name, sorted(known), n=1, cutoff=cutoff)
        if near or (prefix and name.startswith(prefix)):
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise TypeError(
                f"{cls.__name__}.{name} is not a method that is ever called.{hint}\n"
                f"  want  one of {', '.join(sorted(known))}\n"
                f"  fix   rename it; a helper of your own may start with an underscore"
            )
