"""Runs the commands of the harness for the tests: each in a process of its own, that may fork."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def tried(what: str, *words: str, base: Path) -> dict[str, Counter[str]]:
    """The verdicts by the name of what was tried; what the command said is shown where a test fails."""
    reported = base / "reported.json"
    reported.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.durability", what, "--at", str(base), "--json", str(reported), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    print(done.stdout, done.stderr)
    assert reported.exists(), done.stderr
    found: dict[str, Any] = json.loads(reported.read_text())
    return {name: Counter(one["counts"]) for name, one in found.items()}


def all_ok(counts: dict[str, Counter[str]]) -> bool:
    """Whether there are verdicts, and all of them are good."""
    return bool(counts) and all(set(one) == {"ok"} for one in counts.values())
