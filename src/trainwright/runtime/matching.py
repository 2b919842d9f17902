"""Find parameters of a module by the name of a submodule, or by a glob over their own names."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from trainwright.base.errors import SettingError, message
from trainwright.base.names import did_you_mean


@dataclass(frozen=True, slots=True)
class Found:
    """What a pattern has matched."""

    parameters: dict[str, nn.Parameter]
    """By name; a tied parameter once, under the first of its names that matches."""
    submodule: nn.Module | None
    """The submodule of that name; None where the pattern is none."""


def find(module: nn.Module, pattern: str | None, setting: str) -> Found:
    """The parameters of `module` that `pattern` means: all for None, else a submodule's, or those matching a glob.

    `*` in a glob matches dots too. SettingError, which opens with the text `setting`, where nothing has such a name.
    """
    named = dict(module.named_parameters(remove_duplicate=False))
    if pattern is None:
        return Found(_once(named), module)
    if not isinstance(pattern, str):
        raise TypeError(message(f"{setting}: a {type(pattern).__name__}", want='a string: "layer1", "layer1.*"'))
    modules = dict(module.named_modules(remove_duplicate=False))
    if pattern and pattern in modules:
        inside = {name: p for name, p in named.items() if name.startswith(f"{pattern}.")}
        return Found(_once(inside), modules[pattern])
    matched = {name: p for name, p in named.items() if fnmatchcase(name, pattern)}
    if matched:
        return Found(_once(matched), None)
    known = {*named, *modules} - {""}
    children = ", ".join(name for name, _ in module.named_children())
    raise SettingError(
        message(
            f"{setting} matches nothing in {type(module).__name__}.{did_you_mean(pattern, known)}",
            have=children or ", ".join(named) or "no parameters",
            want="the name of a submodule, or a glob over the names of parameters",
            fix='"layer1", "layer1.0", "layer1.*", "*.bias"',
        )
    )


def _once(named: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    first: dict[nn.Parameter, str] = {}
    for name, parameter in named.items():
        first.setdefault(parameter, name)
    return {name: parameter for parameter, name in first.items()}
