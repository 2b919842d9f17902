"""The signals that end jobs lose no update and end with the usual exit code, loader workers included."""

from __future__ import annotations

from pathlib import Path

from .commands import all_ok, tried


def test_a_signal_to_the_training_alone_loses_no_update(tmp_path: Path) -> None:
    assert all_ok(tried("signals", "--times", "3", "--variant", "background+workers", base=tmp_path))


def test_a_signal_to_the_whole_process_group_loses_no_update(tmp_path: Path) -> None:
    variant = "background+workers+persistent+slow"
    assert all_ok(tried("signals", "--group", "--times", "3", "--variant", variant, base=tmp_path))
