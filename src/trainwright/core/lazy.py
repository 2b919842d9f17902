"""Lazy imports of the public names of a package (PEP 562, as in `lazy_loader`); its stub `__init__.pyi` lists them.

Type checkers read the same stub, so the module of each name is stated once.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pkgutil import get_data
from typing import Any, NamedTuple


class _Table(NamedTuple):
    """The public names of a package."""

    public: list[str]
    modules: dict[str, str]
    """The module of each name."""
    packages: tuple[str, ...]
    """Public subpackages."""


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package with a stub, which is read at the first use."""

    def get(name: str) -> Any:
        table = _table(package)
        if name in table.modules:
            value = getattr(import_module(table.modules[name]), name)
        elif name in table.packages:
            value = import_module(f"{package}.{name}")
        elif name == "__all__":
            value = table.public
        else:
            raise AttributeError(_unknown(name, package, table), name=name, obj=sys.modules[package])
        setattr(sys.modules[package], name, value)  # later uses do not call this function
        return value

    def names() -> list[str]:
        table = _table(package)
        return sorted({*table.public, *table.packages})

    return get, names


@cache
def _table(package: str) -> _Table:
    """Return the names in the stub of a package, or the classes and functions that a module defines."""
    outer, _, own = package.rpartition(".")
    spec = find_spec(package)
    is_package = spec is not None and spec.submodule_search_locations is not None
    source = get_data(package, "__init__.pyi") if is_package else get_data(outer, f"{own}.py")
    assert source is not None
    table = _Table([], {}, ())
    for node in ast.parse(source).body:
        if isinstance(node, ast.ImportFrom) and node.module == package:
            table = table._replace(packages=(*table.packages, *(alias.name for alias in node.names)))
        elif isinstance(node, ast.ImportFrom):
            table.modules.update({alias.name: str(node.module) for alias in node.names})
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            table.public.extend(ast.literal_eval(node.value))
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            table.modules[node.name] = package
    return table


def _unknown(name: str, package: str, table: _Table) -> str:
    """Return the text of an AttributeError, with the subpackage that has the name, if any."""
    text = f"module {package!r} has no attribute {name!r}"
    held = [f"{package}.{inner}" for inner in table.packages if name in _table(f"{package}.{inner}").modules]
    return f"{text}: write `from {held[0]} import {name}`" if held else text
