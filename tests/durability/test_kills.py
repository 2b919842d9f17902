"""Killed at any moment, a run goes on exactly from what was saved last, or from newer; others do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from .commands import all_ok, tried


def test_kills_lose_nothing_that_was_acknowledged_and_change_nothing(tmp_path: Path) -> None:
    assert all_ok(tried("kills", "--kills", "22", "--variant", "sync", "background", base=tmp_path))


def test_kills_of_a_run_with_loader_workers_lose_nothing(tmp_path: Path) -> None:
    assert all_ok(tried("kills", "--kills", "10", "--variant", "background+workers", "--seed", "40", base=tmp_path))


def test_the_harness_finds_what_torch_save_over_one_file_loses(tmp_path: Path) -> None:
    (counts,) = tried("kills", "--adapter", "torch_save", "--kills", "24", base=tmp_path).values()
    assert counts["error"] >= 1 and counts["ok"] >= 1  # cut off in the middle of its only file, or not


def test_the_harness_finds_what_accelerate_loses(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    counts = tried("kills", "--adapter", "accelerate", "--variant", "limit1", "folder", "--kills", "32", base=tmp_path)
    assert counts["Accelerate limit1"]["error"] >= 1
    assert counts["Accelerate folder"]["mixed"] + counts["Accelerate folder"]["error"] >= 1
