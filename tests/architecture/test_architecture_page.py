"""The page of the architecture names files, classes and functions that there are, and every package."""

from __future__ import annotations

import ast
import re

import pytest
from layers import ORDER, PACKAGE, ROOT

PAGE = (ROOT / "docs" / "development" / "architecture.md").read_text()
NAMED = sorted(set(re.findall(r"`([a-z_/]+\.py)::([A-Za-z_.]+)`", PAGE)))


def defined(source: str) -> set[str]:
    """The functions and classes of a source, methods as `Class.method`."""
    found = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{one.name}" for one in node.body if isinstance(one, ast.FunctionDef)}
    return found


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_a_named_place_is_there(file: str, name: str) -> None:
    assert name in defined((PACKAGE / file).read_text())


def test_the_page_walks_an_update_an_epochs_end_a_save_and_a_resume() -> None:
    assert len(NAMED) >= 40
    assert [
        title for title in ("One update", "The end of an epoch", "A save", "A resume") if f"## {title}" not in PAGE
    ] == []


def test_every_package_is_in_the_table_of_the_page() -> None:
    packages = [name if name.endswith(".py") else f"{name}/" for name in ORDER if not name.startswith("__")]
    assert [name for name in packages if f"| `{name}` |" not in PAGE] == []
