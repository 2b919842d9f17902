"""What `import trainwright` gives: a sorted, complete and documented list of names."""

from __future__ import annotations

import ast
import inspect
import re
from importlib import import_module
from types import ModuleType

import pytest
from layers import PACKAGE
from torch import nn

import trainwright
from trainwright.trainer import HOOKS, METHODS

ROOT = PACKAGE.parent.parent


def imported_names() -> dict[str, str]:
    """The module of every name that type checkers see."""
    nodes = ast.walk(ast.parse((PACKAGE / "__init__.pyi").read_text()))
    return {alias.name: str(n.module) for n in nodes if isinstance(n, ast.ImportFrom) for alias in n.names}


def written(value: object) -> bool:
    """Whether somebody wrote its docstring: a class inherits none, and a dataclass makes up `Name(field: type)`."""
    doc = vars(value).get("__doc__") if inspect.isclass(value) else inspect.getdoc(value)
    return bool(doc) and not doc.startswith(f"{getattr(value, '__name__', '')}(")


def test_all_is_sorted_and_holds_every_public_name() -> None:
    assert trainwright.__all__ == sorted(trainwright.__all__, key=lambda name: (not name.isupper(), name))
    assert set(trainwright.__all__) == {*imported_names(), "__version__"}
    assert len(trainwright.__all__) == len(set(trainwright.__all__))


def test_a_name_that_is_imported_later_is_the_one_that_type_checkers_see() -> None:
    seen = imported_names()
    for name in set(trainwright.__all__) - {"__version__"}:
        assert getattr(trainwright, name) is getattr(import_module(seen[name]), name)
        assert name in dir(trainwright)


def test_a_name_that_there_is_not_is_refused_as_by_any_module() -> None:
    with pytest.raises(AttributeError, match="module 'trainwright' has no attribute 'OneCycel'"):
        _ = trainwright.OneCycel  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match="cannot import name 'OneCycel'"):
        from trainwright import OneCycel  # type: ignore[attr-defined]  # noqa: F401


def test_public_names_and_their_methods_are_documented_and_no_modules() -> None:
    public = {name: getattr(trainwright, name) for name in trainwright.__all__ if name != "__version__"}
    assert [name for name, value in public.items() if isinstance(value, ModuleType)] == []
    assert [name for name, value in public.items() if not written(value)] == []
    classes = {name: value for name, value in public.items() if inspect.isclass(value)}
    assert [wrong for name, value in classes.items() for wrong in undocumented(name, value)] == []


def undocumented(name: str, cls: type) -> list[str]:
    """The public methods and properties of a class without a docstring."""
    own = {key: value for key, value in vars(cls).items() if not key.startswith("_")}
    methods = {key: value for key, value in own.items() if inspect.isfunction(value) or isinstance(value, property)}
    return [f"{name}.{key}" for key, value in methods.items() if not inspect.getdoc(value)]


ATTRIBUTES = {
    *("device", "fast_path", "history", "is_main", "optimizers", "progress", "result", "state", "world"),
}
"""What a trainer has besides its arguments, hooks and methods; each is in the docs as `trainer.x` or `self.x`."""


def test_a_trainer_shows_its_arguments_hooks_methods_and_documented_attributes_alone() -> None:
    trainer = trainwright.Trainer(nn.Linear(2, 1), None, nn.MSELoss(), console=False)
    arguments = set(inspect.signature(trainwright.Trainer).parameters) - {"console"}
    shown = {name for name in dir(trainer) if not name.startswith("_")}
    assert shown == arguments | {*HOOKS, *METHODS} | ATTRIBUTES
    pages = "".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    assert [name for name in sorted(ATTRIBUTES) if not re.search(rf"(trainer|self)\.{name}\b", pages)] == []
