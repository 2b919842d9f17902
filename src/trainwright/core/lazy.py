"""Imports the public names of a package when they are first used; its stub `__init__.pyi` is the table of them.

Type checkers read the same stub, so each name has one line that says where it comes from (PEP 562; what `lazy_loader`
does for packages of scientific Python).
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pkgutil import get_data
from typing import Any


def lazy_names(package: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__all__`, `__getattr__` and `__dir__` of a package that has a stub."""
    stub = get_data(package, "__init__.pyi")
    assert stub is not None
    public: list[str] = []
    modules: dict[str, str] = {}
    for node in ast.parse(stub).body:
        if isinstance(node, ast.ImportFrom):
            modules |= {alias.name: str(node.module) for alias in node.names}
        elif isinstance(node, ast.Assign):  # of `__all__`
            public = ast.literal_eval(node.value)

    def get(name: str) -> Any:
        if name not in modules:
            module = sys.modules[package]
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=module)
        value = getattr(import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)  # the next use finds it without this function
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *public})

    return public, get, names
