"""Selection of parameters of a model by name or glob, and of blocks by class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from trainwright.core.errors import SettingError, message
from trainwright.core.suggestions import did_you_mean


@dataclass(frozen=True, slots=True)
class Found:
    """The matches of a pattern."""

    parameters: dict[str, nn.Parameter]
    """By name; a tied parameter appears once, under its first matching name."""
    submodule: nn.Module | None
    """The submodule that the pattern names; None for a glob over parameters."""


def find(module: nn.Module, pattern: str | None, setting: str) -> Found:
    """Return the parameters that `pattern` selects: all for None, those of a submodule, or the matches of a glob.

    `*` in a glob also matches dots. SettingError if there is no match; `setting`: the start of its message.
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
        f"{setting} matches nothing in {type(module).__name__}.{did_you_mean(pattern, known)}",
        have=children or ", ".join(named) or "no parameters",
        want="the name of a submodule, or a glob over the names of parameters",
        fix='"layer1", "layer1.0", "layer1.*", "*.bias"',
    )


def _once(named: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    first: dict[nn.Parameter, str] = {}
    for name, parameter in named.items():
        first.setdefault(parameter, name)
    return {name: parameter for parameter, name in first.items()}


REPEATED = 3
"""The fewest modules of a class for it to be a repeated block."""
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the outermost modules of repeated classes; empty if the model repeats no class.

    A repeated class has submodules, is no container, and has at least three modules in the model.
    """
    counted = Counter(type(module) for module in model.modules() if any(True for _ in module.children()))
    classes = tuple(one for one, n in counted.items() if n >= REPEATED and not issubclass(one, _CONTAINERS))
    found = outermost(model, classes)
    return [] if found == [model] else found


def outermost(module: nn.Module, classes: tuple[type[nn.Module], ...]) -> list[nn.Module]:
    """Return the outermost modules of these classes; a module that is used twice appears once."""
    if isinstance(module, classes):
        return [module]
    found = [inner for child in module.children() for inner in outermost(child, classes)]
    return list(dict.fromkeys(found))


Blocks = type[nn.Module] | Collection[type[nn.Module]]
"""One or several classes of modules."""
_LISTS = (nn.ModuleList, nn.ModuleDict)


def find_blocks(model: nn.Module, blocks: Blocks | None, call: str) -> dict[str, nn.Module]:
    """Return the outermost modules of these classes in a model, by name and in order.

    None selects the repeated classes (`repeated_blocks`). `call`: the function that errors name. SettingError for a
    class without a module in the model, or without a forward.
    """
    if blocks is None:
        found = repeated_blocks(model)
        if not found:
            what = f"{call}: {type(model).__name__} repeats no class of modules that have modules inside"
            raise SettingError(what, want="blocks=", fix=f"{call}(model, {{Block}}), with a class")
    else:
        classes = module_classes(blocks, lambda text: f"{call}(model, blocks={text})")
        for kind in classes:
            if not any(isinstance(module, kind) for module in model.modules() if module is not model):
                raise _nothing(model, kind.__name__, call)
        found = [inner for child in model.children() for inner in outermost(child, classes)]
    named = {name: module for name, module in model.named_modules() if any(module is one for one in found)}
    if lists := [f"{name} ({type(one).__name__})" for name, one in named.items() if isinstance(one, _LISTS)]:
        raise SettingError(f"{call}: {lists[0]} has no forward of its own", want="classes of the modules in it")
    return named


def module_classes(
    given: Any, written: Callable[[str], str], *, want: str = "a class of modules, or several", empty: bool = False
) -> tuple[type[nn.Module], ...]:
    """Return one or several classes of modules as a tuple; SettingError for anything else.

    `written`: returns the setting as code, given its value as text. `empty`: whether an empty collection is valid.
    """
    several = isinstance(given, Collection) and not isinstance(given, str | nn.Module)
    classes: tuple[Any, ...] = tuple(given) if several else (given,)
    wrong = [one for one in classes if not (isinstance(one, type) and issubclass(one, nn.Module))]
    if wrong or not (classes or empty):
        module = next((one for one in wrong if isinstance(one, nn.Module)), None)
        name = "Block" if module is None else type(module).__name__
        shown = repr(given) if module is None else f"{name}(...)"
        raise SettingError(written(shown), want=want, fix=written(f"{{{name}}}"))
    return classes


def described(found: dict[str, nn.Module]) -> str:
    """Return the number of blocks of each class as text, such as "6 Block"."""
    counted = Counter(type(module).__name__ for module in found.values())
    return " and ".join(f"{n} {name}" for name, n in counted.items())


def _nothing(model: nn.Module, text: str, call: str) -> SettingError:
    kinds = dict.fromkeys(type(module).__name__ for module in model.modules() if module is not model)
    near = did_you_mean(text, kinds)
    if type(model).__name__ == text:
        near = " It is the class of the model itself: to compute all of it again saves nothing."
    what = f"{call}: {text} means no module in {type(model).__name__}.{near}"
    return SettingError(what, have=", ".join([*kinds][:12]) or "no modules", want="classes that it has")
