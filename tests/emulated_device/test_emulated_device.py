"""On a device whose memory is apart from the host's all examples and pages run, and a run gives the CPU's very bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import apart
import pytest

from test_docs import PAGES, ROOT

pytestmark = pytest.mark.skipif(not apart.HAS_COMPILER, reason=f"no C++ compiler {apart.COMPILER!r} builds the device")

HERE = Path(__file__).parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SHRUNK = str(ROOT / "tests" / "examples" / "shrunk.py")
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return apart.build(tmp_path_factory.mktemp("apart"))


@pytest.fixture(scope="module")
def read(library: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What failed in each page; nothing where all of it runs."""
    done = on_apart(library, tmp_path_factory.mktemp("pages"), "pages", *NAMES, seconds=600)
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith('["'))


def on_apart(library: Path, directory: Path, *what: str, seconds: int = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(HERE / "on_apart.py"), str(library), *what],
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def test_the_device_is_apart_and_computes_what_the_cpu_does(library: Path, tmp_path: Path) -> None:
    done = on_apart(library, tmp_path, "script", str(HERE / "apart_runs.py"))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs(example: Path, library: Path, tmp_path: Path) -> None:
    if example.name == "transformers_lm.py":
        pytest.importorskip("transformers")
    done = on_apart(library, tmp_path, "script", SHRUNK, str(example))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", NAMES)
def test_the_code_of_a_page_runs(page: str, read: dict[str, str]) -> None:
    assert read[page] == ""
