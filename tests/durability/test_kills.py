"""Killed at any moment, a run goes on from the last acknowledged state, or a newer one, exactly; others do not."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def tried(what: str, *words: str, base: Path) -> dict[str, Counter[str]]:
    """The verdicts of a command of the harness, by the name of what was tried; its text where a test fails."""
    told = base / "told.json"
    command = [sys.executable, "-m", "tests.durability", what, "--at", str(base), "--json", str(told), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    print(done.stdout, done.stderr)
    assert told.exists(), done.stderr
    found: dict[str, Any] = json.loads(told.read_text())
    return {name: Counter(one["counts"]) for name, one in found.items()}


def test_sixty_kills_lose_nothing_that_was_acknowledged_and_change_nothing(tmp_path: Path) -> None:
    counts = tried("kills", "--kills", "24", "--variant", "sync", "background", base=tmp_path)
    assert [set(one) for one in counts.values()] == [{"ok"}, {"ok"}]


def test_kills_of_a_run_with_loader_workers_lose_nothing(tmp_path: Path) -> None:
    counts = tried("kills", "--kills", "12", "--variant", "background+workers", "--seed", "40", base=tmp_path)
    assert [set(one) for one in counts.values()] == [{"ok"}]


def test_the_harness_finds_what_torch_save_over_one_file_loses(tmp_path: Path) -> None:
    (counts,) = tried("kills", "--adapter", "torch_save", "--kills", "32", base=tmp_path).values()
    assert counts["error"] >= 1 and counts["ok"] >= 1  # cut off in the middle of its only file, or not


def test_the_harness_finds_what_accelerate_loses(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    counts = tried("kills", "--adapter", "accelerate", "--variant", "limit1", "folder", "--kills", "16", base=tmp_path)
    assert counts["Accelerate limit1"]["error"] >= 2
    assert counts["Accelerate folder"]["mixed"] + counts["Accelerate folder"]["error"] >= 2
