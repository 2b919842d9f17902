"""What `import trainwright` and its public packages give: sorted, complete and documented lists of names."""

from __future__ import annotations

import ast
import doctest
import inspect
import re
from collections.abc import Callable
from importlib import import_module
from types import ModuleType

import pytest
from layers import PACKAGE
from torch import nn

import trainwright
from trainwright.trainer import HOOKS, METHODS

ROOT = PACKAGE.parent.parent


PACKAGES = ("data", "metrics", "modules", "observers", "optim", "precision", "schedules", "tools")
"""The public packages that have a table of names; `protocols` and `testing` are public files."""
FILES = ("protocols", "testing")
MOST = 60
"""Names at the top, without the packages."""


def table(package: str = "") -> dict[str, str]:
    """The module of every name that type checkers see in a package."""
    tree = ast.parse((PACKAGE / package / "__init__.pyi").read_text())
    found = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module != "trainwright"]
    return {alias.name: str(node.module) for node in found for alias in node.names}


def defined(file: str) -> set[str]:
    """The public classes of `protocols.py` and checks of `testing.py`."""
    tree = ast.parse((PACKAGE / f"{file}.py").read_text())
    kinds = {"protocols": ast.ClassDef, "testing": ast.ClassDef | ast.FunctionDef}[file]
    return {node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")}


def written(value: object) -> bool:
    """Whether somebody wrote its docstring: a class inherits none, and a dataclass makes up `Name(field: type)`."""
    doc = vars(value).get("__doc__") if inspect.isclass(value) else inspect.getdoc(value)
    return bool(doc) and not doc.startswith(f"{getattr(value, '__name__', '')}(")


def test_the_top_has_few_names_and_dir_shows_them_and_the_public_packages_alone() -> None:
    assert set(trainwright.__all__) == {*table(), "__version__"} and len(trainwright.__all__) <= MOST
    assert set(dir(trainwright)) == {*trainwright.__all__, *PACKAGES, "protocols", "testing"}


@pytest.mark.parametrize("package", ["", *PACKAGES])
def test_all_is_sorted_and_each_name_is_the_one_that_type_checkers_see(package: str) -> None:
    module, seen = import_module(f"trainwright.{package}".rstrip(".")), table(package)
    names = [name for name in module.__all__ if name != "__version__"]
    assert module.__all__ == sorted(set(module.__all__), key=lambda name: (not name.isupper(), name))
    assert set(names) == set(seen) and set(module.__all__) <= set(dir(module))
    assert [name for name in names if getattr(module, name) is not getattr(import_module(seen[name]), name)] == []


def test_a_name_of_two_packages_is_one_object() -> None:
    found: dict[str, set[str]] = {}
    for package in ("", *PACKAGES):
        for name, module in table(package).items():
            found.setdefault(name, set()).add(module)
    assert {name: modules for name, modules in found.items() if len(modules) > 1} == {}


def test_every_public_name_is_in_the_reference_once() -> None:
    """The reference is made by the directives `.. autoclass:: trainwright.OneCycle` and its like."""
    pages = "".join(page.read_text() for page in sorted((ROOT / "docs" / "reference").glob("*.md")))
    documented = re.findall(r"^\.\. auto(?:class|function|exception):: ([\w.]+)$", pages, re.M)
    top = {*trainwright.__all__} - {"__version__"}
    inner = {f"{package}.{name}" for package in PACKAGES for name in set(table(package)) - top}
    inner |= {f"{file}.{name}" for file in FILES for name in defined(file) - top}
    assert sorted(documented) == sorted(f"trainwright.{name}" for name in top | inner)


def public_values() -> dict[str, object]:
    """Every public class and function by its name."""
    modules = [import_module(f"trainwright.{package}".rstrip(".")) for package in ("", *PACKAGES, *FILES)]
    names = [(module, name) for module in modules for name in getattr(module, "__all__", [*vars(module)])]
    found = {name: getattr(module, name) for module, name in names if not name.startswith("_")}
    return {name: value for name, value in found.items() if str(getattr(value, "__module__", "")).startswith("trainw")}


RECORDS = {
    *("Advice", "AveragedWeights", "Batches", "Best", "Bucketed", "CrossValidation", "Effect", "Fold", "LRRange"),
    *("LargestBatch", "ModelStatistics", "Overfit", "Pad", "ParameterStatistics", "Plan", "Progress", "Report"),
    *("Result", "Saved", "Slice", "SmokeRun", "Speed", "Together", "Update", "Validation", "Window"),
}
"""Classes whose objects the library makes: the reference shows their attributes."""
PROTOCOLS = {"Clip", "Metric", "Schedule", "Stateful"}


def test_the_docstring_of_a_public_name_lists_every_parameter() -> None:
    missing = []
    for name, value in public_values().items():
        if name not in documented_names() or name in RECORDS | PROTOCOLS:
            continue
        for owner, function in {name: value, **methods_of(name, value)}.items():
            listed = re.findall(r"^ {4}\*{0,2}(\w+): ", inspect.getdoc(function) or "", re.M)
            given = [one for one in inspect.signature(function).parameters if one != "self"]
            missing += [f"{owner}({one}=)" for one in given if one not in listed and "Error" not in owner]
    assert missing == []


def documented_names() -> set[str]:
    """The names with a place of their own in the reference."""
    pages = "".join(page.read_text() for page in sorted((ROOT / "docs" / "reference").glob("*.md")))
    return set(re.findall(r"^\.\. auto(?:class|function|exception):: [\w.]+?(\w+)$", pages, re.M))


def methods_of(name: str, value: object) -> dict[str, Callable[..., object]]:
    """The methods of the Trainer that users call with arguments."""
    return {f"Trainer.{key}": getattr(value, key) for key in METHODS} if name == "Trainer" else {}


def test_the_examples_of_public_docstrings_run() -> None:
    ran = 0
    for name, value in public_values().items():
        for example in doctest.DocTestFinder(recurse=False).find(value, name, globs={}):
            results = doctest.DocTestRunner().run(example)
            assert results.failed == 0, name
            ran += bool(results.attempted)
    assert ran >= 5


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_has_the_name_of_a_public_thing_beside_it(package: str) -> None:
    assert {path.stem for path in (PACKAGE / package).iterdir()} & set(table(package)) == set()


def test_a_name_that_there_is_not_is_refused_as_by_any_module() -> None:
    with pytest.raises(AttributeError, match=r"^module 'trainwright' has no attribute 'OneCycel'\n"):
        _ = trainwright.OneCycel  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"^module 'trainwright' has no attribute 'zzz'$"):
        _ = trainwright.zzz  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match="cannot import name 'OneCycel'"):
        from trainwright import OneCycel  # type: ignore[attr-defined]  # noqa: F401
    with pytest.raises(AttributeError, match=r"module 'trainwright\.tools' has no attribute 'OneCycle'"):
        _ = trainwright.tools.OneCycle  # type: ignore[attr-defined]


