"""The pages of docs/coming_from and docs/cookbook are programs: each runs alone and prints what the page says.

A page names the packages that it needs in its first line, `<!-- needs: lightning -->`. It then runs in a process of its
own, by the interpreter in TRAINWRIGHT_PEERS_PYTHON where that is set, and is skipped where a package is missing.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from test_docs import FENCE, PROGRAMS, ROOT, blocks, run

PYTHON = os.environ.get("TRAINWRIGHT_PEERS_PYTHON", sys.executable)
PAGES = sorted(page for folder in PROGRAMS for page in folder.glob("*.md") if page.name != "index.md")
SHARED_LINES = 11
"""Lines of data and model, the same on all pages."""
MOST_KERAS_DIFFERS = 0.05
"""Keras has an AdamW of its own, so that its page states no number."""


def packages(page: Path) -> list[str]:
    """The packages that a page names in its first line."""
    needed = re.match(r"<!-- needs: (.+) -->", page.read_text())
    return needed[1].split(", ") if needed else []


def is_alone(page: Path) -> bool:
    """Whether a page runs in a process of its own: beside other packages, or because it starts processes."""
    return bool(packages(page)) or "launch(" in page.read_text()


def is_installed(package: str) -> bool:
    """Whether the interpreter that runs the pages finds a package."""
    if sys.executable == PYTHON:
        return find_spec(package) is not None
    code = f"import importlib.util as u, sys; sys.exit(u.find_spec({package!r}) is None)"
    return subprocess.run([PYTHON, "-c", code], check=False).returncode == 0


def outputs(page: Path) -> list[tuple[str, str]]:
    """The code before each text block, back to the text block before it, and the text."""
    found, code = list[tuple[str, str]](), ""
    for match in FENCE.finditer(page.read_text()):
        if match["language"] == "python" and match["reason"] is None:
            code += "\n" * 2 + match["code"]
        elif match["language"] == "text" and code:
            found.append((code, match["code"]))
            code = ""
    return found


def check_printed(page: Path, printed: str) -> None:
    """Compare what a page prints with its text blocks, in their order."""
    for _, text in outputs(page):
        assert text.rstrip() in printed, f"{page.name} prints\n{printed}\nand says\n{text}"
        printed = printed.split(text.rstrip(), 1)[1]


@pytest.mark.parametrize("page", [page for page in PAGES if not is_alone(page)], ids=lambda page: page.stem)
def test_a_program_prints_what_its_page_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.reason is None:
            run(block, namespace)
    check_printed(page, capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if is_alone(page)], ids=lambda page: page.stem)
def test_a_program_beside_other_packages_prints_what_its_page_says(page: Path, tmp_path: Path) -> None:
    missing = [name for name in packages(page) if not is_installed(name)]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")
    script = tmp_path / "page.py"
    script.write_text("\n\n".join(block.code for block in blocks(page) if block.reason is None))
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(
        [PYTHON, "-W", "ignore", script], capture_output=True, text=True, cwd=tmp_path, env=environment, check=False
    )
    assert ran.returncode == 0, ran.stderr
    check_printed(page, ran.stdout)
    if page.stem == "keras":
        [difference] = re.findall(r"^largest difference of a weight: (\S+)$", ran.stdout, re.M)
        assert 0 < float(difference) < MOST_KERAS_DIFFERS


def test_the_cookbook_has_thirty_recipes_and_lists_each_page() -> None:
    listed = (ROOT / "docs" / "cookbook" / "index.md").read_text()
    recipes = [page for page in PAGES if page.parent.name == "cookbook"]
    assert len(recipes) >= 30
    assert [page.name for page in recipes if f"({page.name})" not in listed] == []


def test_the_readme_states_the_lines_of_the_programs() -> None:
    """Lines of code of each side, without those that all pages share: data and model."""

    def lines(code: str) -> int:
        return len([line for line in code.splitlines() if line.strip() and not line.strip().startswith("#")])

    pages = {page.stem: list(blocks(page)) for page in PAGES if page.parent.name == "coming_from"}
    counted = {name: lines(of_page[0].code) - SHARED_LINES for name, of_page in pages.items()}
    ours = lines(pages["lightning"][1].code)
    stated = (
        f"has {ours} lines of code here, {counted['plain_loop']} as a plain loop and\nin Ignite, "
        f"{counted['accelerate']} in Accelerate, and {counted['lightning']} in Lightning and transformers"
    )
    assert counted["ignite"] == counted["plain_loop"] and counted["transformers"] == counted["lightning"]
    assert stated in (ROOT / "README.md").read_text()
