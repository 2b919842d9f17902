"""The layers of the package, and what its files import, read from their source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "trainwright"
ORDER = (
    *("protocols.py", "core", "modules", "distributed", "metrics", "schedules", "precision", "optim", "update"),
    *("data", "checkpointing", "observers", "diagnostics", "evaluation", "acceleration", "fit"),
    *("trainer.py", "tools", "testing.py", "__init__.py", "__main__.py"),
)
"""Every package and top-level file: each imports only those that stand before it, and its own files.

The demo uses the public names, as any program of a user's does, and so stands last.
"""
LAYERS = {name: number for number, name in enumerate(ORDER, 1)}


@dataclass(frozen=True, slots=True)
class Import:
    """One imported name: the file that imports, the dotted module or name, and whether a function does it."""

    path: Path
    line: int
    target: str
    relative: bool
    inside_function: bool
    annotation: bool = False
    """Whether it stands under TYPE_CHECKING: for annotations alone."""

    @property
    def where(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"


def files() -> list[Path]:
    """Every source file of the package."""
    return sorted(PACKAGE.rglob("*.py"))


def place(path: Path) -> str:
    """The folder of a file, or the file's own name where it lies at the top."""
    return path.relative_to(PACKAGE).parts[0]


def imports(path: Path, source: str | None = None) -> list[Import]:
    """Everything a file imports, anywhere in it, under TYPE_CHECKING and inside functions too."""
    tree = ast.parse(path.read_text() if source is None else source)
    return list(_imports(tree, path, inside=False))


def target_place(target: str) -> str | None:
    """The folder or top-level file that an imported name of the package lies in; None for other packages."""
    parts = target.split(".")
    if parts[0] != "trainwright":
        return None
    found = [name for name in LAYERS if len(parts) > 1 and name.removesuffix(".py") == parts[1]]
    return found[0] if found else "__init__.py"


def folder_imports() -> dict[tuple[str, str], int]:
    """How many imports go from each folder to each other one: statements, by the modules that they name."""
    seen: dict[tuple[str, str], set[tuple[Path, str]]] = {}
    for path in files():
        for found in imports(path):
            there = target_place(found.target)
            if there is not None and there != place(path) and not found.annotation:
                seen.setdefault((place(path), there), set()).add((path, module_of(found.target)))
    return {edge: len(names) for edge, names in sorted(seen.items())}


def module_of(target: str) -> str:
    """The module that an imported name comes from."""
    parts = target.split(".")
    while len(parts) > 1 and not _exists(*parts[1:]):
        parts.pop()
    return ".".join(parts)


@cache
def attributes(path: Path) -> tuple[tuple[int, str], ...]:
    """Every dotted name that a file reads, with its line: `torch.distributed.is_initialized` and so on."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
    return tuple((node.lineno, ast.unparse(node)) for node in nodes)


def _exists(*parts: str) -> bool:
    path = PACKAGE.joinpath(*parts)
    return path.is_dir() or path.with_name(path.name + ".py").is_file()


def _imports(node: ast.AST, path: Path, *, inside: bool, typing: bool = False) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(path, child.lineno, alias.name, False, inside, typing)
        elif isinstance(child, ast.ImportFrom):
            for alias in child.names:
                yield Import(path, child.lineno, f"{child.module}.{alias.name}", child.level > 0, inside, typing)
        within = inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            for each in child.body:
                yield from _imports(ast.Module([each], []), path, inside=within, typing=True)
            for each in child.orelse:
                yield from _imports(ast.Module([each], []), path, inside=within, typing=typing)
        else:
            yield from _imports(child, path, inside=within, typing=typing)


def name_of(path: Path) -> str:
    """The dotted name of a file's module, without the package: `update.window`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def circles() -> list[list[str]]:
    """The files that import each other in a circle, imports for annotations alone left out: one list for each."""
    graph = {name_of(path): {*_of_package(path)} for path in files()}
    reached = {name: _reach(name, graph) for name in graph}
    groups = {frozenset(other for other in reached[name] if name in reached[other]) for name in graph}
    return sorted(sorted(group) for group in groups if group)


def _of_package(path: Path) -> Iterator[str]:
    for found in imports(path):
        module = module_of(found.target)
        if module.startswith("trainwright.") and not found.annotation:
            yield module.removeprefix("trainwright.")


def _reach(start: str, graph: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    ahead = list(graph.get(start, ()))
    while ahead:
        name = ahead.pop()
        if name not in seen:
            seen.add(name)
            ahead += graph.get(name, ())
    return seen
