"""The pages of docs/coming_from are programs: each runs in a process of its own, beside the library that it compares.

A page names the packages that it needs in its first line; it is skipped where one of them is not installed. The text
block after the comparison is compared with the line that the program prints.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from test_docs import ROOT, blocks

PAGES = sorted(path for path in (ROOT / "docs" / "coming_from").glob("*.md") if path.name != "index.md")
LINE = re.compile(r"^largest difference of a weight: (\S+)$", re.M)
PYTHON = os.environ.get("TRAINWRIGHT_PEERS_PYTHON", sys.executable)
"""An interpreter of an environment with the other libraries, where there is one apart."""


def is_installed(package: str) -> bool:
    """Whether the interpreter that runs the pages finds a package."""
    if sys.executable == PYTHON:
        return find_spec(package) is not None
    code = f"import importlib.util as u, sys; sys.exit(u.find_spec({package!r}) is None)"
    return subprocess.run([PYTHON, "-c", code], check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_two_programs_of_a_page_end_with_the_weights_that_it_states(page: Path, tmp_path: Path) -> None:
    text = page.read_text()
    needed = re.match(r"<!-- needs: (.+) -->", text)
    missing = [name for name in (needed[1].split(", ") if needed else []) if not is_installed(name)]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")
    script = tmp_path / "page.py"
    script.write_text("\n\n".join(block.code for block in blocks(page)))
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(
        [PYTHON, "-W", "ignore", script], capture_output=True, text=True, cwd=tmp_path, env=environment, check=False
    )
    assert ran.returncode == 0, ran.stderr
    stated, printed = LINE.findall(text), LINE.findall(ran.stdout)
    if page.stem == "keras":  # has an AdamW of its own, so that the last digits are not the same everywhere
        assert not stated
        assert 0 < float(printed[0]) < 0.05
    else:
        assert stated == printed
    assert printed
