"""What several tests of tools start with."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(scope="module")
def little_to_collect():
    """Each trial of `find_batch_size` collects garbage, which takes 0.3 s where it looks through all of torch."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
