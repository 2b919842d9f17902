"""Every example runs to its end with `--smoke`, in a directory of its own, without a warning."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from loading import EXAMPLES

PATHS = sorted(EXAMPLES.glob("*.py"))
QUICK = {"quickstart_digits.py", "full_digits.py", "own_loop.py"}
"""The examples of the README; each takes some seconds, most of them to import torch."""
OPTIONS = {"variable_length.py": ["--packed", "--nested"]}
"""Switches of parts that an example leaves out by default."""


def test_there_are_examples() -> None:
    assert PATHS


@pytest.mark.parametrize(
    "example",
    [pytest.param(path, marks=() if path.name in QUICK else pytest.mark.slow, id=path.name) for path in PATHS],
)
def test_an_example_runs(example: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(example), "--smoke", *OPTIONS.get(example.name, [])],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout, "an example shows what it did"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the client and the kernel, not of this package
def test_the_notebook_runs_and_its_outputs_are_those_that_are_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path = EXAMPLES / "digits.ipynb"
    committed, again = (nbformat.read(path, as_version=4) for _ in range(2))
    NotebookClient(again, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    last = [[cell.outputs[-1].output_type for cell in one.cells if cell.get("outputs")] for one in (committed, again)]
    assert last[0] == last[1]
    assert len(last[0]) == 7
    report = [cell.outputs[0].data["text/plain"] for cell in (committed.cells[10], again.cells[10])]
    assert "accuracy" in report[0]
    assert report[0].splitlines()[-3:] == report[1].splitlines()[-3:]
    assert "\\r" not in path.read_text()
