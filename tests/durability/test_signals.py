"""The signals that end jobs lose no update and end with the usual exit code, loader workers included."""

from __future__ import annotations

from pathlib import Path

import pytest

from .commands import all_ok, tried


def test_a_signal_to_the_training_alone_loses_no_update(tmp_path: Path) -> None:
    assert all_ok(tried("signals", "--times", "4", "--variant", "background+workers", base=tmp_path))


@pytest.mark.xfail(strict=True, reason="workers do not ignore the signals yet")
def test_a_signal_to_the_whole_process_group_loses_no_update(tmp_path: Path) -> None:
    variants = ("background+workers+persistent", "background+workers+slow")
    assert all_ok(tried("signals", "--group", "--times", "4", "--variant", *variants, base=tmp_path))
