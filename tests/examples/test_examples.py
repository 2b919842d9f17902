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
