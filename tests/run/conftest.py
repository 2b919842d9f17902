"""Where the runs of these tests are saved."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest


@pytest.fixture
def directory():
    """A directory in memory, where there is one: here nothing depends on a drive."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as made:
        yield Path(made)
