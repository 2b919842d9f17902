"""A disk that is full, failing or away costs the saves of that time: not the training, nor what was saved before."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from .commands import all_ok, tried


def test_a_training_outlives_its_disk_says_so_and_saves_again(tmp_path: Path) -> None:
    assert all_ok(tried("faults", "--updates", "24", base=tmp_path))


def test_a_real_file_system_may_run_full(tmp_path: Path) -> None:
    mount = ["unshare", "-rm", "sh", "-c", f"mount -t tmpfs -o size=1m none {tmp_path}"]
    try:
        refused = subprocess.run(mount, capture_output=True, check=False).returncode != 0
    except FileNotFoundError:
        refused = True
    if refused:
        pytest.skip("no file system can be mounted here")
    assert all_ok(tried("faults", "--tmpfs", "--updates", "24", base=tmp_path))
