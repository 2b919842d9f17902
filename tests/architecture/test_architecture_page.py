"""The pages for developers name files, classes and functions that there are; that of the architecture every package."""

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


ADDING = (ROOT / "docs" / "development" / "adding.md").read_text()
FILES = sorted(set(re.findall(r"`([\w/]+\.pyi?)`", ADDING)))
ROWS = sorted(set(re.findall(r"`(\w+)`\s+(?:of|in)\s+`([\w/]+\.py)`", ADDING)))
FOLDERS = [ROOT, *(ROOT / "tests" / name for name in ("laws", "metrics", "tools")), PACKAGE]
FOLDERS += [PACKAGE / name for name in ("schedules", "metrics")]
"""Folders that the page of additions names files from."""


def sources(file: str) -> list[str]:
    """The sources that the name of a file may mean."""
    return [(folder / file).read_text() for folder in FOLDERS if (folder / file).exists()]


def test_the_files_that_an_addition_changes_are_there() -> None:
    assert len(FILES) >= 20
    assert [file for file in FILES if not sources(file)] == []


def test_the_lists_that_an_addition_extends_are_in_their_files() -> None:
    assert len(ROWS) >= 10
    assert [row for row in ROWS if not any(re.search(rf"\b{row[0]}\b", one) for one in sources(row[1]))] == []
