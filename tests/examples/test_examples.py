"""Every example runs, cut short, in a directory of its own; complete ones end as their headers say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from loading import EXAMPLES

PATHS = sorted(EXAMPLES.glob("*.py"))
QUICK = {"quickstart_digits.py", "full_digits.py", "own_loop.py"}
"""The examples of the README; each takes some seconds, most of them to import torch."""
OPTIONS = {"variable_length.py": ["--packed", "--nested"]}
"""Switches of parts that an example leaves out by default."""
SHRUNK = Path(__file__).with_name("shrunk.py")
LONG = {
    *("advise.py", "checkpointing.py", "custom_operator.py", "custom_steps.py", "dpo.py", "fsdp_char_lm.py"),
    *("pruning.py", "transformers_lm.py", "tune_digits.py"),
}
"""Examples whose complete run takes long, or whose header states no share of rows; their own tests check them."""


def output(*command: str, directory: Path) -> str:
    """Run a command; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "error", *command],
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def skip_without_package(example: Path) -> None:
    needed = re.search(r"pip install (\w+)$", example.read_text(), re.M)
    if needed and find_spec(needed[1]) is None:
        pytest.skip(f"{needed[1]} is not installed")


@pytest.mark.parametrize(
    "example",
    [pytest.param(path, marks=() if path.name in QUICK else pytest.mark.slow, id=path.name) for path in PATHS],
)
def test_an_example_runs(example: Path, tmp_path: Path) -> None:
    skip_without_package(example)
    assert output(str(SHRUNK), str(example), *OPTIONS.get(example.name, []), directory=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("example", [path for path in PATHS if path.name not in LONG], ids=lambda path: path.name)
def test_an_example_ends_as_its_header_says(example: Path, tmp_path: Path) -> None:
    """The header's share, or its R2, is that of the last number of the output, or of the best epoch."""
    header = example.read_text().split('"""')[1]
    expected = re.search(r"^Expected\s+(.*?)(?=^\w|\Z)", header, re.M | re.S)
    assert expected is not None, "a header says what to expect"
    printed = output(str(example), directory=tmp_path)
    if "bit for bit" in expected[1] and "%" not in expected[1]:
        assert "equal, bit for bit" in printed and "NOT" not in printed
    elif "R2" in expected[1]:
        least = float(re.search(r"at least ([\d.]+)", expected[1])[1])
        assert float(re.findall(r"R2 ([\d.]+)", printed)[-1]) >= least
    else:
        [least] = re.findall(r"(?:at least )?([\d.]+)(?: to [\d.]+)? %", expected[1])[:1]
        shares = [float(share) for share in re.findall(r"([\d.]+)%? (?:of (?:the|\d)|with )", printed)]
        shares += [100 * float(best) for best in re.findall(r"^ best.* ([01]\.\d+)", printed, re.M)]
        shares += [100 * float(one) for one in re.findall(r"val_accuracy ([01]\.\d+)", printed)]
        assert shares, printed[-2000:]
        assert max(shares[-12:]) >= float(least), f"{least} % promised, {shares[-12:]} found"