@pytest.mark.parametrize("package", [*PACKAGES, "protocols", "testing"])
def test_a_name_of_a_package_that_is_asked_for_at_the_top_is_refused_with_the_line_to_write(package: str) -> None:
    inside = {"protocols": ["Clip"], "testing": ["check_clip"]}.get(package) or [*table(package)]
    for name in set(inside) - set(trainwright.__all__):
        with pytest.raises(AttributeError, match="has no attribute") as caught:
            getattr(trainwright, name)
        line = str(caught.value).partition("  fix   ")[2].splitlines()[0]
        assert re.fullmatch(rf"from trainwright\.\w+ import {name}", line)
        exec(line, {})


def test_public_names_and_their_methods_are_documented_and_no_modules() -> None:
    for package in ("", *PACKAGES):
        module = import_module(f"trainwright.{package}".rstrip("."))
        public = {name: getattr(module, name) for name in module.__all__ if name != "__version__"}
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
    *("device", "evaluating", "fast_path", "history", "is_main", "optimizers", "progress", "result", "state", "world"),
}
"""What a trainer has besides its arguments, hooks and methods; each is in the docs as `trainer.x` or `self.x`."""


def test_a_trainer_shows_its_arguments_hooks_methods_and_documented_attributes_alone() -> None:
    trainer = trainwright.Trainer(nn.Linear(2, 1), None, nn.MSELoss(), console=False)
    arguments = set(inspect.signature(trainwright.Trainer).parameters) - {"console"}
    shown = {name for name in dir(trainer) if not name.startswith("_")}
    assert shown == arguments | {*HOOKS, *METHODS} | ATTRIBUTES
    pages = "".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    assert [name for name in sorted(ATTRIBUTES) if not re.search(rf"(trainer|self)\.{name}\b", pages)] == []


def test_the_citation_names_the_version_of_the_package() -> None:
    for path, line in ((".github/CITATION.cff", "version: {}"), ("docs/citing.md", "version = {{{}}}")):
        assert line.format(trainwright.__version__) in (ROOT / path).read_text()
