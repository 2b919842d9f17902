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
from types import FrameType
from typing import Any, NamedTuple, NoReturn


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
            _refuse(name, package, importing=_imports(sys._getframe(1)))
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


def _refuse(name: str, package: str, *, importing: bool) -> NoReturn:
    """Raise AttributeError, or ImportError, for a name that a package does not have.

    The message names what to write instead. `importing`: raised as ImportError, since `from package import name` turns
    an AttributeError into an ImportError without its text.
    """
    from trainwright.core.errors import message

    instead = "" if name.startswith("__") else _instead(name, package)
    text = (
        f"cannot import name {name!r} from {package!r}"
        if importing
        else f"module {package!r} has no attribute {name!r}"
    )
    text = message(text, fix=instead, where=bool(instead))
    if importing:
        raise ImportError(text, name=package)
    raise AttributeError(text, name=name, obj=sys.modules[package])


def _imports(frame: FrameType) -> bool:
    """Return whether a frame is at a statement `from package import name`."""
    from opcode import opname

    code = frame.f_code.co_code
    return frame.f_lasti >= 0 and opname[code[frame.f_lasti]] == "IMPORT_FROM"


def _instead(name: str, package: str) -> str:
    """Return what to write in place of a name that a package does not have: where it is, or another name."""
    from trainwright.core.suggestions import FOREIGN_NAMES, nearest

    root = package.partition(".")[0]
    packages = [root, *(f"{root}.{inner}" for inner in _table(root).packages)]
    where = {known: one for one in reversed(packages) for known in _table(one).modules}
    if name not in where and name in FOREIGN_NAMES:
        return FOREIGN_NAMES[name]
    found = name if name in where else nearest(name, where)
    return f"from {where[found]} import {found}" if found else ""
