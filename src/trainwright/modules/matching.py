"""Find parameters by name or glob, and blocks of a model by class, name, glob or predicate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
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
    """By name; a tied parameter once, under its first matching name."""
    submodule: nn.Module | None
    """The submodule of that name; None where the pattern is a glob over parameters."""


def find(module: nn.Module, pattern: str | None, setting: str) -> Found:
    """Return the parameters that `pattern` selects: all for None, else those of a submodule, or matches of a glob.

    `*` in a glob matches dots too. SettingError, whose text starts with `setting`, where there is no match.
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


Predicate = Callable[[str, nn.Module], bool]
REPEATED = 3
"""The number of instances from which a class is a repeated block."""
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules of repeated classes, none inside another; none where the model repeats no class.

    A repeated class is one of modules with modules inside, containers apart, that the model has three times or more.
    """
    counted = Counter(type(module) for module in model.modules() if any(True for _ in module.children()))
    classes = tuple(one for one, n in counted.items() if n >= REPEATED and not issubclass(one, _CONTAINERS))
    found = outermost(model, classes)
    return [] if found == [model] else found


def outermost(module: nn.Module, classes: tuple[type[nn.Module], ...]) -> list[nn.Module]:
    """Return the modules of these classes, none inside another; a module that is used twice once."""
    if isinstance(module, classes):
        return [module]
    found = [inner for child in module.children() for inner in outermost(child, classes)]
    return list(dict.fromkeys(found))


Blocks = type[nn.Module] | str | Collection[type[nn.Module] | str] | Predicate
"""A class or a pattern of names, several of them, or a function of a module's name and the module."""
_LISTS = (nn.ModuleList, nn.ModuleDict)


def find_blocks(model: nn.Module, blocks: Blocks | None, call: str) -> dict[str, nn.Module]:
    """Return the selected modules by name, in the order of the model, none inside another.

    None selects the classes with modules inside, containers apart, that the model has three times or more. `call` is
    the function that errors name. SettingError where an item selects no module, or one without a forward.
    """
    if blocks is None:
        found = repeated_blocks(model)
        if not found:
            what = f"{call}: {type(model).__name__} repeats no class of modules that have modules inside"
            fix = f"{call}(model, {{Block}}), with a class, or names such as 'layers.*'"
            raise SettingError(what, want="blocks=", fix=fix)
        return {name: module for name, module in model.named_modules() if any(module is one for one in found)}
    chosen: dict[str, nn.Module] = {}
    for text, predicate in _predicates(blocks, call):
        selected = dict(_outermost(model, "", predicate))
        if not selected:
            raise _nothing(model, text, call)
        chosen |= selected
    if lists := [f"{name} ({type(one).__name__})" for name, one in chosen.items() if isinstance(one, _LISTS)]:
        what = f"{call}: {lists[0]} has no forward of its own"
        raise SettingError(what, want="the modules in it", fix=f"'{lists[0].split(' ')[0]}.*'")
    every = {id(one) for one in chosen.values()}
    around = {id(inner) for one in chosen.values() for inner in one.modules() if inner is not one}
    return {name: one for name, one in model.named_modules() if id(one) in every - around}


def described(found: dict[str, nn.Module]) -> str:
    """Return the number of blocks of each class: "6 Block"."""
    counted = Counter(type(module).__name__ for module in found.values())
    return " and ".join(f"{n} {name}" for name, n in counted.items())


def _predicates(blocks: Any, call: str) -> Iterator[tuple[str, Predicate]]:
    """Yield each item of `blocks` as text, with its predicate of name and module."""
    several = isinstance(blocks, Iterable) and not isinstance(blocks, str | type | nn.Module)
    items = list(blocks) if several else [blocks]
    if not items:
        raise SettingError(f"{call}(blocks={blocks!r})", want="a class, a name, or several", fix="{Block}")
    for one in items:
        if isinstance(one, str):
            yield repr(one), lambda name, _, one=one: fnmatchcase(name, one)  # type: ignore[misc]
        elif isinstance(one, type) and issubclass(one, nn.Module):
            yield one.__name__, lambda _, module, one=one: isinstance(module, one)  # type: ignore[misc]
        elif not several and callable(one) and not isinstance(one, type | nn.Module):
            function: Any = one
            yield "the function", function
        else:
            given = f"{type(one).__name__}(...)" if isinstance(one, nn.Module) else repr(one)
            want = "classes of modules, names or globs over names, or one function of name and module"
            fix = f"blocks={{{type(one).__name__}}}" if isinstance(one, nn.Module) else "blocks={Block}"
            raise SettingError(f"{call}(blocks={given})", want=want, fix=fix)


def _outermost(module: nn.Module, path: str, predicate: Predicate) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        place = f"{path}.{name}".lstrip(".")
        if predicate(place, child):
            yield place, child
        else:
            yield from _outermost(child, place, predicate)


def _nothing(model: nn.Module, text: str, call: str) -> SettingError:
    kinds = dict.fromkeys(type(module).__name__ for module in model.modules() if module is not model)
    names = [name for name, _ in model.named_modules() if name]
    near = did_you_mean(text.strip("'"), [*names, *kinds])
    if type(model).__name__ == text:
        near = " It is the class of the model itself: to compute all of it again saves nothing."
    what = f"{call}: {text} means no module in {type(model).__name__}.{near}"
    return SettingError(what, have=", ".join([*kinds][:12]) or "no modules", want="classes or names it has")
