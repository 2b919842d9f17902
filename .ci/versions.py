#!/usr/bin/env python3
"""Runs the full tier with the Python that runs this file, and with versions of your choice.

It works in a fresh clone, with nothing but Python 3.11 or later and the package index::

    python3.11 .ci/versions.py oldest                 # the oldest versions that pyproject.toml allows
    python3.13 .ci/versions.py newest torch==2.13.0   # the newest, and one that is pinned
    python3.13 .ci/versions.py newest --quick -- -x   # the quick tier; the rest goes to pytest

The environment is built in a temporary folder, which is removed at the end, or in `--folder`, which is kept and used
again. Tests that failed run once more, alone: those that fail again have failed. The last lines are the versions and
the counts. The status is 1 where a test failed.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
RUN_AGAIN = 40
"""Of more tests that failed none runs again: they did not fail by chance."""


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", choices=("oldest", "newest"), help="of the dependencies that pyproject.toml allows")
    parser.add_argument("pins", nargs="*", help="versions of packages that differ, as torch==2.13.0")
    parser.add_argument("--quick", action="store_true", help="run the quick tier")
    parser.add_argument("--folder", type=Path, help="keep the environment in this folder, or use the one that is there")
    own, rest = sys.argv[1:], []
    if "--" in own:
        own, rest = own[: own.index("--")], own[own.index("--") + 1 :]
    given = parser.parse_args(own)
    given.rest = rest
    return given


def dependencies() -> dict[str, str]:
    """Return the oldest version of each package that the library needs."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return dict(line.split(">=") for line in listed)


def build(folder: Path, constraints: dict[str, str]) -> Path:
    """Make the environment, or complete the one that is there; return its Python."""
    python = folder / "env" / "bin" / "python"
    if not python.exists():
        venv.create(folder / "env", with_pip=True, upgrade_deps=True)  # groups need pip 25.1
    pins = folder / "constraints.txt"
    pins.write_text("".join(f"{name}=={version}\n" for name, version in constraints.items()))
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--constraint", pins]
    subprocess.run([*install, "-e", ".", "--group", "test"], cwd=ROOT, check=True)
    return python


def run_tests(python: Path, folder: Path, tier: list[str], rest: list[str]) -> tuple[dict[str, int], list[str]]:
    """Run the tests; return the counts, and the names of those that failed when they ran again too."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["OMP_NUM_THREADS"] = "1"
    pytest = [python, "-m", "pytest", "-q", "-o", f"cache_dir={folder / 'cache'}", *tier]
    first, again = folder / "first.xml", folder / "again.xml"
    subprocess.run([*pytest, f"--junitxml={first}", *rest], cwd=ROOT, env=environment, check=False)
    cases, failed = results(first)
    if 0 < len(failed) <= RUN_AGAIN:
        alone = ["-n", "0", "--last-failed", "--last-failed-no-failures", "none", f"--junitxml={again}"]
        subprocess.run([*pytest, *alone], cwd=ROOT, env=environment, check=False)
        cases["passed when run again"] = len(failed) - len(results(again)[1])
        failed = results(again)[1]
    cases["failed"] = len(failed)
    return cases, failed


def results(report: Path) -> tuple[dict[str, int], list[str]]:
    """Read a report of pytest's: how many passed and were skipped, and what failed."""
    passed, skipped, failed = 0, 0, []
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return {"passed": passed, "skipped": skipped}, failed


def main() -> int:
    """Build, run, and print the summary."""
    given, begun = arguments(), time.monotonic()
    constraints = dependencies() if given.versions == "oldest" else {}
    constraints |= dict(pin.split("==") for pin in given.pins)
    with tempfile.TemporaryDirectory() as made:
        folder = (given.folder or Path(made)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        python = build(folder, constraints)
        listed = subprocess.run(
            [python, "-m", "pip", "list", "--format", "freeze"], capture_output=True, text=True, check=True
        ).stdout
        tier = [] if given.quick else ["--full"]
        cases, failed = run_tests(python, folder, tier, given.rest)
    names = "|".join(dependencies())
    versions = " ".join(re.findall(rf"^(?:{names})==\S+", listed, re.MULTILINE))
    print(f"== {platform.system()} {platform.machine()}, Python {platform.python_version()}: {versions}")
    print(
        f"== {' '.join(['pytest', *tier, *given.rest])}, {datetime.now(UTC):%Y-%m-%d}, {time.monotonic() - begun:.0f} s"
    )
    for name in failed:
        print(f"FAILED {name}")
    print(", ".join(f"{count} {name}" for name, count in cases.items()))
    return int(bool(failed) or not cases["passed"])


if __name__ == "__main__":
    sys.exit(main())
