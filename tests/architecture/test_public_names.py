"""What `import trainwright` gives: a sorted, complete and documented list of names."""

from __future__ import annotations

import ast
import inspect
from types import ModuleType

import pytest
from layers import PACKAGE

import trainwright


def imported_names() -> list[str]:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    return [alias.asname or alias.name for n in tree.body if isinstance(n, ast.ImportFrom) for alias in n.names]


def written(value: object) -> bool:
    """Whether somebody wrote its docstring: a class inherits none, and a dataclass makes up `Name(field: type)`."""
    doc = vars(value).get("__doc__") if inspect.isclass(value) else inspect.getdoc(value)
    return bool(doc) and not doc.startswith(f"{getattr(value, '__name__', '')}(")


def test_all_is_sorted_and_holds_every_public_name() -> None:
    assert trainwright.__all__ == sorted(trainwright.__all__, key=lambda name: (not name.isupper(), name))
    assert set(trainwright.__all__) == {*imported_names(), "__version__"}
    assert len(trainwright.__all__) == len(set(trainwright.__all__))


@pytest.mark.parametrize("name", trainwright.__all__)
def test_a_public_name_is_documented_and_no_module(name: str) -> None:
    value = getattr(trainwright, name)
    assert not isinstance(value, ModuleType)
    assert name == "__version__" or written(value)


@pytest.mark.parametrize("name", [name for name in trainwright.__all__ if inspect.isclass(getattr(trainwright, name))])
def test_the_public_methods_of_a_public_class_are_documented(name: str) -> None:
    cls = getattr(trainwright, name)
    own = {key: value for key, value in vars(cls).items() if not key.startswith("_")}
    methods = {key: value for key, value in own.items() if inspect.isfunction(value) or isinstance(value, property)}
    assert [key for key, value in methods.items() if not inspect.getdoc(value)] == []
